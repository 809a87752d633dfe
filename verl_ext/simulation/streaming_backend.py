# SPDX-License-Identifier: Apache-2.0
"""A simulated engine with a clock: answers take time, and only so many are generated at once."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from verl_ext.allocation.groups import Group, Outcome, Request


class SimulatedStream:
    """Streams the outcomes of a backend that has them at once, such as `SimulatedBackend`, in virtual time.

    As a :class:`~verl_ext.allocation.rounds.Backend` it makes whole rounds on the same clock, so that both modes can
    be compared.

    Args:
        backend: whose ``generate`` gives the outcomes.
        latency: seconds that an outcome takes to generate; default: its tokens, one a second.
        slots: answers generated at once; those beyond it queue in order.
    """

    def __init__(
        self, backend: Any, latency: Callable[[Outcome], float] | None = None, slots: int | None = None
    ) -> None:
        self.backend = backend
        self.now = 0.0
        """Seconds since the beginning."""
        self.busy = 0.0
        """Seconds of slots in use."""
        self.order: list[str] = []
        """uids of the groups in the order they came back."""
        self._latency = latency or (lambda outcome: float(outcome.response_tokens))
        self._slots = slots
        self._queue: deque[Outcome] = deque()
        self._running: dict[tuple[str, int], tuple[float, float, Outcome]] = {}  # since when, for how long
        self._ends: list[tuple[float, int, tuple[str, int]]] = []
        self._back: dict[str, list[Outcome]] = {}
        self._due: dict[str, int] = {}
        self._count = 0

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue the sessions."""
        for request in requests:
            self._due[request.group.uid] = request.n
            self._back[request.group.uid] = []
        self._queue.extend(self.backend.generate(requests))
        self._start()

    def next(self) -> list[Outcome]:
        """Let time pass until a request is complete.

        Raises:
            RuntimeError: nothing is in flight.
        """
        while self._ends:
            self.now, _, key = heapq.heappop(self._ends)
            since, seconds, outcome = self._running.pop(key)
            self.busy += seconds
            self._back[outcome.group].append(outcome)
            self._start()
            if len(self._back[outcome.group]) == self._due[outcome.group]:
                return self._leave(outcome.group)
        raise RuntimeError("no rollout is in flight")

    def abort(self, groups: Sequence[Group]) -> list[Outcome]:
        """Cut off these groups: tokens in proportion to the time their answers ran; none of those that queued."""
        uids = {group.uid for group in groups}
        for key in [key for key in self._running if key[0] in uids]:
            since, seconds, outcome = self._running.pop(key)
            share = (self.now - since) / seconds if seconds else 1.0
            self.busy += self.now - since
            self._back[key[0]].append(replace(outcome, response_tokens=int(share * outcome.response_tokens)))
        self._ends = [end for end in self._ends if end[2] in self._running]
        heapq.heapify(self._ends)
        rest: deque[Outcome] = deque()
        for outcome in self._queue:
            if outcome.group in uids:
                self._back[outcome.group].append(replace(outcome, response_tokens=0))
            else:
                rest.append(outcome)
        self._queue = rest
        self._start()
        return [replace(outcome, failed=False, aborted=True) for uid in sorted(uids) for outcome in self._leave(uid)]

    def generate(self, requests: Sequence[Request]) -> list[Outcome]:
        """A whole round."""
        self.submit(requests)
        return [outcome for _ in requests for outcome in self.next()]

    def _start(self) -> None:
        while self._queue and (self._slots is None or len(self._running) < self._slots):
            outcome = self._queue.popleft()
            key, seconds = (outcome.group, outcome.session), self._latency(outcome)
            self._running[key] = (self.now, seconds, outcome)
            self._count += 1
            heapq.heappush(self._ends, (self.now + seconds, self._count, key))

    def _leave(self, uid: str) -> list[Outcome]:
        self.order.append(uid)
        del self._due[uid]
        return self._back.pop(uid)
