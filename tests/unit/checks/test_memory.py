# SPDX-License-Identifier: Apache-2.0
"""What a run would lack only once its engines start: memory, the engine itself."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.unit.checks.check_configs import config_with
from verl_ext.checks import Problems, memory
from verl_ext.checks.local import _engine
from verl_ext.checks.memory import GIB, Sizes, check_memory, model_sizes
from verl_ext.tiny.policy_store import SHIPPED

MODEL = "actor_rollout_ref.model.path"


@pytest.fixture
def machine(monkeypatch):
    """A machine of so many GiB, with a GPU of so many."""

    def has(host=16.0, gpu=None, parameters=10**9, values_a_token=100_000):
        monkeypatch.setattr(memory, "machine_memory", lambda: int(host * GIB))
        monkeypatch.setattr(memory, "gpu_memory", lambda: gpu and int(gpu * GIB))
        monkeypatch.setattr(memory, "model_sizes", lambda path: Sizes(parameters, values_a_token))

    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    return has


def test_sizes_are_those_of_the_weights(tmp_path):
    save_file({"a": np.zeros((3, 4), np.float16), "b": np.zeros(5, np.float32)}, tmp_path / "one.safetensors")
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_sizes(str(tmp_path)) == Sizes(17, 2 * 2 * 2 * 8)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {**config, "head_dim": 16}}))
    assert model_sizes(str(tmp_path)) == Sizes(17, 2 * 2 * 2 * 16)
    (tmp_path / "config.json").write_text(json.dumps({**config, "kv_lora_rank": 64}))
    assert model_sizes(str(tmp_path)).values_a_token == 0
    assert model_sizes("Nobody/nothing") is None
    assert model_sizes(str(SHIPPED)).parameters == 526_464


@pytest.mark.bad_input
def test_a_cache_larger_than_the_machine_is_refused(machine, monkeypatch):
    machine(host=24, parameters=10**6)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    assert "of this machine's 24.0 GiB" in check_memory(config_with()).text
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "500")
    with pytest.raises(Problems, match=r"500.0 GiB of keys and values.*24.0 GiB; accepted: a smaller VLLM_CPU_KVCACHE"):
        check_memory(config_with())
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "much")
    with pytest.raises(Problems, match="VLLM_CPU_KVCACHE_SPACE='much': a number of GiB"):
        check_memory(config_with())


@pytest.mark.bad_input
def test_a_model_larger_than_the_machine_is_refused(machine):
    """16 bytes of training state and 4 of the engine's weights, a parameter."""
    machine(host=20.5, parameters=GIB)
    check_memory(config_with())
    machine(host=20, parameters=GIB)
    with pytest.raises(Problems, match="20.* GiB for 1 rank"):
        check_memory(config_with())


@pytest.mark.bad_input
def test_what_a_gpu_cannot_hold_is_refused(machine):
    config = config_with("hardware=gpu_1x1")
    config.actor_rollout_ref.rollout.max_model_len = 10_000
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = 1
    machine(gpu=None)
    assert "no GPU" in check_memory(config).text
    machine(gpu=80, parameters=4 * GIB)
    check_memory(config)
    machine(gpu=60, parameters=4 * GIB)  # 64 GiB of training state
    with pytest.raises(Problems, match="64.0 GiB of training state") as error:
        check_memory(config)
    assert len(error.value.problems) == 1
    for key, value in {"offload_policy": True, "model_dtype": "bf16"}.items():
        fits = config_with("hardware=gpu_1x1", **{f"actor_rollout_ref.actor.fsdp_config.{key}": value})
        check_memory(fits)
    machine(gpu=60, parameters=GIB, values_a_token=2 * 10**6)  # 37 GiB for an answer of 10,000 tokens
    with pytest.raises(Problems, match=r"gpu_memory_utilization=0.5: .*37.3 GiB of keys and values"):
        check_memory(config)


@pytest.mark.bad_input
def test_an_engine_that_is_not_installed_is_refused():
    assert "is installed" in _engine(config_with()).text
    with pytest.raises(Problems, match=r'rollout.name=sglang: sglang is not installed.*verl\[sglang\].*: vllm'):
        _engine(config_with(**{"actor_rollout_ref.rollout.name": "sglang"}))
