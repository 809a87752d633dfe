"""The words of allocation: outcomes of rollouts, groups of them, requests for more, verdicts and fates.

Counts here are of sessions: one session is one rollout, even where it yields several training rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum


class Verdict(str, Enum):
    """What an allocator has decided about a group.

    ``CONTINUE``: undecided. ``COMMIT``: for the batch. ``ABANDON``: no more rollouts, not trained on. ``DEFER``: as
    ABANDON, and the prompt is not offered again before the pool's next epoch. ``RETIRE``: as ABANDON, and the prompt
    leaves the pool.
    """

    CONTINUE = "continue"
    COMMIT = "commit"
    ABANDON = "abandon"
    DEFER = "defer"
    RETIRE = "retire"


class Fate(str, Enum):
    """What became of a rollout, finally. Every rollout gets exactly one; see :class:`~.ledger.Ledger`.

    ``filtered`` is a completed group without signal (saturated, or too few rows left); ``surplus`` was effective or
    undecided but not needed; ``unscored`` has a trajectory but no reward; ``failed`` has no trajectory; ``aborted``
    was cut off while being generated (``rounds: streaming``) or belonged to a step that broke off; ``skipped`` was in a
    batch whose step made no update.
    """

    TRAINED = "trained"
    DOWN_SAMPLED = "down_sampled"
    ABANDONED = "abandoned"
    FILTERED = "filtered"
    SURPLUS = "surplus"
    STALE = "stale"
    UNSCORED = "unscored"
    FAILED = "failed"
    ABORTED = "aborted"
    AUDIT = "audit"
    SKIPPED = "skipped"


class RoundError(RuntimeError):
    """A round that could not be completed: a session is missing, told twice, never asked for or beyond the budget; a
    worker or the engine is gone."""


@dataclass(slots=True)
class Outcome:
    """One rollout's result.

    Anything that cannot be scored ends as ``correct=None, score=None``: a missing, NaN or infinite score, a missing
    verdict on correctness, or a failed rollout. Unscored is never the same as wrong.

    Raises:
        ValueError: ``correct`` is neither a truth value (bool, 0 or 1) nor None, or a count is negative.
    """

    group: str
    """uid of the group."""
    session: int
    """Number of the rollout within its group, counted from 0 over all rounds."""
    correct: bool | None
    """Verifiable correctness; what allocation reads. None: could not be scored."""
    score: float | None
    """The reward, possibly shaped; what the update reads."""
    prompt_tokens: int
    """Tokens of the prompt."""
    response_tokens: int
    """Tokens generated."""
    failed: bool = False
    """True where no trajectory exists."""
    truncated: bool = False
    """True where generation stopped at the length limit."""
    policy_version: int = 0
    """Version of the weights that generated it; the lowest, where they were exchanged meanwhile."""
    rows: int = 1
    """Training rows of the session."""
    aborted: bool = False
    """True where generation was cut off, its group no longer being wanted: no trajectory, but the tokens count."""
    error: str = ""
    """Why it failed, in the engine's words; for the log alone."""
    last_version: int | None = None
    """The highest version; None: the lowest, the weights were not exchanged while it was generated."""

    def __post_init__(self) -> None:
        correct, score = self.correct, self.score
        if self.failed or self.aborted or correct is None or score is None or not math.isfinite(score):
            self.correct = self.score = None
        elif correct is not True and correct is not False:
            if correct != correct:  # NaN
                self.correct = self.score = None
            elif correct == 0 or correct == 1:
                self.correct = bool(correct)
            else:
                raise ValueError(
                    f"outcome of group {self.group!r} session {self.session}: correct={correct!r}; "
                    "accepted: True, False, 0, 1 or None (could not be scored)"
                )
        if self.session < 0 or self.prompt_tokens < 0 or self.response_tokens < 0:
            raise ValueError(
                f"outcome of group {self.group!r}: session={self.session}, prompt_tokens={self.prompt_tokens}, "
                f"response_tokens={self.response_tokens}; accepted: 0 or more each"
            )

    @property
    def scored(self) -> bool:
        """Whether the outcome has a reward."""
        return self.correct is not None


@dataclass(slots=True, eq=False)
class Group:
    """The rollouts of one prompt in one step.

    Statistics are over the scored outcomes and read ``correct`` only, so that a shaped or noisy score never makes a
    saturated group look alive.
    """

    uid: str
    """Unique over a run; no underscore (trajectory keys are ``uid_session_index``)."""
    prompt: int
    """Row of the pool."""
    offered_at: int
    """Step in which the prompt was offered."""
    requested: int = 0
    """Sessions asked for so far; the next session's number."""
    outcomes: list[Outcome] = field(default_factory=list)
    """Outcomes told so far, in order of session."""
    verdict: Verdict = Verdict.CONTINUE
    """The allocator's decision."""
    fate: Fate | None = None
    """Fate of the group's scored rollouts if not trained; None leaves it to the verdict."""
    successes: int = 0
    """Scored outcomes that are correct."""
    trials: int = 0
    """Scored outcomes."""
    version: int = 0
    """Version of the weights when the prompt was offered."""
    requests: int = 0
    """Requests made of it in this step."""
    _told: int = field(default=0, repr=False)  # bit per session, so that a repeat is seen in constant time
    _aside: int = field(default=0, repr=False)  # bit per session that is not to be trained on

    def __post_init__(self) -> None:
        if "_" in self.uid or not self.uid:
            raise ValueError(f"group uid {self.uid!r}; accepted: a non-empty string without underscores")

    def add(self, outcome: Outcome) -> None:
        """Record one outcome, in any order of sessions.

        Raises:
            RoundError: the session was never asked for, was told before, or belongs to another group.
        """
        session = outcome.session
        bit = 1 << session
        if outcome.group != self.uid or session >= self.requested or self._told & bit:
            if outcome.group != self.uid:
                problem = f"belongs to group {outcome.group!r}"
            elif session >= self.requested:
                problem = f"was never asked for ({self.requested} sessions were)"
            else:
                problem = "was told twice"
            raise RoundError(f"group {self.uid!r}: session {session} {problem}")
        self._told |= bit
        outcomes = self.outcomes
        if not outcomes or outcomes[-1].session < session:
            outcomes.append(outcome)
        else:
            at = len(outcomes)
            while at and outcomes[at - 1].session > session:
                at -= 1
            outcomes.insert(at, outcome)
        if outcome.correct is not None:
            self.trials += 1
            if outcome.correct:
                self.successes += 1

    @property
    def returned(self) -> int:
        """Sessions that have come back, failed and unscored ones included."""
        return len(self.outcomes)

    @property
    def pending(self) -> int:
        """Sessions asked for that have not come back."""
        return self.requested - len(self.outcomes)

    @property
    def live(self) -> bool:
        """Undecided or for a batch, and without a fate: it may still be trained on."""
        return self.fate is None and self.verdict in (Verdict.CONTINUE, Verdict.COMMIT)

    @property
    def mixed(self) -> bool:
        """Both a right and a wrong outcome: non-zero GRPO signal."""
        return 0 < self.successes < self.trials

    @property
    def saturated(self) -> bool:
        """At least one scored outcome and all alike."""
        return self.trials > 0 and (self.successes == 0 or self.successes == self.trials)

    @property
    def spread(self) -> float:
        """Difference between the highest and the lowest score; 0 without any."""
        scores = [outcome.score for outcome in self.outcomes if outcome.score is not None]
        return max(scores) - min(scores) if scores else 0.0

    @property
    def all_failed(self) -> bool:
        """Nothing is pending, and none of its rollouts has a trajectory."""
        done = self.outcomes and not self.trials and not self.pending
        return bool(done) and all(outcome.failed for outcome in self.outcomes)

    @property
    def given_up(self) -> bool:
        """All of two rollouts or more failed: no more are asked for in this step, whatever the allocator decides."""
        return len(self.outcomes) >= 2 and self.all_failed

    @property
    def cut_off(self) -> bool:
        """Some of it was aborted: what came back before says less than the allocator wanted to know."""
        return any(outcome.aborted for outcome in self.outcomes)

    def set_aside(self, sessions: Iterable[int]) -> None:
        """These sessions count in the group's statistics but are never trained on (fate down_sampled)."""
        for session in sessions:
            self._aside |= 1 << session

    @property
    def trainable(self) -> list[Outcome]:
        """Scored outcomes that were not set aside: what a down-sampler chooses from."""
        return [o for o in self.outcomes if o.correct is not None and not self._aside >> o.session & 1]

    def missing(self) -> list[int]:
        """Sessions asked for that have not come back, by number."""
        return [session for session in range(self.requested) if not self._told >> session & 1]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """``n`` more rollouts of a group, as the sessions ``first .. first + n - 1``."""

    group: Group
    n: int
    first: int = field(init=False)
    """Number of the first new session, fixed when the request is made."""

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"request for group {self.group.uid!r}: n={self.n}; accepted: 1 or more")
        object.__setattr__(self, "first", self.group.requested)

    @classmethod
    def again(cls, group: Group) -> Request:
        """The group's sessions in flight, asked for once more under their own numbers: their engine is gone."""
        request = cls(group, group.pending)
        object.__setattr__(request, "first", group.requested - group.pending)
        return request

    @property
    def sessions(self) -> range:
        """The numbers of the new sessions."""
        return range(self.first, self.first + self.n)
