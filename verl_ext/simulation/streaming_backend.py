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
        self._complete: deque[str] = deque()
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
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
        while not self._complete:
            if not self._ends:
                raise RuntimeError("no rollout is in flight")
            self._pass()
        return self._leave(self._complete.popleft())

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        """Call when that time has come: weights are exchanged while answers are generated."""
        self._count += 1
        heapq.heappush(self._calls, (seconds, self._count, call))

    def until(self, seconds: float) -> None:
        """Let time pass, with the engines at work."""
        while min(self._ends[0][0] if self._ends else seconds, self._calls[0][0] if self._calls else seconds) < seconds:
            self._pass()
        self.now = max(self.now, seconds)
        while self._calls and self._calls[0][0] <= seconds:
            heapq.heappop(self._calls)[2]()

    def pause(self, seconds: float) -> None:
        """Let time pass, with the engines at rest: what is in flight goes on after it."""
        self.now += seconds
        self._running = {key: (since + seconds, length, o) for key, (since, length, o) in self._running.items()}
        self._ends = [(end + seconds, number, key) for end, number, key in self._ends]

    def _pass(self) -> None:
        """To the next event."""
        if self._calls and (not self._ends or self._calls[0][0] <= self._ends[0][0]):
            self.now, _, call = heapq.heappop(self._calls)
            return call()
        self.now, _, key = heapq.heappop(self._ends)
        _, seconds, outcome = self._running.pop(key)
        self.busy += seconds
        self._back[outcome.group].append(outcome)
        if len(self._back[outcome.group]) == self._due[outcome.group]:
            self._complete.append(outcome.group)
        self._start()

    def abort(self, groups: Sequence[Group]) -> list[Outcome]:
        """Cut off these groups: tokens in proportion to the time their answers ran; none of those that queued."""
        uids = {group.uid for group in groups}
        whole = [uid for uid in self._complete if uid in uids]
        self._complete = deque(uid for uid in self._complete if uid not in uids)
        back = [outcome for uid in whole for outcome in self._leave(uid)]
        uids -= set(whole)
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
        cut = [outcome for uid in sorted(uids) for outcome in self._leave(uid)]
        return back + [replace(outcome, failed=False, aborted=True) for outcome in cut]

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
