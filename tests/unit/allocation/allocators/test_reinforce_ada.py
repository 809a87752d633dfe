"""Reinforce-Ada: who leaves when, and its published composition with a balanced subset."""

import numpy as np
import pytest

from tests.unit.allocation.helpers import Run, check_step, u_shaped
from verl_ext.allocation import Outcome, SettingError, make_allocator, normalised_over


class Scripted:
    """Sessions of a prompt by its script: 1 right, 0 wrong, . not scored."""

    def __init__(self, scripts):
        self.scripts, self.rounds = scripts, []

    def generate(self, requests):
        self.rounds.append({r.group.prompt: r.n for r in requests})
        out = []
        for r in requests:
            for s in r.sessions:
                mark = self.scripts[r.group.prompt][s]
                out.append(Outcome(r.group.uid, s, None if mark == "." else mark == "1", float(mark == "1"), 1, 1))
        return out


SCRIPTS = ["110000000000", "011101110111", "111111111111", "000000000000", "....0001...0"]


@pytest.mark.parametrize("leave, wanted, sizes, left", [
    ("balanced", 4, [4, 8, 12, 12, 12], 2),
    ("balanced", 5, [8, 12, 12, 12, 12], 2),  # two right and three wrong
    ("balanced", 2, [4, 4, 12, 12, 8], 3),
    ("positive", 4, [4, 4, 4, 12, 8], 4),
])  # fmt: skip
def test_a_prompt_leaves_with_enough_of_both(leave, wanted, sizes, left):
    backend = Scripted(SCRIPTS)
    run = Run(np.full(5, 0.5), "reinforce_ada", groups=5, backend=backend,
              settings={"group_size": 12, "chunk": 4, "leave": leave, "wanted": wanted})  # fmt: skip
    collected = run.step(0)
    found = {group.prompt: group.requested for group in collected.started}
    assert [found[prompt] for prompt in range(5)] == sizes
    assert {n for counts in backend.rounds for n in counts.values()} == {4}
    assert collected.metrics["prompts_left"] == left and collected.metrics["prompts_never_left"] == 5 - left
    trained = [prompt for prompt in range(5) if len(SCRIPTS[prompt][: sizes[prompt]].replace(".", "")) > 1]
    assert sorted(group.prompt for group in collected.groups) == trained  # also those that never left


def test_as_published_with_a_balanced_subset_of_four():
    run = Run(u_shaped(0.5, 300), "reinforce_ada", "max_variance", groups=24, keep=4, settings={})
    for number in range(4):
        collected = run.step(number)
        check_step(run, collected, run.ledger.step_record(number))
        assert collected.short_by == 0 and collected.rounds <= 4
        rows = {}
        for outcome in collected.kept:
            rows.setdefault(outcome.group, []).append(outcome.correct)
        for group in collected.groups:
            kept, right, wrong = rows[group.uid], group.successes, group.trials - group.successes
            assert len(kept) == 4 and sum(kept) == min(right, max(2, 4 - wrong))
            assert group.requested == 32 or right >= 2 and wrong >= 2
            assert collected.statistics[group.uid].mean == pytest.approx(right / group.trials)
    assert normalised_over(run.allocator, run.downsampler) == "group"
    sizes = {group.requested for group in collected.started}
    assert sizes <= {8, 16, 24, 32} and len(sizes) > 2


def test_budget_and_rounds_end_a_step():
    run = Run(np.zeros(50), "reinforce_ada", groups=10, rollouts=100, settings={"group_size": 32})
    collected = run.step(0)
    check_step(run, collected, run.ledger.step_record(0))
    assert collected.rollouts == 100 and len(collected.started) == 10
    run = Run(np.zeros(50), "reinforce_ada", groups=10, rollouts=36, settings={"group_size": 32})
    assert len(run.step(0).started) == 4  # a chunk each
    run = Run(np.zeros(50), "reinforce_ada", groups=10, max_rounds=2, settings={"group_size": 32})
    assert {group.requested for group in run.step(0).started} == {16}


def test_settings_are_checked_by_name():
    for bad, named in [
        ({"chunk": 33}, "chunk=33"), ({"wanted": 1}, "wanted=1"), ({"leave": "never"}, "balanced | positive"),
    ]:  # fmt: skip
        with pytest.raises(SettingError) as error:
            make_allocator("reinforce_ada", **bad)
        assert named in str(error.value)
