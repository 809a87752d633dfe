"""Long runs: memory is flat, and nothing is left behind, also after a failure and after Ctrl-C."""

from __future__ import annotations

import json
import signal
import sys
import time

import numpy as np
import pytest

from benchmarks.bench_engine import MOST_GROWTH, PARTS, REST, trend
from tests.faults.live_run import LiveRun, memory_by_name

pytestmark = pytest.mark.faults

MIB = 2.0**20


def described(name: str, row: dict[str, float]) -> str:
    """Median; slope of the second half of the steps with its interval, and the growth that it makes over all."""
    return (
        f"{name} {row['bytes'] / MIB:.0f} MiB {row['late_bytes_a_step'] / 1024:+.1f} [{row['late_low'] / 1024:+.1f}, "
        f"{row['late_high'] / 1024:+.1f}] KiB a step ({row['growth']:+.1%})"
    )


@pytest.mark.ray
@pytest.mark.row("a run of 300 steps")
def test_300_steps_on_fake_engines(tmp_path, fault):
    """256 rollouts a step; the measuring is benchmarks/bench_engine.py's."""
    out = tmp_path / "steps.json"
    command = [sys.executable, "-m", "benchmarks.bench_engine", "--one", "256", "300", str(out)]
    run = LiveRun(tmp_path, command=_from_here(command))
    try:
        status, _ = run.end(within=3600)
        assert status == 0, run.log[-4000:]
        left = run.nothing_left()
    finally:
        run.tidy()
    lines = json.loads(out.read_text())["steps"]
    assert len(lines) == 300 and all(line["left_in_queue"] == line["left_in_driver"] == 0 for line in lines)
    trends = {part: trend(lines, part) for part in ("driver", *PARTS, REST)}
    grown = {part: row["growth"] for part, row in trends.items() if row["growth"] > MOST_GROWTH}
    assert not grown, {part: described(part, row) for part, row in trends.items()}
    fault.saw("; ".join(described(part, row) for part, row in trends.items()) + f"; {left}")


@pytest.mark.ray
@pytest.mark.parametrize("how", ["an error", "Ctrl-C"])
def test_fake_runs_that_end_early_leave_nothing(tmp_path, how):
    code = """
        import sys
        from verl_ext.testing.fake_run import fake_config, fake_run
        with fake_run(fake_config(), prompts=256) as collector:
            print("ready", flush=True)
            while True:
                collector.sample(1 + collector.allocation.ledger.issued)
                if sys.argv[1] == "an error":
                    raise RuntimeError("an error")
    """
    import textwrap

    run = LiveRun(tmp_path, command=_from_here([sys.executable, "-c", textwrap.dedent(code), how]))
    try:
        run.wait_for(lambda: "ready" in run.log, 300, "ready")
        time.sleep(1.0)
        status, _ = run.end(signal.SIGINT if how == "Ctrl-C" else None, within=120)
        assert status != 0
        run.nothing_left()
    finally:
        run.tidy()


def _from_here(command: list[str]) -> list[str]:
    """The command in the repository's root, whatever folder it is started in."""
    from pathlib import Path

    root = str(Path(__file__).parents[2])
    return ["env", f"PYTHONPATH={root}", *command]


@pytest.mark.real_stack
@pytest.mark.row("a run of 50 steps")
def test_50_real_steps(tmp_path, fault):
    steps = 50
    run = LiveRun(
        tmp_path, "recipe=cpu/sara", "trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1",
        f"trainer.total_training_steps={steps}", "trainer.resume_mode=disable",
    )  # fmt: skip
    memory: dict[int, dict[str, int]] = {}
    try:
        run.wait_for_step(1)
        while run.child.poll() is None:
            done = run.steps()
            if done and done[-1] not in memory:
                memory[done[-1]] = memory_by_name(run.processes())
            time.sleep(0.3)
        status, _ = run.end(within=120)
        assert status == 0, run.log[-4000:]
        left = run.nothing_left()
        result = run.result()
    finally:
        run.tidy()
    result.check_ledger()
    assert len(result.ledger) == steps
    names = set.intersection(*[set(memory[step]) for step in sorted(memory)[2:-2]])
    assert {"main_ppo", "VLLM::EngineCore", "ray::AllocatedTaskRunner", "ray::SimpleStorageUnit", "gcs_server"} <= names
    # The first steps fill caches and buffers; the last sample may fall into the run's end.
    measured = [memory[step] for step in sorted(memory)[10:-1]]
    trends = {name: trend([{f"{name}_bytes": at[name], "step_rollouts": 1} for at in measured], name) for name in names}
    # Idle workers come and go.
    steady = [name for name in names if "IDLE" not in name]
    grown = {name: described(name, trends[name]) for name in steady if trends[name]["growth"] > 2 * MOST_GROWTH}
    assert not grown
    total = np.array([sum(at[name] for name in names) for at in measured]) / MIB
    told = sorted(trends, key=lambda name: -trends[name]["bytes_a_step"])[:3]
    fault.saw(
        f"{total[0]:.0f} MiB at step 11, {total[-1]:.0f} at the end; fastest growing: "
        + "; ".join(described(name, trends[name]) for name in told) + f"; {left}",
        result.ledger[-1],
    )  # fmt: skip
