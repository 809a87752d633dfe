# SPDX-License-Identifier: Apache-2.0
"""Settings as typed dataclasses, made from configuration values; what is refused is named with what is accepted."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class SettingError(ValueError):
    """Settings that are not accepted, or that contradict each other: one line a problem."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def refused(name: str, value: Any, accepted: str) -> SettingError:
    """The error about one setting."""
    return SettingError(f"{name}={value!r}; accepted: {accepted}")


def require(condition: bool, name: str, value: Any, accepted: str) -> None:
    """Raises:
    SettingError: the condition does not hold.
    """
    if not condition:
        raise refused(name, value, accepted)


def require_all(*checks: tuple[bool, str, Any, str]) -> None:
    """As :func:`require`, for several settings at once.

    Raises:
        SettingError: naming every setting whose condition does not hold.
    """
    problems = [f"{name}={value!r}; accepted: {accepted}" for fits, name, value, accepted in checks if not fits]
    if problems:
        raise SettingError(*problems)


def attempt(problems: list[str], check: Callable[..., T], *args: Any) -> T | None:
    """Make a check; what it refuses is added to ``problems``, so that the checks after it are made too."""
    try:
        return check(*args)
    except SettingError as error:
        problems += error.problems
        return None


def is_number(value: Any) -> bool:
    """Whether it is a finite int or float; bools are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any, least: int | None = None) -> bool:
    """Whether it is an int of ``least`` or more; bools are not."""
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def build(kind: type[T], section: str, values: Any) -> T:
    """Make the settings dataclass ``kind`` from configuration values; a field that is such a class itself, likewise.

    A field named after a word of Python's ends with an underscore, which its setting is without (``async_``).

    Args:
        section: name of the settings, e.g. ``allocation.allocator``.
        values: by name; None: all defaults.

    Raises:
        SettingError: naming every setting that is unknown, missing or of the wrong type; or what ``kind`` refuses.
    """
    fields = {field.name.rstrip("_"): field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    known = ", ".join(sorted(fields)) or "none"
    values = {} if values is None else values
    if not isinstance(values, Mapping):
        raise refused(section, values, f"a group of settings: {known}")
    hints, problems, given = _hints(kind), [], {}
    hints = {name: hints[field.name] for name, field in fields.items()}
    for name, value in values.items():
        setting = f"{section}.{name}"
        if name not in fields:
            problems.append(f"{setting}={value!r}; accepted: the settings {known}")
        elif dataclasses.is_dataclass(hints[name]) and not isinstance(value, hints[name]):
            nested = attempt(problems, build, hints[name], setting, value)
            given |= {} if nested is None else {name: nested}
        elif not _fits(value, hints[name]):
            problems.append(f"{setting}={value!r}; accepted: {_describe(hints[name])}")
        else:
            given[name] = _convert(value, hints[name])
    needed = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    for name in needed:
        if name not in values:
            problems.append(f"{section}.{name}=None; accepted: {_describe(hints[name])}; it has no default")
    whole = set(needed) <= set(given)
    given = {fields[name].name: value for name, value in given.items()}
    made = attempt(problems, lambda: kind(**given)) if whole else None
    if problems:
        raise SettingError(*problems)
    return made


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
        return is_whole(value)
    if hint is type(None):
        return value is None
    return hint is Any or isinstance(value, origin or hint)


def _convert(value: Any, hint: Any) -> Any:
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if float in options and int not in options and is_whole(value):
        return float(value)
    return value


_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string", type(None): "null"}


def _describe(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(option) for option in typing.get_args(hint))
    if origin is typing.Literal:
        return " | ".join(map(str, typing.get_args(hint)))
    if (origin or hint) is Mapping or isinstance(origin, type) and issubclass(origin, Mapping):
        return "a group of settings"
    return _NAMES.get(hint, getattr(hint, "__name__", str(hint)))
