"""Wrong configurations of every kind: setting, value, and the words that must be in the error before Ray starts."""

import re

import pytest
from omegaconf import OmegaConf

import verl_ext.main_ppo as main_ppo
from tests.unit.checks.check_configs import NOWHERE, config_with, found, problems_of
from verl_ext.checks import Problems, State
from verl_ext.checks.data import Rows
from verl_ext.checks.findings import Checks
from verl_ext.checks.local import check_settings, check_with_verl
from verl_ext.tiny.policy_store import tiny_paths

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"

BY_ITSELF = [
    # numbers of verl's
    ("data.train_batch_size", 0, "at least 1"),
    ("data.train_batch_size", "abc", "whole number"),
    ("data.train_batch_size", 32.0, "whole number"),
    ("data.train_batch_size", True, "whole number"),
    ("data.max_prompt_length", -1, "at least 1"),
    ("data.max_response_length", None, "at least 1"),
    (f"{ROLLOUT}.n", 0, "at least 1"),
    (f"{ROLLOUT}.n", "eight", "whole number"),
    (f"{ROLLOUT}.temperature", 0, "above 0"),
    (f"{ROLLOUT}.temperature", float("nan"), "above 0"),
    (f"{ROLLOUT}.top_p", 1.5, r"\(0, 1\]"),
    (f"{ROLLOUT}.top_k", -2, "-1 for all"),
    (f"{ROLLOUT}.gpu_memory_utilization", 50, r"\(0, 1\]"),
    (f"{ROLLOUT}.tensor_model_parallel_size", 2, "does not divide the 1 ranks"),
    (f"{ROLLOUT}.data_parallel_size", 2, "does not divide the 1 ranks"),
    (f"{ROLLOUT}.data_parallel_size", 0, "at least 1"),
    (f"{ROLLOUT}.pipeline_model_parallel_size", 2, "does not divide the 1 ranks"),
    (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", 2, "does not divide the 1 ranks"),
    (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", 0, "1 or more"),
    (f"{ACTOR}.ulysses_sequence_parallel_size", 2, "does not divide the 1 ranks"),
    (f"{ROLLOUT}.agent.num_workers", 0, "at least 1"),
    (f"{ROLLOUT}.val_kwargs.n", 0, "at least 1"),
    (f"{ROLLOUT}.max_model_len", 18, "at least 19"),
    (f"{ACTOR}.ppo_mini_batch_size", 24, "data.train_batch_size=32"),
    (f"{ACTOR}.ppo_mini_batch_size", 0, "at least 1"),
    (f"{ACTOR}.ppo_epochs", 0.5, "whole number"),
    (f"{ACTOR}.optim.lr", "fast", "number"),
    (f"{ACTOR}.clip_ratio", -0.2, "at least 0"),
    (f"{ROLLOUT}.max_num_seqs", 0, "at least 1"),
    (f"{ROLLOUT}.val_kwargs.temperature", -1, "at least 0"),
    (f"{ROLLOUT}.val_kwargs.top_p", 0, r"\(0, 1\]"),
    ("algorithm.gamma", 1.5, r"\[0, 1\]"),
    ("algorithm.lam", -0.1, r"\[0, 1\]"),
    ("data.val_batch_size", "abc", "null, or a whole number"),
    ("data.val_batch_size", 0, "null, or a whole number"),
    ("data.train_max_samples", "all", "-1 for all"),
    ("data.val_max_samples", 1.5, "-1 for all"),
    ("data.dataloader_num_workers", -1, "at least 0"),
    ("reward.num_workers", 0, "at least 1"),
    ("trainer.n_gpus_per_node", "all", "whole number"),
    ("trainer.nnodes", 0, "at least 1"),
    ("trainer.total_epochs", 0, "at least 1"),
    ("trainer.total_training_steps", 0, "null, or"),
    ("trainer.save_freq", 2.5, "-1 for never"),
    ("trainer.test_freq", -5, "-1 for never"),
    ("transfer_queue.backend.SimpleStorage.num_data_storage_units", 0, "at least 1"),
    ("transfer_queue.backend.SimpleStorage.total_storage_size", 1000, "too small"),
    ("transfer_queue.backend.SimpleStorage.total_storage_size", "abc", "null, or a whole number"),
    # sections that are single values
    ("reward.reward_model", None, "reward.reward_model=None: settings under it"),
    ("trainer.v1", None, "trainer.v1=None: settings under it"),
    ("trainer.v1.sampler", "foo", "trainer.v1.sampler='foo': settings under it"),
    ("algorithm.filter_groups", "foo", "algorithm.filter_groups='foo': null or settings under it"),
    ("algorithm.filter_groups", None, None),
    ("transfer_queue.backend", "foo", "transfer_queue.backend='foo': settings under it"),
    # allocation
    ("allocation.selector", None, "a group of settings"),
    ("allocation.allocator", {"group_size": 8}, "a rule's name and settings"),
    ("allocation.downsampler", "none", "a group of settings"),
    ("allocation.selector.name", "mops", "mopps"),
    ("allocation.allocator.name", "sarra", "sara"),
    ("allocation.allocator.group_size", 1, "2 or more"),
    ("allocation.allocator.group_size", 16, f"{ROLLOUT}.n=8"),
    ("allocation.allocator.probe", 9, "probe"),
    ("allocation.allocator.probe", "four", "an integer"),
    ("allocation.allocator.prob", 4, "probe"),
    ("allocation.stop", 3, "groups, rollouts"),
    ("allocation.stop.groups", 0, "1 or more"),
    ("allocation.stop.rollouts", 7, "one group"),
    ("allocation.stop.run_rollouts", -1, "1 or more"),
    ("allocation.stop.step", 7, "run_rollouts"),
    ("allocation.outcome.threshold", "half", "a number or null"),
    ("allocation.outcome.key", "", "field of the reward"),
    ("allocation.max_rounds", 0, "1 or more"),
    ("allocation.max_rounds", 1, "2 or more with Sara"),
    ("allocation.max_rounds", "many", "an integer"),
    ("allocation.seed", -1, "0 or more"),
    ("allocation.seed", None, "an integer"),
    ("allocation.deadline_s", "soon", "a number"),
    ("allocation.deadline_s", 0, "seconds above 0"),
    ("allocation.resume", "maybe", "strict | fresh"),
    ("allocation.record", 7, "a string or null"),
    ("allocation.record", __file__, "is a file"),
    ("allocation.rounds", 3, "barrier | streaming"),
    ("allocation.round", 3, "max_rounds"),
    ("allocation.reward_deadline_s", 0, "seconds above 0"),
    ("allocation", None, "verl_ext.main_ppo"),
    # what verl can do, but not together with rounds
    ("trainer.use_v1", False, "V1 trainer"),
    ("trainer.v1.trainer_mode", "async", "accepted is allocated"),
    ("reward.reward_model.enable", True, "enable_resource_pool"),
    ("algorithm.filter_groups", {"enable": True}, "dynamic_sampling"),
    ("algorithm.adv_estimator", "remax", "greedy rollout"),
    ("distillation.enabled", True, "not supported"),
    ("trainer.v1.sampler.custom_sampler", {"path": "mine.py"}, "its own sampler"),
    ("trainer.v1.sampler.sync_refill_failed_groups", True, "accepted is False"),
    ("skip.rollout_tq.enable", True, "accepted is False"),
    ("data.gen_batch_size", 1, "accepted is null"),
    ("data.gen_batch_size", 32, None),  # the batch's own size: nothing else than null
    (f"{ROLLOUT}.router_config_path", "router.yaml", "before it has tokens to route by"),
    (f"{ROLLOUT}.full_determinism", True, "one and the same; accepted is False"),
    ("actor_rollout_ref.hybrid_engine", False, "accepted is True"),
    ("trainer.default_hdfs_dir", "hdfs://x/y", "neither the state of the rules"),
    (f"{ACTOR}.shuffle", True, "padding alone"),
    ("critic.shuffle", True, "padding alone"),
    # files and folders
    ("data.train_files", "/no/such/train.parquet", "does not exist"),
    ("data.train_files", None, "names no file"),
    ("data.train_files", "/tmp", "is a folder"),
    ("data.train_files", __file__, "neither .parquet nor .json"),
    ("data.val_files", ["/no/such/val.parquet"], "does not exist"),
    ("actor_rollout_ref.model.path", "/no/such/model", "no such folder"),
    ("actor_rollout_ref.model.path", __file__, "is a file"),
    ("actor_rollout_ref.model.path", "", "a folder or a hub's name"),
    ("actor_rollout_ref.model.tokenizer_path", "./nowhere", "no such folder"),
    ("trainer.default_local_dir", __file__, "is a file"),
    ("trainer.default_local_dir", None, "a folder's path"),
    ("trainer.default_local_dir", "~nosuchuser/x", "default_local_dir=~nosuchuser/x: ~nosuchuser is no user's home"),
    ("trainer.default_local_dir", "x" * 300, "default_local_dir=x+: cannot be a folder: File name too long"),
    ("actor_rollout_ref.model.path", "~nosuchuser/x", "no such folder"),
    ("actor_rollout_ref.model.path", "/" + "x" * 300, "no such folder"),
    ("trainer.device", "cpu", None),  # nothing wrong: no problem of any kind
]  # fmt: skip

BY_VERL = [
    ("algorithm.adv_estimator", "grop", "grpo"),
    (f"{ACTOR}.policy_loss.loss_mode", "vanila", "vanilla"),
    (f"{ROLLOUT}.name", "llvm", "vllm"),
    ("trainer.logger", ["console", "wandbb"], "wandb"),
    ("trainer.resume_mode", "always", "resume_path"),
    ("data.truncation", "cut", "error"),
    (f"{ACTOR}.loss_agg_mode", "mean", "loss_agg_mode: mean"),
    (f"{ROLLOUT}.mode", "sync", "rollout.mode=async"),
    (f"{ROLLOUT}.pipeline_model_parallel_size", 2, "pipeline_model_parallel_size"),
    ("actor_rollout_ref.model.external_lib", "no_such_module_of_mine", "no_such_module_of_mine"),
    ("reward.custom_reward_function.path", "/no/such/reward.py", "not found"),
    ("reward.custom_reward_function.path", "pkg://no_such_package", "no_such_package"),
    ("reward.custom_reward_function.name", "compute_scores", "compute_scores"),
    ("reward.reward_manager.name", "naiv", "naive"),
]


@pytest.fixture(autouse=True)
def small_and_there(tmp_path, monkeypatch):
    """The tiny task's folders need not be made for these tests."""
    monkeypatch.setenv("VERL_EXT_CACHE", NOWHERE)
    monkeypatch.chdir(tmp_path)


def by_setting(rows):
    return pytest.mark.parametrize(("setting", "value", "words"), rows, ids=[f"{row[0]}={row[1]}" for row in rows])


@pytest.mark.bad_input
@by_setting(BY_ITSELF)
def test_refused_without_verl(setting, value, words):
    said = problems_of(config_with(**{setting: value}), with_verl=False)
    if words is None:
        assert said == []
        return
    last = setting.rpartition(".")[2]
    assert [text for text in said if re.search(words, text) and last in text], said


@pytest.mark.bad_input
@by_setting(BY_VERL)
def test_refused_by_what_verl_knows(setting, value, words):
    said = problems_of(config_with(**{setting: value}))
    last = setting.rpartition(".")[2]
    assert len(said) >= 1 and [text for text in said if words in text and last in text], said


@pytest.mark.bad_input
@pytest.mark.parametrize(("recipe", "least"), [("sara", 2), ("pilot_commit", 2), ("grpo", 1), ("dapo", 1)])
def test_fewer_rounds_than_the_rule_needs_are_refused_before_ray(recipe, least):
    def problems(rounds):
        return problems_of(config_with(f"recipe=cpu/{recipe}", **{"allocation.max_rounds": rounds}), with_verl=False)

    assert problems(least) == []
    if least > 1:
        assert "max_rounds=1; accepted: 2 or more" in problems(1)[0]


def test_sara_that_stops_with_its_probe_needs_one_round():
    values = {"allocation.max_rounds": 1, "allocation.allocator.commit": "stop"}
    assert problems_of(config_with(**values), with_verl=False) == []


@pytest.mark.bad_input
def test_streaming_needs_requests_that_can_be_aborted():
    values = {"allocation.rounds": "streaming"}
    assert problems_of(config_with(**values), with_verl=False) == []
    split = {f"{ROLLOUT}.disaggregation.enabled": True}
    assert problems_of(config_with(**split), with_verl=False) == []
    (problem,) = problems_of(config_with(**values, **split), with_verl=False)
    assert "disaggregation.enabled=True" in problem and "allocation.rounds=barrier" in problem
    problem, engine = problems_of(config_with(**values, **{f"{ROLLOUT}.name": "sglang"}), with_verl=False)
    assert engine.startswith("engine: ") and "sglang is not installed here" in engine
    assert "rollout.name=sglang: single requests can be aborted in vllm and hf only" in problem


@pytest.mark.bad_input
def test_recipes_for_fsdp_refuse_another_engine_of_training():
    (problem,) = problems_of(config_with("recipe=dapo_math_17k/grpo", "model_engine=megatron"), with_verl=False)[:1]
    assert "model_engine=megatron with FSDP's settings" in problem and "accepted is model_engine=dp" in problem


def test_an_engine_that_is_not_told_of_deadlines_is_a_warning():
    def warnings(engine):
        checks = Checks()
        check_settings(config_with(**{f"{ROLLOUT}.name": engine}), checks)
        return [text for text in found(checks, State.WARNING) if "deadline_s" in text]

    assert warnings("vllm") == []
    (said,) = warnings("sglang")
    assert "rollout.name=sglang" in said and "goes on generating" in said


def test_a_replica_of_the_engine_is_all_of_its_ranks():
    def problems(tensor, data):
        values = {f"{ROLLOUT}.tensor_model_parallel_size": tensor, f"{ROLLOUT}.data_parallel_size": data,
                  "trainer.n_gpus_per_node": 4}  # fmt: skip
        return problems_of(config_with(**values), with_verl=False)

    assert problems(2, 2) == problems(1, 4) == problems(4, 1) == []
    (problem,) = problems(2, 4)
    assert f"{ROLLOUT}.tensor_model_parallel_size=2 x {ROLLOUT}.data_parallel_size=4 does not divide the 4" in problem


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        ({}, 8),
        ({"fsdp_config.ulysses_sequence_parallel_size": 2}, 4),
        ({"ulysses_sequence_parallel_size": 4}, 2),
        ({"strategy": "megatron", "megatron": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
                                               "context_parallel_size": 1}}, 2),
    ],
)  # fmt: skip
def test_ranks_that_share_a_sequence_or_a_model_count_once(values, ranks):
    checks = Checks()
    config = config_with(**{"trainer.n_gpus_per_node": 8}, **{f"{ACTOR}.{name}": v for name, v in values.items()})
    check_settings(config, checks)
    (said,) = [finding.text for finding in checks.findings if finding.check == "settings"]
    assert f"optimizer steps on {ranks} ranks" in said


def test_all_independent_problems_are_said():
    values = {
        "allocation.seed": -1, "allocation.resume": "maybe", "allocation.allocator.name": "sarra",
        "algorithm.adv_estimator": "remax", "data.train_files": "/no/train.parquet",
        "data.val_files": "/no/val.parquet", "actor_rollout_ref.model.path": "/no/model", "trainer.nnodes": 0,
    }  # fmt: skip
    said = "\n".join(problems_of(config_with(**values), with_verl=False))
    assert all(str(value) in said for value in values.values()), said


@pytest.mark.bad_input
def test_a_reference_that_cannot_be_resolved_is_the_only_problem_said():
    (problem,) = problems_of(config_with(resolved=False, **{"data.train_files": "${no.such.key}"}))
    assert "no" in problem and "configuration" in problem
    (problem,) = problems_of(config_with(resolved=False, **{"tiny.mix": "mixed"}))
    assert "mixed" in problem and "balanced" in problem


def test_verls_own_trainer_is_checked_without_allocation():
    values = {"trainer.v1.trainer_mode": "sync", "allocation.max_rounds": 0, "trainer.nnodes": 0}
    (problem,) = problems_of(config_with(**values), with_verl=False)
    assert "trainer.nnodes=0" in problem


SEPARATE_ASYNC = "trainer.v1.separate_async"


@pytest.mark.bad_input
@pytest.mark.parametrize("mode, setting, value, accepted", [
    ("colocate_async", "actor_rollout_ref.hybrid_engine", False, "accepted is True"),
    ("colocate_async", "trainer.v1.colocate_async.num_warmup_batches", -1, "at least 0"),
    ("colocate_async", "trainer.v1.colocate_async.num_warmup_batches", 3, "1024 for each of 1 engines, and more"),
    ("separate_async", f"{SEPARATE_ASYNC}.num_warmup_batches", 2.9, "999 for each of 1 engines"),
    ("separate_async", f"{SEPARATE_ASYNC}.num_warmup_batches", "many", "at least 0"),
    ("separate_async", f"{SEPARATE_ASYNC}.parameter_sync_step", 4, "number of mini-batches"),
    ("separate_async", f"{SEPARATE_ASYNC}.parameter_sync_step", 0, "number of mini-batches"),
    ("separate_async", f"{ROLLOUT}.nnodes", 0, "nodes of their own"),
    ("separate_async", f"{ROLLOUT}.n_gpus_per_node", 0, "nodes of their own"),
    ("separate_async", f"{ROLLOUT}.checkpoint_engine.backend", "naive", "accepted is gloo"),
    ("separate_async", f"{ROLLOUT}.checkpoint_engine.backend", "nccl", "accepted is gloo"),
    ("separate_async", "data.train_batch_size", 0, "at least 1"),
])  # fmt: skip
def test_what_verls_asynchronous_modes_cannot_run_with_is_named(mode, setting, value, accepted):
    recipe = f"recipe=cpu/grpo_{mode}"
    assert problems_of(config_with(recipe), with_verl=False) == []
    (problem,) = problems_of(config_with(recipe, **{setting: value}), with_verl=False)
    assert setting in problem and str(value) in problem and accepted in problem


@pytest.mark.parametrize("more", [
    {"actor_rollout_ref.rollout.max_num_seqs": 1024}, {"trainer.n_gpus_per_node": 2}, {"data.train_batch_size": 16}],
    ids=["room in the server", "another engine", "fewer rollouts"])  # fmt: skip
def test_as_many_in_flight_as_fit_are_accepted(more):
    warmup = {"trainer.v1.colocate_async.num_warmup_batches": 3}
    assert problems_of(config_with("recipe=cpu/grpo_colocate_async", **warmup, **more), with_verl=False) == []


def test_problems_are_raised_together():
    checks = Checks()
    check_settings(config_with(**{"allocation.seed": -1, "allocation.deadline_s": -1}), checks)
    with pytest.raises(Problems, match=r"(?s)seed=-1.*deadline_s=-1") as error:
        checks.stop_if_short()
    assert len(error.value.problems) == 2


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("allocation.max_round=3", "max_round"),
        ("allocation/allocator=sarra", "allocation/allocator/sarra"),
        ("recipe=cpu/nothing", "recipe/cpu/nothing"),
        ("hardware=tpu", "hardware/tpu"),
    ],
)
def test_what_hydra_refuses_is_named(override, named):
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException

    recipe = [] if override.startswith("recipe") else ["recipe=cpu/sara"]
    with initialize_config_module("verl_ext.configs", version_base=None):
        with pytest.raises(HydraException, match=named):
            compose("main", overrides=[*recipe, override])


@pytest.mark.bad_input
@pytest.mark.parametrize("setting", ["data.val_batch_size", "transfer_queue.backend.SimpleStorage.total_storage_size"])
def test_what_numbers_are_needed_for_is_skipped_where_they_are_wrong(setting):
    checks = Checks()
    check_with_verl(config_with(**{setting: "abc"}), checks, None, {"data.val_files": Rows("data.val_files", total=9)})
    assert [text for text in found(checks, State.SKIPPED) if "storage" in text]
    assert not [text for text in found(checks) if "TypeError" in text and text.startswith("data")]


@pytest.mark.bad_input
@pytest.mark.parametrize("value", [None, "all"])
def test_its_own_settings_have_to_be_some(value):
    import verl_ext.check

    with pytest.raises(Problems, match="check=.*timeout_s and cluster under it"):
        verl_ext.check.run(config_with(check=value), Checks())


@pytest.mark.bad_input
def test_the_cache_of_the_tiny_task_has_to_be_one_that_can_be_written(monkeypatch):
    monkeypatch.setenv("VERL_EXT_CACHE", "/dev/null/x")
    made = tiny_paths("balanced")
    paths = {"actor_rollout_ref.model.path": str(made.model), "data.train_files": str(made.train),
             "data.val_files": str(made.val)}  # fmt: skip
    said = problems_of(config_with(**paths), with_verl=False)
    assert len(said) == 2 and all("VERL_EXT_CACHE=/dev/null/x: /dev/null is a file" in text for text in said)
    with pytest.raises(Problems, match="VERL_EXT_CACHE=/dev/null/x: the tiny task cannot be made there"):
        main_ppo.run(config_with(**paths))


@pytest.mark.parametrize("value", ["check.cluster=maybe", "check.timeout_s=0"])
def test_its_own_settings_are_checked(value, tmp_path, monkeypatch):
    import verl_ext.check

    name, _, given = value.partition("=")
    config = config_with(**{name: OmegaConf.create({"x": given}).x if given == "maybe" else 0})
    with pytest.raises(Problems, match=re.escape(name)):
        verl_ext.check.run(config, Checks())
