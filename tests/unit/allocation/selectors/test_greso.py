"""GRESO: how often it skips, and which way its probabilities move."""

import numpy as np
import pytest

from tests.unit.allocation.selectors.selector_runs import ByHand


def test_a_run_of_saturated_outcomes_is_offered_less_and_less():
    prompts = 6000
    run = ByHand("greso", prompts, groups=prompts, step=0.0)
    kind = np.arange(prompts) % 3
    for z in range(3):
        offered = np.zeros(prompts, bool)
        offered[run.step(lambda row: ((0, 4, 8)[kind[row]], 8), want=prompts)] = True
        if z == 0:
            assert offered.all()
    # After one saturated outcome each: half; the mixed ones always.
    run = ByHand("greso", prompts, groups=prompts, step=0.0)
    run.begin()
    state = run.selector.state_dict()
    state["runs"] = np.select([kind == 0, kind == 1], [-3, 0], 1).astype(np.int32)
    run.selector.load_state_dict(state | {"easy": 0.5, "hard": 0.6})
    offered = np.zeros(prompts, bool)
    offered[run.step(want=prompts)] = True
    assert offered[kind == 1].all()
    assert offered[kind == 0].mean() == pytest.approx(0.6**3, abs=0.03)
    assert offered[kind == 2].mean() == pytest.approx(0.5, abs=0.03)


def test_nothing_is_offered_less_than_the_least():
    run = ByHand("greso", 20_000, groups=20_000)
    run.begin()
    state = run.selector.state_dict()
    run.selector.load_state_dict(state | {"runs": np.full(20_000, -60, np.int32)})
    assert len(run.step(want=20_000)) / 20_000 == pytest.approx(0.01, abs=0.003)


def test_runs_by_hand():
    run = ByHand("greso", 1, groups=1, least=1.0)
    seen = []
    for told in ((8, 8), (8, 8), (0, 8), (0, 0), (0, 8), (1, 1), (3, 8), (0, 4)):
        run.step(lambda row, told=told: told)
        seen.append(int(run.selector.state_dict()["runs"][0]))
    assert seen == [1, 2, -1, -1, -2, 1, 0, -1]  # a run is of one kind, and nothing scored ends none


@pytest.mark.parametrize("solved, failed, easy, hard", [(1, 2, -1, -1), (0, 2, 1, -1), (1, 1, -1, 1), (0, 1, 1, 1)])
def test_at_the_target_there_are_too_many(solved, failed, easy, hard):
    """12 prompts, a target of 1/4: a twelfth solved, a sixth failed. At the target counts as above, as officially."""
    run = ByHand("greso", 12, groups=12, least=1.0)
    kinds = [(8, 8)] * solved + [(0, 8)] * failed + [(4, 8)] * (12 - solved - failed)
    run.step(lambda row: (4, 8))
    run.step(lambda row: kinds[row])
    moved = run.selector.metrics()
    assert (moved["p_easy"], moved["p_hard"]) == pytest.approx((0.5 + 0.01 * easy, 0.5 + 0.01 * hard))


def test_the_probabilities_move_from_the_second_epoch_on():
    """All solved: too many easy ones, so p_easy falls; no hard ones, so p_hard rises."""
    run = ByHand("greso", 4, groups=4, least=1.0)
    run.step(lambda row: (8, 8))
    assert run.selector.metrics()["p_easy"] == 0.5
    for step in range(1, 60):
        run.step(lambda row: (8, 8))
        assert run.selector.metrics()["p_easy"] == pytest.approx(max(0.05, 0.5 - 0.01 * step))
        assert run.selector.metrics()["p_hard"] == pytest.approx(min(0.95, 0.5 + 0.01 * step))
