"""What a reward says about one rollout, turned into an outcome: correct, wrong, or not scored.

Allocation reads `correct`; the update reads `score`. The two are kept apart because a score may be shaped (an overlong
penalty, a format bonus): a group whose answers are all wrong is saturated even where its scores differ.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any

UNSCORED = "unscored"
"""Field in which a reward may say, in a word, why it gave no score; counted as allocation/unscored/<word>."""


@dataclass(frozen=True)
class OutcomeRule:
    """How `correct` is read from what the reward function returned."""

    key: str = "acc"
    """Field of the reward's dictionary that holds correctness; a reward that returns a bare number is read as it."""

    threshold: float | None = None
    """A graded value counts as correct from this value on; null accepts only True / False, 1 / 0 and 1 / -1."""


class OutcomeError(ValueError):
    """A reward's value that cannot be read as correct or wrong."""


LARGEST = 1e30
"""A score beyond this, either side of 0, is not scored: verl sums and squares scores in float32, which ends at 3e38."""


_DEEPEST = 20


@dataclass(frozen=True)
class Reading:
    """What is made of a reward's answer about one rollout."""

    correct: bool | None
    """None: not scored, and `score` is None, too; or there was no rule to read it by."""
    score: float | None
    """None: not scored."""
    reason: str = ""
    """Of what is not scored, a word that can be part of a metric's name: `no_score`, `score_is_str`, `acc_is_list`."""
    said: str = ""
    """The same in a sentence, with key, type and value; empty where the reward itself said nothing at all (None)."""


def as_number(value: Any) -> float | None:
    """The value of a finite number or bool, also as a NumPy scalar or a tensor or array of one; else None."""
    if not isinstance(value, str | bytes | bytearray) and callable(getattr(value, "item", None)):
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError):  # of several numbers, or of none
            return None
    if not isinstance(value, Real | Decimal):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def read_outcome(score: Any, extra: Mapping[Any, Any] | None, rule: OutcomeRule | None) -> Reading:
    """Correctness and score of one rollout, from what its reward returned.

    A finite number or a bool counts. Whatever else is returned is "not scored", never "wrong".

    Args:
        score: the reward's score.
        extra: the reward's dictionary; empty or None where it returned a bare number.
        rule: None (validation) takes the score as it is, and reads no correctness.

    Raises:
        OutcomeError: the reward has no field `rule.key`, or its value is graded and `rule.threshold` is null.
    """
    value = as_number(score)
    if value is None or abs(value) > LARGEST:
        return _not_scored("score", score)
    if rule is None:
        return Reading(None, value)

    extra = extra or {}
    if rule.key in extra:
        raw = extra[rule.key]
    elif set(extra) <= {"score", UNSCORED}:
        raw = score
    else:
        raise OutcomeError(
            f"the reward returned no '{rule.key}' (allocation.outcome.key): keys seen {sorted(map(str, extra))}; "
            f"name the field that says whether the answer is correct"
        )
    graded = as_number(raw)
    if graded is None:
        return _not_scored(rule.key, raw)
    if rule.threshold is not None:
        return Reading(graded >= rule.threshold, value)
    if graded in (0.0, -1.0):
        return Reading(False, value)
    if graded == 1.0:
        return Reading(True, value)
    raise OutcomeError(
        f"the reward's '{rule.key}' is {graded}, neither 0 / 1 nor -1 / 1: set allocation.outcome.threshold to say "
        f"from which value on an answer counts as correct"
    )


def _not_scored(key: str, value: Any) -> Reading:
    if value is None:
        return Reading(None, None, "no_score")
    number = as_number(value)
    kind = type(value).__name__ if number is None else "too_large"
    if isinstance(value, float) and number is None:
        kind = "nan" if math.isnan(value) else "inf"
    return Reading(
        None, None, word(f"{key}_is_{kind}"),
        f"the reward's {key!r} is {_shown(value)} of type {type(value).__name__}: not scored; accepted: a finite "
        f"number (at most {LARGEST:g} in size) or a bool",
    )  # fmt: skip


def word(text: Any) -> str:
    """A text as a part of a metric's name."""
    return re.sub(r"[^\w.-]+", "_", str(text)).strip("_")[:60] or "unnamed"


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # of a class of the user's, or an integer of too many digits
        text = f"<{type(error).__name__} in its repr>"
    return text if len(text) <= 80 else f"{text[:77]}..."


def plain(value: Any, depth: int = 0) -> Any:
    """What a reward returned beside its score, in what JSON knows: names that are text; numbers, texts, lists, dicts.

    It is stored with the rollout, logged, and saved with a rollout that waits for a later step.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | float):
        return str(value) if isinstance(value, str) else float(value)
    if isinstance(value, int) and abs(value) < 2**63:
        return int(value)
    if depth < _DEEPEST:
        if isinstance(value, Mapping):
            return {str(key): plain(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [plain(item, depth + 1) for item in value]
        if callable(getattr(value, "tolist", None)):
            return plain(value.tolist(), depth + 1)
    number = as_number(value)
    return _shown(value) if number is None else number
