"""Prompts none of whose rollouts come back: given up for the step, tried in a later epoch, out after some times."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .groups import Group, RoundError, Verdict
from .state import check_keys

logger = logging.getLogger(__name__)

MOST_IN_A_ROW = 16
"""Different prompts in a row, none of which had failed before, after which the engine is held to be broken."""


class Failures:
    """Who failed, and how often in a row.

    An engine refuses some prompts whatever is done (too long for it, an agent loop that raises on them): a group given
    up costs the step that group and no more. Where prompt after prompt fails that never did before, it is the engine.

    Args:
        keys: the prompts' keys, by row of the pool.
        give_up_after: times in a row after which a prompt leaves the pool; None: never.
    """

    def __init__(self, keys: Sequence[str], give_up_after: int | None) -> None:
        self.give_up_after = give_up_after
        self.out = 0
        """Prompts that left the pool so."""
        self._keys = keys
        self._times: dict[int, int] = {}  # by prompt: steps in a row that gave it up
        self._in_a_row: dict[int, str] = {}  # by prompt that failed for the first time: the engine's words

    def see(self, group: Group) -> None:
        """A request of the group is complete.

        Raises:
            RoundError: the engine is broken; with its own words.
        """
        if not group.all_failed:
            self._in_a_row.clear()
            self._times.pop(group.prompt, None)
            return
        if group.given_up:
            group.verdict = Verdict.DEFER
        if group.prompt in self._times:
            return
        self._in_a_row[group.prompt] = group.outcomes[-1].error
        if len(self._in_a_row) >= MOST_IN_A_ROW:
            raise RoundError(
                f"none of the rollouts of {len(self._in_a_row)} prompts in a row came back; the last failed with: "
                f"{group.outcomes[-1].error or 'no reason given'}"
            )

    def give_up(self, group: Group, step: int) -> Verdict:
        """The step ends without the group: what becomes of its prompt."""
        times = self._times[group.prompt] = self._times.get(group.prompt, 0) + 1
        name, most = self._keys[group.prompt], self.give_up_after
        if times == 1:
            logger.warning(
                "step %d: none of the %d rollouts of prompt %s (row %d) came back: %s; it is tried again in later "
                "epochs%s",
                step, group.requested, name, group.prompt, group.outcomes[-1].error or "no reason given",
                "" if most is None else f", {most} times in all (allocation.give_up_after)",
            )  # fmt: skip
        if most is None or times < most:
            return Verdict.DEFER
        self.out += 1
        return Verdict.RETIRE

    def state_dict(self) -> dict[str, Any]:
        """12 bytes a prompt that fails."""
        return {
            "out": self.out,
            "prompts": np.array(list(self._times), np.int64),
            "times": np.array(list(self._times.values()), np.int32),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over saved counts."""
        check_keys("failures", state, ("out", "prompts", "times"))
        self.out = int(state["out"])
        self._times = dict(zip(np.asarray(state["prompts"]).tolist(), np.asarray(state["times"]).tolist(), strict=True))
