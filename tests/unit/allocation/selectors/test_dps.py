"""DPS against a hidden Markov model summed over all paths, and against the published update written out by hand."""

from itertools import combinations, product

import numpy as np
import pytest

from tests.unit.allocation.selectors.selector_runs import ByHand
from verl_ext.allocation import SettingError, make_selector
from verl_ext.allocation.selectors import dps


def test_the_filter_against_all_paths():
    """State and transition after each observation, for matrices and likelihoods that change from step to step."""
    rng = np.random.default_rng(0)
    steps, prompts = 5, 7
    counts = rng.gamma(1.0, size=(steps, 3, 3, prompts)) + 0.01
    seen = rng.random((steps, 3, prompts))
    start = rng.dirichlet(np.ones(3), prompts).T
    state = start
    for last in range(steps):
        if last == 2:  # nothing observed: the likelihood says nothing
            seen[last] = 1.0
        before = state
        state, moved = dps.condition(counts[last], state, seen[last])
        assert dps.predict(counts[last], before) == pytest.approx(
            (counts[last] / counts[last].sum(axis=0) * before).sum(axis=1)
        )
        if last == 2:
            assert dps.predict(counts[last], before) == pytest.approx(state)
        for m in range(prompts):
            weight = np.zeros(3)
            pair = np.zeros((3, 3))
            for path in product(range(3), repeat=last + 2):
                p = start[path[0], m]
                for t, (old, new) in enumerate(zip(path[:-1], path[1:], strict=True)):
                    p *= counts[t, new, old, m] / counts[t, :, old, m].sum() * seen[t, new, m]
                weight[path[-1]] += p
                pair[path[-1], path[-2]] += p
            assert state[:, m] == pytest.approx(weight / weight.sum(), rel=1e-10)
            assert moved[:, :, m] == pytest.approx(pair / pair.sum(), rel=1e-10)


PRIORS = {
    1.0: np.ones((3, 3)),
    2.5: np.full((3, 3), 2.5),
    "progress": np.array([[1, 0.5, 0.5], [1, 1, 0.5], [1, 1, 1]]),
    "stability": np.array([[1, 0.5, 0.5], [0.5, 1, 0.5], [0.5, 0.5, 1]]),
    "local": np.array([[1, 1, 0], [1, 1, 1], [0, 1, 1.0]]),
}
STARTS = {"uniform": [1 / 3] * 3, "failed": [1, 0, 0], "mixed": [0, 1, 0], "passed": [0, 0, 1]}


def by_hand(observations, forget, prior=1.0, start="uniform"):
    """The published recursion of one prompt: pi, A. A step is an observation, None (a candidate that was not chosen),
    or "out" (no candidate), which leaves a prompt that was never one as it starts."""
    pi, A_0 = np.array(STARTS[start], float), PRIORS[prior]
    A, known = A_0.copy(), False
    for seen in observations:
        P = A / A.sum(axis=0)
        if seen is None or isinstance(seen, str):
            pi, A = P @ pi if known else pi, forget * A + (1 - forget) * A_0
            known = known or seen is None
            continue
        known = True
        s, n = seen
        new = np.eye(3)[0 if s == 0 else 2 if s == n else 1]
        joint = np.outer(new, pi) * P
        if not joint.any():  # impossible under the prior
            joint = np.outer(new, pi)
        A = forget * A + (1 - forget) * A_0 + joint / joint.sum()
        pi = new
    return pi, A


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("forget", [0.5, 1.0])
def test_the_published_update(forget, prior, start):
    """With all of the official code's priors and initial states; a step draws half of the prompts as candidates."""
    prompts = 12
    rng = np.random.default_rng(1)
    run = ByHand("dps", prompts, groups=3, forget=forget, candidates=2, prior=prior, start=start)
    told = [[] for _ in range(prompts)]
    for _ in range(25):
        outcomes = {row: (int(rng.choice([0, 3, 8])), 8) for row in range(prompts)}
        chosen, candidates = run.step(outcomes.get), set(run.selector._candidates)
        assert len(candidates) == 6 and set(chosen) < candidates
        for row in range(prompts):
            told[row].append(outcomes[row] if row in chosen else None if row in candidates else "out")
    state = run.selector.state_dict()
    for row in range(prompts):
        pi, A = by_hand(told[row], forget, prior, start)
        assert state["state"][:, row] == pytest.approx(pi, abs=1e-12)
        assert state["counts"][:, :, row] == pytest.approx(A, abs=1e-12)


def test_the_first_prediction_is_the_initial_state_and_entropy_prefers_the_unknown():
    for start, mixed in (("failed", 0), ("mixed", 1), ("passed", 0), ("uniform", 1 / 3)):
        run = ByHand("dps", 2, groups=1, start=start)
        run.begin()
        assert -run.selector._losses(np.arange(2), None) == pytest.approx([mixed, mixed])
    run = ByHand("dps", 3, groups=3, entropy=0.5)
    run.begin()
    state = run.selector.state_dict()
    state["known"][:] = True
    state["state"] = np.array([[0.2, 1 / 3, 0], [0.5, 1 / 3, 1], [0.3, 1 / 3, 0]])
    state["counts"] = np.tile(np.eye(3)[:, :, None], (1, 1, 3)) + 1e-300
    run.selector.load_state_dict(state)
    entropies = [-(0.2 * np.log(0.2) + 0.5 * np.log(0.5) + 0.3 * np.log(0.3)), np.log(3), 0]
    expected = np.array([0.5, 1 / 3, 1]) + 0.5 * np.array(entropies)
    assert -run.selector._losses(np.arange(3), None) == pytest.approx(expected)


def test_it_offers_what_it_predicts_to_be_mixed():
    run = ByHand("dps", 60, groups=20, candidates=3)
    kind = np.arange(60) % 3  # 0: never right, 1: mixed, 2: always right
    for _ in range(12):
        chosen = run.step(lambda row: ((0, 4, 8)[kind[row]], 8))
    assert (kind[chosen] == 1).mean() >= 0.9
    assert run.selector.metrics()["mixed_predicted"] > 0.5


def test_a_prefix_keeps_its_length_and_soft_labels_weigh_it():
    for k in (2, 3, 8):
        for n in range(1, k):
            # Mixed groups of k, each number of successes as likely: the share that begins with n failures.
            alike = [np.mean([hits[0] >= n for hits in combinations(range(k), s)]) for s in range(1, k)]
            weights = dps.likelihood(np.array([0, n]), np.array([n, n]), np.array([k, k]), soft=True)
            assert weights[:, 0] == pytest.approx([1, np.mean(alike), 0])
            assert weights[:, 1] == pytest.approx([0, np.mean(alike), 1])
    whole = dps.likelihood(np.array([0, 8, 3]), np.array([8, 8, 4]), np.array([8, 8, 8]), soft=True)
    assert np.array_equal(whole, np.array([[1, 0, 0], [0, 0, 1], [0, 1, 0]]))

    left = {}
    for censored in ("hard", "soft"):
        run = ByHand("dps", 1, groups=1, censored=censored)
        run.step(lambda row: (0, 4))
        assert run.selector.metrics()["censored_share"] == 1.0
        state = run.selector.state_dict()
        assert (state["trials"][0], state["sizes"][0]) == (4, 8)
        left[censored] = state["state"][dps.MIXED, 0]
        run.step(lambda row: (0, 8))
        assert run.selector.metrics()["censored_share"] == 0.0
        assert run.selector.state_dict()["state"][dps.MIXED, 0] == 0
    assert left["hard"] == 0 and left["soft"] == pytest.approx((4 / 35) / (1 + 4 / 35))


def test_predictions_of_the_long_unobserved_tie_and_the_seed_decides():
    def chosen(seed):
        run = ByHand("dps", 400, groups=20, candidates=20, seed=seed)
        run.step(lambda row: (row % 9, 8), want=400)
        for _ in range(100):
            run.step(lambda row: (4, 8), want=0)
        return run.step(want=20)

    first = chosen(0)
    assert first == chosen(0) and first != chosen(1)
    assert len(set(first)) == 20 and max(first) - min(first) > 200  # not the first rows of an array
    # The kinds (all failed, mixed, all passed) are as frequent as in the pool: none is preferred by residue.
    many = np.concatenate([chosen(seed) for seed in range(2, 12)])
    assert np.isin(many % 9, range(1, 8)).mean() == pytest.approx(7 / 9, abs=0.1)


def test_what_is_unscorable_is_unobserved():
    run = ByHand("dps", 3, groups=3)
    run.step(lambda row: (0, 0))
    assert run.selector.metrics()["seen_share"] == 0
    assert run.selector.state_dict()["state"] == pytest.approx(np.full((3, 3), 1 / 3))


def test_wrong_settings_are_named():
    with pytest.raises(SettingError, match=r"allocation.selector.forget=1.2; accepted: a number in \[0, 1\]"):
        make_selector("dps", forget=1.2)
    with pytest.raises(SettingError, match=r"allocation.selector.candidates=0"):
        make_selector("dps", candidates=0)
    with pytest.raises(SettingError, match=r"allocation.selector.censored='none'; accepted: hard \| soft"):
        make_selector("dps", censored="none")
