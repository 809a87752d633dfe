"""Stopped and resumed is the run that never stopped: the real collector, Ray actors and TransferQueue on fake engines.

`tests/unit/test_resume.py` goes through every rule and every stop; here the trajectories that wait take part.
"""

from __future__ import annotations

import pytest

from tests.integration.fake_stack import clear_all, fake_stack, left_in_transfer_queue, step_of

pytestmark = pytest.mark.ray

STEPS = 5
SMALL = ("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
RECIPES = {
    "sara": ("recipe=cpu/sara", *SMALL),
    "sara that carries over": (
        "recipe=cpu/sara", *SMALL, "allocation.allocator.max_staleness=2", "allocation.allocator.carry_prior=true",
    ),
    "cero, sara": ("recipe=cpu/cero_sara", *SMALL, "allocation.stop.rollouts=64"),
    "dps, sara, PODS": ("recipe=cpu/sara_dps_pods", *SMALL, "allocation.stop.rollouts=128"),
    "pilot_commit": ("recipe=cpu/pilot_commit", *SMALL),
    "dapo": ("recipe=cpu/dapo", *SMALL),
}  # fmt: skip
# 40 prompts in steps that start 8 to 32 of them: epochs end in these runs.
DATA = {"prompts": 40, "logit_std": 2.0, "logit_mean": 0.0, "fail_share": 0.02, "unscored_share": 0.02}


@pytest.fixture(scope="module")
def stack():
    with fake_stack() as running:
        yield running
        assert left_in_transfer_queue() == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_stopped_twice_and_killed_once(stack, tmp_path, recipe):
    overrides = RECIPES[recipe]
    straight = stack.collector(*overrides, **DATA)
    wanted = [step_of(straight, step) for step in range(1, STEPS + 1)]
    if "dps" not in recipe and "cero" not in recipe:  # which offer some prompts again before others
        assert wanted[-1]["metrics"]["allocation/pool/epoch"] > 0
    clear_all()

    folder = str(tmp_path / "allocation")
    run = stack.collector(*overrides, **DATA)
    for step in (1, 2):
        assert step_of(run, step) == wanted[step - 1]
        run.save(folder)
        clear_all()  # another process, another queue
        run = stack.collector(*overrides, **DATA)
        run.load(folder)
    step_of(run, 3)  # lost: killed before it was saved, in the middle of a step
    with pytest.raises(KeyboardInterrupt):
        run.backend.manager.generate_round, kept = _killed, run.backend.manager.generate_round
        try:
            run.sample(4)
        finally:
            run.backend.manager.generate_round = kept
    clear_all()
    run = stack.collector(*overrides, **DATA)
    run.load(folder)
    for step in range(3, STEPS + 1):
        assert step_of(run, step) == wanted[step - 1]
    clear_all()


def _killed(*_):
    raise KeyboardInterrupt


def test_something_waits_in_the_queue_where_it_should(stack):
    for recipe in ("sara that carries over", "pilot_commit"):
        run = stack.collector(*RECIPES[recipe], **DATA)
        assert any(step_of(run, step)["ledger"]["waiting"] for step in range(1, STEPS)), recipe
        clear_all()


@pytest.mark.parametrize("change, said", [
    (("allocation.allocator.probe=3",), "allocation.allocator.probe: saved 'auto', now 3"),
    (("allocation/allocator=dynamic_sampling",), "allocation.allocator.name: saved 'sara', now 'dynamic_sampling'"),
    (("allocation/selector=mopps",), "allocation.selector.name: saved 'shuffled', now 'mopps'"),
    (("allocation/downsampler=random", "allocation.downsampler.keep=4"), "sampler.name: saved 'none', now 'random'"),
    (("allocation.seed=7",), "allocation.seed: saved 0, now 7"),
    (("data.seed=7",), "data.seed: saved 1, now 7"),
    (("data.shuffle=False",), "data.shuffle: saved True, now False"),
    (("allocation.max_rounds=5",), "allocation.max_rounds: saved 8, now 5"),
    (("allocation.stop.rollouts=99",), "allocation.stop.rollouts: saved 384, now 99"),
    (("allocation.outcome.threshold=0.5",), "allocation.outcome.threshold: saved None, now 0.5"),
])  # fmt: skip
def test_a_state_of_another_run_is_refused_by_what_differs(stack, tmp_path, change, said):
    folder = str(tmp_path / "allocation")
    stack.collector(*RECIPES["sara"], prompts=40).save(folder)
    with pytest.raises(ValueError, match="allocation.resume=fresh") as refused:
        stack.collector(*RECIPES["sara"], *change, prompts=40).load(folder)
    assert said in str(refused.value)
    stack.collector(*RECIPES["sara"], *change, "allocation.resume=fresh", prompts=40).load(folder)


def test_a_state_of_other_prompts_or_another_version_is_refused(stack, tmp_path, monkeypatch):
    """As many prompts, and yet others."""
    folder = str(tmp_path / "allocation")
    stack.collector(*RECIPES["sara"], prompts=40).save(folder)
    for prompts, name, row in ((40, "question", 0), (41, "prompt", 40)):
        said = f"now '{prompts} of digest.*; the first that differs is row {row} of the training data: '{name} {row}'"
        with pytest.raises(ValueError, match=f"training prompts: saved '40 of digest .*', {said}"):
            stack.collector(*RECIPES["sara"], prompts=prompts, name=name).load(folder)
    monkeypatch.setattr("verl_ext.__version__", "9.9")
    with pytest.raises(ValueError, match="version of verl_ext: saved '.*', now '9.9'"):
        stack.collector(*RECIPES["sara"], prompts=40).load(folder)
