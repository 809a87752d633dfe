"""SARA's rest: groups carried over, audits of abandoned groups, each prompt's own prior, graded rewards."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.allocation.helpers import Run, check_step, decisions, u_shaped
from verl_ext.allocation import (
    Fate,
    Group,
    Outcome,
    SettingError,
    Verdict,
    effective_probability,
    load_state,
    make_allocator,
    save_state,
    spread_probability,
)
from verl_ext.allocation.allocators.audit import Audit

# ---------------------------------------------- carried over


def test_carried_groups_come_first_and_are_topped_up_in_the_next_step():
    run = Run(u_shaped(0.35, 4000), "sara", groups=32, rollouts=8000,
              settings={"max_staleness": 1, "window": 128, "margin": 0.1})  # fmt: skip
    carried, surplus = [], 0
    for number in range(8):
        collected = run.step(number)
        record = run.ledger.step_record(number)
        check_step(run, collected, record)
        expected = carried[:32]
        assert [group.uid for group in collected.groups[: len(expected)]] == expected
        assert all(group.requested == 8 for group in collected.groups)
        assert all(group.requested == 4 and group.mixed for group in collected.waiting)
        assert record["waiting"] == 4 * len(collected.waiting)
        carried = [group.uid for group in collected.waiting]
        surplus += record["fates"]["surplus"]
        assert collected.metrics["surplus_groups"] == 0 and collected.metrics["lag_max"] <= 1
    assert carried and surplus == 0
    plain = Run(u_shaped(0.35, 4000), "sara", groups=32, rollouts=8000, settings={"window": 128})
    issued = [sum(r.step(number).rollouts for number in range(8, 16)) for r in (run, plain)]
    assert issued[0] < issued[1]


def test_carried_groups_are_stale_by_version():
    run = Run(np.full(2000, 0.5), "sara", groups=4, settings={"max_staleness": 2, "window": 60})
    run.step(0)
    first = {group.uid for group in run.allocator._waiting.groups}
    seen = {}
    for number in range(1, 5):
        collected = run.step(number)
        for group in collected.started:
            if group.uid in first and group.fate is not None:
                seen.setdefault(group.fate, set()).add(number)
    assert seen == {Fate.TRAINED: {1, 2}, Fate.STALE: {3}}


@pytest.mark.parametrize("name, extra", [
    ("sara", {"window": 40}), ("sara", {"window": 40, "commit": "stop"}), ("dynamic_sampling", {"gen_multiple": 8}),
])  # fmt: skip
def test_a_step_filled_by_carried_groups_starts_no_prompt(name, extra):
    run = Run(np.full(2000, 0.5), name, groups=4, settings={"max_staleness": 9, **extra})
    run.step(0)
    collected = run.step(1)
    check_step(run, collected, {**run.ledger.step_record(1), "issued": collected.rollouts, "tokens": collected.tokens})
    assert collected.short_by == 0 and not [group for group in collected.started if group.offered_at == 1]
    expected = 4 * 4 if name == "sara" and "commit" not in extra else 0
    assert collected.rollouts == expected
    assert collected.metrics["groups_started"] == 0 and collected.metrics["fate/surplus"] == 0


def test_a_budget_too_small_for_carried_groups_leaves_them_waiting():
    run = Run(np.full(300, 0.5), "sara", groups=8, rollouts=600, settings={"max_staleness": 3, "window": 60})
    run.step(0)
    assert len(run.allocator._waiting.groups) > 8
    run.ledger.step_record(0)
    run.stop = type(run.stop)(8, 17)
    collected = run.step(1)
    check_step(run, collected, run.ledger.step_record(1))
    assert len(collected.groups) == 4 and collected.rollouts == 16


# ---------------------------------------------- audits


@pytest.mark.parametrize("commit", ["top_up", "stop"])
def test_audits_measure_false_abandonment(commit):
    rates = u_shaped(0.35, 20000)
    run = Run(rates, "sara", groups=64, rollouts=20000, settings={"audit_fraction": 0.5, "commit": commit})
    audited = abandoned = effective = 0
    for number in range(25):
        collected = run.step(number)
        record = run.ledger.step_record(number)
        check_step(run, collected, record)
        done = [group for group in collected.started if group.fate is Fate.AUDIT]
        audited += len(done)
        effective += sum(group.mixed for group in done)
        abandoned += sum(group.verdict is Verdict.ABANDON for group in collected.started)
        assert all(group.requested == 8 and group.verdict is Verdict.ABANDON for group in done)
        assert record["fates"]["audit"] == 8 * len(done)
        assert not {group.uid for group in done} & {outcome.group for outcome in collected.kept}
    metrics = collected.metrics
    assert metrics["audit_groups"] == audited and metrics["p_eff_audited"] == effective / audited
    if commit == "top_up":  # under stop, those of the last round would need a round of their own
        assert audited == pytest.approx(abandoned / 2, rel=0.1)
    assert audited > 500 and metrics["p_eff_audited_predicted"] == pytest.approx(4 / 9)
    # the truth of this population: P(mixed at 8 | pure at 4)
    pure = rates**4 + (1 - rates) ** 4
    truth = 1 - (rates**8 + (1 - rates) ** 8).sum() / pure.sum()
    assert metrics["p_eff_audited_low"] < truth < metrics["p_eff_audited_high"] < 0.25


def test_auditing_changes_no_other_decision_of_a_step():
    def first(fraction):
        run = Run(u_shaped(0.35, 4000), "sara", groups=32, rollouts=40000, settings={"audit_fraction": fraction})
        return run.step(0)

    plain, audited = first(0.0), first(1.0)
    assert [group.uid for group in plain.groups] == [group.uid for group in audited.groups]
    assert [(g.uid, g.verdict) for g in plain.started] == [(g.uid, g.verdict) for g in audited.started]
    assert audited.metrics["fate/audit"] > 0 and "audit_groups" not in plain.metrics
    assert audited.rollouts - plain.rollouts == audited.metrics["fate/audit"] / 2


def test_a_complete_group_needs_no_audit():
    run = Run(u_shaped(0.35, 300), "sara", groups=8, settings={"audit_fraction": 1.0, "probe": 8})
    collected = run.step(0)
    check_step(run, collected, run.ledger.step_record(0))
    assert collected.metrics["audit_groups"] == 0 and collected.metrics["p_eff_audited_high"] == 1.0
    abandoned = [group for group in collected.started if group.verdict is Verdict.ABANDON]
    assert abandoned and all(group.fate is Fate.FILTERED and group.requested == 8 for group in abandoned)


def test_an_audits_interval():
    audit = Audit(0.5)
    audit.load_state_dict({"groups": 9, "effective": 0, "predicted": 0.0})
    # Wilson's upper end at no success of n: z^2 / (n + z^2).
    assert audit.metrics()["p_eff_audited_low"] == 0.0
    assert audit.metrics()["p_eff_audited_high"] == pytest.approx(1.959964**2 / (9 + 1.959964**2), abs=1e-6)
    assert Audit(0.0).metrics() == {}


# ---------------------------------------------- each prompt's own prior


def carried(**extra):
    return make_allocator("sara", carry_prior=True, **extra)


def pure(kind, n, row=0, uid="g", size=8):
    group = Group(uid, row, 0, requested=n)
    for s in range(n):
        group.add(Outcome(uid, s, bool(kind), float(kind), 1, 1))
    return group


@pytest.mark.parametrize("discount, past", [(0.7, (0, 8)), (0.8, (8, 0)), (0.5, (3, 5)), (0.7, (0, 64))])
@pytest.mark.parametrize("extra", [{}, {"tau_low": 0.45, "probe": None}, {"probe": 3}])
def test_the_point_of_abandonment_follows_the_prompts_own_posterior(discount, past, extra):
    rule = carried(discount=discount, **extra)
    judge = rule._judge
    before = Group("b", 0, 0, requested=sum(past))
    for s in range(sum(past)):
        before.add(Outcome("b", s, s < past[0], 1.0, 1, 1))
    judge.end_step([before])
    a, b = 1 + discount * past[0], 1 + discount * past[1]
    assert [float(x[0]) for x in judge._prior([before])] == pytest.approx([a, b])
    tau = extra.get("tau_low")
    if tau is None:
        n = extra.get("probe", 4)
        tau = (effective_probability(0, n - 1, 8) + effective_probability(0, n, 8)) / 2
    fresh = Group("g", 0, 1)
    judge.start([fresh])
    for kind in (0, 1):
        below = [n for n in range(2, 9) if n == 8 or effective_probability(kind * n, n, 8, a, b) < tau]
        codes = [judge.verdicts([pure(kind, n)])[0] for n in range(1, 9)]
        assert codes == [2 if n >= below[0] else 0 for n in range(1, 9)]  # never at one rollout
        if below[0] > 2:
            assert judge.more(pure(kind, 1)) == below[0] - 1
    assert judge.more(fresh) >= 2
    other = Group("h", 5, 1)
    judge.start([other])  # a prompt never seen starts from the prior
    assert judge.more(other) == extra.get("probe", 4) or "tau_low" in extra and judge.more(other) == 4


def test_lost_rollouts_shorten_what_a_prompt_with_a_past_can_reach():
    judge = carried()._judge
    judge.end_step([pure(1, 2)])
    judge.start([Group("g", 0, 1)])
    group = Group("g", 0, 1, requested=4)
    for s in range(4):
        group.add(Outcome("g", s, None if s < 2 else True, 1.0, 1, 1))
    a, tau = 1 + 0.7 * 2, (effective_probability(0, 3, 8) + effective_probability(0, 4, 8)) / 2
    assert effective_probability(2, 2, 6, a, 1) < tau < effective_probability(2, 2, 8, a, 1)
    assert judge.verdicts([group])[0] == 2 and judge.verdicts([pure(1, 2)])[0] == 0


def test_the_past_is_discounted_at_every_visit():
    judge = carried(discount=0.5)._judge
    for kind, n in [(1, 8), (0, 4), (1, 2)]:
        judge.end_step([pure(kind, n), Group("unscored", 0, 0)])
    successes, failures = 0.25 * 8 + 2, 0.5 * 4
    assert [float(x[0]) for x in judge._prior([Group("g", 0, 1)])] == [1 + 0.5 * successes, 1 + 0.5 * failures]


@pytest.mark.parametrize("discount", [0.7, 0.8])
def test_no_prompt_dies_of_its_past(discount):
    """A prompt that failed for a hundred visits still gets two rollouts, and is topped up once it is mixed."""
    rates = np.zeros(4)
    run = Run(rates, "sara", groups=4, rollouts=200, settings={"carry_prior": True, "discount": discount})
    for number in range(100):
        collected = run.step(number)
        assert len(collected.started) == 4 and min(group.requested for group in collected.started) >= 2
    run.backend.success_rates = np.full(4, 0.5)
    trained = sum(len(run.step(number).groups) for number in range(100, 140))
    assert trained > 40


def test_carried_priors_save_rollouts_where_prompts_come_back():
    rates = u_shaped(0.35, 200)
    cost = {}
    for carry in (False, True):
        run = Run(rates, "sara", groups=16, rollouts=4000, settings={"carry_prior": carry}, seed=1)
        steps = [run.step(number) for number in range(60)][20:]
        cost[carry] = sum(c.rollouts for c in steps) / sum(len(c.groups) for c in steps)
    assert cost[True] < 0.97 * cost[False]


# ---------------------------------------------- graded rewards


def by_enumeration(counts, size, levels, tolerance, concentration):
    """Over all sequences of levels still to come, by Polya's urn."""
    total, m = 0.0, size - sum(counts)
    for sequence in product(range(len(levels)), repeat=m):
        weights, p = [c + a for c, a in zip(counts, concentration, strict=True)], 1.0
        for level in sequence:
            p *= weights[level] / sum(weights)
            weights[level] += 1
        seen = {i for i, c in enumerate(counts) if c} | set(sequence)
        values = [levels[i] for i in seen]
        total += p * (max(values) - min(values) > tolerance + 1e-9)
    return total


@settings(max_examples=60, deadline=None)
@given(data=st.data(), levels=st.sampled_from([[0, 1], [0, 0.5, 1], [0, 0.25, 0.5, 1.0], [-1, 0, 0.1, 2, 3]]))
def test_the_probability_of_a_spread_is_the_urns(data, levels):
    counts = data.draw(st.lists(st.integers(0, 2), min_size=len(levels), max_size=len(levels)))
    size = sum(counts) + data.draw(st.integers(0 if sum(counts) else 1, 4))
    concentration = [data.draw(st.sampled_from([0.2, 0.5, 1.0, 3.0])) for _ in levels]
    tolerance = data.draw(st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0, 10.0]))
    found = spread_probability(counts, size, levels, tolerance, concentration)
    assert found == pytest.approx(by_enumeration(counts, size, levels, tolerance, concentration), abs=1e-11)


def test_the_probability_of_a_spread_by_monte_carlo():
    rng = np.random.default_rng(0)
    levels, concentration, draws = np.linspace(0, 1, 6), np.array([2.0, 0.3, 0.3, 0.3, 0.5, 1.0]), 100_000
    cases = [([0] * 6, 0.2), ([0, 2, 1, 0, 0, 0], 0.2), ([0, 0, 0, 0, 0, 4], 0.45), ([3, 0, 0, 0, 0, 0], 0)]
    for counts, tolerance in cases:
        more = 16 - sum(counts)
        rates = rng.dirichlet(concentration + counts, draws)
        to_come = rng.multinomial(more, rates)
        seen = (to_come + counts) > 0
        low, high = levels[seen.argmax(1)], levels[5 - seen[:, ::-1].argmax(1)]
        share = (high - low > tolerance + 1e-9).mean()
        found = spread_probability(counts, 16, levels, tolerance, concentration)
        assert found == pytest.approx(share, abs=4 * math.sqrt(0.25 / draws))


def test_two_levels_are_outcomes():
    n, k = np.arange(0, 17), 16
    for alpha, beta in [(1, 1), (0.3, 2.0)]:
        failed = np.stack([n, 0 * n], axis=1)
        expected = effective_probability(0 * n, n, k, alpha, beta)
        np.testing.assert_allclose(spread_probability(failed, k, [0, 1], 0, [beta, alpha]), expected, atol=1e-11)
        passed = effective_probability(n, n, k, alpha, beta)
        np.testing.assert_allclose(spread_probability(failed[:, ::-1], k, [0, 1], 0, [beta, alpha]), passed, atol=1e-11)
    assert spread_probability([2, 1], 16, [0, 1]) == 1.0
    for bad in ({"levels": [1, 0]}, {"tolerance": -1}, {"concentration": 0}, {"group_size": 2}, {"counts": [1.5, 0]}):
        with pytest.raises(ValueError):
            spread_probability(**{"counts": [1, 2], "group_size": 4, "levels": [0, 1], **bad})


class Graded:
    """Scores of a prompt around its own mean, all answers counted as wrong."""

    def __init__(self, means, width):
        self.means, self.width = means, width

    def generate(self, requests):
        out = []
        for r in requests:
            for s in r.sessions:
                rng = np.random.default_rng([r.group.prompt, r.group.offered_at, s])
                score = float(np.clip(self.means[r.group.prompt] + self.width * rng.normal(), 0, 1))
                out.append(Outcome(r.group.uid, s, False, score, 1, 1))
        return out


@pytest.mark.parametrize("extra", [{"probe": 4}, {"probe": None, "tau_low": 0.5}])
def test_graded_rewards_without_a_right_answer(extra):
    means = np.where(np.arange(800) % 2, 0.5, 0.0)
    settings = {"effective": "spread", "tolerance": 0.1, "levels": 11, **extra}
    run = Run(means, "sara", groups=8, rollouts=4000, settings=settings, backend=Graded(means, 0.1))
    assert run.allocator._judge._first >= 2
    for number in range(4):
        collected = run.step(number)
        check_step(run, collected, run.ledger.step_record(number))
        assert collected.short_by == 0 and collected.metrics["batch_effective_share"] == 1.0
        for group in collected.groups:
            scores = [outcome.score for outcome in group.outcomes]
            assert max(scores) - min(scores) > 0.1 and len(scores) == 8
        for group in collected.started:
            if group.verdict is Verdict.ABANDON:
                scores = [outcome.score for outcome in group.outcomes]
                assert max(scores) - min(scores) <= 0.1 + 1e-9 and 2 <= len(scores) <= 8
    flat = Run(means, "sara", groups=8, settings=settings, backend=Graded(means, 0.0)).step(0)
    assert not flat.groups and flat.metrics["batch_effective_share"] == 0.0


def test_float_residue_is_no_spread():
    allocator = make_allocator("sara", effective="spread")
    for third, alive in ((0.1 + 0.2, False), (0.3 + 1e-5, True)):
        group = Group("g", 0, 0, requested=3)
        for session, points in enumerate((0.3, 0.3, third)):
            group.add(Outcome("g", session, False, points, 1, 1))
        assert allocator._judge.effective(group) is alive


def test_settings_are_checked_by_name():
    for bad, named in [
        ({"max_staleness": -1}, "max_staleness=-1"), ({"audit_fraction": 1.5}, "audit_fraction=1.5"),
        ({"discount": 0.81}, "discount=0.81; accepted: a number in (0, 0.8]"),
        ({"carry_prior": True, "effective": "spread"}, "carry_prior=True"), ({"effective": "all"}, "outcome | spread"),
        ({"effective": "spread", "tolerance": 1.0}, "tolerance=1.0"), ({"score_high": 0.0}, "score_high=0.0"),
        ({"effective": "spread", "probe": 4, "tau_low": 0.4}, "one of probe and tau_low"), ({"levels": 1}, "levels=1"),
        ({"effective": "spread", "tau_low": 0.97, "probe": None}, "tau_low=0.97; accepted: a number in (0, "),
        ({"concentration": 0.0}, "concentration=0.0"),
    ]:  # fmt: skip
        with pytest.raises(SettingError) as error:
            make_allocator("sara", **bad)
        assert named in str(error.value)


# ---------------------------------------------- saved state


@pytest.mark.parametrize("stopped", [1, 2, 4])
@pytest.mark.parametrize("extra", [
    {"max_staleness": 2, "window": 40}, {"carry_prior": True, "audit_fraction": 0.4, "max_staleness": 1, "window": 30},
    {"effective": "spread", "max_staleness": 1, "window": 30, "commit": "stop"},
])  # fmt: skip
def test_a_resumed_run_decides_as_one_that_never_stopped(tmp_path, stopped, extra):
    def fresh():
        return Run(u_shaped(0.4, 150), "sara", "max_variance", groups=6, seed=4, keep=4, unscorable=0.05, failing=0.05,
                   settings=extra)  # fmt: skip

    def steps(run, numbers):
        return [(decisions(c), c.metrics["p_eff_abandoned"], c.metrics.get("p_eff_audited"), r)
                for c, r in ((run.step(number), run.ledger.step_record(number)) for number in numbers)]  # fmt: skip

    whole, broken, resumed = fresh(), fresh(), fresh()
    expected = steps(whole, range(7))
    found = steps(broken, range(stopped))
    assert broken.allocator._waiting.groups
    save_state(tmp_path, broken.state_dict())
    resumed.load_state_dict(load_state(tmp_path))
    assert found + steps(resumed, range(stopped, 7)) == expected
