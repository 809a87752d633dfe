"""Worker processes that hang, die, leak or print: the answer is unscored under a name, all others get their verdict."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from verl_ext.rewards import worker_pool as pool_module
from verl_ext.rewards.worker_pool import PoolSettings, Unscored, WorkerPool

STUB = str(Path(__file__).parent / "stub")
DEADLINE_S = 0.3


def use_stub(monkeypatch):
    monkeypatch.syspath_prepend(STUB)
    monkeypatch.setattr(pool_module, "COMPARER", "stub_compare")


@pytest.fixture
def pool(monkeypatch):
    """A pool whose workers find the stub in place of the comparison, which also makes them start quickly."""
    use_stub(monkeypatch)
    pool = WorkerPool(PoolSettings(workers=2, deadline_s=DEADLINE_S, memory_mb=256))
    yield pool
    pids = pool.pids()
    pool.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def reason(pool, answer, gold="1"):
    with pytest.raises(Unscored) as failure:
        pool.judge(gold, answer)
    return failure.value.reason


def test_a_worker_that_hangs_is_replaced_and_delays_no_other_answer(pool):
    assert pool.judge("1", "1")
    with ThreadPoolExecutor(2) as threads:
        started = time.monotonic()
        hung = threads.submit(reason, pool, "hang")
        while len(pool._idle) == 2:
            time.sleep(0.001)
        [victim] = set(pool._workers) - set(pool._idle)
        first = victim.process.pid
        assert [pool.judge("1", str(i)) for i in range(20)] == [i == 1 for i in range(20)]
        assert hung.result() == "deadline"
        assert time.monotonic() - started >= DEADLINE_S
    assert victim.process.pid != first and not os.path.exists(f"/proc/{first}")
    assert pool.judge("1", "1")


def test_a_worker_that_waits_for_something_is_ended_by_the_clock(monkeypatch):
    use_stub(monkeypatch)
    pool = WorkerPool(PoolSettings(workers=1, deadline_s=0.03, memory_mb=256))
    assert reason(pool, "sleep") == "deadline"
    assert pool.judge("1", "1")
    pool.close()


def test_a_worker_that_the_kernel_does_not_let_run_is_replaced(monkeypatch):
    """Its timers end it only once it runs again: here the one that waits keeps the time."""
    use_stub(monkeypatch)
    monkeypatch.setattr(pool_module, "_GRACE_S", 0.1)
    pool = WorkerPool(PoolSettings(workers=1, deadline_s=0.03, memory_mb=256))
    assert reason(pool, "stop") == "deadline"
    assert pool.judge("1", "1")
    pool.close()


def test_each_of_many_threads_gets_the_verdict_on_its_own_answer(pool):
    answers = [str(i % 3) for i in range(200)]
    for at in (50, 120):
        answers[at] = "die"
    answers[90] = "raise"

    def verdict(answer):
        try:
            return pool.judge("1", answer)
        except Unscored as failure:
            return failure.reason

    with ThreadPoolExecutor(8) as threads:
        verdicts = list(threads.map(verdict, answers))
    names = {"die": "crash", "raise": "error"}
    assert verdicts == [names.get(answer, answer == "1") for answer in answers]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("die", "crash"), ("segfault", "crash"), ("memory", "memory"), ("raise", "error"), ("recurse", "error")],
)
def test_what_goes_wrong_has_a_name_and_the_pool_goes_on(pool, answer, expected):
    assert reason(pool, answer) == expected
    assert pool.judge("1", "1") and not pool.judge("1", "2")


def test_a_worker_killed_from_outside_costs_no_answer(pool):
    assert pool.judge("1", "1")
    [pid] = pool.pids()
    os.kill(pid, signal.SIGKILL)
    assert pool.judge("1", "1")
    assert pool.pids() != [pid]


def test_memory_used_up_by_earlier_answers_costs_a_later_one_nothing(pool, monkeypatch):
    pool._workers = pool._idle = pool._workers[:1]
    assert not pool.judge("1", "leak")
    before = pool.pids()
    # Too much beside what leaked, little enough for a fresh worker.
    assert not pool.judge("1", "leak")
    assert pool.pids() != before


def test_a_worker_that_has_grown_is_replaced_before_it_is_full(pool):
    pool._workers = pool._idle = pool._workers[:1]
    pool.judge("1", "leak")
    before = pool.pids()
    for _ in range(63):
        pool.judge("1", "1")
    assert pool.pids() != before


def test_what_is_printed_is_no_verdict_and_nothing_is_written(pool, tmp_path):
    assert not pool.judge("1", "print")
    assert reason(pool, f"write:{tmp_path / 'file'}") == "error"
    assert not (tmp_path / "file").exists() or (tmp_path / "file").stat().st_size == 0


def test_credentials_in_the_environment_do_not_reach_a_worker(pool, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "1")
    assert pool.judge("absent", "environment:SECRET_TOKEN")
    assert pool.judge(os.environ["PATH"], "environment:PATH")


def test_a_worker_that_cannot_start_is_named(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('half installed')")
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = WorkerPool(PoolSettings(workers=1, deadline_s=DEADLINE_S, memory_mb=256))
    with pytest.raises(Unscored, match="start: .*half installed"):
        pool.judge("1", "1")
    assert pool.pids() == []


def test_a_fork_of_this_process_has_no_share_in_the_pool():
    settings = PoolSettings(workers=1)
    mine = pool_module.shared_pool(settings)
    assert pool_module.shared_pool(settings) is mine
    pid = os.fork()
    if pid == 0:
        os._exit(0 if not pool_module._pools else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert pool_module.shared_pool(settings) is mine
    pool_module.close_pools()


PARENT = """
import sys, threading, time
sys.path.insert(0, {stub!r})
from verl_ext.rewards import worker_pool as pool_module
pool_module.COMPARER = "stub_compare"
from verl_ext.rewards.worker_pool import PoolSettings, shared_pool
pool = shared_pool(PoolSettings(workers=2, deadline_s={deadline}, memory_mb=256))
pool.judge("1", "1")
thread = threading.Thread(target=lambda: pool.judge("1", "hang"), daemon=True)
thread.start()
while len(pool._idle) == 2:
    time.sleep(0.001)
pool.judge("1", "2")
print(*pool.pids(), flush=True)
{end}
"""


@pytest.mark.parametrize("killed", [False, True], ids=["exits", "is killed"])
def test_no_worker_outlives_its_parent(killed):
    """Also one that hangs where nobody can end it any more: its own timer does."""
    end = "time.sleep(60)" if killed else ""
    code = PARENT.format(stub=STUB, deadline=DEADLINE_S, end=end)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    if killed:
        parent.kill()
    assert parent.wait(20) == (-signal.SIGKILL if killed else 0)
    until = time.monotonic() + (10 if killed else 0.2)
    while alive := [pid for pid in pids if _running(pid)]:
        assert time.monotonic() < until, f"still running: {alive}"
        time.sleep(0.02)


def _running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
