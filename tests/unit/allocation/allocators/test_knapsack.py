"""Knapsack: greedy against dynamic programming, its edge cases, and what it learns from earlier visits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.allocation.helpers import Run, decisions, u_shaped
from verl_ext.allocation import Outcome, SettingError, load_state, make_allocator, save_state
from verl_ext.allocation.allocators import knapsack_allocation


def value(p, n):
    return (1 - p**n - (1 - p) ** n) * p * (1 - p) ** 2


def by_dynamic_programming(rates, total, least, most):
    """The largest sum of values over all ways to divide ``total``."""
    best = {0: 0.0}
    for p in rates:
        step = {}
        for spent, sum_so_far in best.items():
            for n in range(least, most + 1):
                if spent + n <= total:
                    step[spent + n] = max(step.get(spent + n, -1.0), sum_so_far + value(p, n))
        best = step
    return best[total]


@settings(max_examples=40, deadline=None)
@given(
    rates=st.lists(st.sampled_from([0.02, 0.1, 0.25, 0.5, 0.5, 0.8, 0.97]), min_size=1, max_size=6),
    least=st.integers(1, 3), room=st.integers(0, 7), share=st.floats(0, 1), seed=st.integers(0, 9),
)  # fmt: skip
def test_greedy_is_exact(rates, least, room, share, seed):
    most = least + room
    total = len(rates) * least + round(share * len(rates) * room)
    sizes = knapsack_allocation(rates, total, least, most, least, 0.9, np.random.default_rng(seed))
    assert sizes.sum() == total and sizes.min() >= least and sizes.max() <= most
    found = sum(value(p, int(n)) for p, n in zip(rates, sizes, strict=True))
    assert found == pytest.approx(by_dynamic_programming(rates, total, least, most), abs=1e-10)


@settings(max_examples=40, deadline=None)
@given(
    rates=st.lists(st.sampled_from([0.0, 1.0, float("nan"), 0.01, 0.2, 0.6, 0.99]), min_size=1, max_size=40),
    most=st.integers(8, 128), typical=st.integers(2, 8), short=st.floats(0, 1), seed=st.integers(0, 3),
)  # fmt: skip
def test_the_budget_is_divided_whole(rates, most, typical, short, seed):
    total = 2 * len(rates) + round(short * (typical - 2) * len(rates))
    sizes = knapsack_allocation(rates, total, 2, most, typical, 0.9, np.random.default_rng(seed))
    assert sizes.sum() == total and sizes.min() >= 2 and sizes.max() <= most


def test_who_gets_what():
    nan = float("nan")
    # as rare an outcome on either side, but hard prompts are worth more: p (1 - p)^2
    hard, even, easy = knapsack_allocation([0.1, 0.5, 0.9], 48, 2, 128, 16)
    assert hard > 2 * easy and hard > 2 * even and hard + even + easy == 48
    # unknown prompts get the typical size, solved and hopeless ones the least. 0.3 needs log(0.1) / log(0.7) = 6.46 ->
    # 6 beyond its 2: of the 18 left 12 are surplus, for the hopeless and the unknown prompt alike
    four = [nan, 0.3, 1.0, 0.0], 32, 2, 128, 8
    assert knapsack_allocation(*four).tolist() == [14, 8, 2, 8]
    # by expectation it needs 1 / .21 - 1 = 3.76 -> 3: a surplus of 15
    assert knapsack_allocation(*four, cost="expectation").tolist() == [16, 5, 2, 9]
    assert knapsack_allocation(*four, fallback=False).tolist() == [8, 20, 2, 2]
    assert knapsack_allocation([0.0, 0.3, 1.0], 12, 2, 128, 8, negative=5, positive=1).tolist() == [5, 6, 1]
    assert knapsack_allocation([nan, nan], 10, 2, 128, 8).tolist() == [5, 5]
    assert knapsack_allocation([0.0, 0.0, 1.0], 24, 2, 128, 8).tolist() == [11, 11, 2]
    assert knapsack_allocation([1.0, 1.0], 16, 2, 128, 8).tolist() == [8, 8]
    assert knapsack_allocation([0.5, 0.0], 16, 2, 10, 8).tolist() == [6, 10]
    # ties go by the seed, not by position
    first = {tuple(knapsack_allocation([0.5] * 4, 18, 2, 9, 4, rng=np.random.default_rng(i))) for i in range(40)}
    assert {tuple(sorted(sizes)) for sizes in first} == {(4, 4, 5, 5)} and len(first) == 6
    for total in (5, 385):
        with pytest.raises(ValueError, match=f"total={total}"):
            knapsack_allocation([0.5] * 3, total, 2, 128, 8)
    with pytest.raises(ValueError, match="in \\[0, 1\\]"):
        knapsack_allocation([1.5], 8, 2, 128, 8)


def test_rates_come_from_the_latest_outcomes_of_all_visits():
    script = {}

    class Scripted:
        def generate(self, requests):
            rollouts = [(r.group, s) for r in requests for s in r.sessions]
            return [Outcome(group.uid, s, script[group.offered_at], float(s), 1, 1) for group, s in rollouts]

    run = Run(np.full(2, 0.5), "knapsack", groups=2, backend=Scripted(),
              settings={"group_size": 8, "history": 10, "history_min": 9})  # fmt: skip
    rates = lambda: [run.allocator._success_rate(prompt) for prompt in (0, 1)]  # noqa: E731
    script[0] = True
    run.step(0)
    assert all(np.isnan(rates()))  # 8 seen, 9 needed
    script[1] = False
    assert [group.requested for group in run.step(1).started] == [8, 8]
    assert rates() == [0.2, 0.2]  # the latest ten: eight wrong, two right


@pytest.mark.parametrize("size", [16, 15])
def test_a_large_last_visit_counts_whole(size):
    """As the official code: the mean of the whole last visit where it has 16 rollouts, else of the latest 16 of all."""

    class Scripted:
        def generate(self, requests):
            return [Outcome(r.group.uid, s, r.group.uid.startswith("s0") or s % 16 < size // 4, 1.0, 1, 1)
                    for r in requests for s in r.sessions]  # fmt: skip

    run = Run(np.full(1, 0.5), "knapsack", groups=1, backend=Scripted(), settings={"group_size": size})
    run.step(0)
    assert run.allocator._success_rate(0) == 1
    run.step(1)
    right = size // 4 + (1 if size < 16 else 0)  # the sixteenth newest is of the first visit, and right
    assert run.allocator._success_rate(0) == right / 16 and run.allocator._seen[0][1] == 2 * size


def test_zero_of_128_is_rare_where_success_is_possible():
    """An estimate of 0 from a whole visit of 128 rollouts at p = .02: .98^128 = .075; of its last 16 it were .72."""
    run = Run(np.full(1500, 0.02), "knapsack", groups=1500, settings={"group_size": 128})
    run.step(0)
    zeros = np.mean([run.allocator._success_rate(prompt) == 0 for prompt in range(1500)])
    assert zeros == pytest.approx(0.98**128, abs=0.027)  # four standard deviations


def test_steps_spend_the_budget_and_move_it_to_hard_prompts():
    rates = np.tile([0.0, 0.02, 0.1, 0.5, 0.9, 1.0], 40)
    run = Run(rates, "knapsack", groups=60, settings={"group_size": 16})
    for number in range(8):
        collected = run.step(number)
        record = run.ledger.step_record(number)
        assert collected.rollouts == record["issued"] == 60 * 16 and record["waiting"] == 0
        assert collected.rounds == 1 and len(collected.groups) == 60 and collected.short_by == 0
        assert record["fates"]["trained"] == 60 * 16
    sizes = {p: np.mean([g.requested for g in collected.started if rates[g.prompt] == p]) for p in (0.1, 0.9, 1.0)}
    assert sizes[0.1] > 2 * sizes[0.9] and sizes[1.0] == 2
    short = Run(rates, "knapsack", groups=60, rollouts=100, settings={"group_size": 16}).step(0)
    assert short.rollouts == 100 and len(short.started) == 50 and short.short_by == 10


@pytest.mark.parametrize("stopped", [1, 3, 4])
def test_a_resumed_run_decides_as_one_that_never_stopped(tmp_path, stopped):
    def fresh():
        return Run(u_shaped(0.4, 40), "knapsack", groups=16, seed=2, failing=0.05, settings={"group_size": 8})

    whole, broken, resumed = fresh(), fresh(), fresh()
    expected = [decisions(whole.step(number)) for number in range(6)]
    found = [decisions(broken.step(number)) for number in range(stopped)]
    save_state(tmp_path, broken.state_dict())
    resumed.load_state_dict(load_state(tmp_path))
    assert found + [decisions(resumed.step(number)) for number in range(stopped, 6)] == expected
    assert len({group[2] for group in expected[-1][0]}) > 2  # sizes do differ


def test_settings_are_checked_by_name():
    for bad, named in [({"least": 9}, "least=9"), ({"most": 7}, "most=7"), ({"history": 63}, "history=63"),
                       ({"negative": 9}, "negative=9"), ({"positive": 0}, "positive=0"),
                       ({"confidence": 1.0}, "confidence=1.0")]:  # fmt: skip
        with pytest.raises(SettingError, match=named):
            make_allocator("knapsack", **bad)
