"""What stopping, resuming and scoring rely upon in verl 0.9.1 and Ray."""

from __future__ import annotations

import inspect
import os

from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.experimental.reward_loop.reward_loop import RewardLoopManager, RewardLoopWorker
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path, get_checkpoint_tracker_filename
from verl.workers.rollout.llm_server import LLMServerClient

from verl_ext.runs import checkpoints as tracker


def test_verl_asks_whether_to_save_and_to_validate_after_the_step():
    """So that a step can still be made the last, saved and not validated, when it is over."""
    fit = inspect.getsource(PPOTrainer.fit)
    at = [fit.index(text) for text in (
        "is_last_step = self.global_steps >=", "self.step(", "trainer.save_freq", "trainer.test_freq",
        "self._compute_metrics(", "self.logger.log(data=metrics",
    )]  # fmt: skip
    assert at == sorted(at)
    assert "self.global_steps <= self.total_training_steps" in fit[: at[0]]


def test_verl_reads_the_tracker_and_starts_from_scratch_where_the_checkpoint_is_gone(tmp_path, capsys):
    assert os.path.basename(get_checkpoint_tracker_filename("")) == tracker.TRACKER
    (tmp_path / tracker.TRACKER).write_text("3")
    assert find_latest_ckpt_path(str(tmp_path)) is None
    (tmp_path / "global_step_3").mkdir()
    assert find_latest_ckpt_path(str(tmp_path)) == str(tmp_path / "global_step_3")


def test_verl_writes_the_tracker_last():
    save = inspect.getsource(PPOTrainer._save_checkpoint)
    assert save.index("actor_rollout_wg.save_checkpoint") < save.index("torch.save(") < save.index(tracker.TRACKER)
    assert 'open(local_latest_checkpointed_iteration, "w")' in save, "it is written in place no more: see tracker.mend"


def test_reward_workers_are_made_and_called_as_here():
    assert list(inspect.signature(RewardLoopWorker.__init__).parameters) == ["self", "config", "reward_router_address"]
    assert ".remote(self.config, self.reward_router_address)" in inspect.getsource(RewardLoopManager)
    score = inspect.getsource(AgentLoopWorker._compute_score)
    assert "random.choice(self.reward_loop_worker_handles)" in score
    assert "final_output.reward_score = result" in score and 'final_output.extra_fields["reward_extra_info"]' in score


def test_sessions_generate_through_the_client():
    parameters = list(inspect.signature(LLMServerClient.generate).parameters)
    assert parameters[:2] == ["self", "request_id"]


def test_rays_store_of_keys_and_values():
    from ray.experimental import internal_kv

    put, exists = internal_kv._internal_kv_put, internal_kv._internal_kv_exists
    assert {"key", "value", "overwrite", "namespace"} <= set(inspect.signature(put).parameters)
    assert {"key", "namespace"} <= set(inspect.signature(exists).parameters)


def test_vllm_makes_its_sockets_where_it_is_told(monkeypatch, tmp_path):
    from vllm import envs
    from vllm.utils.network_utils import get_open_zmq_ipc_path

    from verl_ext.launch.cleanup import _VLLM_SOCKETS

    monkeypatch.setenv(_VLLM_SOCKETS, str(tmp_path))
    assert envs.VLLM_RPC_BASE_PATH == str(tmp_path)
    assert get_open_zmq_ipc_path().startswith(f"ipc://{tmp_path}/")
