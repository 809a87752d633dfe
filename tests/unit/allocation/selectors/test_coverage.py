"""Coverage: what a selector looks at, how long the others wait, and that no rule narrows to a few prompts."""

import logging

import numpy as np
import pytest

from tests.unit.allocation.helpers import u_shaped
from tests.unit.allocation.selectors.selector_runs import SelectorRun
from verl_ext.allocation import PromptPool, SettingError, make_selector


def distinct(rows, window):
    return len(set(rows[-window:])) / window


@pytest.mark.parametrize("selector", ["dps", "mopps"])
@pytest.mark.parametrize("spacing", [None, 0.5, 1.0])
def test_defaults_never_narrow_to_a_few_prompts(selector, spacing):
    """1,024 prompts in steps of 32, whose default candidates are all of them (MoPPS: half)."""
    chooses = {} if spacing is None else {"spacing": spacing}
    run = SelectorRun(u_shaped(0.35, 1024), selector, groups=32, chooses=chooses)
    looks = []
    for number in range(1, 97):
        collected = run.step(number)
        looks += [group.prompt for group in collected.started]
        if number % 8 == 0 and number >= 32:
            metrics = collected.metrics
            assert metrics["selector/distinct_share"] == distinct(looks, 1024)
            assert metrics["selector/distinct_share"] >= run.selector.settings.spacing
            last = {row: i for i, row in enumerate(looks)}
            longest = max(number - (last[row] // 32 + 1 if row in last else 0) for row in range(1024))
            assert metrics["selector/longest_unseen"] == longest
    if spacing == 1.0:
        assert set(looks) == set(range(1024)) and longest <= 63


def test_without_spacing_they_do():
    run = SelectorRun(u_shaped(0.35, 1024), "dps", groups=32, chooses={"spacing": 0.0})
    for number in range(1, 97):
        collected = run.step(number)
    assert collected.metrics["selector/distinct_share"] < 0.5


def test_what_has_not_rested_is_offered_where_nothing_else_is_left(caplog):
    """20 prompts and steps of 15: five that have rested, then those that have rested longest."""
    caplog.set_level(logging.INFO)
    run = SelectorRun(np.full(20, 0.5), "mopps", groups=15, chooses={"spacing": 0.75})
    steps = [[group.prompt for group in run.step(number).started] for number in range(1, 5)]
    for before, after in zip(steps[:-1], steps[1:], strict=True):
        assert len(after) == 15 and set(range(20)) - set(before) < set(after)
    said = [record.getMessage() for record in caplog.records if "have rested" in record.getMessage()]
    assert said == ["Mopps: 240 candidates wanted, 20 of 20 prompts have rested: all of them are scored"]


def test_every_rule_reports_its_coverage():
    for selector, chooses in (("shuffled", {}), ("greso", {}), ("cero", {"rounds": 20}), ("dps", {})):
        run = SelectorRun(np.repeat([0.0, 1.0], 30), selector, groups=6, chooses=chooses)
        for number in range(1, 21):
            metrics = run.step(number).metrics
        kinds = [metrics[f"selector/offered_{kind}"] for kind in ("solved", "failed", "mixed")]
        assert sum(kinds) == metrics["groups_started"] and kinds[2] == 0
        assert 0 < metrics["selector/distinct_share"] <= 1 and metrics["selector/longest_unseen"] >= 0
        if selector == "shuffled":
            assert metrics["selector/distinct_share"] > 0.9 and metrics["selector/longest_unseen"] <= 18


def test_looks_are_counted_over_the_prompts_in_play():
    pool = PromptPool([str(i) for i in range(4)])
    assert pool.coverage() == {"distinct_share": 1.0, "longest_unseen": 0.0} and np.isinf(pool.rested()).all()
    pool.look_at([0, 1])
    pool.look_at([1])
    assert pool.coverage() == {"distinct_share": 2 / 3, "longest_unseen": 2.0}  # 2 and 3, never in two steps
    assert pool.rested().tolist() == [0.5, 0.0, np.inf, np.inf]
    pool.retire(2)
    pool.retire(3)
    assert pool.coverage() == {"distinct_share": 0.5, "longest_unseen": 1.0} and pool.rested()[0] == 1.0
    other = PromptPool([str(i) for i in range(4)])
    other.load_state_dict(pool.state_dict())
    assert other.coverage() == pool.coverage() and other.rested().tolist() == pool.rested().tolist()


@pytest.mark.bad_input
def test_settings_are_checked_by_name():
    with pytest.raises(SettingError, match=r"allocation.selector.spacing=1.5; accepted: a number in \[0, 1\]"):
        make_selector("dps", spacing=1.5)
