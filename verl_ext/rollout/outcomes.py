"""What a reward says about one rollout, turned into an outcome: correct, wrong, or not scored.

Allocation reads `correct`; the update reads `score`. The two are kept apart because a score may be shaped (an overlong
penalty, a format bonus): a group whose answers are all wrong is saturated even where its scores differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OutcomeRule:
    """How `correct` is read from what the reward function returned."""

    key: str = "acc"
    """Field of the reward's dictionary that holds correctness; a reward that returns a bare number is read as it."""

    threshold: float | None = None
    """A graded value counts as correct from this value on; null accepts only True / False, 1 / 0 and 1 / -1."""


class OutcomeError(ValueError):
    """A reward's value that cannot be read as correct or wrong."""


def finite_or_none(score: Any) -> float | None:
    """A score as a number; None where it is None, a text, NaN or infinite: not scored."""
    if score is None or isinstance(score, str):
        return None
    try:
        value = float(score)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


def read_outcome(score: Any, extra: dict[str, Any] | None, rule: OutcomeRule) -> tuple[bool | None, float | None]:
    """(correct, score) of one rollout; (None, None) where it could not be scored.

    A score that is None, NaN or infinite is "not scored", never "wrong".

    Raises:
        OutcomeError: the reward has no field `rule.key`, or its value is graded and `rule.threshold` is null.
    """
    value = finite_or_none(score)
    if value is None:
        return None, None

    extra = extra or {}
    if rule.key in extra:
        raw = extra[rule.key]
    elif set(extra) <= {"score"}:
        raw = score
    else:
        raise OutcomeError(
            f"the reward returned no '{rule.key}' (allocation.outcome.key): keys seen {sorted(extra)}; "
            f"name the field that says whether the answer is correct"
        )
    if raw is None:
        return None, None
    raw = float(raw)
    if not math.isfinite(raw):
        return None, None
    if rule.threshold is not None:
        return raw >= rule.threshold, value
    if raw in (0.0, -1.0):
        return False, value
    if raw == 1.0:
        return True, value
    raise OutcomeError(
        f"the reward's '{rule.key}' is {raw}, neither 0 / 1 nor -1 / 1: set allocation.outcome.threshold to say from "
        f"which value on an answer counts as correct"
    )
