"""Reward for answers in mathematics: right or wrong by math-verify, or not scored, which is never the same as wrong.

`reward.custom_reward_function.path=pkg://verl_ext.rewards.math_verify`; settings are `reward.custom_reward_function.
reward_kwargs.<name>`, the fields of :class:`MathSettings`.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from verl_ext.rewards.decide import decide
from verl_ext.rewards.extract import bare, final_answer
from verl_ext.rewards.plain import formula, tidy
from verl_ext.rewards.verdicts import Verdicts
from verl_ext.rewards.worker_pool import PoolSettings, Unscored, shared_pool
from verl_ext.typed_settings import build, is_number, is_whole, require, require_all

logger = logging.getLogger(__name__)

NO_ANSWER = "[INVALID]"
"""`pred` of a response without a final answer; the word of verl's own math_dapo."""

_PRED_CHARS = 200
_SECTION = "reward.custom_reward_function.reward_kwargs"
_verdicts = Verdicts(4096)
# verl passes these beside the settings where there is a reward model.
_VERLS_OWN = {"reward_router_address", "reward_model_tokenizer"}


@dataclass(frozen=True)
class MathSettings:
    """How answers are read and judged."""

    style: Literal["any", "answer", "boxed"] = "any"
    """Where the final answer stands: the last `Answer:` line, the last `\\boxed{}`, or whichever comes later."""

    unfinished_box: Literal["wrong", "earlier"] = "wrong"
    """A last box that is begun and not ended: there is no answer, or the one before it counts."""

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
        right, wrong, deadline = self.right_score, self.wrong_score, self.deadline_s
        checks = [
            ("right_score", is_number(right), "a finite number"),
            ("wrong_score", is_number(wrong) and wrong < right, f"a number below right_score={right}"),
            ("deadline_s", is_number(deadline) and deadline > 0, "a positive number of seconds"),
        ]
        for name, least in (("max_answer_chars", 1), ("workers", 1), ("memory_mb", 256)):
            checks.append((name, is_whole(getattr(self, name), least), f"an integer of {least} or more"))
        require_all(*((fits, f"{_SECTION}.{name}", getattr(self, name), accepted) for name, fits, accepted in checks))

    @property
    def pool(self) -> PoolSettings:
        """Size and limits of the pool of worker processes."""
        return PoolSettings(self.workers, float(self.deadline_s), self.memory_mb)


def compute_score(
    data_source: str, solution_str: Any, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **kwargs: Any
) -> dict[str, Any]:
    """Score one response.

    Numbers, and what the text alone decides, are compared here; all else is read by math-verify and compared in a
    worker process with a deadline; equal answers to a prompt once. Thread-safe: verl calls it in the
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
        SettingError: an unknown setting, or one that cannot be; or math-verify is not installed.
        TypeError, ValueError: the ground truth is no answer: the data is at fault, not the response.
    """
    settings = _settings(frozenset((name, value) for name, value in kwargs.items() if name not in _VERLS_OWN))
    gold = true_answers(ground_truth)
    if not isinstance(solution_str, str):
        return _unscored("not_text", NO_ANSWER)
    answer = final_answer(solution_str, settings.style, settings.unfinished_box)
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
    if answer.isdecimal() and all(map(str.isdecimal, gold)):
        # Most answers are such, and need no more.
        return answer.lstrip("0") in [true.lstrip("0") for true in gold]
    pool, failure = settings.pool, None
    given = tidy(formula(answer))
    for true in gold:
        verdict = decide(tidy(formula(true)), given)
        if isinstance(verdict, tuple):
            texts = verdict
            try:
                verdict = _verdicts.get((pool, *texts), lambda texts=texts: shared_pool(pool).judge(*texts))
            except Unscored as error:
                failure = error
                continue
        if verdict:
            return True
    if failure is not None:
        raise failure
    return False


def _scored(right: bool, pred: str, settings: MathSettings) -> dict[str, Any]:
    score = settings.right_score if right else settings.wrong_score
    return {"score": float(score), "acc": right, "pred": pred, "unscored": None}


def _unscored(reason: str, pred: str) -> dict[str, Any]:
    return {"score": None, "acc": None, "pred": pred, "unscored": reason}


def true_answers(ground_truth: Any) -> list[str]:
    """The true answers of a row without what stands around them.

    Raises:
        TypeError, ValueError: it is no answer.
    """
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
    found = importlib.util.find_spec("math_verify") is not None
    require(found, "reward.custom_reward_function.path", "pkg://verl_ext.rewards.math_verify",
            "an environment with math-verify (pip install math-verify==0.9.0)")  # fmt: skip
    return build(MathSettings, _SECTION, dict(given))
