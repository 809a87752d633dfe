"""A pool of math worker processes: a deadline an answer, and a worker that hangs or dies is replaced.

Workers are plain child processes talking over pipes, because verl calls rewards in threads of a Ray actor: there
`signal.alarm` raises, a fork would copy a threaded process, and a `ProcessPoolExecutor` neither ends a worker that
hangs nor survives one that dies.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

from verl_ext.rewards.math_worker import CLOCK_FACTOR

COMPARER = "verl_ext.rewards.compare_answers"
"""Module whose `same` the workers call."""

START_S = 120.0
"""Seconds a worker has to import math-verify, also on a busy machine."""

_GRACE_S = 5.0
_OVERDUE = (-signal.SIGPROF, -signal.SIGALRM)
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "VIRTUAL_ENV", "VERL_EXT_RUN_ID")
_LONGEST_REPLY = 4096


class Unscored(Exception):
    """An answer that could not be judged; `reason` is deadline, memory, crash, error or start."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True)
class PoolSettings:
    """Size and limits of a pool."""

    workers: int = 2
    """Worker processes."""

    deadline_s: float = 5.0
    """Seconds of processor time an answer may take in a worker; by the clock, CLOCK_FACTOR times as many."""

    memory_mb: int = 1024
    """Address space of a worker in MiB."""


class _Worker:
    """One slot of the pool: a process, started when first needed and again whenever it is lost."""

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self.process: subprocess.Popen | None = None
        self.ready = False
        self.served = 0
        self._buffer = b""

    def readiness(self) -> int:
        """0: no process yet; 1: starting; 2: ready."""
        if self.process is None:
            return 0
        return 2 if self.ready or self._has_output(0.0) else 1

    def start(self) -> None:
        """Start the process without waiting for it."""
        settings = self.settings
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        # No credentials for a process that reads a model's answers; found is what is found here.
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "verl_ext.rewards.math_worker",
                str(settings.deadline_s),
                str(settings.memory_mb),
                COMPARER,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=environment,
            cwd="/",
            # Ctrl-C is this process's to handle.
            start_new_session=True,
        )
        self.ready, self.served, self._buffer = False, 0, b""

    def judge(self, request: bytes) -> bool:
        """The verdict on one request.

        Raises:
            Unscored: the worker hung, died, ran out of memory, or could not judge.
        """
        if self.process is None or self.process.poll() is not None:
            # Never started, or died while idle (the kernel's out-of-memory killer, say).
            self.end()
            self.start()
        if not self.ready:
            self._await_ready()
        self.served += 1
        try:
            self.process.stdin.write(request)
            # The worker keeps the deadline itself; this is for one that the kernel does not let run at all.
            reply = self._read(CLOCK_FACTOR * self.settings.deadline_s + _GRACE_S)
        except TimeoutError:
            self.replace()
            raise Unscored("deadline", "a worker that does not even end") from None
        except OSError:
            # Nobody reads the pipe any more.
            reply = None
        if reply is None:
            status = self._exit_status()
            self.replace()
            raise Unscored("deadline" if status in _OVERDUE else "crash", f"exit status {status}")
        if reply.get("recycle"):
            self.replace()
        if "unscored" in reply:
            raise Unscored(reply["unscored"], reply.get("detail", ""))
        return reply["right"]

    def _exit_status(self) -> int:
        """How the process ended, or was ended now."""
        try:
            return self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def _await_ready(self) -> None:
        try:
            reply = self._read(START_S)
        except TimeoutError:
            reply = {"failed": f"not ready after {START_S:g} s"}
        if not reply or "ready" not in reply:
            status = self._exit_status()
            self.end()
            raise Unscored("start", (reply or {}).get("failed", f"the worker ended with exit status {status}"))
        self.ready = True

    def _read(self, seconds: float) -> dict | None:
        """One reply; None where the process has ended or talks nonsense.

        Raises:
            TimeoutError: nothing came in time.
        """
        until = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            if not self._has_output(until - time.monotonic()):
                raise TimeoutError
            part = os.read(self.process.stdout.fileno(), _LONGEST_REPLY)
            if not part or len(self._buffer) > _LONGEST_REPLY:
                return None
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            return json.loads(line)
        except ValueError:
            return None

    def _has_output(self, seconds: float) -> bool:
        # select() cannot watch the high file descriptors of a large process.
        poll = select.poll()
        poll.register(self.process.stdout.fileno(), select.POLLIN)
        return bool(poll.poll(max(0.0, seconds) * 1000))

    def replace(self) -> None:
        """End the process and start another in the background."""
        self.end()
        self.start()

    def end(self) -> None:
        """End the process and wait for it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()
            self.process = None


class WorkerPool:
    """Judges answers from any number of threads; each gets the verdict on its own answer.

    A failure that may not be the answer's own (`memory`, `crash`) in a worker that had judged others before is tried
    once more in a fresh one, so that a verdict does not depend on what was judged earlier.
    """

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self._workers = [_Worker(settings) for _ in range(settings.workers)]
        self._idle = list(self._workers)
        self._freed = threading.Condition()

    def judge(self, true: str, given: str) -> bool:
        """Whether an answer equals the true one.

        Raises:
            Unscored: there is no verdict; says why.
        """
        request = json.dumps({"true": true, "given": given}).encode("ascii") + b"\n"
        worker = self._take()
        try:
            used = worker.served > 0
            try:
                return worker.judge(request)
            except Unscored as failure:
                if not used or failure.reason not in ("memory", "crash"):
                    raise
            return worker.judge(request)
        finally:
            with self._freed:
                self._idle.append(worker)
                self._freed.notify()

    def _take(self) -> _Worker:
        """An idle worker: rather one that is ready than one that is starting, rather that than a new one."""
        with self._freed:
            while not self._idle:
                self._freed.wait()
            worker = max(self._idle, key=_Worker.readiness)
            self._idle.remove(worker)
            return worker

    def pids(self) -> list[int]:
        """Process ids of the workers that are running."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.end()


_pools: dict[PoolSettings, WorkerPool] = {}
_lock = threading.Lock()


def shared_pool(settings: PoolSettings) -> WorkerPool:
    """This process's pool with these settings; closed when the process exits."""
    with _lock:
        if settings not in _pools:
            _pools[settings] = WorkerPool(settings)
        return _pools[settings]


@atexit.register
def close_pools() -> None:
    """End the workers of all shared pools."""
    with _lock:
        for pool in _pools.values():
            pool.close()
        _pools.clear()


def _forget_pools() -> None:
    """The workers belong to the process that started them, not to a fork of it."""
    global _pools, _lock
    _pools, _lock = {}, threading.Lock()


os.register_at_fork(after_in_child=_forget_pools)
