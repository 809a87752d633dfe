"""The stages of the first day on a GPU: what each needs, and its runs as overrides of a recipe."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.random_task import write

Runs = dict[str, tuple[str, ...]]
"""Overrides of each run by its name; what stands before a `+` names the folder, so that a run can resume another."""

_SHORT = ("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.logger=[console,file]")
_HF = ("actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.model.external_lib=verl_ext.rollout.hf")
_VLLM = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.disable_log_stats=False")
_STREAMING = "allocation.rounds=streaming"
_LORA = ("actor_rollout_ref.model.lora_rank=16", "actor_rollout_ref.model.lora_alpha=16")


def _precision(kind: str) -> tuple[str, ...]:
    """bf16 or fp32, for rollouts and in the trainer's forward and backward; its own weights stay in fp32."""
    parts = f"param_dtype:{kind},reduce_dtype:fp32,buffer_dtype:fp32"
    return (
        f"actor_rollout_ref.rollout.dtype={'bfloat16' if kind == 'bf16' else 'float32'}",
        f"++actor_rollout_ref.actor.fsdp_config.mixed_precision={{{parts}}}",
    )


def _gpu() -> tuple[str, ...]:
    """One GPU for a recipe made for the CPU: its device, and attention by what is installed."""
    flash = importlib.util.find_spec("flash_attn") is not None
    attention = "flash_attention_2" if flash else "sdpa"
    return (
        "hardware=gpu_1x1", "trainer.device=cuda", "actor_rollout_ref.model.use_fused_kernels=True",
        "actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        f"++actor_rollout_ref.model.override_config.attn_implementation={attention}",
    )  # fmt: skip


def tiny_runs(engine: tuple[str, ...], gpu: bool, steps: int) -> Runs:
    """The tiny policy: three ways to allocate, precision, LoRA, saving and resuming; on GPUs FSDP 1 and adapters."""
    shared = (*_SHORT, *engine, *(_gpu() if gpu else ()), *_precision("fp32"))
    to_end = f"trainer.total_training_steps={steps}"
    fixed = (*shared, to_end, "trainer.resume_mode=disable")
    runs = {
        "grpo": ("recipe=cpu/grpo", *fixed),
        "sara": ("recipe=cpu/sara", *fixed),
        "sara streaming": ("recipe=cpu/sara", *fixed, _STREAMING),
        "sara bf16": ("recipe=cpu/sara", *fixed, *_precision("bf16")),
        "sara LoRA merged": ("recipe=cpu/sara", *fixed, *_LORA, "++actor_rollout_ref.model.lora.merge=True"),
        "sara saved": ("recipe=cpu/sara", *shared, to_end, f"trainer.save_freq={steps}"),
        "sara saved+resumed": ("recipe=cpu/sara", *shared, f"trainer.total_training_steps={steps + 1}"),
    }
    if gpu:
        runs["sara FSDP 1"] = ("recipe=cpu/sara", *fixed, "actor_rollout_ref.actor.strategy=fsdp")
    if gpu and engine != _HF:
        base_weights = "actor_rollout_ref.rollout.load_format=safetensors"
        runs["sara LoRA adapter"] = ("recipe=cpu/sara", *fixed, *_LORA, base_weights)
    return runs


def large_runs(folder: Path, steps: int, size: str = ".5B") -> Runs:
    """A policy with random weights and answers of up to 4,096 tokens: rules against verl's own trainer."""
    model, prompts = write(folder, size)
    shared = (
        *_SHORT, *_VLLM, *_gpu(), *_precision("bf16"),
        "trainer.resume_mode=disable", f"trainer.total_training_steps={steps}",
        f"actor_rollout_ref.model.path={model}", f"data.train_files={prompts}", f"data.val_files={prompts}",
        f"reward.custom_reward_function.path={Path(__file__).with_name('random_task.py')}",
        "data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "data.max_prompt_length=16", "data.max_response_length=4096",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.5", "actor_rollout_ref.actor.optim.lr=1e-7",
    )  # fmt: skip
    ours = ("recipe=cpu/grpo", *shared)
    sara = ("recipe=cpu/sara", *shared)
    return {
        "verl's own trainer": (*ours, "trainer.v1.trainer_mode=sync"),
        "uniform": ours,
        "dynamic_sampling": ("recipe=cpu/dapo", *shared),
        "sara": sara,
        "sara streaming": (*sara, _STREAMING),
        "sara streaming, carry": ("recipe=cpu/sara_colocate_async", *shared),
    }


LAB_POLICIES = ("10M", "100M")


@dataclass(frozen=True)
class Stage:
    """A part of the benchmark that can be left out."""

    what: str
    missing: Callable[[], list[str]]
    """What it needs and does not find."""
    runs: Callable[[Path, int], Runs]
    """Its runs, by folder and number of steps."""


def _without(*modules: str, cuda: bool = True) -> Callable[[], list[str]]:
    def missing() -> list[str]:
        found = [f"the package {name}" for name in modules if importlib.util.find_spec(name) is None]
        return found + ["a CUDA device"] * (cuda and not cuda_here())

    return missing


def cuda_here() -> bool:
    """Whether this process sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


STAGES = {
    "A": Stage("the tiny policy, generated for by Hugging Face code", _without(cuda=False),
               lambda folder, steps: tiny_runs(_HF, cuda_here(), steps)),
    "B": Stage("the tiny policy with vLLM", _without("vllm"), lambda folder, steps: tiny_runs(_VLLM, True, steps)),
    "C": Stage("random weights, answers of up to 4,096 tokens, vLLM", _without("vllm"), large_runs),
}  # fmt: skip
