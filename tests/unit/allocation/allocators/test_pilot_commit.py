"""Pilot-Commit: counts a step, binding, the band, staleness, the buffer, retirement; waiting groups as saved state."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from tests.unit.allocation.helpers import Run, check_step, decisions, u_shaped
from verl_ext.allocation import (
    Fate,
    Group,
    Outcome,
    Request,
    RoundError,
    SettingError,
    StateError,
    Verdict,
    load_state,
    make_allocator,
    pack_groups,
    save_state,
    unpack_groups,
)
from verl_ext.allocation.allocators.pilot_commit import pilots_for

SMALL = {"group_size": 16, "n_pilot": 4, "p_lower": 0.25, "p_upper": 0.75}


def requested(run):
    """The rounds of a run as lists of (prompt's group uid, first session, n)."""
    rounds, generate = [], run.backend.generate
    run.backend.generate = lambda requests: (
        rounds.append([(r.group.uid, r.first, r.n) for r in requests]), generate(requests)
    )[1]  # fmt: skip
    return rounds


def step(run, number, version=None):
    collected = run.collect(number, run.backend, policy_version=version)
    return collected, run.ledger.step_record(number)


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


@settings(max_examples=12, deadline=None)
@given(
    staleness=st.integers(1, 4), share=st.sampled_from([0.3, 0.9]),
    order=st.sampled_from(["random", "max_variance", "most_recent", "least_recent"]),
    gaps=st.lists(st.integers(0, 3), min_size=7, max_size=7),
)  # fmt: skip
def test_staleness_is_exact_in_versions_and_not_in_steps(staleness, order, share, gaps):
    rates = np.where(np.random.default_rng(0).random(600) < share, 0.5, 0.0)
    run = Run(rates, "pilot_commit", groups=4, rollouts=4000,
              settings={**SMALL, "max_staleness": staleness, "buffer_order": order, "buffer_size": 40})  # fmt: skip
    version, held = 0, {}
    for number, gap in enumerate(gaps):
        version += gap  # 0: the step before made no update
        collected, record = step(run, number, version)
        check_step(run, collected, record)
        for group in collected.started:
            if group.offered_at != number:
                lag = version - held.pop(group.uid)
                assert (group.fate is Fate.STALE) == (lag > staleness)
                assert group.fate is not Fate.STALE or group.requested == 4
        assert not held, "a waiting group was forgotten"
        held = {group.uid: version if group.offered_at == number else group.version for group in collected.waiting}
        assert len(held) <= 40
        assert record["waiting"] == 4 * len(held) and all(g.returned == 4 for g in collected.waiting)
        assert record["fates"]["stale"] == 4 * collected.metrics["pilots_stale"]
        assert collected.metrics["lag_max"] <= staleness


def test_the_buffer_drops_the_oldest_and_prefers_what_it_is_told_to():
    run = Run(np.full(500, 0.5), "pilot_commit", groups=2,
              settings={**SMALL, "buffer_size": 9, "gen_multiple": 6.0, "wave": "full"})  # fmt: skip
    step(run, 0)
    before = [group.uid for group in run.allocator._waiting.groups]
    collected, record = step(run, 1)
    after = [group.uid for group in collected.waiting]
    assert len(before) == len(after) == 9 and collected.metrics["pilots_beyond_buffer"] > 0
    order = [group.uid for group in collected.started]
    dropped = [g.uid for g in collected.started if g.fate is Fate.SURPLUS]
    assert max(map(order.index, dropped)) < min(map(order.index, after))
    assert record["fates"]["surplus"] == 4 * len(dropped)

    run = Run(np.linspace(0.1, 0.9, 400), "pilot_commit", groups=3,
              settings={"n_pilot": 12, "group_size": 16, "p_lower": 0.05, "p_upper": 0.95,
                        "buffer_order": "max_variance", "wave": "full"})  # fmt: skip
    step(run, 0)
    collected, _ = step(run, 1)
    waited = [g for g in collected.started if g.offered_at == 0]
    pilot = {g.uid: abs(sum(o.correct for o in g.outcomes[:12]) - 6) for g in waited}
    used = [g.uid for g in collected.groups]
    assert set(used) <= set(pilot)
    assert max(pilot[uid] for uid in used) <= min(pilot[uid] for uid in pilot if uid not in used)


class Half:
    """Every other rollout is right."""

    def generate(self, requests):
        return [Outcome(r.group.uid, s, s % 2 == 0, float(s % 2 == 0), 1, 1) for r in requests for s in r.sessions]


@pytest.mark.parametrize("order, offered_at", [("most_recent", {2}), ("least_recent", {1}), ("random", {0, 1, 2})])
def test_the_buffer_goes_by_age_if_told_to(order, offered_at):
    """Waves of 270 pilots that all qualify; each step commits 90, so that the oldest of three are used up by then."""
    run = Run(np.full(6000, 0.5), "pilot_commit", groups=90, backend=Half(),
              settings={**SMALL, "buffer_order": order, "wave": "full"})  # fmt: skip
    for number in range(3):
        run.step(number)
    assert {group.offered_at for group in run.step(3).groups} == offered_at


def test_an_epochs_end_flushes_the_buffer_if_told_to():
    """100 prompts, waves of 24: pilots of the first epoch wait over its end, or are dropped there."""
    for flush in (False, True):
        run = Run(np.full(100, 0.5), "pilot_commit", groups=8, backend=Half(),
                  settings={**SMALL, "flush": flush, "wave": "full", "max_staleness": 9})  # fmt: skip
        flushed, of, older = [], {}, 0
        for number in range(12):
            epoch = run.pool.epoch
            collected, record = step(run, number)
            check_step(run, collected, record)
            flushed.append(collected.metrics["pilots_flushed"])
            of.update((g.uid, run.pool.epoch) for g in collected.started if g.offered_at == number)
            stale = [group for group in collected.started if group.fate is Fate.STALE]
            assert len(stale) == flushed[-1] + collected.metrics["pilots_stale"]
            assert record["fates"]["stale"] == 4 * len(stale)
            older += sum(of[group.uid] < epoch for group in collected.groups)
        assert (sum(map(bool, flushed)) >= 2) == flush == (older == 0)
        saved = run.allocator.state_dict()
        other = make_allocator("pilot_commit", **SMALL)
        other.load_state_dict(saved)
        assert other.state_dict()["epochs"] == saved["epochs"] and len(saved["epochs"]) == len(collected.waiting)


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


@pytest.mark.parametrize("stopped", range(1, 6))
def test_a_resumed_run_decides_as_one_that_never_stopped(tmp_path, stopped):
    def fresh():
        return Run(u_shaped(0.4, 250), "pilot_commit", groups=4, seed=4, unscorable=0.05, failing=0.05,
                   settings={**SMALL, "n_pilot_kept": 3, "retire_after": 2, "gen_multiple": 5.0})  # fmt: skip

    def steps(run, numbers):
        return [(decisions(c), c.metrics["lag_mean"], r) for c, r in (step(run, number) for number in numbers)]

    whole, broken = fresh(), fresh()
    expected = steps(whole, range(8))
    found = steps(broken, range(stopped))
    assert broken.allocator._waiting.groups
    save_state(tmp_path, broken.state_dict())
    resumed = fresh()
    resumed.load_state_dict(load_state(tmp_path))
    assert found + steps(resumed, range(stopped, 8)) == expected


def test_waiting_groups_are_small_and_strict_as_state():
    groups = []
    for i in range(200):
        group = Group(f"s3g{i}", i, 3, requested=16, version=2)
        for s in range(16):
            lost = s == 5
            correct, score = (None, None) if lost else (s % 3 == 0, s / 7)
            group.add(Outcome(group.uid, s, correct, score, 90, 400 + s, lost, s == 2, 2, 1 + s % 2))
        group.set_aside([1, 2])
        groups.append(group)
    state = pack_groups(groups)
    arrays = sum(value.nbytes for value in state.values() if isinstance(value, np.ndarray))
    assert arrays / (200 * 16) <= 33
    again = unpack_groups(state)
    for old, new in zip(groups, again, strict=True):
        assert [getattr(old, name) for name in Group.__slots__] == [getattr(new, name) for name in Group.__slots__]
    assert pack_groups([])["uid"] == [] and unpack_groups(pack_groups([])) == []
    with pytest.raises(StateError, match="columns do not fit"):
        unpack_groups({**state, "correct": state["correct"][1:]})
    with pytest.raises(StateError, match="missing"):
        unpack_groups({key: value for key, value in state.items() if key != "rows"})
    groups[0].requested += 1
    (pending,) = unpack_groups(pack_groups(groups[:1]))
    assert pending.pending == 1 and pending.missing() == [16] and Request.again(pending).sessions == range(16, 17)


def test_a_waiting_prompt_is_not_offered_and_does_not_hold_an_epoch_open():
    run = Run(np.full(12, 0.5), "pilot_commit", groups=1, settings={**SMALL, "gen_multiple": 4.0, "max_staleness": 50})
    epochs = []
    for number in range(30):
        before = {group.prompt for group in run.allocator._waiting.groups}
        collected, record = step(run, number)
        check_step(run, collected, record)
        assert not before & {group.prompt for group in collected.started if group.offered_at == number}
        epochs.append(run.pool.epoch)
    assert epochs[-1] > 2 and collected.short_by == 0


def test_a_step_that_breaks_off_loses_its_waiting_groups_and_no_count():
    run = Run(np.full(300, 0.5), "pilot_commit", groups=4, settings=SMALL)
    step(run, 0)
    generate = run.backend.generate

    def broken(requests):
        raise ConnectionError("gone")

    run.backend.generate = broken
    with pytest.raises(ConnectionError):
        step(run, 1)
    run.ledger.check()
    assert run.ledger.waiting == 0 and run.ledger.rollouts_by_fate["aborted"] > 0
    run.ledger.step_record(1)
    run.backend.generate = generate
    collected, record = step(run, 2)
    check_step(run, collected, record)
    assert collected.short_by == 0
