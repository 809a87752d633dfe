"""What the asynchronous trainer modes stand on in verl 0.9.1, and the faults in it that are mended here."""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

pytest.importorskip("verl.trainer.ppo.v1.trainer_base")

from verl.checkpoint_engine import base as checkpoint_engine  # noqa: E402
from verl.trainer.ppo.v1 import trainer_base, trainer_colocate_async, trainer_separate_async  # noqa: E402
from verl.utils import fsdp_utils  # noqa: E402
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient  # noqa: E402
from verl.workers.rollout.replica import CONTROL_METHOD_CONCURRENCY, RolloutReplica  # noqa: E402

from tests.contract.test_platform_contract import on_cpu, run_python  # noqa: E402
from verl_ext.checks import async_modes  # noqa: E402
from verl_ext.cpu.patches import saved_weights_of_their_own  # noqa: E402
from verl_ext.training.task_runner import log_with_flush  # noqa: E402
from verl_ext.training.training_settings import MODES, VERLS_OWN  # noqa: E402

SEPARATE = trainer_separate_async.PPOTrainerSeparateAsync
COLOCATE = trainer_colocate_async.PPOTrainerColocateAsync


# --- faults that are mended -----------------------------------------------------------------------


def test_verl_still_passes_flush_to_a_logger_and_that_still_fails(monkeypatch, caplog):
    assert "flush=True" in inspect.getsource(SEPARATE._setup)
    logger = logging.getLogger(trainer_separate_async.__name__)
    monkeypatch.setattr(trainer_separate_async, "logger", logger)
    with caplog.at_level(logging.INFO, logger.name), pytest.raises(TypeError, match="flush"):
        trainer_separate_async.logger.info("said", flush=True)
    log_with_flush()
    mended = trainer_separate_async.logger
    log_with_flush()
    assert trainer_separate_async.logger is mended
    with caplog.at_level(logging.INFO, logger.name):
        mended.info("said %s", "so", flush=True)
    assert [record.getMessage() for record in caplog.records] == ["said so"]


@pytest.fixture
def sharded(tmp_path):
    """A model with a sharded weight and a plain one, as FSDP 2 leaves them."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model = torch.nn.Linear(4, 3)
        model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
        yield model
    finally:
        torch.distributed.destroy_process_group()


def old_policy_after_a_step(model) -> tuple[float, float]:
    """Most that weights set aside, and weights put back from them, differ from those at the time of setting aside."""
    from verl.experimental.separation.engine_workers import DetachActorWorker

    def values():
        return [model.weight.to_local().detach().clone(), model.bias.detach().clone()]

    # As in a worker: verl takes the functions from their module when it first sets weights aside.
    worker = SimpleNamespace(config=SimpleNamespace(actor=SimpleNamespace(strategy="fsdp2")), _strategy_handlers=None)
    save, restore = DetachActorWorker._get_strategy_handlers(worker)
    before, saved = values(), save(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    kept = [saved[0][name][0] for name in ("weight", "bias")]
    aside = max(float((new - old).abs().max()) for new, old in zip(kept, before, strict=True))
    restore(model, *saved)
    return aside, max(float((new - old).abs().max()) for new, old in zip(values(), before, strict=True))


def test_verl_still_keeps_the_live_weights_on_a_cpu_and_the_copy_is_one(monkeypatch, sharded):
    monkeypatch.setattr(fsdp_utils, "fsdp2_sharded_save_to_cpu", fsdp_utils.fsdp2_sharded_save_to_cpu)
    assert not hasattr(fsdp_utils.fsdp2_sharded_save_to_cpu, "_verl_ext_patched")
    assert old_policy_after_a_step(sharded) == (1.0, 1.0), "verl has mended it: the patch can go"
    for _ in range(2):
        saved_weights_of_their_own()
        assert old_policy_after_a_step(sharded) == (0.0, 0.0)


def test_both_are_in_place_in_a_process_of_a_run_on_the_cpu():
    out = run_python(
        """
        import verl
        from verl.checkpoint_engine import CheckpointEngineRegistry
        from verl.utils import fsdp_utils
        print(CheckpointEngineRegistry.get("gloo").__module__,
              hasattr(fsdp_utils.fsdp2_sharded_save_to_cpu, "_verl_ext_patched"))
        """,
        **on_cpu(),
    )
    assert out.split()[-2:] == ["verl_ext.cpu.gloo_engine", "True"]


# --- what is relied upon --------------------------------------------------------------------------


def test_the_modes_are_verls():
    for mode in VERLS_OWN:
        assert trainer_base.get_trainer_cls(mode).__module__.startswith("verl.")
    assert trainer_base.get_trainer_cls("separate_async") is SEPARATE
    assert trainer_base.get_trainer_cls("colocate_async") is COLOCATE


def test_a_checkpoint_engine_is_made_and_called_as_ours_expects():
    from verl.workers import engine_workers

    methods = {"prepare", "build_topology", "init_process_group", "finalize", "send_weights", "receive_weights"}
    assert checkpoint_engine.CheckpointEngine.__abstractmethods__ == methods
    made = inspect.getsource(engine_workers)
    assert "backend, is_master=(torch.distributed.get_rank() == 0), bucket_size=bucket_size, **engine_kwargs" in made
    assert "await self.checkpoint_engine.send_weights(per_tensor_param, global_steps=global_steps)" in made
    assert "backend, bucket_size=bucket_size, **engine_kwargs" in inspect.getsource(
        checkpoint_engine.CheckpointEngineWorker
    )
    order = ["prepare", "build_topology", "init_process_group"]
    built = inspect.getsource(checkpoint_engine.CheckpointEngineManager.build_process_group)
    assert sorted(order, key=built.index) == order
    synced = inspect.getsource(checkpoint_engine.CheckpointEngineManager.update_weights)
    order = ["abort_replicas", "build_process_group", "update_weights(global_steps", '"finalize"', "resume_generation"]
    positions = [synced.index(step, synced.index("# 1.")) for step in order]
    assert positions == sorted(positions)


def test_a_server_has_as_many_places_as_the_check_counts():
    assert CONTROL_METHOD_CONCURRENCY == async_modes.CONTROL_CALLS
    for sequences in (1, 983, 984, 985, 4096):
        replica = SimpleNamespace(config=SimpleNamespace(max_num_seqs=sequences))
        expected = max(async_modes.LEAST_CALLS, sequences + async_modes.CONTROL_CALLS)
        assert RolloutReplica.max_concurrency.fget(replica) == expected


def test_an_aborted_request_is_sent_again_through_the_class_beneath():
    asked = inspect.getsource(FullyAsyncLLMServerClient.generate)
    assert "await super().generate(" in asked and 'output.stop_reason not in ("aborted", "abort")' in asked
    assert "prompt_ids=prompt_ids + final_output.token_ids" in asked
    assert "await super()._acquire_server(" in inspect.getsource(FullyAsyncLLMServerClient._acquire_server)


def test_where_the_modes_pause_and_go_on():
    ends = inspect.getsource(COLOCATE.on_sample_end)
    assert ends.index("abort_replicas()") < ends.index("sleep_replicas()")
    goes_on = inspect.getsource(COLOCATE.on_step_end)
    assert goes_on.index("update_weights(self.global_steps)") < goes_on.index("resume_generation_replicas()")
    assert "standalone_checkpoint_manager.update_weights(self.global_steps)" in inspect.getsource(SEPARATE.on_step_end)
    assert "standalone_server_manager.get_client(client_cls=FullyAsyncLLMServerClient)" in inspect.getsource(
        SEPARATE.get_llm_client
    )
    saved = inspect.getsource(SEPARATE._compute_old_log_prob)
    assert "save_model_to_cpu(0)" in saved and "restore_model_from_cpu(0)" in saved


def test_the_hooks_that_our_modes_choose_between_are_all_that_verls_have():
    """A class of ours has two of verl's above it, and names the one whose hook it takes."""

    def own(trainer):
        return {name for name, value in vars(trainer).items() if callable(value) and not name.startswith("__")}

    assert own(trainer_base.get_trainer_cls("sync")) == {"on_init_end", "on_sample_end", "on_step_end"}
    hooks = {"get_llm_client", "on_init_end", "on_sample_end", "on_step_end", "on_train_begin"}
    assert own(COLOCATE) == hooks and hooks < own(SEPARATE)
    more = {name for name in own(SEPARATE) - hooks if name.startswith("on_")}
    assert more == {"on_sample_begin", "on_step_begin", "on_validate_begin"}
    mine = {name for mode in MODES[1:] for name in vars(trainer_base.get_trainer_cls(mode))}
    assert hooks <= mine | {"on_train_begin"}


def test_what_separate_async_asserts_is_what_the_check_names():
    asserted = inspect.getsource(SEPARATE.__init__)
    for said in (
        "train_batch_size == parameter_sync_step * ppo_mini_batch_size",
        "rollout.nnodes > 0",
        "rollout.n_gpus_per_node > 0",
        'checkpoint_engine.backend != "naive"',
        "reward.reward_model.enable_resource_pool",
    ):
        assert said in asserted
    assert asserted.count("assert ") == 5


def test_each_engine_apart_from_the_trainer_has_a_pool_with_two_cpus_a_rank():
    """As `verl_ext.checks.cluster` counts them."""
    made = inspect.getsource(RolloutReplica.init_standalone)
    assert "max_colocate_count=2" in made and "[self.gpus_per_replica_node] * self.nnodes" in made
    assert "min(gpus_per_node, self.world_size)" in inspect.getsource(RolloutReplica.__init__)
