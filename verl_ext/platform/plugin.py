# SPDX-License-Identifier: Apache-2.0
"""What ``import verl`` loads in every process (entry point ``verl.plugins`` and ``VERL_USE_EXTERNAL_MODULES``).

Does nothing unless ``VERL_PLATFORM=cpu``.
"""

from .activate import cpu_asked_for, refuse_accelerator

if cpu_asked_for():
    refuse_accelerator()

    from . import cpu, patches, vllm_cpu  # noqa: F401  (importing cpu registers the platform)

    patches.apply_all()
    vllm_cpu.check_loaded()
