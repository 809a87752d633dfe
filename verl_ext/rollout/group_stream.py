"""Groups in flight on the rollout workers, without rounds: sent, reported when scored and stored, or cut off.

`StreamingSessions` is the worker's side, behind the same sessions, rewards and storing as rounds. `GroupStream` is the
driver's: one call waits on each worker for whatever is complete there, so that thousands of groups in flight are not
thousands of calls to watch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import ray

from verl_ext.allocation import RoundError
from verl_ext.rollout.engine_client import GroupLLMClient
from verl_ext.rollout.outcomes import OutcomeError
from verl_ext.rollout.reward_calls import RewardError
from verl_ext.rollout.sessions import GroupRequest, GroupRun, SessionReply

logger = logging.getLogger(__name__)

ABORT_EVERY_S, ABORT_WITHIN_S = 0.05, 5.0
"""The engine is told again until the sessions have ended, since it knows nothing of a request that has not reached it
yet; after the second, they are cancelled here."""


Report = tuple[str, list[SessionReply] | Exception]
"""A group's uid, and the replies of its sessions or what its run raised: an answer that cannot be read, a dead server,
a full storage. An error is a value here, so that it takes no other group's replies with it."""


class StreamingSessions:
    """The part of a rollout worker that runs groups one by one."""

    def _init_streaming(self) -> None:
        self._runs: dict[str, GroupRun] = {}
        self._complete: list[Report] = []
        self._news = asyncio.Event()
        self._stream = 0

    async def submit_groups(self, groups: list[GroupRequest], global_steps: int, deadline_s: float) -> None:
        """Begin these groups' sessions and return."""
        for group in groups:
            run = self._runs[group.uid] = GroupRun(group)
            run.whole = asyncio.create_task(self._run_to_the_end(run, global_steps, deadline_s))

    async def next_groups(self) -> list[Report]:
        """Wait for a group to be complete; the reports of all that are, in the order in which they were."""
        stream = self._stream
        while not self._complete and stream == self._stream:
            self._news.clear()
            await self._news.wait()
        if stream != self._stream:
            return []  # of a step that broke off
        complete, self._complete = self._complete, []
        return complete

    async def abort_groups(self, uids: list[str]) -> list[Report]:
        """Cut these groups off; reports of those that were still here, complete or not."""
        runs = [self._runs[uid] for uid in uids if uid in self._runs]
        await self._cut_off(runs)
        wanted = set(uids)
        found = [entry for entry in self._complete if entry[0] in wanted]
        self._complete = [entry for entry in self._complete if entry[0] not in wanted]
        return found

    async def clear_stream(self) -> None:
        """A step broke off: nothing is running or waiting to be told after this."""
        self._stream += 1
        self._news.set()
        await self._cut_off(list(self._runs.values()))
        self._complete = []

    async def _run_to_the_end(self, run: GroupRun, global_steps: int, deadline_s: float) -> None:
        started_at = time.monotonic()
        uid = run.group.uid
        try:
            replies = await self._run_group(run.group, self._sampling_params(), global_steps, deadline_s, run=run)
            for reply in replies:
                reply.started_at = started_at
            self._complete.append((uid, replies))
        except (OutcomeError, RewardError, RoundError) as error:
            self._complete.append((uid, error))
        except Exception as error:
            logger.exception("group %s failed", uid)
            self._complete.append((uid, RoundError(f"group {uid} failed in its rollout worker: {error!r}")))
        finally:
            del self._runs[uid]
            self._news.set()

    async def _cut_off(self, runs: list[GroupRun]) -> None:
        for run in runs:
            # Rows that are being stored already are: the group counts as complete.
            run.aborted = not (run.scoring is not None and run.scoring.done())
            if run.scoring is not None:
                run.scoring.cancel()
        await self._end_sessions(runs)
        if runs:
            await asyncio.wait([run.whole for run in runs])

    async def _end_sessions(self, runs: list[GroupRun]) -> None:
        """Have the engine end what is left of these groups, so that it works on none of it; else cancel it."""
        client = self.llm_client
        give_up = time.monotonic() + ABORT_WITHIN_S
        while pending := [task for run in runs for task in run.pending]:
            told = isinstance(client, GroupLLMClient) and await client.abort([run.group.uid for run in runs])
            if not told or time.monotonic() > give_up:
                if told:
                    logger.warning("%d sessions did not end after the engine was told to abort them", len(pending))
                for task in pending:
                    task.cancel()
                break
            await asyncio.wait(pending, timeout=ABORT_EVERY_S)


class GroupStream:
    """Groups in flight on all workers, as the driver sees them.

    Args:
        workers: actors with the methods of `StreamingSessions`.
    """

    def __init__(self, workers: list[Any]) -> None:
        self._workers = workers
        self._load = [0] * len(workers)
        self._sent: dict[str, tuple[int, int, float, Any]] = {}  # by uid: worker, sessions, overdue from, call
        self._waits: dict[Any, int] = {}  # the call that waits on each worker
        self._arrived: deque[list[SessionReply]] = deque()

    def __len__(self) -> int:
        return len(self._sent)

    def submit(self, groups: list[GroupRequest], global_steps: int, deadline_s: float, most_s: float) -> None:
        """Send each group to the worker with the fewest sessions; `most_s`: seconds after which it is overdue."""
        shares: dict[int, list[GroupRequest]] = {}
        for group in groups:
            i = self._load.index(min(self._load))
            self._load[i] += group.n
            shares.setdefault(i, []).append(group)
        overdue = time.monotonic() + most_s
        for i, share in shares.items():
            call = self._workers[i].submit_groups.remote(share, global_steps, deadline_s)
            for group in share:
                self._sent[group.uid] = (i, group.n, overdue, call)

    def next(self) -> list[SessionReply]:
        """Wait for a group's sessions to be scored and stored; their replies.

        Raises:
            RoundError: a worker or a server died, a group is overdue, TransferQueue is full, or nothing is in flight.
            RewardError: the reward does not answer at all.
            OutcomeError: the reward's answer cannot be read as correct or wrong.
        """
        while not self._arrived:
            self._listen()
        return self._leave(self._arrived.popleft())

    def abort(self, uids: list[str]) -> list[SessionReply]:
        """Cut these groups off; the replies of all their sessions in flight: none of a group that has left.

        Raises:
            RoundError, RewardError, OutcomeError: as `next`; no group is waited for that is not in flight.
        """
        wanted = {uid: self._sent[uid] for uid in uids if uid in self._sent}
        by_worker: dict[int, list[str]] = {}
        for uid, (i, *_) in wanted.items():
            by_worker.setdefault(i, []).append(uid)
        # Calls to an asynchronous actor may overtake each other: no abort before what it aborts has arrived.
        _get([call for *_, call in wanted.values()])
        found = _get([self._workers[i].abort_groups.remote(share) for i, share in by_worker.items()])
        self._arrived.extend(self._whole(report for answer in found for report in answer))
        while wanted.keys() - {group[0].uid for group in self._arrived}:  # complete before, and on their way to `next`
            self._listen()
        taken = {group[0].uid: group for group in self._arrived if group[0].uid in wanted}
        self._arrived = deque(group for group in self._arrived if group[0].uid not in wanted)
        return [reply for uid in wanted for reply in self._leave(taken[uid])]

    def clear(self) -> None:
        """A step broke off: nothing of it is left on the workers that still live."""
        calls = [worker.clear_stream.remote() for worker in self._workers]
        self._load = [0] * len(self._workers)
        self._sent, self._waits = {}, {}
        self._arrived.clear()
        ray.wait(calls, num_returns=len(calls), timeout=2 * ABORT_WITHIN_S)

    def _listen(self) -> None:
        """Wait for one worker's next report."""
        if not self._sent:
            raise RoundError("no group is in flight, but the outcomes of one are waited for")
        silent = {i for i, *_ in self._sent.values()} - set(self._waits.values())
        self._waits |= {self._workers[i].next_groups.remote(): i for i in sorted(silent)}
        overdue = next(iter(self._sent.values()))[2]  # the group sent first
        ready, _ = ray.wait(list(self._waits), num_returns=1, timeout=max(0.0, overdue - time.monotonic()))
        if not ready:
            now = time.monotonic()
            stuck = [uid for uid, (_, _, end, _) in self._sent.items() if end <= now]
            raise RoundError(
                f"{len(stuck)} groups did not come back within their deadlines (twice allocation.deadline_s, and some "
                f"more): {', '.join(stuck[:10])}" + (f" and {len(stuck) - 10} more" if len(stuck) > 10 else "")
            )
        for call in ready:
            del self._waits[call]
            self._arrived.extend(self._whole(_get([call])[0]))

    def _whole(self, reports: Iterable[Report]) -> list[list[SessionReply]]:
        """The replies of groups whose run raised nothing; if one did, they wait for `next`, and it is raised."""
        whole, errors = [], []
        for uid, said in reports:
            if isinstance(said, Exception):
                errors.append(said)
                self._gone(uid)
            else:
                whole.append(said)
        if errors:
            self._arrived.extend(whole)
            raise errors[0]
        return whole

    def _leave(self, replies: list[SessionReply]) -> list[SessionReply]:
        self._gone(replies[0].uid)
        return replies

    def _gone(self, uid: str) -> None:
        i, n, *_ = self._sent.pop(uid)
        self._load[i] -= n


def _get(calls: list[Any]) -> list[Any]:
    """Answers of workers; what they raise, by its own name."""
    try:
        return ray.get(calls)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, OutcomeError | RewardError | RoundError):
            raise error.cause from error
        raise
    except ray.exceptions.RayActorError as error:
        raise RoundError(f"a rollout worker died with groups in flight: {error}") from error
