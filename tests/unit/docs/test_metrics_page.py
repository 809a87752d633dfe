# SPDX-License-Identifier: Apache-2.0
"""docs/metrics.md says what every number under `allocation/` in the log is."""

import re
from pathlib import Path

import pytest

import verl_ext.training
from scripts.write_metrics import DOCUMENT, document, is_described, sections
from verl_ext.allocation import conclude
from verl_ext.allocation.registry import allocators, selectors
from verl_ext.configuration import compose_config
from verl_ext.simulate import run
from verl_ext.training import metrics as training

ROOT = Path(__file__).parents[3]
MORE = {
    "sara": ["allocation.allocator.audit_fraction=0.5", "allocation.allocator.max_staleness=2"],
    "dynamic_sampling": ["allocation.allocator.max_staleness=2"],
}
"""Settings without which some numbers are not logged."""


def test_the_page_is_as_the_code_says():
    assert (ROOT / DOCUMENT).read_text() == document(), "python -m scripts.write_metrics"


@pytest.fixture
def logged(monkeypatch):
    """Names that a short simulation logs, and what its rule declares."""

    def names(part, name, *more):
        seen, collect = set(), conclude._metrics
        monkeypatch.setattr(conclude, "_metrics", lambda *args: seen.update(found := collect(*args)) or found)
        small = ["simulation.steps=6", "simulation.prompts=256", *more]
        run(compose_config([f"allocation/{part}={name}", *small], "simulate"))
        return seen - {"rollouts_total", "tokens_total"}

    return names


@pytest.mark.parametrize("part, registry", [("allocator", allocators), ("selector", selectors)])
def test_every_rule_logs_what_it_declares_and_nothing_else(logged, part, registry):
    loop = set(conclude.METRICS) | {name for name in sections()["The pool of prompts"]}
    for name in registry.names():
        seen = logged(part, name, *MORE.get(name, ()))
        assert all(map(is_described, seen)), [one for one in seen if not is_described(one)]
        prefix = "selector/" if part == "selector" else ""
        own = {prefix + one for one in registry.get(name).METRICS}
        others = {one for one in seen - loop if not one.startswith(("fate/", "fate_tokens/"))}
        assert own == others, (name, own ^ others)


def test_what_the_training_room_writes_is_declared():
    """By its source; the integration tests look at what real runs log."""
    text = "".join(path.read_text() for path in Path(verl_ext.training.__file__).parent.glob("*.py"))
    written = set(re.findall(r'metrics\["allocation/([\w/]+)"\]', text))
    assert {"collect_s", "rows", "val_lost"} <= written <= set(training.METRICS)


def test_every_metric_has_a_meaning_and_a_unit_and_most_say_what_is_good():
    tables = [metric for table in sections().values() for metric in table.values()]
    assert all(metric.meaning and metric.unit for metric in tables)
    assert not is_described("allocation/nonsense") and is_described("allocation/unscored/timeout")
