# SPDX-License-Identifier: Apache-2.0
"""A backend that replays the recorded outcomes of a real run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from verl_ext.allocation.groups import Outcome, Request
from verl_ext.allocation.state import rng_for
from verl_ext.runs.outcome_records import RecordError


class ReplayBackend:
    """Outcomes of each prompt as they were recorded, those of the nearest step first.

    A prompt offered in step t is served its recorded visits in order of their distance to t (the earlier of two at the
    same distance first), the sessions of a visit in seeded order; when all are used up, it begins again, and those
    rollouts are counted in ``reused``. Frozen, all visits of a prompt are one.

    A visit has as many sessions as the recording rule asked for, which may depend on the outcomes: SARA stops after
    four failures. Record with ``allocator=uniform`` where rules are to be compared fairly.

    Args:
        table: what `read_record` returned.
        seed: of the order within a visit.
        frozen: mix all steps.

    Raises:
        RecordError: the table has no rows.
    """

    def __init__(self, table: pa.Table, seed: int = 0, *, frozen: bool = False) -> None:
        if not len(table):
            raise RecordError("the recorded table has no rows")
        prompts = table["prompt"].combine_chunks()
        self.keys: list[str] = prompts.dictionary.to_pylist()
        """Keys of the prompts, by row of the pool."""
        code = prompts.indices.to_numpy()
        step = np.zeros(len(table), np.int64) if frozen else table["step"].to_numpy()
        session = table["session"].to_numpy()
        order = np.lexsort((session, step, code))
        self._step = step[order]
        self._correct = _list(table, "correct", order)
        self._score = _list(table, "score", order)
        self._tokens = table["tokens"].to_numpy()[order].tolist()
        self._failed = _list(table, "failed", order)
        self._first = np.searchsorted(code[order], np.arange(len(self.keys) + 1))
        self._seed = seed
        self._queues: dict[str, list[int]] = {}
        self.policy_version = 0
        """Version recorded in the outcomes."""
        self.rollouts = 0
        """Rollouts served so far."""
        self.reused = 0
        """Of them, those served to the same group before."""

    def begin_step(self) -> None:
        """Groups of earlier steps that do not wait are done."""
        self._queues = {}

    def rates(self) -> np.ndarray:
        """Share of right answers among the scored ones, by row of the pool; NaN where none was scored."""
        rates = np.full(len(self.keys), np.nan)
        for row in range(len(self.keys)):
            scored = [c for c in self._correct[self._first[row] : self._first[row + 1]] if c is not None]
            if scored:
                rates[row] = sum(scored) / len(scored)
        return rates

    def generate(self, requests: Sequence[Request]) -> list[Outcome]:
        """One outcome for every session, in the order of the requests."""
        outcomes = []
        for request in requests:
            group = request.group
            queue = self._queue(group.uid, group.prompt, group.offered_at)
            for session in request.sessions:
                at = queue[session % len(queue)]
                self.reused += session >= len(queue)
                outcomes.append(
                    Outcome(
                        group.uid, session, self._correct[at], self._score[at], 0, self._tokens[at],
                        self._failed[at], False, self.policy_version,
                    )
                )  # fmt: skip
            self.rollouts += request.n
        return outcomes

    def _queue(self, uid: str, row: int, offered_at: int) -> list[int]:
        """Indices of the prompt's outcomes in the order they are served to a group; a function of seed and group."""
        queue = self._queues.get(uid)
        if queue is None:
            low, high = self._first[row], self._first[row + 1]
            steps = self._step[low:high]
            luck = rng_for(self._seed, "replay", row, offered_at).random(high - low)
            queue = (low + np.lexsort((luck, steps, abs(steps - offered_at)))).tolist()
            self._queues[uid] = queue
        return queue


def _list(table: pa.Table, column: str, order: np.ndarray) -> list:
    return table[column].take(pa.array(order)).to_pylist()
