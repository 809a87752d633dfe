"""What the rewards of a step said, and a warning when they teach nothing step after step.

Rewards that are all zero look like a hard data set, but are mostly an answer format that the reward does not read. Two
answers beside what was expected tell the two apart at a glance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

SAMPLES = 2
VERDICTS = ("right", "wrong", "unscored")
_PROMPT_CHARS, _ANSWER_CHARS, _OTHER_CHARS, _KEPT_CHARS = 200, 400, 200, 2000


class Reply(Protocol):
    """What is read of a rollout worker's reply about a session."""

    uid: str
    session: int
    correct: bool | None
    failed: bool
    aborted: bool
    too_long: bool
    error: str
    rows: Sequence[Any]
    answer: Sequence[int]


@dataclass
class StepTally:
    """Verdicts of a step's rollouts, counted as they come."""


    right: int = 0
    wrong: int = 0
    unscored: Counter[str] = field(default_factory=Counter)
    """Rollouts with a response but without a score, by the reward's own word for the reason."""
    too_long: set[str] = field(default_factory=set)
    """Groups whose prompts have more tokens than data.max_prompt_length."""
    kept: dict[str, list[Reply]] = field(default_factory=lambda: {verdict: [] for verdict in VERDICTS})
    """The first replies of each verdict, each of another group."""

    def add(self, reply: Reply) -> None:
        """Count one rollout; one without a response is none of the reward's."""
        if reply.too_long:
            self.too_long.add(reply.uid)
        if reply.failed or reply.aborted:
            return
        if reply.correct is None:
            self.unscored[reply.error or "no_score"] += 1
        elif reply.correct:
            self.right += 1
        else:
            self.wrong += 1
        kept = self.kept["unscored" if reply.correct is None else "right" if reply.correct else "wrong"]
        if len(kept) < SAMPLES and reply.uid not in {one.uid for one in kept} and (reply.rows or reply.answer):
            kept.append(reply)

    def metrics(self) -> dict[str, float]:
        """`unscored/<reason>`, for the reasons that there were, and `prompts_too_long`, where there were any."""
        found = {f"unscored/{reason}": float(count) for reason, count in sorted(self.unscored.items())}
        return found | ({"prompts_too_long": float(len(self.too_long))} if self.too_long else {})


@dataclass(frozen=True)
class Sample:
    """An answer as it is shown."""

    prompt: str
    response: str
    truth: Any
    """The ground truth."""
    reward: Any
    """What the reward returned; of an unscored answer, why there is no score."""
    verdict: str = "wrong"
    """One of VERDICTS."""

    def record(self, step: int) -> dict[str, Any]:
        """A line of answers.jsonl: the ends of long texts, where answers are."""
        return {"step": step, "verdict": self.verdict, "prompt": self.prompt[-_KEPT_CHARS:],
                "answer": self.response[-_KEPT_CHARS:], "truth": _short(self.truth), "reward": _short(self.reward)}

    def __str__(self) -> str:
        # repr keeps an answer of control characters or a thousand lines on one line of the log.
        return (
            f"prompt ...{self.prompt[-_PROMPT_CHARS:]!r}\n    answer ...{self.response[-_ANSWER_CHARS:]!r}\n"
            f"    expected {_short(self.truth)}; the reward said {_short(self.reward)}"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _OTHER_CHARS else text[:_OTHER_CHARS] + "..."


class Streak:
    """Steps in a row of one kind, and when to warn of them: after `after`, then after twice as many, and so on.

    The count starts at 0 in a resumed run.

    Args:
        after: steps in a row; None never warns.
    """

    def __init__(self, after: int | None) -> None:
        self.after = after
        self.steps = 0
        """Steps in a row."""
        self._next = after

    def add(self, of_the_kind: bool) -> bool:
        """Count a step that has ended; whether a warning is due."""
        if not of_the_kind:
            self.steps, self._next = 0, self.after
            return False
        self.steps += 1
        if self.after is None or self.steps < self._next:
            return False
        self._next = 2 * self.steps
        return True


class NoGradientWatch(Streak):
    """Warns of steps whose rewards teach the policy nothing although answers are right."""

    def is_due(self, no_gradient: bool) -> bool:
        """Count a step; whether a warning is due."""
        return self.add(no_gradient)

    def message(self, tally: StepTally) -> str:
        """The warning."""
        seen = "every answer was right" if not tally.wrong else "all answers to a prompt scored alike"
        return (
            f"no gradient in {self.steps} steps in a row: in the last, {seen} ({tally.right} right, {tally.wrong} "
            f"wrong), and where a group's scores do not differ its advantages are 0; choose harder data, or an "
            f"allocator that goes on to other prompts (allocation/allocator=dynamic_sampling or sara, for instance)"
        )


class AllZeroWatch(Streak):
    """Warns of steps without a right answer."""

    def is_due(self, tally: StepTally) -> bool:
        """Count a step that has ended; whether a warning is due. A step without any answer counts for nothing."""
        if not tally.right and not tally.wrong and not tally.unscored:
            return False
        return self.add(not tally.right)

    def message(self, tally: StepTally, samples: Sequence[Sample]) -> str:
        """The warning."""
        unscored = ", ".join(f"{count} {reason}" for reason, count in tally.unscored.most_common())
        text = (
            f"no answer was right in {self.steps} steps in a row; in the last, {tally.wrong} were wrong and "
            f"{sum(tally.unscored.values())} unscored{f' ({unscored})' if unscored else ''}: is the data this hard, or "
            f"does the reward not read the answers' format?"
        )
        return "\n  ".join([text, *map(str, samples)])
