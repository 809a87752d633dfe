"""The ledger: what became of every rollout ever issued, in rollouts and in tokens.

A rollout moves ``in flight -> undecided -> (waiting ->) a final fate``. Undecided exists only within a step: the
rollout has come back and its step has not ended. The ledger holds counts, never rollouts, so its size does not grow;
it refuses any movement of more than there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .groups import Fate, Outcome
from .state import StateError, check_keys

_FATES = tuple(fate.value for fate in Fate)


class LedgerError(RuntimeError):
    """The ledger does not add up, or would not after the movement asked for."""


class Ledger:
    """Counts of rollouts and generated tokens by fate, cumulative and since the last :meth:`step_record`."""

    def __init__(self) -> None:
        self.issued = 0
        """Rollouts ever asked for."""
        self.tokens = 0
        """Response tokens ever generated."""
        self.prompt_tokens = 0
        """Prompt tokens of the rollouts that came back, one prompt per rollout."""
        self.in_flight = 0
        """Rollouts asked for that have not come back."""
        self.undecided = 0
        """Rollouts back whose step has not ended."""
        self.waiting = 0
        """Rollouts kept for a later step."""
        self.rollouts_by_fate: dict[str, int] = dict.fromkeys(_FATES, 0)
        self.tokens_by_fate: dict[str, int] = dict.fromkeys(_FATES, 0)
        self._undecided_tokens = 0
        self._waiting_tokens = 0
        self._mark()

    def issue(self, rollouts: int) -> None:
        """``rollouts`` more are asked for."""
        if rollouts < 0:
            raise LedgerError(f"cannot issue {rollouts} rollouts")
        self.issued += rollouts
        self.in_flight += rollouts

    def returned(self, outcomes: Iterable[Outcome]) -> None:
        """These came back; their tokens become known.

        Raises:
            LedgerError: more come back than are in flight.
        """
        n, tokens, prompt_tokens = 0, 0, 0
        for outcome in outcomes:
            n += 1
            tokens += outcome.response_tokens
            prompt_tokens += outcome.prompt_tokens
        if n > self.in_flight:
            raise LedgerError(f"{n} rollouts came back with {self.in_flight} in flight")
        self.in_flight -= n
        self.undecided += n
        self._undecided_tokens += tokens
        self.tokens += tokens
        self.prompt_tokens += prompt_tokens

    def settle(self, outcomes: Iterable[Outcome], fate: Fate) -> None:
        """These undecided rollouts get their final fate.

        Raises:
            LedgerError: there are not that many undecided rollouts, or tokens.
        """
        n, tokens = _weigh(outcomes)
        self._leave_undecided(n, tokens, fate.value)
        self.rollouts_by_fate[fate.value] += n
        self.tokens_by_fate[fate.value] += tokens

    def lose(self, rollouts: int, fate: Fate = Fate.FAILED) -> None:
        """``rollouts`` in flight will never come back (no outcome, no tokens known).

        Raises:
            LedgerError: fewer are in flight.
        """
        if not 0 <= rollouts <= self.in_flight:
            raise LedgerError(f"cannot lose {rollouts} rollouts with {self.in_flight} in flight")
        self.in_flight -= rollouts
        self.rollouts_by_fate[fate.value] += rollouts

    def abort(self, lost: Fate = Fate.FAILED) -> None:
        """A step broke off: what is in flight is ``lost``, what is undecided becomes aborted. Waiting ones stay."""
        self.lose(self.in_flight, lost)
        self.rollouts_by_fate[Fate.ABORTED.value] += self.undecided
        self.tokens_by_fate[Fate.ABORTED.value] += self._undecided_tokens
        self.undecided = self._undecided_tokens = 0

    def reclassify(self, outcomes: Iterable[Outcome], fate: Fate, into: Fate) -> None:
        """Correct the fate of rollouts settled since the last :meth:`step_record`, e.g. trained into skipped.

        Raises:
            LedgerError: fewer have that fate in this step.
        """
        n, tokens = _weigh(outcomes)
        here = self.rollouts_by_fate[fate.value] - self._before["rollouts_by_fate"][fate.value]
        tokens_here = self.tokens_by_fate[fate.value] - self._before["tokens_by_fate"][fate.value]
        if n > here or tokens > tokens_here:
            raise LedgerError(
                f"cannot turn {n} rollouts ({tokens} tokens) from {fate.value} into {into.value}: "
                f"this step has {here} ({tokens_here} tokens)"
            )
        self.rollouts_by_fate[fate.value] -= n
        self.tokens_by_fate[fate.value] -= tokens
        self.rollouts_by_fate[into.value] += n
        self.tokens_by_fate[into.value] += tokens

    def wait(self, outcomes: Iterable[Outcome]) -> None:
        """These undecided rollouts are kept for a later step.

        Raises:
            LedgerError: there are not that many undecided.
        """
        n, tokens = _weigh(outcomes)
        self._leave_undecided(n, tokens, "waiting")
        self.waiting += n
        self._waiting_tokens += tokens

    def unwait(self, outcomes: Iterable[Outcome]) -> None:
        """These waiting rollouts are taken up again and are undecided.

        Raises:
            LedgerError: there are not that many waiting.
        """
        n, tokens = _weigh(outcomes)
        if n > self.waiting or tokens > self._waiting_tokens:
            raise LedgerError(
                f"cannot take up {n} waiting rollouts ({tokens} tokens): "
                f"{self.waiting} ({self._waiting_tokens} tokens) are waiting"
            )
        self.waiting -= n
        self._waiting_tokens -= tokens
        self.undecided += n
        self._undecided_tokens += tokens

    def check(self) -> None:
        """Raises:
        LedgerError: naming what does not add up, in rollouts or in tokens.
        """
        fates, fate_tokens = sum(self.rollouts_by_fate.values()), sum(self.tokens_by_fate.values())
        negative = {name: n for name, n in {**self._open(), **self.rollouts_by_fate}.items() if n < 0}
        if negative:
            raise LedgerError(f"negative counts: {negative}")
        if self.issued != fates + self.in_flight + self.undecided + self.waiting:
            raise LedgerError(
                f"rollouts: {self.issued} issued, but {fates} with a fate + {self.in_flight} in flight + "
                f"{self.undecided} undecided + {self.waiting} waiting; by fate {self.rollouts_by_fate}"
            )
        if self.tokens != fate_tokens + self._undecided_tokens + self._waiting_tokens:
            raise LedgerError(
                f"tokens: {self.tokens} generated, but {fate_tokens} with a fate + {self._undecided_tokens} "
                f"undecided + {self._waiting_tokens} waiting; by fate {self.tokens_by_fate}"
            )

    def step_record(self, step: int) -> dict[str, Any]:
        """The step's line for ``ledger.jsonl``, and the start of the next step's counts.

        ``in_flight`` includes undecided rollouts, so that ``issued_total = sum(fates_total) + in_flight + waiting``.
        Over one step, ``issued = sum(fates) + (in_flight + waiting after) - (in_flight + waiting before)``.

        Raises:
            LedgerError: the ledger does not add up.
        """
        self.check()
        before = self._before
        record = {
            "step": int(step),
            "issued": self.issued - before["issued"],
            "tokens": self.tokens - before["tokens"],
            "prompt_tokens": self.prompt_tokens - before["prompt_tokens"],
            "fates": {f: n - before["rollouts_by_fate"][f] for f, n in self.rollouts_by_fate.items()},
            "fate_tokens": {f: n - before["tokens_by_fate"][f] for f, n in self.tokens_by_fate.items()},
            "in_flight": self.in_flight + self.undecided,
            "waiting": self.waiting,
            "in_flight_tokens": self._undecided_tokens,
            "waiting_tokens": self._waiting_tokens,
            "issued_total": self.issued,
            "tokens_total": self.tokens,
            "prompt_tokens_total": self.prompt_tokens,
            "fates_total": dict(self.rollouts_by_fate),
            "fate_tokens_total": dict(self.tokens_by_fate),
        }
        self._mark()
        return record

    def state_dict(self) -> dict[str, Any]:
        """All counts, JSON only."""
        return {
            "issued": self.issued,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "in_flight": self.in_flight,
            "undecided": self.undecided,
            "waiting": self.waiting,
            "undecided_tokens": self._undecided_tokens,
            "waiting_tokens": self._waiting_tokens,
            "rollouts_by_fate": dict(self.rollouts_by_fate),
            "tokens_by_fate": dict(self.tokens_by_fate),
            "before": {key: dict(v) if isinstance(v, dict) else v for key, v in self._before.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over saved counts.

        Raises:
            StateError: keys differ, or the saved counts do not add up.
        """
        check_keys("ledger", state, self.state_dict())
        for name in ("rollouts_by_fate", "tokens_by_fate"):
            check_keys(f"ledger {name}", state[name], _FATES)
        fresh = Ledger()
        check_keys("ledger before", state["before"], fresh._before)
        for name in ("issued", "tokens", "prompt_tokens", "in_flight", "undecided", "waiting"):
            setattr(fresh, name, int(state[name]))
        fresh._undecided_tokens, fresh._waiting_tokens = int(state["undecided_tokens"]), int(state["waiting_tokens"])
        fresh.rollouts_by_fate = {f: int(state["rollouts_by_fate"][f]) for f in _FATES}
        fresh.tokens_by_fate = {f: int(state["tokens_by_fate"][f]) for f in _FATES}
        fresh._before = {k: dict(v) if isinstance(v, Mapping) else int(v) for k, v in state["before"].items()}
        try:
            fresh.check()
        except LedgerError as error:
            raise StateError(f"state of ledger: {error}") from error
        self.__dict__.update(fresh.__dict__)

    def _open(self) -> dict[str, int]:
        return {"in_flight": self.in_flight, "undecided": self.undecided, "waiting": self.waiting}

    def _leave_undecided(self, n: int, tokens: int, whither: str) -> None:
        if n > self.undecided or tokens > self._undecided_tokens:
            raise LedgerError(
                f"cannot move {n} rollouts ({tokens} tokens) to {whither}: "
                f"{self.undecided} ({self._undecided_tokens} tokens) are undecided"
            )
        self.undecided -= n
        self._undecided_tokens -= tokens

    def _mark(self) -> None:
        self._before = {
            "issued": self.issued,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "rollouts_by_fate": dict(self.rollouts_by_fate),
            "tokens_by_fate": dict(self.tokens_by_fate),
        }


def _weigh(outcomes: Iterable[Outcome]) -> tuple[int, int]:
    tokens = [outcome.response_tokens for outcome in outcomes]
    return len(tokens), sum(tokens)
