# SPDX-License-Identifier: Apache-2.0
"""End what a run started, however the run ends.

A failed start leaves vLLM's EngineCore and Worker processes behind (verl 0.9.1, vLLM 0.28.0), each holding gigabytes.
Every process of a run carries the run's id in its environment; nothing without that id is ever touched. A watcher
process, which waits on a pipe that only this process holds open, does the same when this process is killed outright.

Linux only (it reads ``/proc``); elsewhere nothing is found and nothing is ended.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

RUN_ID = "VERL_EXT_RUN_ID"
"""Environment variable that marks every process of a run."""

_VLLM_SOCKETS = "VLLM_RPC_BASE_PATH"
_GRACE_S = 5.0
SHARED_MEMORY = "/dev/shm/"
_PATIENCE_S = 30.0


def run_processes(run_id: str) -> list[int]:
    """The pids of this user's processes that carry the run's id, without this process and its ancestors."""
    mark = f"{RUN_ID}={run_id}".encode()
    spared = _self_and_ancestors()
    found = []
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not entry.isdigit() or int(entry) in spared:
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as environ:
                if mark in environ.read().split(b"\0"):
                    found.append(int(entry))
        except OSError:
            # Ended meanwhile, or another user's.
            continue
    return found


def _self_and_ancestors() -> set[int]:
    pids, pid = set(), os.getpid()
    while pid > 0 and pid not in pids:
        pids.add(pid)
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
                pid = int(stat.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return pids


def paths_in_use(pids: Iterable[int | str]) -> set[str]:
    """Paths of shared memory that these processes have open or mapped, and of sockets that they are bound to."""
    sockets = _bound_sockets()
    paths = set()
    for pid in pids:
        opened: list[str] = []
        try:
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                opened.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
        except OSError:  # ended meanwhile, or another user's
            pass
        try:
            with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
                opened += [line.rstrip("\n")[line.index("/") :] for line in maps if "/" in line]
        except OSError:
            pass
        paths |= {path for path in opened if path.startswith(SHARED_MEMORY) and not path.endswith("(deleted)")}
        paths |= {sockets[name] for name in opened if name in sockets}
    return paths


def remove_unused(paths: Iterable[str]) -> None:
    """Remove these paths, except those that a process still uses.

    A killed process leaves shared memory behind, gigabytes of it (verl's weights on their way to
    vLLM), and the names of sockets.
    """
    paths = set(paths)
    if paths:
        paths -= paths_in_use(filter(str.isdigit, os.listdir("/proc"))) | set(_bound_sockets().values())
    for path in paths:
        try:
            os.unlink(path)
        except OSError:  # its owner has done it
            continue


def _bound_sockets() -> dict[str, str]:
    """Paths of bound sockets, keyed by their names among the file descriptors in /proc."""
    found = {}
    try:
        with open("/proc/net/unix", encoding="utf-8", errors="replace") as table:
            for line in table:
                fields = line.split(maxsplit=7)
                if len(fields) == 8 and fields[7].startswith("/"):
                    found[f"socket:[{fields[6]}]"] = fields[7].rstrip("\n")
    except OSError:
        pass
    return found


def end_run_processes(run_id: str, grace_s: float = _GRACE_S, leftovers: Iterable[str] = ()) -> list[int]:
    """End every process of the run that is still there, and remove the shared memory and sockets they leave.

    Args:
        run_id: the run's id, as in the environment variable ``VERL_EXT_RUN_ID``.
        grace_s: seconds between asking (SIGTERM) and ending (SIGKILL).
        leftovers: paths that processes of the run which are gone already had in use.

    Returns:
        The pids that were still there.
    """
    paths = {*leftovers, *paths_in_use(run_processes(run_id))}
    ended: set[int] = set()
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + grace_s
        while pids := run_processes(run_id):
            for pid in pids:
                # SIGTERM is sent once, SIGKILL until nothing is left.
                if number == signal.SIGKILL or pid not in ended:
                    ended.add(pid)
                    try:
                        os.kill(pid, number)
                    except OSError:
                        continue
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
    remove_unused(paths)
    return sorted(ended)


def end_child(child: subprocess.Popen) -> None:
    """End a run that was started as a child in a group of its own.

    The child gets SIGTERM first, so that it can end what it started; then its process group is killed.
    Processes outside the group (Ray's and vLLM's) are ended by the run's own watcher.
    """
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_PATIENCE_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            pass
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


def _start_watcher(run_id: str, folder: str) -> subprocess.Popen:
    """Start a process that ends the run's processes and removes its folder once this process is gone."""
    environment = {key: value for key, value in os.environ.items() if key != RUN_ID}
    return subprocess.Popen(
        # -I -S: nothing but this file and the standard library is imported.
        [sys.executable, "-I", "-S", os.path.abspath(__file__), run_id, folder],
        stdin=subprocess.PIPE,
        env=environment,
        # Not in the foreground group: Ctrl-C must not end it before its work is done.
        start_new_session=True,
    )


def _after_ray_init(action: Callable[[], None]) -> None:
    """Run ``action`` after `ray.init`, which replaces signal handlers; its handler for SIGTERM aborts the process.

    Replaces: ray.init (ray 2.60)
    """
    from verl_ext.after_import import after_import

    def wrap() -> None:
        import ray

        original = ray.init

        @functools.wraps(original)
        def init(*args, **kwargs):
            context = original(*args, **kwargs)
            action()
            return context

        ray.init = init

    after_import("ray", wrap)


@contextmanager
def run_guard(ask_to_stop: Callable[[], bool] | None = None) -> Iterator[str]:
    """Mark this run's processes, and end those that are left when the block is left, in whichever way.

    SIGTERM becomes ``SystemExit(143)`` inside the block, so that it unwinds like Ctrl-C.

    Args:
        ask_to_stop: called from the handler of the first SIGTERM; True: whatever runs in the block was asked to end by
            itself, and only a second SIGTERM ends it at once. The exit status is 143 in both cases.

    Yields:
        The run's id.
    """
    run_id = uuid.uuid4().hex
    before = {key: os.environ.get(key) for key in (RUN_ID, "SPT_NOENV", _VLLM_SOCKETS)}
    os.environ[RUN_ID] = run_id
    # Ray and vLLM set process titles; without this the title overwrites the environment that /proc shows.
    os.environ["SPT_NOENV"] = "1"
    # vLLM names its sockets anew each time and leaves them behind, even in a run that ends well.
    folder = tempfile.mkdtemp(prefix="verl_ext-")
    os.environ.setdefault(_VLLM_SOCKETS, folder)
    watcher = _start_watcher(run_id, folder)

    guarded, terminated = True, False

    def on_sigterm(number, frame):
        nonlocal terminated
        first, terminated = not terminated, True
        if first and ask_to_stop is not None and ask_to_stop():
            return
        raise SystemExit(128 + number)

    def catch_sigterm():
        return signal.signal(signal.SIGTERM, on_sigterm) if guarded else None

    try:
        previous = catch_sigterm()
        _after_ray_init(catch_sigterm)
    except ValueError:
        # Not in the main thread: no handler of ours, the watcher still does its work.
        previous = None
    try:
        yield run_id
    finally:
        guarded = False
        leftovers = paths_in_use(run_processes(run_id))
        ray = sys.modules.get("ray")
        try:
            if ray is not None and ray.is_initialized():
                ray.shutdown()
        finally:
            end_run_processes(run_id, leftovers=leftovers)
            shutil.rmtree(folder, ignore_errors=True)
            if previous is not None:
                signal.signal(signal.SIGTERM, previous)
            for key, value in before.items():
                if value is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = value
            watcher.stdin.close()
            watcher.wait()
        if terminated:
            # ray.get turns whatever a handler raises into exit status 1.
            raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    # Whoever ends the run by a signal to all of its processes (`ray job stop`, Slurm) needs the watcher after that.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_run_processes(sys.argv[1])
    shutil.rmtree(sys.argv[2], ignore_errors=True)
