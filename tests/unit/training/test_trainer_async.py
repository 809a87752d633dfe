"""The modes in which groups go on over the update: verl's loop with our trainers in it, and no policy."""

import json
from types import SimpleNamespace

import pytest

from tests.unit.training.conftest import WithoutPolicy, train
from verl_ext.runs.ledger_check import ledger_faults
from verl_ext.training.trainer_async import PPOTrainerAllocatedColocateAsync, PPOTrainerAllocatedSeparateAsync

MODES = {"colocate": PPOTrainerAllocatedColocateAsync, "separate": PPOTrainerAllocatedSeparateAsync}


@pytest.fixture
def run(made):
    """A trainer of a mode with engines that note what they are told."""

    def make(mode, steps, *overrides):
        kind = type("Trainer", (WithoutPolicy, MODES[mode]), {})
        trainer = made(f"trainer.total_training_steps={steps}", "trainer.save_freq=2", *overrides,
                       recipe=f"cpu/sara_{mode}_async", kind=kind, prompts=240)  # fmt: skip
        trainer.told = []

        def engines():
            def note(name):
                return lambda *given, **_: trainer.told.append((name, trainer.global_steps)) or {}

            names = ("update_weights", "resume_generation_replicas", "abort_replicas", "sleep_replicas")
            return SimpleNamespace(**{name: note(name) for name in names})

        trainer.checkpoint_manager = trainer.standalone_checkpoint_manager = engines()
        trainer.hybrid_rollout_config, trainer._enable_hybrid_replicas = SimpleNamespace(enable_switch=False), False
        trainer.current_mode = None
        return trainer

    return make


def ledger_of(trainer):
    path = f"{trainer.config.trainer.default_local_dir}/ledger.jsonl"
    return [json.loads(line) for line in open(path)]


@pytest.mark.parametrize("mode", MODES)
def test_a_run_trains_whole_groups_and_leaves_nothing(run, queue, mode):
    trainer = train(run(mode, 6))
    lines, most = ledger_of(trainer), trainer.settings.async_.max_lag
    assert ledger_faults(lines) == [] and len(lines) == 6
    assert any(line["in_flight"] for line in lines), "groups go on over the update"
    updates = [update["keys"] for update in trainer.actor_rollout_wg.updates]
    trained = [{key.split("_")[0] for key in keys if "_" in key} for keys in updates]
    groups = [uid for update in trained for uid in update if uid.startswith("s")]
    assert len(trained) == 6 and len(groups) == len(set(groups)), "a group is trained on once"
    for _, metrics in trainer.logged:
        assert metrics["allocation/optimizer_steps"] == 2 and metrics["allocation/async/lag_max"] <= most
    assert queue.tags["train"] == {} and queue.rows["train"] == {} and len(trainer.manager.stream) == 0


def test_colocated_engines_stop_for_the_update_and_go_on_with_the_new_weights(run):
    trainer = train(run("colocate", 3))
    order = ("abort_replicas", "sleep_replicas", "update_weights", "resume_generation_replicas")
    assert trainer.told == [(name, step) for step in (1, 2, 3) for name in order]


def test_engines_of_their_own_are_told_of_new_weights_alone(run):
    trainer = train(run("separate", 3))
    assert trainer.told == [("update_weights", step) for step in (1, 2, 3)]
    assert trainer.collector.allocation.generating == 3


def test_the_next_step_is_collected_before_the_weights_are_out(run):
    trainer, versions = run("separate", 4), {}
    admit = trainer.collector.allocation.begin_step

    def begin_step(step, policy_version=None):
        versions[step] = (policy_version, trainer.collector.allocation.generating)
        return admit(step, policy_version)

    trainer.collector.allocation.begin_step = begin_step
    train(trainer)
    assert sorted(versions) == [1, 2, 3, 4], "and none beyond the last"
    assert versions[1] == (0, 0) and all(v[0] == step - 1 for step, v in versions.items())
    assert all(generating in (step - 2, step - 1) for step, (_, generating) in versions.items() if step > 1)


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_asks_again_for_what_was_in_flight(run, queue, mode):
    first = train(run(mode, 2))
    flight = first.collector._state()["allocation"]["flight"]
    assert flight is not None and queue.tags["train"] == {}
    second = run(mode, 4)
    in_hand = {group.uid: group.missing() for group in second.collector.allocation.flight.groups}
    assert sorted(in_hand) == sorted(flight["uid"]) and any(in_hand.values())
    asked, submit = {}, second.manager.stream.submit

    def note(groups, *given):
        for group in groups:
            asked.setdefault(group.uid, list(range(group.first, group.first + group.n)))
        submit(groups, *given)

    second.manager.stream.submit = note
    train(second)
    assert all(asked[uid] == sessions for uid, sessions in in_hand.items() if sessions)
    assert ledger_faults(ledger_of(second)) == [] and len(ledger_of(second)) == 4
    assert queue.tags["train"] == {}
