"""Rules by name: the built-in ones, those registered by decorator, and those of installed packages' entry points."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, TypeVar

from ..typed_settings import build, refused

C = TypeVar("C", bound=type)


class Registry:
    """Names to rule classes of one kind.

    A rule class has ``Settings``, a dataclass, and is made with one instance of it. Entry points of the group
    ``verl_ext.<kind>s`` name such classes; they are loaded only when asked for.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._rules: dict[str, type] = {}

    def register(self, name: str) -> Callable[[C], C]:
        """Class decorator.

        Raises:
            ValueError: the name is taken by another class.
        """

        def add(rule: C) -> C:
            other = self._rules.get(name)
            if other is not None and (other.__module__, other.__qualname__) != (rule.__module__, rule.__qualname__):
                raise ValueError(f"{self.kind} {name!r} is registered already, as {other.__module__}.{other.__name__}")
            self._rules[name] = rule
            return rule

        return add

    def names(self) -> list[str]:
        """All known rules, those of entry points included."""
        return sorted({*self._rules, *(point.name for point in entry_points(group=f"verl_ext.{self.kind}s"))})

    def get(self, name: str) -> type:
        """The rule's class.

        Raises:
            SettingError: unknown; lists the known ones.
        """
        if name not in self._rules:
            for point in entry_points(group=f"verl_ext.{self.kind}s"):
                if point.name == name:
                    self._rules[name] = point.load()
                    break
            else:
                raise refused(f"allocation.{self.kind}.name", name, "one of " + ", ".join(self.names()))
        return self._rules[name]

    def settings_type(self, name: str) -> type:
        """The rule's settings dataclass."""
        return self.get(name).Settings  # type: ignore[attr-defined]

    def make(self, name: str, **settings: Any) -> Any:
        """Make a rule.

        Raises:
            SettingError: an unknown rule, or a setting that is unknown, of the wrong type or out of range; names
                ``allocation.<kind>.<setting>``, the value and what is accepted.
        """
        rule = self.get(name)
        return rule(build(rule.Settings, f"allocation.{self.kind}", settings))  # type: ignore[attr-defined]


selectors = Registry("selector")
allocators = Registry("allocator")
downsamplers = Registry("downsampler")

register_selector = selectors.register
register_allocator = allocators.register
register_downsampler = downsamplers.register
make_selector = selectors.make
make_allocator = allocators.make
make_downsampler = downsamplers.make
