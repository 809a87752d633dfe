"""How a rule refuses its settings: ``require(0 < self.tau < 1, "allocator.tau", self.tau, "a number in (0, 1)")``."""

from __future__ import annotations

from typing import Any

from .. import typed_settings
from ..typed_settings import SettingError

__all__ = ["SettingError", "refused", "require"]


def refused(setting: str, value: Any, accepted: str) -> SettingError:
    """The error about one setting under ``allocation``."""
    return typed_settings.refused(f"allocation.{setting}", value, accepted)


def require(condition: bool, setting: str, value: Any, accepted: str) -> None:
    """Raises:
    SettingError: the condition does not hold; names ``allocation.<setting>``.
    """
    if not condition:
        raise refused(setting, value, accepted)
