"""Settings of rules: typed dataclasses, checked with errors that name the setting, the value and what is accepted."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class SettingError(ValueError):
    """A setting has a value that is not accepted."""

    def __init__(self, setting: str, value: Any, accepted: str) -> None:
        self.setting, self.value, self.accepted = setting, value, accepted
        super().__init__(f"allocation.{setting}={value!r}; accepted: {accepted}")


def require(condition: bool, setting: str, value: Any, accepted: str) -> None:
    """Raises:
    SettingError: the condition does not hold.
    """
    if not condition:
        raise SettingError(setting, value, accepted)


def build(kind: type[T], section: str, values: Mapping[str, Any]) -> T:
    """Make the settings dataclass ``kind`` from configuration values of ``allocation.<section>``.

    Raises:
        SettingError: a setting is unknown, missing or of the wrong type; or what ``kind`` itself refuses.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints = _hints(kind)
    known = ", ".join(sorted(fields)) or "none"
    for name, value in values.items():
        if name not in fields:
            raise SettingError(f"{section}.{name}", value, f"this rule has the settings {known}")
        if not _fits(value, hints[name]):
            raise SettingError(f"{section}.{name}", value, _describe(hints[name]))
    for name, field in fields.items():
        absent = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if absent and name not in values:
            raise SettingError(f"{section}.{name}", None, f"{_describe(hints[name])}; it has no default")
    return kind(**{name: _convert(value, hints[name]) for name, value in values.items()})


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if origin is typing.Literal:
        return any(value == option and type(value) is type(option) for option in typing.get_args(hint))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is type(None):
        return value is None
    return isinstance(value, hint)


def _convert(value: Any, hint: Any) -> Any:
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if float in options and int not in options and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _describe(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(option) for option in typing.get_args(hint))
    if origin is typing.Literal:
        return " | ".join(map(str, typing.get_args(hint)))
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string", type(None): "null"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))
