"""CERO as a selector: its budget, its rounds, what it learns, and its refusals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, logit

from tests.unit.allocation.helpers import check_step, examples, u_shaped
from tests.unit.allocation.selectors.selector_runs import ByHand, SelectorRun, same_state
from verl_ext.allocation import SettingError, StateError, expected_variance, make_selector
from verl_ext.allocation.selectors import fenchel

ALLOCATORS = {"uniform": {}, "dynamic_sampling": {"gen_multiple": "auto"}, "sara": {}}


@settings(max_examples=examples(40), deadline=None)
@given(
    allocator=st.sampled_from(sorted(ALLOCATORS)),
    schedule=st.sampled_from(["batch", "epoch"]),
    price=st.sampled_from(["exact", "dual"]),
    dual=st.sampled_from(["executed", "virtual"]),
    explore=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    prompts=st.integers(1, 60),
    groups=st.integers(1, 6),
    rounds=st.integers(1, 7),
    extra=st.integers(0, 400),
    failing=st.sampled_from([0.0, 0.3]),
    unscorable=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 99),
)
def test_the_budget_is_never_overspent(
    allocator, schedule, price, dual, explore, prompts, groups, rounds, extra, failing, unscorable, seed
):
    """Whichever allocator spends it, also on rollouts that fail or have no score, and beyond the last round."""
    budget = rounds * 8 + extra
    run = SelectorRun(
        np.random.default_rng(seed).beta(0.4, 0.6, prompts), "cero", allocator, groups=groups, seed=seed,
        settings=ALLOCATORS[allocator], failing=failing, unscorable=unscorable,
        chooses={
            "rounds": rounds, "budget": budget, "schedule": schedule, "price": price, "dual": dual,
            "explore": explore, "seed": seed,
        },
    )  # fmt: skip
    for step in range(1, rounds + 4):
        done = run.step(step)
        check_step(run, done, run.ledger.step_record(step))
        assert run.ledger.issued <= budget
        assert done.metrics["selector/budget_used"] == run.ledger.issued
        if schedule == "batch" and price == "exact":
            assert done.rollouts <= min(done.metrics["selector/round_share"], 2 * groups * 8)


def learning(run, step, moved, rate=0.004):
    """Prompts get easier as they are trained on, a little all of them and most those visited."""
    moved[[group.prompt for group in run.groups if group.mixed]] += 0.3
    return moved + step * rate


@pytest.mark.parametrize("allocator, groups", [("uniform", 32), ("sara", 16)])
def test_no_starved_round_and_no_dumped_budget_over_265_rounds(allocator, groups):
    """Two groups a prompt over the whole run, spent while the policy learns."""
    rates = u_shaped(0.35, size=133 * groups)
    start, moved = logit(np.clip(rates, 1e-9, 1 - 1e-9)), np.zeros(len(rates))
    np.random.default_rng(1).shuffle(start)
    run = SelectorRun(expit(start), "cero", allocator, groups=groups, chooses={"rounds": 265})
    issued, budget = [], 265 * groups * 8
    for step in range(1, 266):
        done = run.step(step)
        issued.append(done.rollouts)
        run.backend.success_rates = expit(start + learning(done, step, moved))
    issued = np.array(issued)
    mean = budget / 265
    assert issued.min() >= 0.5 * mean and issued.max() <= 1.5 * mean
    assert issued[-1] <= 1.5 * mean
    assert 0.98 * budget <= issued.sum() <= budget
    assert done.metrics["selector/empty_rounds"] == 0
    assert done.metrics["selector/budget_used_share"] == issued.sum() / budget


@pytest.mark.parametrize("dual", ["executed", "virtual"])
def test_the_published_price_spends_at_once_and_starves(dual):
    """What the defaults avoid, where nothing but the budget limits a step."""
    rates = np.random.default_rng(1).permutation(u_shaped(0.35, size=1000))
    starved = {}
    for price in ("exact", "dual"):
        run = SelectorRun(
            rates, "cero", "uniform", groups=1000,
            chooses={"rounds": 265, "budget": 265 * 64, "price": price, "dual": dual},
        )  # fmt: skip
        issued = np.array([run.step(step).rollouts for step in range(1, 266)])
        starved[price] = int((issued < 0.1 * 64).sum())
        assert issued.sum() <= 265 * 64
    assert starved["exact"] == 0 and starved["dual"] > 60


def test_it_finds_the_prompts_with_signal():
    """On a population that does not move, more of its groups are mixed than of uniform's, and q is near the truth."""
    rates = np.random.default_rng(0).permutation(u_shaped(0.33, size=2000))
    mixed = {}
    for selector, chooses in (("shuffled", {}), ("cero", {"rounds": 100})):
        run = SelectorRun(rates, selector, "uniform", groups=32, chooses=chooses)
        mixed[selector] = sum(sum(g.mixed for g in run.step(step).groups) for step in range(1, 101))
    assert mixed["cero"] >= 1.3 * mixed["shuffled"]
    visited = run.selector.state_dict()
    counts = visited["successes"] + visited["failures"]
    known = counts >= 12
    assert known.sum() > 50
    q = expected_variance(1 + visited["successes"], 1 + visited["failures"])
    assert np.mean(q[known]) == pytest.approx(np.mean((rates * (1 - rates))[known]), abs=0.03)


def test_forgetting_by_hand():
    run = ByHand("cero", 1, groups=1, rounds=9, forget=0.5, explore=0.0)
    for told in ((6, 8), (0, 0), (1, 1), (2, 4)):
        run.step(lambda row, told=told: told)
    state = run.selector.state_dict()
    # 6, 2 -> (nothing scored: no visit) -> 3 + 1, 1 + 0 -> 2 + 2, .5 + 2
    assert (state["successes"][0], state["failures"][0]) == (4.0, 2.5)
    assert state["spent"] == 4 * 8


def test_theta_follows_its_rate_up_and_down():
    """q of a mixed prompt rises above the prior's, that of a failed one falls; theta keeps its share of L."""
    run = ByHand("cero", 2, groups=2, rounds=9, explore=0.0, theta_rate=0.0)
    run.begin()
    before = run.selector.state_dict()["theta"]
    run.step(lambda row: ((4, 0)[row], 8))
    theta = run.selector.state_dict()["theta"]
    # Beta(5, 5): 25 / 110; Beta(1, 9): 9 / 110; the prior's is 1 / 6.
    assert theta / before == pytest.approx([6 * 25 / 110, 6 * 9 / 110])


def test_an_unscorable_prompt_does_not_hold_the_top():
    """It is paid for, so its theta falls, though its posterior never moves."""
    rates = np.full(64, 0.5)
    rates[:8] = np.nan
    run = SelectorRun(rates, "cero", "uniform", groups=8, chooses={"rounds": 48, "explore": 0.0})
    visits = np.zeros(64)
    for step in range(1, 49):
        visits[[group.prompt for group in run.step(step).started]] += 1
    assert visits[:8].mean() <= visits[8:].mean() * 1.2


def test_exploration_is_its_share_and_uniform():
    # Prompts 0-99 are best and known; the others are offered by exploration alone.
    run = ByHand("cero", 1000, groups=50, rounds=400, explore=0.2, theta_rate=0.0)
    run.begin()
    state = run.selector.state_dict()
    state["successes"], state["failures"] = np.where(np.arange(1000) < 100, 50.0, 0.0), np.full(1000, 50.0)
    run.selector.load_state_dict(state | {"open": False})
    run.selector._rate[:] = run.selector._theta[:] = run.selector._rates()
    visits = np.zeros(1000)
    explored = 0
    for _ in range(400):
        visits[run.step()] += 1
        explored += run.selector.metrics()["explored"]
    assert explored / visits.sum() == pytest.approx(0.2, abs=0.01)
    others = visits[100:]
    assert others.sum() / visits.sum() == pytest.approx(0.2 * 900 / 960, abs=0.02)
    assert others.var() / others.mean() == pytest.approx(1.0, abs=0.25)  # Poisson: no prompt is preferred


def test_ties_are_broken_by_the_seed_alone():
    chosen = {}
    for seed in (0, 0, 1):
        run = ByHand("cero", 500, groups=20, rounds=10, explore=0.0, seed=seed)
        rows = run.step()
        assert chosen.setdefault(seed, rows) == rows
    assert chosen[0] != chosen[1] and chosen[0] != sorted(chosen[0])
    assert len(set(chosen[0])) == 20


def test_an_epoch_is_decided_at_once_and_fills_several_steps():
    run = SelectorRun(
        np.full(40, 0.5), "cero", "uniform", groups=6, chooses={"rounds": 3, "budget": 3 * 20 * 8, "schedule": "epoch"}
    )
    epochs, steps = [], []
    for step in range(1, 13):
        done = run.step(step)
        epochs.append([group.prompt for group in done.groups])
        steps.append(len(done.groups))
    assert steps == [6, 6, 6, 2] * 3  # 20 prompts an epoch: the last step is short
    for epoch in range(3):
        offered = sum(epochs[4 * epoch : 4 * epoch + 4], [])
        assert len(set(offered)) == 20
    assert run.ledger.issued == 3 * 20 * 8
    first, second = set(sum(epochs[:4], [])), set(sum(epochs[4:8], []))
    assert len(second - first) >= 10  # equal prompts: those not yet visited have the higher theta
    assert run.step(13).rollouts == 0


def test_carried_groups_are_paid_for_by_the_epoch_that_runs():
    run = ByHand("cero", 40, groups=6, rounds=3, budget=3 * 160, schedule="epoch")
    assert run.begin() == 160
    for row in run.selector.select(6):
        run.selector.issued(row, 8)
    run.selector.issued(39, 24)  # of a group offered in an earlier step
    run.selector.end_step()
    assert run.begin() == 160 - 48 - 24


def test_an_epoch_resumes_in_its_middle():
    def make():
        return SelectorRun(
            np.random.default_rng(5).random(50), "cero", "sara", groups=4, seed=3,
            chooses={"rounds": 4, "budget": 1000, "schedule": "epoch", "dual": "virtual"},
        )  # fmt: skip

    whole, parts = make(), make()
    for step in range(1, 12):
        expected = whole.step(step)
        again = make()
        again.load_state_dict(parts.state_dict())
        parts = again
        done = parts.step(step)
        assert [g.prompt for g in done.started] == [g.prompt for g in expected.started]
        assert same_state(parts.selector.state_dict(), whole.selector.state_dict())


def test_a_step_that_broke_off_is_paid_for_and_the_run_goes_on():
    class Breaking(Exception):
        pass

    class Backend:
        def generate(self, requests):
            raise Breaking

    run = SelectorRun(np.full(50, 0.5), "cero", "uniform", groups=4, chooses={"rounds": 5, "budget": 5 * 32})
    run.step(1)
    with pytest.raises(Breaking):
        run.step(2, backend=Backend())
    for step in range(3, 9):
        run.step(step)
    assert run.ledger.issued <= 160 and run.selector.metrics()["budget_used"] == run.ledger.issued


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"rounds": 0}, r"allocation.selector.rounds=0; accepted: an integer of 1 or more"),
        ({}, r"allocation.selector.rounds=None; accepted: an integer; it has no default"),
        ({"rounds": 5, "budget": 0}, r"allocation.selector.budget=0"),
        ({"rounds": 5, "schedule": "epoch"}, r"selector.budget=None; accepted: .* allocation.selector.schedule=epoch"),
        ({"rounds": 5, "forget": 1.5}, r"allocation.selector.forget=1.5; accepted: a number in \[0, 1\]"),
        ({"rounds": 5, "price": "shadow"}, r"allocation.selector.price='shadow'; accepted: exact \| dual"),
        ({"rounds": 5, "alpha": 0}, r"allocation.selector.alpha=0.0; accepted: a finite number above 0"),
        ({"rounds": 5, "cap": 0.5}, r"allocation.selector.cap=0.5; accepted: a number of 1 or more"),
        ({"rounds": 5, "explore": -0.1}, r"allocation.selector.explore=-0.1"),
    ],
)
def test_wrong_settings_are_named(wrong, message):
    with pytest.raises(SettingError, match=message):
        make_selector("cero", **wrong)


def test_a_budget_below_one_group_a_round_is_refused():
    with pytest.raises(SettingError, match=r"selector.budget=79; .* rounds x group_size = 80 or more"):
        ByHand("cero", 20, rounds=10, budget=79).begin()
    ByHand("cero", 20, rounds=10, budget=80).begin()


def test_state_of_another_pool_is_refused():
    run = ByHand("cero", 20, rounds=10)
    run.step()
    state = run.selector.state_dict()
    other = ByHand("cero", 21, rounds=10)
    other.selector.load_state_dict(state)
    with pytest.raises(StateError, match="cero knows 20 prompts and the pool has 21"):
        other.begin()
    with pytest.raises(StateError, match="theta"):
        other.selector.load_state_dict(state | {"theta": np.zeros(3)})
    with pytest.raises(StateError, match="missing"):
        other.selector.load_state_dict({})


def test_state_is_at_most_64_bytes_a_prompt():
    run = ByHand("cero", 20_000, groups=64, rounds=10, budget=10 * 20_000 * 8, schedule="epoch", dual="virtual")
    run.step(lambda row: (row % 9, 8))
    arrays = [value for value in run.selector.state_dict().values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) <= 64 * 20_000


def test_a_ranking_sorted_on_demand_offers_what_a_whole_one_does(monkeypatch):
    """Wherever the part that is sorted at once ends."""
    rates = np.random.default_rng(0).permutation(u_shaped(0.2, size=600))
    rank_first, offered, rests = fenchel.rank_first, {}, 0
    for least in (1, 20, None, 600):

        def cut(theta, rows, first, most, rng, least=least):
            nonlocal rests
            head, others = rank_first(theta, rows, first if least is None else least, most, rng)
            rests += len(others) > 0
            return head, others

        monkeypatch.setattr(fenchel, "rank_first", cut)
        run = SelectorRun(rates, "cero", "sara", groups=16, chooses={"rounds": 20})
        offered[least] = [[group.prompt for group in run.step(step).started] for step in range(1, 21)]
    assert rests > 30 and min(map(len, offered[600])) > 20
    assert offered[1] == offered[20] == offered[None] == offered[600]
