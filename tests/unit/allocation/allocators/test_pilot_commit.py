"""Pilot-Commit: counts a step, binding, the band, retirement, and what a step costs."""

import numpy as np
import pytest
from scipy.stats import binom

from tests.unit.allocation.allocators.pilot_runs import SMALL, Half, requested, step
from tests.unit.allocation.helpers import Run, check_step, u_shaped
from verl_ext.allocation import (
    Fate,
    Outcome,
    RoundError,
    SettingError,
    Verdict,
    make_allocator,
)
from verl_ext.allocation.allocators.pilot_commit import pilots_for


def test_a_step_at_full_size_is_384_pilots_of_16_and_128_commits_of_48():
    # somewhat more than half of the prompts qualify
    run = Run(np.where(np.arange(3000) % 20 < 11, 0.5, 0.0), "pilot_commit", groups=128,
              settings={"wave": "full"})  # fmt: skip
    rounds = requested(run)
    first, _ = step(run, 0)
    # the first step's own pilots, then its commits together with as many pilots as the next step will lack
    qualified = first.metrics["pilots_qualified"]
    top_up = len(rounds[1]) - 128
    assert len(rounds[0]) == 384 and 0 < top_up < 384 and qualified >= 256
    assert first.rollouts == (384 + top_up) * 16 + 128 * 48 and len(first.groups) == 128
    for number in (1, 2):
        rounds.clear()
        collected, record = step(run, number)
        check_step(run, collected, record)
        assert collected.rollouts == 12_288 == 384 * 16 + 128 * 48
        (only,) = rounds
        commits = [(uid, n) for uid, first, n in only if first == 16]
        pilots = [(uid, n) for uid, first, n in only if first == 0]
        assert len(commits) == 128 and len(pilots) == 384 and len(only) == 512
        assert {n for _, n in commits} == {48} and {n for _, n in pilots} == {16}
        assert not any(uid.startswith(f"s{number}g") for uid, _ in commits)  # binding: pilots of an earlier step
        assert all(uid.startswith(f"s{number}g") for uid, _ in pilots)
        assert all(group.requested == 64 for group in collected.groups)
        assert collected.short_by == 0 and collected.metrics["lag_max"] >= 1


def test_the_first_step_asks_for_no_more_pilots_where_a_batch_waits_already():
    run = Run(np.full(3000, 0.5), "pilot_commit", groups=128, settings={"wave": "full"})
    rounds = requested(run)
    step(run, 0)
    assert [len(r) for r in rounds] == [384, 128]


@pytest.mark.parametrize("share", [0.05, 0.34, 0.9, 1.0])
@pytest.mark.parametrize("groups", [1, 3, 45, 128])
def test_a_top_up_has_enough_pilots_but_for_one_time_in_forty(groups, share):
    n = pilots_for(groups, share)
    # binom.cdf(groups - 1) is the probability of too few; the normal tail at two deviations is .023
    assert binom.cdf(groups - 1, n, share) < 0.05
    spread = 2 * np.sqrt((n - 1) * share * (1 - share))
    assert n - 1 == 0 or (n - 1) * share - spread < groups
    assert pilots_for(0, share) == pilots_for(-4, share) == 0


def test_no_round_is_made_for_pilots_alone_once_the_batch_is_full():
    # a third qualifies: a wave of 48 pilots gives 16 or so, as often fewer as more
    run = Run(np.where(np.arange(6000) % 3 < 1, 0.5, 0.0), "pilot_commit", groups=16, settings=SMALL)
    rounds = requested(run)
    for number in range(20):
        rounds.clear()
        step(run, number)
        assert all(any(first == 4 for _, first, _ in r) for r in rounds[number == 0 :])
        if number:
            assert sum(n for r in rounds for _, first, n in r if first == 0) <= 4 * (48 + 48)
    assert run.ledger.issued < 20 * (16 * 12 + 48 * 4) * 1.25


def test_without_binding_pilots_and_commits_are_of_one_step():
    run = Run(np.full(400, 0.5), "pilot_commit", groups=8,
              settings={**SMALL, "binding": False, "max_staleness": 0, "wave": "full"})  # fmt: skip
    rounds = requested(run)
    for number in range(3):
        rounds.clear()
        collected, record = step(run, number)
        check_step(run, collected, record)
        assert [{first for _, first, _ in r} for r in rounds] == [{0}, {4}]
        assert [len(r) for r in rounds] == [24, 8]
        assert all(group.offered_at == number for group in collected.groups)
        assert not collected.waiting and record["waiting"] == 0
        assert record["fates"]["surplus"] == 4 * (collected.metrics["pilots_qualified"] - 8)


def test_a_narrow_band_takes_more_waves_and_the_cost_follows():
    rates = np.where(np.arange(4000) % 10 < 2, 0.5, 0.0)  # a fifth can qualify, 7/8 of them do
    run = Run(rates, "pilot_commit", groups=16, rollouts=16 * 16 * 30, settings=SMALL)
    cost, share = [], []
    for number in range(12):
        collected, record = step(run, number)
        check_step(run, collected, record)
        assert collected.short_by == 0
        cost.append(collected.rollouts / (16 * 16))
        share.append((collected.metrics["pilots_qualified"], collected.metrics["pilots"]))
    band = sum(q for q, _ in share) / sum(n for _, n in share)
    # 0.75 + 0.25 / band for every qualified pilot that is used; the rest waits or is stale
    used = 12 * 16 / sum(q for q, _ in share)
    assert np.mean(cost) == pytest.approx(0.75 + 0.25 / band / used, rel=1e-9)
    assert np.mean(cost) > 1.5


@pytest.mark.parametrize("successes, expected", [(0, "defer"), (1, "defer"), (2, None), (12, None), (13, "defer"),
                                                  (15, "defer"), (16, "retire")])  # fmt: skip
def test_the_published_band_is_inclusive(successes, expected):
    class Fixed:
        def generate(self, requests):
            return [Outcome(r.group.uid, s, s < successes, float(s < successes), 1, 1)
                    for r in requests for s in r.sessions]  # fmt: skip

    run = Run(np.full(6, 0.5), "pilot_commit", groups=1, settings={}, backend=Fixed())
    collected, _ = step(run, 0)
    if expected is None:
        assert len(collected.groups) == 1 and collected.groups[0].requested == 64
        return
    assert not collected.groups and {group.verdict.value for group in collected.started} == {expected}
    assert {group.fate for group in collected.started} == {Fate.ABANDONED}
    assert run.pool.metrics()["retired"] == (6 if expected == "retire" else 0)


@pytest.mark.parametrize("n", [3, 4, 7, 49])
def test_speed_rl_is_the_open_band(n):
    allocator = make_allocator("pilot_commit", n_pilot=n, group_size=64, p_lower=0.001, p_upper=0.999, p_solve=None)
    assert [allocator.settings.in_band(s, n) for s in range(n + 1)] == [0 < s < n for s in range(n + 1)]
    decimal = make_allocator("pilot_commit", n_pilot=10, group_size=64, p_lower=0.1, p_upper=0.7)
    assert [s for s in range(11) if decimal.settings.in_band(s, 10)] == [1, 2, 3, 4, 5, 6, 7]


def test_the_first_pilot_rollouts_are_kept_if_told_to():
    run = Run(np.full(100, 0.5), "pilot_commit", groups=4, backend=Half(),
              settings={**SMALL, "n_pilot_kept": 2, "pilots_kept": "first"})  # fmt: skip
    collected = run.step(0)
    assert len(collected.groups) == 4
    for group in collected.groups:
        assert [outcome.session for outcome in group.trainable] == [0, 1, *range(4, 16)]


@pytest.mark.parametrize("share", [0.8, 0.45, 0.2])
@pytest.mark.parametrize("wave", ["need", "full"])
def test_what_a_step_costs(share, wave):
    """0.75 + 0.25 / share of GRPO's rollouts; full waves of 3 B, 1.5 at least. Two deviations come on top."""
    rates = np.where(np.random.default_rng(0).random(8000) < share, 0.5, 0.0)
    run = Run(rates, "pilot_commit", groups=64, rollouts=64 * 16 * 6, settings={**SMALL, "wave": wave},
              backend=Qualifying(rates))  # fmt: skip
    steps = [run.step(number) for number in range(16)][4:]
    assert all(step.short_by == 0 for step in steps)
    cost = np.mean([step.rollouts for step in steps]) / (64 * 16)
    formula = 0.75 + 0.25 / share
    if wave == "full":
        formula = max(1.5, formula)
    assert 0.99 * formula <= cost <= 1.12 * formula


class Qualifying(Half):
    """Of prompts with a success rate above 0 every other rollout is right, of the others none."""

    def __init__(self, rates):
        self.rates = rates

    def generate(self, requests):
        return [Outcome(r.group.uid, s, s % 2 == 0 and self.rates[r.group.prompt] > 0, 1.0, 1, 1)
                for r in requests for s in r.sessions]  # fmt: skip


def test_of_equal_pilots_the_newest_are_committed_first():
    run = Run(np.full(300, 0.5), "pilot_commit", groups=2, backend=Half(),
              settings={**SMALL, "buffer_order": "max_variance", "wave": "full"})  # fmt: skip
    step(run, 0)
    collected, _ = step(run, 1)
    assert {group.offered_at for group in collected.waiting} == {0, 1} and len(collected.groups) == 2
    assert {group.offered_at for group in step(run, 2)[0].groups} == {1}


def test_retirement_after_several_solved_pilots_in_a_row():
    class Scripted:
        """Prompt 0 is always solved, 1 fails every other visit, 2 is scored in a quarter, 3 is mixed."""

        def generate(self, requests):
            out = []
            for r in requests:
                for s in r.sessions:
                    row, visit = r.group.prompt, r.group.offered_at
                    correct = {0: True, 1: visit % 2 == 0, 2: True if s == 0 else None, 3: s % 2 == 0}[row]
                    out.append(Outcome(r.group.uid, s, correct, None if correct is None else float(correct), 1, 1))
            return out

    run = Run(np.full(4, 0.5), "pilot_commit", groups=1, backend=Scripted(),
              settings={**SMALL, "binding": False, "max_staleness": 0, "retire_after": 2,
                        "gen_multiple": 4.0})  # fmt: skip
    for number in range(6):
        visits = {g.prompt: g.verdict for g in step(run, number)[0].started}
        assert visits.get(0) == {0: Verdict.DEFER, 1: Verdict.RETIRE}.get(number)
        assert visits[1] is Verdict.DEFER and visits[2] is Verdict.DEFER and visits[3] is Verdict.COMMIT
    assert run.pool.metrics()["retired"] == 1


def test_pilot_rollouts_beyond_n_pilot_kept_are_down_sampled_by_variance():
    run = Run(np.full(300, 0.4), "pilot_commit", groups=5, downsampler="max_variance", keep=13, unscorable=0.05,
              settings={"group_size": 16, "n_pilot": 8, "n_pilot_kept": 4, "p_lower": 0.2, "p_upper": 0.8})  # fmt: skip
    for number in range(4):
        collected, record = step(run, number)
        check_step(run, collected, record)
        kept = {}
        for outcome in collected.kept:
            kept.setdefault(outcome.group, []).append(outcome)
        for group in collected.groups:
            pilot = [o for o in group.outcomes[:8] if o.scored]
            mine = [o for o in kept[group.uid] if o.session < 8]
            assert len(mine) == min(4, len(pilot)) and len(kept[group.uid]) <= 12
            right = sum(o.correct for o in pilot)
            balanced = min(max(2, 4 - (len(pilot) - right)), right) if len(pilot) > 4 else right
            assert sum(o.correct for o in mine) == balanced
            assert collected.statistics[group.uid].n == group.trials  # of the whole group, not of the rows kept
        assert record["fates"]["down_sampled"] > 0


@pytest.mark.parametrize("rates, faults", [(0.0, {}), (1.0, {}), (0.5, {"unscorable": 1.0})])
@pytest.mark.parametrize("binding", [True, False])
def test_it_ends_on_dead_data(rates, faults, binding):
    run = Run(np.full(200, rates), "pilot_commit", groups=4, settings={**SMALL, "binding": binding}, **faults)
    for number in range(6):
        collected, record = step(run, number)
        check_step(run, collected, record)
        assert collected.short_by == 4 and not collected.waiting
    if rates == 1.0:
        assert run.pool.all_retired and collected.rollouts == 0


def test_an_engine_that_refuses_every_prompt_ends_the_run():
    run = Run(np.full(200, 0.5), "pilot_commit", groups=4, settings=SMALL, failing=1.0)
    with pytest.raises(RoundError, match="prompts in a row"):
        for number in range(6):
            step(run, number)


def test_budgets_below_the_published_cost_still_fill_what_they_can():
    # pilots of the step leave room for the commits they lead to: all qualify, so 16 of 16 each and nothing left over
    run = Run(np.full(300, 0.5), "pilot_commit", groups=16, rollouts=16 * 16, backend=Half(),
              settings={**SMALL, "binding": False, "max_staleness": 0})  # fmt: skip
    run.step(0)
    assert len(run.step(1).groups) >= 15
    # equal rollouts a step: pilots and commits share B k
    run = Run(u_shaped(0.5, 3000), "pilot_commit", groups=16, rollouts=16 * 16, settings=SMALL)
    made = []
    for number in range(10):
        collected, record = step(run, number)
        check_step(run, collected, record)
        made.append(len(collected.groups))
    assert np.mean(made[1:]) > 6


def test_settings_are_checked_by_name():
    for bad, named in [
        ({"n_pilot": 64}, "n_pilot=64"), ({"pilots_kept": "last"}, "pilots_kept='last'"),
        ({"wave": "all"}, "need | full"), ({"n_commit": 47}, "n_commit=47; accepted: null or 48"),
        ({"p_lower": 0.8}, "p_upper=0.75"), ({"p_solve": 0.7}, "p_solve=0.7"), ({"max_staleness": 0}, "binding=true"),
        ({"n_pilot_kept": 17}, "n_pilot=16"), ({"buffer_size": 0}, "buffer_size=0"), ({"retire_after": 0}, "retire_a"),
        ({"off_policy": "ignore"}, "recompute | importance"), ({"gen_multiple": 0}, "gen_multiple=0"),
    ]:  # fmt: skip
        with pytest.raises(SettingError) as error:
            make_allocator("pilot_commit", **bad)
        assert named in str(error.value)
    with pytest.raises(SettingError, match="max_rounds=1"):
        Run(np.full(9, 0.5), "pilot_commit", groups=1, max_rounds=1, settings=SMALL).step(0)
    assert make_allocator("pilot_commit").settings.commit == 48
    assert make_allocator("pilot_commit", buffer_size=10).most_waiting(128) == 160
    assert make_allocator("pilot_commit").most_waiting(128) == 4 * 384 * 16
