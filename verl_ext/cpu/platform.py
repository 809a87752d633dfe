# SPDX-License-Identifier: Apache-2.0
"""verl's platform interface on a machine without an accelerator. Importing this module registers it as "cpu"."""

from __future__ import annotations

from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from verl_ext.cpu.activate import PLATFORM_NAME, cpu_asked_for


def _resident_bytes(field: str) -> int:
    """This process's resident memory: ``VmRSS`` (now) or ``VmHWM`` (its highest so far), in bytes."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _cpu_device_module() -> ModuleType:
    """A module like ``torch.cpu`` with the functions that verl asks ``torch.<device>`` for.

    Device memory is the process's resident memory and the machine's; there is nothing to cache, to pin to, or to wait
    for.
    """
    import psutil

    module = ModuleType("verl_ext_cpu_device", _cpu_device_module.__doc__)
    module.__dict__.update({name: getattr(torch.cpu, name) for name in torch.cpu.__all__})

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def current(device: Any = None) -> int:
        return _resident_bytes("VmRSS")

    def highest(device: Any = None) -> int:
        return _resident_bytes("VmHWM")

    module.__dict__.update(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: "cpu",
        get_device_name=lambda device=None: "cpu",
        mem_get_info=mem_get_info,
        memory_allocated=current,
        memory_reserved=current,
        max_memory_allocated=highest,
        max_memory_reserved=highest,
        reset_peak_memory_stats=nothing,
        empty_cache=nothing,
        ipc_collect=nothing,
        set_device=nothing,
        set_per_process_memory_fraction=nothing,
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
    )
    return module


@PlatformRegistry.register(platform=PLATFORM_NAME)
class PlatformCPU(PlatformBase):
    """The CPU as verl's training and rollout device. Chosen by ``VERL_PLATFORM=cpu`` only, never by detection."""

    def __init__(self) -> None:
        self._module = _cpu_device_module()

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return cpu_asked_for()

    def current_device(self) -> str:
        # As torch.cpu.current_device(): verl hands it to Module.to(), where an index would mean an accelerator.
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return None

    def synchronize(self, device_index: int | None = None) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        # Written by verl, read by nobody: the virtual slots hide no device.
        return "VERL_EXT_CPU_SLOTS"

    @contextmanager
    def nvtx_range(self, msg: str):
        yield

    def profiler_start(self) -> None:
        return None

    def profiler_stop(self) -> None:
        return None

    def ray_resource_name(self) -> str:
        # verl's resource pools ask Ray for "GPU"; ray_init.num_gpus offers that many virtual slots.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        # Weights then travel from trainer to vLLM by shared memory.
        return False

    def cudart(self) -> Any:
        return None
