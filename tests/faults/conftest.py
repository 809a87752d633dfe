"""The table of faults: what docs/faults.md promises, and what the tests saw."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.fake_stack import fake_stack

PROMISES = Path(__file__).parents[2] / "docs" / "faults.md"


def promises() -> dict[str, dict[str, str]]:
    """Fault -> stack and promise, from the table in docs/faults.md."""
    rows = re.findall(r"^\| ([^|]+) \| (fake|real) \| ([^|]+) \|$", PROMISES.read_text(), re.MULTILINE)
    return {fault: {"stack": stack, "promised": promised} for fault, stack, promised in rows}


@dataclass
class Fault:
    """One row of the table; the test fails if it saw nothing."""

    record: Callable[[str, object], None]
    began: float

    def saw(self, text: str, ledger: Mapping[str, Any] | None = None) -> None:
        """What was seen, with its figures.

        Args:
            ledger: the last record of the run's ledger; its rollouts, and those without a fate, are counted.
        """
        self.record("seen", text)
        if ledger is not None:
            still_open = ledger["in_flight"] + ledger["waiting"]
            self.record("rollouts", ledger["issued_total"])
            self.record("lost", ledger["issued_total"] - sum(ledger["fates_total"].values()) - still_open)
        self.record("seconds", round(time.monotonic() - self.began, 1))


@pytest.fixture
def fault(request, record_property):
    """The row of the test's marker `fault_row`, or of its parameter `row`."""
    name = request.node.callspec.params.get("row") if hasattr(request.node, "callspec") else None
    if name is None:
        name = request.node.get_closest_marker("row").args[0]
    assert name in promises(), f"docs/faults.md promises nothing about {name!r}"
    record_property("fault", name)
    return Fault(record_property, time.monotonic())


@pytest.fixture(autouse=True)
def one_at_a_time(request):
    """Where several people test on one machine: VERL_EXT_STACK_LOCK names a file that a real run locks."""
    path = os.environ.get("VERL_EXT_STACK_LOCK")
    if not path or request.node.get_closest_marker("real_stack") is None:
        yield
        return
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def stack(tmp_path_factory):
    """One cluster for all faults on fake engines: two rollout workers, with verl's reward workers and without."""
    from verl_ext.testing.fake_run import fake_config
    from verl_ext.tiny.policy_store import ensure_tiny

    folder = tmp_path_factory.mktemp("reward")
    (folder / "reward.py").write_text(REWARD.format(mode=str(folder / "mode.json")))
    overrides = [
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        "allocation.reward_deadline_s=8",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        "transfer_queue.backend.SimpleStorage.total_storage_size=3000",
    ]
    ensure_tiny(fake_config(overrides).tiny.mix)
    with fake_stack(*overrides, rewards=True) as running:
        running.mode_file = folder / "mode.json"
        yield running


@pytest.fixture
def small_disk(tmp_path):
    """A file system of so many KiB; skipped where none can be mounted."""
    mounted = []

    def make(kib: int) -> Path:
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(place)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield make
    for place in mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)


REWARD = '''\
"""Does what the file of its mode says, on answers of two tokens; else 1 for a right answer, 0 for a wrong one."""
import json, re, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    with open({mode!r}) as file:
        mode = json.load(file)
    right = solution_str.startswith("1")
    chosen = len(solution_str) == 2 and mode.get("prompt") in (None, ground_truth) or mode.get("all")
    what = mode["what"] if chosen else mode.get("else", "plain")
    if what == "raise":
        raise RuntimeError("the reward broke")
    if what == "raise_timeout":
        raise TimeoutError("the reward's own sandbox did not answer")
    if what == "hang":
        time.sleep(1e6)
    if what == "hold":
        re.match(r"(a|aa)+$", "a" * 60 + "b")
    if what == "slow":
        time.sleep(0.3)
    values = dict(none=None, nan=float("nan"), inf=float("inf"), text="right", bare=float(right), signs=2.0 * right - 1)
    if what in values:
        return values[what]
    if what == "graded":
        return 0.3 + 0.4 * right
    if what == "unnamed":
        return dict(score=float(right), style=1)
    return dict(score=float(right), acc=right)
'''


def pytest_configure(config):
    config.addinivalue_line("markers", "row(fault): the fault of docs/faults.md that a test injects")


def pytest_addoption(parser):
    parser.addoption("--faults-json", default=None, help="file that the table of faults is written to")


def pytest_terminal_summary(terminalreporter, config):
    """Print the table, and write it where --faults-json says."""
    rows: dict[str, dict] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            properties = dict(getattr(report, "user_properties", []))
            if name := properties.get("fault"):
                row = rows.setdefault(name, {"fault": name, **promises()[name], "seen": "", "kept": True})
                row["seen"] = properties.get("seen") or row["seen"]
                for figure in ("seconds", "rollouts", "lost"):
                    row[figure] = properties.get(figure, row.get(figure))
                row["kept"] = row["kept"] and outcome == "passed"
    if not rows:
        return
    for row in rows.values():
        if row["kept"] and not row["seen"]:
            row["kept"], row["seen"] = False, "nothing"
    table = [rows[name] for name in promises() if name in rows]
    untried = [name for name in promises() if name not in rows]
    terminalreporter.section("faults")
    for row in table:
        verdict, seconds = "kept  " if row["kept"] else "BROKEN", row.get("seconds") or 0
        terminalreporter.write_line(
            f"{verdict} {row['fault']} ({row['stack']}, {seconds:.0f} s)\n"
            f"         promised: {row['promised']}\n         seen:     {row['seen'] or 'see the failure above'}"
        )
    kept = sum(row["kept"] for row in table)
    terminalreporter.write_line(f"{len(table)} faults tried, {kept} as promised; not tried here: {len(untried)}")
    path = config.getoption("--faults-json")
    if path:
        record = {"tried": len(table), "as_promised": kept, "not_tried": untried, "cores": os.cpu_count()}
        record |= {key: sum(row[key] or 0 for row in table) for key in ("rollouts", "lost")}
        record["rows"] = table
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(record, indent=1) + "\n")
