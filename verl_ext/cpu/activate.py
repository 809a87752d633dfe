# SPDX-License-Identifier: Apache-2.0
"""Switch verl's CPU platform on for a whole run: this process, and every process that it starts."""

from __future__ import annotations

import os
import sys

from verl_ext.cpu.version_alias import install_alias
from verl_ext.files import UnsafePathError

PLATFORM_NAME = "cpu"
PLUGIN_MODULE = "verl_ext.cpu.plugin"


class CpuPlatformError(RuntimeError):
    """The CPU platform was asked for where it cannot work, or did not load where it is needed."""


def cpu_asked_for() -> bool:
    """Whether this process belongs to a run on the CPU platform."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == PLATFORM_NAME


def accelerator_present() -> bool:
    """Whether this process sees an accelerator that verl can train on (CUDA or ROCm, Ascend, Intel XPU)."""
    import torch

    return torch.cuda.is_available() or any(
        hasattr(torch, name) and getattr(torch, name).is_available() for name in ("npu", "xpu")
    )


def refuse_accelerator() -> None:
    """Raise where the CPU platform is asked for although an accelerator is visible.

    Raises:
        CpuPlatformError: names the setting and how to hide the accelerator.
    """
    if accelerator_present():
        raise CpuPlatformError(
            "trainer.device=cpu (VERL_PLATFORM=cpu) was asked for, but this process sees an accelerator. Use "
            "hardware=gpu, or hide the accelerator (CUDA_VISIBLE_DEVICES='') to run on the CPU."
        )


def cpu_environment() -> dict[str, str]:
    """The environment every process of a run on the CPU needs, by variable.

    The first group is what makes the stack work and is always set; the second holds defaults that an exported variable
    overrides.
    """
    fixed = {
        # Which registered platform verl uses; an unknown name stops verl, so a plugin that did not load is seen.
        "VERL_PLATFORM": PLATFORM_NAME,
        # verl 0.9.1 registers its FSDP engines for cuda and npu only; they run on any torch device.
        "VERL_ENGINE_DEVICE": "cuda",
        # Read before entry points, and errors in it propagate: the entry point alone may fail in silence.
        "VERL_USE_EXTERNAL_MODULES": _with_plugin(os.environ.get("VERL_USE_EXTERNAL_MODULES", "")),
        # vLLM takes this as final, whatever else it detects.
        "VLLM_TARGET_DEVICE": "cpu",
        # The virtual slots named "GPU" are no devices: Ray must not hide or show any for them.
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        # Lets an engine of one rank run its worker inside EngineCore (rollout.engine_kwargs.vllm in
        # hardware/cpu.yaml): vLLM 0.28.0 refuses that executor on a CPU otherwise. EngineCore itself stays a process
        # of its own.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    defaults = {
        # GiB of KV cache a vLLM engine reserves; without it, rollout.gpu_memory_utilization of the machine's memory.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Local models only: no look-ups that time out on a machine without a network.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        # No usage report at engine start.
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        # vLLM compiles small functions of its sampler even in eager mode: half a minute at the first rollout, and a C++
        # compiler that a laptop may not have.
        "TORCHDYNAMO_DISABLE": "1",
        # TransferQueue asks for 8 threads at every put and warns each time where there are fewer cores.
        "TQ_NUM_THREADS": str(max(1, min(8, (os.cpu_count() or 1) // 2))),
    }
    return {**{key: os.environ.get(key, value) for key, value in defaults.items()}, **fixed}


def _with_plugin(modules: str) -> str:
    names = [name for name in modules.split(",") if name]
    return ",".join(names if PLUGIN_MODULE in names else [*names, PLUGIN_MODULE])


def activate_cpu_platform(config=None) -> dict[str, str]:
    """Make this process and every Ray worker and vLLM process of the run use the CPU platform.

    Must run before anything of verl is imported: verl looks for its platform once, at import.

    Args:
        config: verl's configuration (an OmegaConf ``DictConfig``). The variables are added to its
            ``ray_kwargs.ray_init.runtime_env.env_vars``, so that they reach workers of a Ray cluster that was started
            elsewhere too; a variable already set there is kept.

    Returns:
        The variables that were set.

    Raises:
        CpuPlatformError: an accelerator is visible, verl was imported before this call, or the folder that the alias
            of vLLM's version is kept in is not this user's alone.
    """
    if "verl" in sys.modules and not cpu_asked_for():
        raise CpuPlatformError("activate_cpu_platform() must be called before verl is imported")
    refuse_accelerator()
    environment = cpu_environment()
    os.environ.update(environment)
    try:
        alias = install_alias()
    except UnsafePathError as error:
        raise CpuPlatformError(str(error)) from error
    if alias is not None:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    if config is not None:
        from omegaconf import open_dict

        with open_dict(config):
            ray_init = config.setdefault("ray_kwargs", {}).setdefault("ray_init", {})
            runtime_env = ray_init.setdefault("runtime_env", {})
            runtime_env["env_vars"] = {**environment, **(runtime_env.get("env_vars") or {})}
    return environment
