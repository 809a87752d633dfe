"""Reward for answers in mathematics: right or wrong by math-verify, or not scored, which is never the same as wrong.

`reward.custom_reward_function.path=pkg://verl_ext.rewards.math_verify`; settings are `reward.custom_reward_function.
reward_kwargs.<name>`, the fields of :class:`MathSettings`.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

from verl_ext.rewards.extract import STYLES, bare, final_answer
from verl_ext.rewards.pool import PoolSettings, Unscored, shared_pool
from verl_ext.rewards.verdicts import Verdicts

logger = logging.getLogger(__name__)

NO_ANSWER = "[INVALID]"
"""`pred` of a response without a final answer; the word of verl's own math_dapo."""

_PRED_CHARS = 200
_DIGITS = "[0-9]{1,1000}"
_NUMBERS = (
    re.compile(rf"(?P<sign>[+-]?)(?P<over>{_DIGITS})(?:/(?P<under>{_DIGITS}))?"),
    re.compile(rf"(?P<sign>[+-]?)\\[dt]?frac\{{(?P<over>[+-]?{_DIGITS})\}}\{{(?P<under>{_DIGITS})\}}"),
)
_DECIMAL = re.compile(rf"[+-]?(?:{_DIGITS})?\.{_DIGITS}")
_verdicts = Verdicts(4096)
# verl passes these beside the settings where there is a reward model.
_VERLS_OWN = {"reward_router_address", "reward_model_tokenizer"}


class RewardSettingError(ValueError):
    """A setting of the reward that cannot be; names it, the value seen and what is accepted."""

    def __init__(self, name: str, value: Any, accepted: str) -> None:
        super().__init__(f"reward.custom_reward_function.reward_kwargs.{name}={value!r}: accepted is {accepted}")


@dataclass(frozen=True)
class MathSettings:
    """How answers are read and judged."""

    style: Literal["any", "answer", "boxed"] = "any"
    """Where the final answer stands: the last `Answer:` line, the last `\\boxed{}`, or whichever comes later."""

    truncated: Literal["score", "wrong", "unscored"] = "score"
    """A response that was cut off at the length limit: scored as it is, wrong whatever it says, or not scored."""

    right_score: float = 1.0
    """Score of a right answer."""

    wrong_score: float = 0.0
    """Score of a wrong answer, or of none (math_dapo's is -1); below `right_score`."""

    max_answer_chars: int = 1000
    """A longer final answer is wrong, unless it is the true one to the letter."""

    deadline_s: float = 5.0
    """Seconds of processor time that judging an answer may take, and ten times as many by the clock; else unscored."""

    workers: int = 2
    """Processes with math-verify in each of verl's reward workers (`reward.num_workers`), 60 MiB each when idle."""

    memory_mb: int = 1024
    """Address space of such a process in MiB; an answer that needs more is unscored."""

    def __post_init__(self) -> None:
        for name, accepted in (("style", STYLES), ("truncated", ("score", "wrong", "unscored"))):
            if (value := getattr(self, name)) not in accepted:
                raise RewardSettingError(name, value, " | ".join(accepted))
        for name in ("right_score", "wrong_score"):
            if not _is_number(value := getattr(self, name)):
                raise RewardSettingError(name, value, "a finite number")
        if self.wrong_score >= self.right_score:
            raise RewardSettingError(
                "wrong_score", self.wrong_score, f"a number below right_score={self.right_score!r}"
            )
        if not _is_number(self.deadline_s) or self.deadline_s <= 0:
            raise RewardSettingError("deadline_s", self.deadline_s, "a positive number of seconds")
        for name, least in (("max_answer_chars", 1), ("workers", 1), ("memory_mb", 256)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise RewardSettingError(name, value, f"a whole number of at least {least}")

    @property
    def pool(self) -> PoolSettings:
        """Size and limits of the pool of worker processes."""
        return PoolSettings(self.workers, float(self.deadline_s), self.memory_mb)


def compute_score(
    data_source: str, solution_str: Any, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **kwargs: Any
) -> dict[str, Any]:
    """Score one response.

    Plain integers and fractions, and answers equal to the true one to the letter, are decided here; all else by
    math-verify in a worker process with a deadline; equal answers to a prompt once. Thread-safe: verl calls it in the
    threads of its reward workers.

    Args:
        data_source: ignored; verl passes it.
        solution_str: the decoded response.
        ground_truth: the true answer, a string or number, with or without `\\boxed{}` or dollars; or a list of such,
            of which any will do.
        extra_info: `truncated`, which the rollout workers of verl_ext set, says whether the response was cut off.
        **kwargs: fields of :class:`MathSettings`.

    Returns:
        `score` and `acc` (None where unscored), `pred` (the final answer, at most 200 characters), and `unscored`:
        None, or why there is no score: `deadline`, `memory`, `crash` (the worker died), `error` (comparing raised),
        `start` (no worker could be started), `truncated`, `not_text` (the response is not a string).

    Raises:
        RewardSettingError: an unknown setting, or one that cannot be; or math-verify is not installed.
        TypeError, ValueError: the ground truth is no answer: the data is at fault, not the response.
    """
    settings = _settings(frozenset((name, value) for name, value in kwargs.items() if name not in _VERLS_OWN))
    gold = _true_answers(ground_truth)
    if not isinstance(solution_str, str):
        return _unscored("not_text", NO_ANSWER)
    answer = final_answer(solution_str, settings.style)
    pred = NO_ANSWER if not answer else answer[:_PRED_CHARS]
    if settings.truncated != "score" and _is_truncated(extra_info):
        return _unscored("truncated", pred) if settings.truncated == "unscored" else _scored(False, pred, settings)
    try:
        return _scored(_is_right(gold, answer, settings), pred, settings)
    except Unscored as failure:
        logger.info("unscored (%s): answer %.200r, true %.200r", failure, answer, gold)
        return _unscored(failure.reason, pred)


def _is_right(gold: list[str], answer: str | None, settings: MathSettings) -> bool:
    if not answer:
        return False
    if answer in gold:
        return True
    if len(answer) > settings.max_answer_chars:
        return False
    number = _number(answer)
    if number is not None:
        numbers = [_number(true) for true in gold]
        if number in numbers:
            return True
        # Decimals may be rounded ones, which math-verify allows for.
        if None not in numbers and not any("." in text for text in (answer, *gold)):
            return False
    pool = settings.pool
    return _verdicts.get((pool, tuple(gold), answer), lambda: shared_pool(pool).judge(gold, answer))


def _number(text: str) -> Fraction | None:
    """The value of a plain integer, fraction or decimal; None where it is anything else."""
    for pattern in _NUMBERS:
        if match := pattern.fullmatch(text):
            under = int(match["under"] or 1)
            value = Fraction(int(match["over"]), under) if under else None
            return -value if value is not None and match["sign"] == "-" else value
    return Fraction(text) if _DECIMAL.fullmatch(text) else None


def _scored(right: bool, pred: str, settings: MathSettings) -> dict[str, Any]:
    score = settings.right_score if right else settings.wrong_score
    return {"score": float(score), "acc": right, "pred": pred, "unscored": None}


def _unscored(reason: str, pred: str) -> dict[str, Any]:
    return {"score": None, "acc": None, "pred": pred, "unscored": reason}


def _true_answers(ground_truth: Any) -> list[str]:
    given = ground_truth
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        given = [given]
    gold = []
    for one in given:
        if _is_number(one):
            one = str(one)
        if not isinstance(one, str):
            raise TypeError(
                f"ground_truth={ground_truth!r:.200}: accepted are a string, a number, or a list of them; "
                f"this holds {type(one).__name__}"
            )
        gold.append(bare(one))
    if not gold or not all(gold):
        raise ValueError(f"ground_truth={ground_truth!r:.200}: an empty answer; accepted is text such as '34'")
    return gold


def _is_number(value: Any) -> bool:
    # NumPy's scalars have no common base with Python's, but all of them convert.
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__") or hasattr(value, "__len__"):
        return False
    return math.isfinite(value)


def _is_truncated(extra_info: Mapping[str, Any] | None) -> bool:
    truncated = (extra_info or {}).get("truncated")
    if truncated is None:
        _warn_of_missing_truncation()
    return bool(truncated)


@lru_cache(maxsize=1)
def _warn_of_missing_truncation() -> None:
    logger.warning(
        "extra_info has no 'truncated': whether a response was cut off is not known, and all are scored as they are "
        "(only the rollout workers of trainer.v1.trainer_mode=allocated say it)"
    )


@lru_cache(maxsize=64)
def _settings(given: frozenset[tuple[str, Any]]) -> MathSettings:
    known = [field.name for field in fields(MathSettings)]
    values = dict(given)
    for name, value in values.items():
        if name not in known:
            raise RewardSettingError(name, value, f"one of {', '.join(known)}")
    if importlib.util.find_spec("math_verify") is None:
        raise RewardSettingError(
            "path",
            "pkg://verl_ext.rewards.math_verify",
            "an environment with math-verify (pip install math-verify==0.9.0)",
        )
    return MathSettings(**values)
