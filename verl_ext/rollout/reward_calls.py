# SPDX-License-Identifier: Apache-2.0
"""Calls of verl's reward workers that end: each has a deadline, and a worker that does not answer is replaced.

verl 0.9.1 waits for a reward without end, and a reward that hangs keeps its worker: in a thread of it, or, where it
holds the interpreter (a regular expression, for one), all of it. So the deadline is kept on this side, and the worker
is killed. Whose answer hung is found out by scoring the group's answers one at a time on a worker apart.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import ray

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_IN_A_ROW = 5
"""Answers in a row that hang, scored alone, after which the reward itself is held to be at fault."""


class RewardError(RuntimeError):
    """The reward does not answer at all."""


class RewardWorkers:
    """The reward workers that one rollout worker uses.

    Args:
        handles: verl's reward workers, shared by all rollout workers; replaced here, in place, when they die or hang.
        make: starts another one; None where that cannot be done from here (a reward model scores).
        deadline_s: seconds for the answers of a group together, and for an answer alone.
    """

    def __init__(self, handles: list[Any], make: Callable[[], Any] | None, deadline_s: float) -> None:
        self.handles = handles
        self.make = make
        self.deadline_s = deadline_s
        self.replaced = 0
        """Workers that hung or died."""
        self._turn = 0
        self._apart: Any = None
        self._apart_lock = asyncio.Lock()
        self._hung_in_a_row = 0

    def __bool__(self) -> bool:
        return bool(self.handles)

    async def call(self, ask: Callable[[Any], Awaitable[T]]) -> T:
        """Ask the next worker.

        Raises:
            TimeoutError: no answer in time; the worker is replaced.
            ray.exceptions.RayActorError: it died; it is replaced.
        """
        self._turn = (self._turn + 1) % len(self.handles)
        handle = self.handles[self._turn]
        try:
            return await asyncio.wait_for(ask(handle), self.deadline_s)
        except ray.exceptions.RayTaskError:
            raise  # the reward's own, be it a TimeoutError of its own
        except (TimeoutError, asyncio.TimeoutError) as error:
            self._replace(handle, f"did not answer within {self.deadline_s:g} s (allocation.reward_deadline_s)")
            raise TimeoutError from error
        except ray.exceptions.RayActorError as error:
            self._replace(handle, f"died ({error})")
            raise

    async def call_apart(self, ask: Callable[[Any], Awaitable[T]], until: float, whose: str) -> T | None:
        """Score one answer on the worker apart, alone; None where it hangs, or `until` (monotonic clock) is past.

        Raises:
            RewardError: the last `MOST_IN_A_ROW` answers hung.
        """
        async with self._apart_lock:
            if time.monotonic() > until:
                logger.error("no time left to score %s (allocation.deadline_s): not scored", whose)
                return None
            handle = self._apart or (self.make() if self.make else self.handles[0])
            try:
                if self.make and self._apart is None:
                    self._apart = handle
                    await handle.__ray_ready__.remote()  # it takes seconds to start, which are not the reward's
                answer = await asyncio.wait_for(ask(handle), self.deadline_s)
            except ray.exceptions.RayTaskError:
                self._hung_in_a_row = 0
                raise
            except (TimeoutError, asyncio.TimeoutError):
                self._hung_in_a_row += 1
                why = f"hung for {self.deadline_s:g} s (allocation.reward_deadline_s)"
            except ray.exceptions.RayActorError:
                self._hung_in_a_row += 1
                why = "ended the reward worker"
            else:
                self._hung_in_a_row = 0
                return answer
            logger.error("the reward of %s %s: not scored", whose, why)
            if self.make:
                ray.kill(handle)
                self._apart = None
                self.replaced += 1
            if self._hung_in_a_row >= MOST_IN_A_ROW:
                raise RewardError(
                    f"the reward {why} for {self._hung_in_a_row} answers in a row, the last of {whose}: mend the "
                    f"reward function, or give it more time by allocation.reward_deadline_s={self.deadline_s:g}"
                )
            return None

    def _replace(self, handle: Any, why: str) -> None:
        if handle not in self.handles:  # another group's call has done it
            return
        self.replaced += 1
        logger.error("a reward worker %s%s", why, ": it is replaced" if self.make else "")
        if self.make is not None:
            ray.kill(handle)
            self.handles[self.handles.index(handle)] = self.make()


def maker(config: Any) -> Callable[[], Any] | None:
    """Starts a reward worker as verl's `RewardLoopManager` does; None with a reward model, whose address it needs."""
    if config.reward.reward_model.enable:
        return None

    def make() -> Any:
        from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

        return ray.remote(RewardLoopWorker).options(num_cpus=0).remote(config, None)

    return make
