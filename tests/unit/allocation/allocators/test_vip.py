"""VIP: the variance it minimises by simulation, the greedy choice against all choices, and what it learns."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.allocation.helpers import Run, decisions, u_shaped
from verl_ext.allocation import SettingError, load_state, make_allocator, save_state
from verl_ext.allocation.allocators import vip_allocation

VARIANCE = {"rloo": lambda p, n: p * (1 - p) / (n - 1), "dr_grpo": lambda p, n: p * (1 - p) * (n - 1) / n**2}


@pytest.mark.parametrize("estimator", VARIANCE)
@pytest.mark.parametrize("p, n", [(0.5, 3), (0.2, 4), (0.9, 8)])
def test_the_variance_is_that_of_the_estimator(estimator, p, n):
    """Of (1/n) sum_i A_i Z_i, with scores Z of variance 1 that do not depend on the rewards, which are -1 and 1."""
    random = np.random.default_rng(0)
    rewards = np.where(random.random((150_000, n)) < p, 1.0, -1.0)
    scores = random.standard_normal(rewards.shape)
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    if estimator == "rloo":
        advantages *= n / (n - 1)
    estimate = (advantages * scores).mean(axis=1)
    # E[A^2] / n: 4 p (1 - p) (n - 1) / n^2, and n^2 / (n - 1)^2 times that; RLOO's is 4 p (1 - p) / (n - 1)
    assert estimate.var() == pytest.approx(4 * VARIANCE[estimator](p, n), rel=0.03)


@settings(max_examples=40, deadline=None)
@given(
    rates=st.lists(st.sampled_from([0.0, 0.02, 0.1, 0.25, 0.5, 0.5, 0.8, 1.0]), min_size=1, max_size=4),
    least=st.integers(3, 4), room=st.integers(0, 6), share=st.floats(0, 1), estimator=st.sampled_from(list(VARIANCE)),
)  # fmt: skip
def test_no_other_division_has_less_variance(rates, least, room, share, estimator):
    total = len(rates) * least + round(share * len(rates) * room)
    sizes = vip_allocation(rates, total, least, least + room, estimator, np.random.default_rng(0))
    assert sizes.sum() == total and sizes.min() >= least and sizes.max() <= least + room

    def variance(division):
        return sum(VARIANCE[estimator](p, n) for p, n in zip(rates, division, strict=True))

    every = itertools.product(range(least, least + room + 1), repeat=len(rates))
    assert variance(sizes) == pytest.approx(min(variance(d) for d in every if sum(d) == total), abs=1e-12)


def test_shares_follow_the_root_of_the_variance():
    p = np.array([0.02, 0.1, 0.3, 0.5])
    sizes = vip_allocation(p, 4 + 2000, 2, 5000)
    root = np.sqrt(p * (1 - p))
    assert (sizes - 1) / 2000 == pytest.approx(root / root.sum(), abs=1e-3)
    assert vip_allocation([0.0, 1.0, 0.5], 24, 3, 32).tolist() == [3, 3, 18]
    assert vip_allocation([0.0, 1.0, 0.5], 24, 3, 10).tolist() == [7, 7, 10]  # what the other may not have
    ties = {tuple(vip_allocation([0.5] * 3, 13, 3, 9, rng=np.random.default_rng(i))) for i in range(30)}
    assert ties == {(5, 4, 4), (4, 5, 4), (4, 4, 5)}
    for total in (8, 100):
        with pytest.raises(ValueError, match=f"total={total}"):
            vip_allocation([0.5] * 3, total, 3, 32)
    with pytest.raises(ValueError, match="in \\[0, 1\\]"):
        vip_allocation([float("nan")], 8, 3, 32)


def test_steps_spend_the_budget_and_move_it_to_the_middle():
    rates = np.tile([0.0, 0.02, 0.1, 0.5, 0.9, 1.0], 40)
    run = Run(rates, "vip", groups=60, settings={"group_size": 16})
    for number in range(8):
        collected = run.step(number)
        assert collected.rollouts == 60 * 16 and collected.rounds == 1 and len(collected.groups) == 60
        if number < 4:  # the first epoch: nothing is known
            assert {group.requested for group in collected.started} == {16}
    sizes = {p: np.mean([g.requested for g in collected.started if rates[g.prompt] == p]) for p in set(rates)}
    assert sizes[0.5] > sizes[0.1] > sizes[0.02] >= 3 and sizes[0.5] > sizes[0.9] > sizes[1.0]
    assert 0 < run.allocator.metrics()["rate_error"] < 0.15


def test_earlier_outcomes_fade():
    allocator = make_allocator("vip", forget=0.5)
    allocator.load_state_dict({"prompts": np.array([4]), "kept": np.array([[8.0, 8.0]])})
    assert allocator._rate(4) == 0.9 and allocator._rate(5) == 0.5  # (1 + 8) / (2 + 8); the prior's mean
    run = Run(np.zeros(1), "vip", groups=1, settings={"group_size": 8})
    run.allocator.load_state_dict({"prompts": np.array([0]), "kept": np.array([[8.0, 8.0]])})
    run.step(0)
    assert run.allocator._rate(0) == pytest.approx((1 + 4) / (2 + 4 + 8))


def test_a_resumed_run_decides_as_one_that_never_stopped(tmp_path):
    def fresh():
        return Run(u_shaped(0.4, 40), "vip", groups=16, seed=2, failing=0.05, settings={"group_size": 8})

    whole, broken, resumed = fresh(), fresh(), fresh()
    expected = [decisions(whole.step(number)) for number in range(6)]
    found = [decisions(broken.step(number)) for number in range(3)]
    save_state(tmp_path, broken.state_dict())
    resumed.load_state_dict(load_state(tmp_path))
    assert found + [decisions(resumed.step(number)) for number in range(3, 6)] == expected
    assert len({group[2] for group in expected[-1][0]}) > 2  # sizes do differ


@pytest.mark.bad_input
def test_settings_are_checked_by_name():
    assert make_allocator("vip", group_size=2).settings.least == 2
    assert make_allocator("vip", group_size=64).settings.most == 256
    for bad, named in [({"least": 9}, "least=9"), ({"least": 1}, "least=1"), ({"most": 7}, "most=7"),
                       ({"least": 2, "estimator": "dr_grpo"}, "least=2"), ({"forget": 1.5}, "forget=1.5"),
                       ({"beta": 0.0}, "beta=0.0")]:  # fmt: skip
        with pytest.raises(SettingError, match=named):
            make_allocator("vip", **bad)
