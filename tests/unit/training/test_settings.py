"""Contradictions are refused before Ray starts, by the name of the setting."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import verl_ext.main_ppo as main_ppo
from verl_ext.checks.allocation_settings import check_config
from verl_ext.checks.async_modes import async_problems
from verl_ext.checks.unread import check_unread
from verl_ext.training.training_settings import VERLS_OWN, rows_multiple
from verl_ext.typed_settings import SettingError

RECIPES = sorted(
    path.stem for path in (Path(main_ppo.__file__).parent / "configs/recipe/cpu").glob("*.yaml") if path.stem != "base"
)
OF_VERLS_MODES = ["grpo_colocate_async", "grpo_separate_async"]


def composed(*overrides):
    with initialize_config_module("verl_ext.configs", version_base=None):
        config = compose("main", overrides=list(overrides))
    OmegaConf.resolve(config)
    return config


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe not in OF_VERLS_MODES])
def test_every_recipe_composes_and_passes(recipe):
    settings, budget = check_config(composed(f"recipe=cpu/{recipe}"))
    assert budget.optimizer_steps == 2 and budget.rollouts >= 256
    assert settings.max_rounds == 8


@pytest.mark.parametrize("recipe", OF_VERLS_MODES)
def test_a_recipe_of_verls_own_mode_has_all_that_the_mode_needs(recipe):
    config = composed(f"recipe=cpu/{recipe}")
    assert config.trainer.v1.trainer_mode == recipe.removeprefix("grpo_") in VERLS_OWN
    assert async_problems(config) == [] and check_unread(config).warnings == ()
    slots = {"colocate_async": 1, "separate_async": 2}[config.trainer.v1.trainer_mode]
    assert config.ray_kwargs.ray_init.num_gpus == slots


REFUSED = [
    (["trainer.v1.trainer_mode=async"], "trainer.v1.trainer_mode='async': accepted is allocated.*colocate_async"),
    (["allocation.rounds=streaming", "allocation.async.carry=0.5"],
     "async.carry=0.5 with trainer.v1.trainer_mode=allocated,.* accepted is 0, or .*allocated_colocate_async"),
    (["recipe=cpu/sara_colocate_async", "allocation.async.carry=0"], "async.carry=0 .*accepted is a number above 0"),
    (["recipe=cpu/sara_colocate_async", "allocation.rounds=barrier"], "async.carry=0.5; accepted: 0 with .*barrier"),
    (["recipe=cpu/sara_colocate_async", "allocation/allocator=hora"], "0 with Hora"),
    (["recipe=cpu/sara_colocate_async", "algorithm.rollout_correction.rollout_is=null"],
     "max_lag=2 without a correction.*rollout_is=token"),
    (["recipe=cpu/sara_separate_async", "actor_rollout_ref.rollout.calculate_log_probs=False"],
     "max_lag=3 without a correction.*calculate_log_probs=True"),
    (["recipe=cpu/sara_separate_async", "actor_rollout_ref.hybrid_engine=True"], "hybrid_engine=True.*is False"),
    (["recipe=cpu/sara_colocate_async", "actor_rollout_ref.hybrid_engine=False"], "hybrid_engine=False.*is True"),
    (["trainer.use_v1=False"], "trainer.use_v1=False"),
    (["allocation.allocator.group_size=4"], "group_size=4 contradicts actor_rollout_ref.rollout.n=8"),
    (["allocation/downsampler=max_variance", "allocation.downsampler.keep=9"], "keep.*9"),
    (["allocation.allocator.probe=null", "allocation.allocator.tau_low=1.5"], "allocation.allocator.tau_low=1.5"),
    (["allocation.allocator.probe=null", "allocation.allocator.tau_low=0.9"], "tau_low"),
    (["allocation.allocator.name=sarra"], "allocator.name='sarra'.*sara"),
    (["+allocation.allocator.prob=3"], "allocation.allocator.prob.*probe"),
    (["allocation.allocator.probe=four"], "allocation.allocator.probe='four'"),
    (["+allocation.round=3"], "allocation.round=3; accepted: the settings .*max_rounds"),
    (["allocation.rounds=3"], "allocation.rounds=3; accepted: barrier \\| streaming"),
    (["recipe=cpu/pilot_commit", "allocation.rounds=streaming"], "rounds='streaming'.*barrier with PilotCommit.*wave"),
    (["allocation.rounds=streaming", "actor_rollout_ref.rollout.name=sglang"], "rollout.name=sglang.*vllm and hf only"),
    (["allocation.max_rounds=0"], "allocation.max_rounds=0"),
    (["allocation.stop.groups=0"], "allocation.stop.groups=0"),
    (["allocation.stop.rollouts=7"], "allocation.stop.rollouts=7.*group"),
    (["+allocation.stop.steps=7"], "allocation.stop.steps=7; accepted: the settings groups, rollouts, run_rollouts"),
    (["allocation.seed=-1"], "allocation.seed=-1"),
    (["allocation.deadline_s=0"], "allocation.deadline_s=0"),
    (["allocation.resume=maybe"], "allocation.resume='maybe'.*strict .* fresh"),
    (["reward.reward_model.enable=True"], "reward.reward_model.enable_resource_pool"),
    (["algorithm.filter_groups.enable=True"], "allocation/allocator=dynamic_sampling"),
    (["actor_rollout_ref.actor.ppo_mini_batch_size=24"], "ppo_mini_batch_size=24.*train_batch_size=32"),
    (["algorithm.adv_estimator=remax"], "algorithm.adv_estimator=remax"),
    (["transfer_queue.backend.SimpleStorage.total_storage_size=1000"], "total_storage_size=1000 is too small"),
    (
        ["allocation/downsampler=max_variance", "allocation.downsampler.keep=4",
         "allocation.downsampler.normalise_over=group", "algorithm.adv_estimator=rloo"],
        "normalise_over=group with algorithm.adv_estimator=rloo",
    ),
    (
        ["recipe=cpu/pilot_commit", "allocation.allocator.off_policy=importance"],
        "off_policy=importance.*rollout_correction",
    ),
]  # fmt: skip


@pytest.mark.bad_input
@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[over[-1] for over, _ in REFUSED])
def test_refused_by_name(overrides, message):
    given = overrides if overrides[0].startswith("recipe=") else ["recipe=cpu/sara", *overrides]
    with pytest.raises(SettingError, match=f"(?s){message}"):
        check_config(composed(*given))


def test_rows_are_padded_to_whole_micro_batches_only_where_their_size_is_fixed():
    by_tokens = composed("recipe=cpu/sara")
    assert rows_multiple(by_tokens, use_critic=False, use_reference=False) == 2
    fixed = composed(
        "recipe=cpu/sara",
        "actor_rollout_ref.actor.use_dynamic_bsz=False",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=12",
    )
    assert rows_multiple(fixed, use_critic=False, use_reference=False) == 48


def test_the_command_line_wins_over_the_recipe():
    config = composed("recipe=cpu/sara", "allocation/allocator=uniform", "allocation.stop.groups=5")
    assert config.allocation.allocator.name == "uniform" and check_config(config)[1].prompts == 5


def test_main_says_what_is_wrong_without_a_traceback(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["main_ppo", "recipe=cpu/sara", "allocation.max_rounds=0"])
    with pytest.raises(SystemExit, match="verl_ext: allocation.max_rounds=0"):
        main_ppo.main()
