"""Counts the wrong inputs that the tests give: `pytest tests/unit -m bad_input --bad-inputs-json FILE`."""

from __future__ import annotations

import json
from pathlib import Path


def pytest_addoption(parser):
    parser.addoption("--bad-inputs-json", default=None, help="file for the number of wrong inputs tried and refused")


def pytest_terminal_summary(terminalreporter, config):
    """Write how many were tried, and how many were refused by the error that names them."""
    path = config.getoption("--bad-inputs-json")
    if not path:
        return
    counts = {
        outcome: sum("bad_input" in report.keywords for report in terminalreporter.stats.get(outcome, []))
        for outcome in ("passed", "failed", "error")
    }
    record = {"tried": sum(counts.values()), "refused_by_name": counts["passed"]}
    terminalreporter.write_line(f"bad inputs: {record['tried']} tried, {record['refused_by_name']} refused by name")
    Path(path).write_text(json.dumps(record, indent=1) + "\n")
