"""The seams of verl that the training side stands on. A failure here says what changed in verl, before a run does."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path

import pytest

base = pytest.importorskip("verl.trainer.ppo.v1.trainer_base")
import transfer_queue as tq  # noqa: E402
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopManager, AgentLoopWorker  # noqa: E402
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop  # noqa: E402
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker  # noqa: E402
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo  # noqa: E402
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ  # noqa: E402
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer  # noqa: E402
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync  # noqa: E402
from verl.workers.engine_workers import TrainingWorker  # noqa: E402
from verl.workers.rollout.llm_server import LLMServerClient  # noqa: E402

VerlWorker = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__
TaskRunner = TaskRunnerV1.__ray_metadata__.modified_class.__ray_actor_class__
Trainer = base.PPOTrainer


def parameters(function) -> list[str]:
    # Ray adds a parameter of its own to the methods of an actor class.
    return [p for p in inspect.signature(inspect.unwrap(function)).parameters if p != "_ray_trace_ctx"]


def test_the_verl_installed_is_the_one_required():
    from importlib.metadata import version

    required = (Path(__file__).parents[2] / "REQUIRED_VERL.txt").read_text()
    assert f"verl=={version('verl')}" in required


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (Trainer.__init__, ["self", "config"]),
        (Trainer._build_replay_buffer, ["self"]),
        (Trainer._init_dataloader, ["self"]),
        (Trainer.fit, ["self", "agent_loop_manager"]),
        (Trainer.prepare_step, ["self"]),
        (Trainer._step_once, ["self", "metrics", "timing_raw", "sample_batch_size"]),
        (Trainer.step, ["self", "metrics", "timing_raw"]),
        (Trainer._compute_advantage, ["self", "batch", "metrics"]),
        (TaskRunner.run, ["self", "config"]),
        (TaskRunner.init_agent_loop_manager, ["self"]),
        (VerlWorker._run_prompt, ["self", "prompt", "sampling_params", "trajectory", "trace"]),
        (Trainer._compute_metrics, ["self", "batch", "metrics", "timing_raw", "global_steps", "epoch"]),
        (Trainer._log_rollout_data, ["self", "batch", "timing_raw", "rollout_data_dir"]),
        (Trainer._get_required_batch_multiple, ["self", "dp_size"]),
        (Trainer._balance_batch, ["self", "batch", "metrics", "logging_prefix", "keep_minibatch"]),
        (Trainer._update_actor, ["self", "batch", "metrics"]),
        (Trainer._update_critic, ["self", "batch", "metrics"]),
        (
            Trainer._val_metrics_update,
            ["self", "data_sources", "sample_uids", "reward_extra_infos_dict", "sample_turns", "expected_acc_counts"],
        ),
        (
            Trainer._dump_generations,
            ["self", "inputs", "outputs", "gts", "scores", "reward_extra_infos_dict", "dump_path"],
        ),
        (AgentLoopBase._cap_text_prompt_length, ["self", "prompt_ids"]),
        (Trainer._save_checkpoint, ["self"]),
        (Trainer._load_checkpoint, ["self"]),
        (Trainer.on_validate_begin, ["self"]),
        (Trainer.on_train_begin, ["self"]),
        (PPOTrainerSync.on_sample_end, ["self"]),
        (ReplayBuffer.sample, ["self", "global_steps", "partition_id", "batch_size"]),
        (AgentLoopWorker._run_agent_loop, ["self", "sampling_params", "trajectory", "agent_name", "trace", "kwargs"]),
        (AgentLoopWorker._compute_score, ["self", "outputs", "kwargs"]),
        (AgentLoopWorker._compute_multi_modal_inputs, ["self", "output", "input_ids"]),
        (AgentLoopManager._init_agent_loop_workers, ["self"]),
        (RewardLoopWorker.compute_score_batch, ["self", "data"]),
        (
            LLMServerClient.generate,
            [
                "self",
                "request_id",
                "prompt_ids",
                "sampling_params",
                "image_data",
                "video_data",
                "audio_data",
                "mm_processor_kwargs",
                "kwargs",
            ],
        ),
        (LLMServerClient._vllm_request_id, ["self", "request_id"]),
        (LLMServerClient._acquire_server, ["self", "request_id", "extra"]),
        (LLMServerClient._release_server, ["self", "server_id", "request_id"]),
        (TrainingWorker.train_mini_batch, ["self", "data"]),
        (run_ppo, ["config", "task_runner_class"]),
        (tq.kv_clear, ["keys", "partition_id"]),
        (tq.kv_list, ["partition_id"]),
        (tq.async_kv_batch_put, ["keys", "partition_id", "fields", "tags", "data_parser"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_signature(function, expected):
    assert parameters(function) == expected


MIRRORED = {
    # Ours repeat what these do, but for one thing each; a change upstream has to be looked at.
    Trainer._update_actor: "d7009bd8a69d40b9",
    Trainer._update_critic: "1b2879bec14681ba",
    VerlWorker._agent_loop_postprocess: "523edacbff73640d",
    AgentLoopWorker._run_agent_loop: "32c3d607c5d4c9fa",
    AgentLoopWorker._compute_score: "cf4b57719ad3c1b2",
    VerlWorker.generate_sequences: "4d7178988eae6a71",
    run_ppo: "a65eddb189e56ae1",
    Trainer._step_once: "efdd4abe161c6dee",
    Trainer.fit: "7d83a81c2e62979f",
}


@pytest.mark.parametrize("function", MIRRORED, ids=lambda f: f.__qualname__)
def test_what_is_mirrored_is_unchanged(function):
    source = inspect.getsource(inspect.unwrap(function))
    assert hashlib.sha256(source.encode()).hexdigest()[:16] == MIRRORED[function]


def test_the_places_that_ask_for_the_mode_are_known():
    """The trainer sets trainer_mode to "sync" after verl's constructor: every place that reads it is accounted for."""
    source = inspect.getsource(base)
    assert source.count("self.trainer_mode") == 10
    assert source.count('self.trainer_mode != "sync"') == 4


def test_update_batches_by_number_of_mini_batches():
    source = inspect.getsource(inspect.unwrap(TrainingWorker.train_mini_batch))
    assert 'tu.pop(data, key="mini_batch_size", default=None)' in source
    assert "batch_size_per_dp % num_mini_batch == 0" in source


def test_ray_actor_classes_can_be_subclassed():
    for actor in (AgentLoopWorkerTQ, TaskRunnerV1):
        assert inspect.isclass(actor.__ray_metadata__.modified_class.__ray_actor_class__)
    assert issubclass(AgentLoopManagerTQ, AgentLoopManager)
    names = SingleTurnAgentLoop.__init__.__code__.co_names
    assert names == ("super", "__init__", "rollout_config", "prompt_length", "response_length")


def test_the_single_turn_loop_keeps_no_state_of_a_rollout():
    """It is reused over rollouts: `run` must assign nothing to self."""
    source = inspect.getsource(inspect.unwrap(SingleTurnAgentLoop.run))
    assigned = [ln for ln in source.splitlines() if ln.strip().startswith("self.") and "=" in ln.split("(")[0]]
    assert "self." in source and not assigned


def test_the_single_turn_loop_uses_its_event_loop_as_an_executor_only():
    source = inspect.getsource(AgentLoopBase) + inspect.getsource(SingleTurnAgentLoop)
    calls = source.count("self.loop.run_in_executor(\n            None,\n            lambda:")
    assert source.count("self.loop.") == calls > 0


def test_file_logger_path_comes_from_the_environment(tmp_path, monkeypatch):
    from verl.utils.tracking import FileLogger

    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    logger = FileLogger("project", "experiment")
    logger.log({"x": 1.0}, step=3)
    logger.finish()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step":3,"data":{"x":1.0}}\n'


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_pool_offers_prompts_in_the_order_of_verls_own_loader(shuffle):
    """Two epochs of verl's StatefulDataLoader against PromptRows.order, on a length the batch size divides."""
    from omegaconf import OmegaConf
    from torchdata.stateful_dataloader import StatefulDataLoader
    from verl.trainer.ppo.utils import create_rl_sampler

    from verl_ext.testing.fake_run import FakePrompts
    from verl_ext.training.prompts import PromptRows

    config = OmegaConf.create({"shuffle": shuffle, "seed": 7, "prompt_key": "prompt"})
    dataset = FakePrompts(64)
    loader = StatefulDataLoader(
        dataset=dataset,
        batch_size=16,
        drop_last=True,
        num_workers=0,
        collate_fn=lambda rows: [row["index"] for row in rows],
        sampler=create_rl_sampler(config, dataset),
    )
    verls = [[row for batch in loader for row in batch] for _ in range(2)]
    rows = PromptRows(dataset, config)
    assert [rows.order(epoch).tolist() for epoch in range(2)] == verls
    assert (verls[0] != verls[1]) == shuffle


@pytest.mark.parametrize("seed", [None, 7])
def test_the_order_of_prompts_is_the_data_seeds_alone(seed):
    """Also where there is none, and whatever else the process draws: a resumed run finds the same order."""
    import torch
    from omegaconf import OmegaConf

    from verl_ext.testing.fake_run import FakePrompts
    from verl_ext.training.prompts import PromptRows

    def orders(config):
        torch.manual_seed(len(seen))
        rows = PromptRows(FakePrompts(64), OmegaConf.create(config))
        seen.append([rows.order(epoch).tolist() for epoch in range(2)])
        return seen[-1]

    seen = []
    assert orders({"shuffle": True, "seed": seed}) == orders({"shuffle": True, "seed": seed})
    assert orders({"shuffle": True, "seed": 8}) != seen[0]


def test_duplicate_prompts_are_kept_once():
    import datasets
    from omegaconf import OmegaConf

    from verl_ext.testing.fake_run import FakePrompts
    from verl_ext.training.prompts import PromptRows

    dataset = FakePrompts(8)
    dataset.dataframe = datasets.concatenate_datasets([dataset.dataframe, dataset.dataframe.select([3, 5])])
    rows = PromptRows(dataset, OmegaConf.create({"shuffle": True, "seed": 1}))
    assert rows.duplicates == 2 and len(rows.keys) == 8
    assert sorted(rows.order(0).tolist()) == list(range(8))


class RowsAlone:
    """A data set with a length and rows: verl asks for no more."""

    def __init__(self, prompts):
        self.prompts = prompts

    def __len__(self):
        return len(self.prompts)

    def __getitem__(self, row):
        return self.prompts[row]


def test_a_data_set_without_a_table_has_the_prompts_of_one_with_it():
    from omegaconf import OmegaConf

    from verl_ext.testing.fake_run import FakePrompts
    from verl_ext.training.prompts import PromptRows

    config, table = OmegaConf.create({"shuffle": True, "seed": 3}), FakePrompts(12)
    rows = PromptRows(RowsAlone([table[i] for i in range(12)] + [table[5]]), config)
    assert rows.keys == PromptRows(table, config).keys and rows.duplicates == 1
    assert sorted(rows.order(0).tolist()) == list(range(12)) and rows.fetch(7)["index"] == 7


@pytest.mark.bad_input
def test_a_truth_without_a_json_form_is_named_by_its_row():
    from decimal import Decimal

    from omegaconf import OmegaConf

    from verl_ext.testing.fake_run import FakePrompts
    from verl_ext.training.prompts import PromptRows

    prompts = [FakePrompts(3)[i] for i in range(3)]
    prompts[2]["reward_model"] = {"ground_truth": Decimal("1.5")}
    with pytest.raises(TypeError, match="row 2 of data.train_files: .*Decimal.*accepted in prompt and ground_truth"):
        PromptRows(RowsAlone(prompts), OmegaConf.create({"shuffle": False}))


def test_validation_looks_at_transfer_queue_by_the_method_that_is_overridden():
    """A dead worker in validation is noticed each time that verl looks at what has come back."""
    buffer = base.ReplayBuffer
    assert parameters(buffer._sync_metadata_from_transfer_queue) == ["self"]
    assert "self._sync_metadata_from_transfer_queue()" in inspect.getsource(buffer)
    assert "kv_list" in inspect.getsource(buffer._sync_metadata_from_transfer_queue)


def test_a_rollout_backend_is_found_by_its_name():
    """`verl_ext.rollout.hf` enters itself into both of verl's tables, which have no function for it."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout, get_rollout_class
    from verl.workers.rollout.replica import RolloutReplica, get_rollout_replica_class

    from verl_ext.rollout.hf import HFReplica, HFServerAdapter

    assert BaseRollout.__abstractmethods__ == {"resume", "update_weights", "release"}
    assert _ROLLOUT_REGISTRY["hf", "async"] == "verl_ext.rollout.hf.HFServerAdapter"
    assert get_rollout_class("hf", "async") is HFServerAdapter
    assert get_rollout_replica_class("hf") is HFReplica and issubclass(HFReplica, RolloutReplica)
