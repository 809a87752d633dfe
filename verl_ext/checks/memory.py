# SPDX-License-Identifier: Apache-2.0
"""What a run needs of this machine's memory, by estimate: weights, training state, and the engine's keys and values.

Activations, logits and buffers are not counted: what is refused here does not fit, what passes may still be short.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.checks.model import configuration, model_folder
from verl_ext.checks.numbers import PARALLEL

from .findings import Problems, Seen

GIB = 2**30
_KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
_KEPT = 4
"""Numbers a parameter that training keeps: weight, gradient and Adam's two moments; with LoRA the weight alone."""


@dataclass(frozen=True)
class Sizes:
    """Of a model."""

    parameters: int
    """Numbers among its weights."""
    values_a_token: int
    """Keys and values that the engine keeps for a token; 0: not known."""


def model_sizes(path: str) -> Sizes | None:
    """Read from the headers of its weights and its configuration; None where they are not on this machine."""
    folder = model_folder(path)
    files = list(folder.glob("*.safetensors")) if folder is not None else []
    if not files:
        return None
    parameters = sum(_parameters(file) for file in files)
    found = configuration(path)
    text = found.get("text_config") or found
    heads, layers = text.get("num_attention_heads"), text.get("num_hidden_layers")
    if not heads or not layers or "kv_lora_rank" in text:
        return Sizes(parameters, 0)
    width = text.get("head_dim") or text["hidden_size"] // heads
    return Sizes(parameters, 2 * layers * (text.get("num_key_value_heads") or heads) * width)


def _parameters(file: Path) -> int:
    with open(file, "rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def machine_memory() -> int:
    """Bytes that processes here may use: the machine's, or the container's limit."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            memory = min(memory, int(Path(limit).read_text()))
        except (OSError, ValueError):
            continue
    return memory


def gpu_memory() -> int | None:
    """Bytes of the first GPU here; None without one."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def check_memory(config: DictConfig) -> Seen:
    """What can be estimated, beside what there is.

    Raises:
        Problems: the training state, the engine's weights or its keys and values do not fit.
    """
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    on_cpu = config.trainer.device == "cpu"
    space = _kv_space(config) if on_cpu and rollout.name == "vllm" else 0.0
    sizes = model_sizes(model.path)
    if sizes is None and not space:
        return Seen(f"memory: the weights of {model.path} are not here, so that nothing is estimated")
    sizes = sizes or Sizes(0, 0)
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    replica = math.prod(OmegaConf.select(config, name) for name in PARALLEL)
    width = 4 if rollout.dtype in ("float32", "float") else 2
    longest = rollout.get("max_model_len") or config.data.max_prompt_length + config.data.max_response_length
    fsdp = config.actor_rollout_ref.actor.get("fsdp_config") or {}
    kept = (1 if (model.get("lora_rank") or 0) > 0 else _KEPT) * (2 if "bf" in str(fsdp.get("model_dtype")) else 4)
    # FSDP 2's own offloading keeps it all in host memory.
    state = 0 if fsdp.get("offload_policy") and not on_cpu else kept * sizes.parameters / ranks
    weights = width * sizes.parameters / replica
    cache = (space * GIB or width * sizes.values_a_token * longest) / replica
    said = f"{_said(state)} of training state, {_said(weights)} of engine weights, {_said(cache)} of keys and values"
    if on_cpu:
        return _on_cpu(config.trainer.n_gpus_per_node, state + weights + cache, said)
    return _on_gpu(rollout.gpu_memory_utilization, state, weights + cache, said)


def _on_cpu(ranks: int, rank: float, said: str) -> Seen:
    needed, there = ranks * rank, machine_memory()
    what = f"{_said(needed)} for {ranks} rank(s) with {said} each, of this machine's {_said(there)}"
    if needed > there:
        raise Problems(
            f"memory: {what}; accepted: a smaller {_KV_SPACE} (GiB an engine), a smaller model, or fewer ranks "
            "(trainer.n_gpus_per_node)"
        )
    return Seen(f"memory: {what}")


def _on_gpu(share: float, state: float, engine: float, said: str) -> Seen:
    there, problems = gpu_memory(), []
    if there is None:
        return Seen(f"memory: a GPU holds {said} for the longest answer; not compared, this machine has no GPU")
    if state > there:
        problems.append(
            f"memory: {said}; the first is more than a GPU's {_said(there)}; accepted: more GPUs "
            "(trainer.n_gpus_per_node, trainer.nnodes), a smaller model, or tuning=lora"
        )
    if engine > there * share:
        problems.append(
            f"actor_rollout_ref.rollout.gpu_memory_utilization={share:g}: {said} for the longest answer; the last two "
            f"are more than {share:g} of a GPU's {_said(there)}; accepted: a larger share, or a larger {PARALLEL[0]}"
        )
    if problems:
        raise Problems(*problems)
    return Seen(f"memory: a GPU holds {said} for the longest answer; it has {_said(there)}")


def _kv_space(config: DictConfig) -> float:
    """GiB that vLLM's CPU build reserves for keys and values."""
    given: Any = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {}
    value = given.get(_KV_SPACE) or os.environ.get(_KV_SPACE) or 0
    try:
        space = float(value)
    except (TypeError, ValueError):
        space = -1.0
    if not 0 <= space < math.inf:
        raise Problems(f"{_KV_SPACE}={value!r}: a number of GiB is accepted")
    return space


def _said(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.0f} MiB"
