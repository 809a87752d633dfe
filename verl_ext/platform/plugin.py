# SPDX-License-Identifier: Apache-2.0
"""What ``import verl`` loads in every process (entry point ``verl.plugins`` and ``VERL_USE_EXTERNAL_MODULES``).

Does nothing unless ``VERL_PLATFORM=cpu``.
"""

from .activate import cpu_asked_for, refuse_accelerator

if cpu_asked_for():
    refuse_accelerator()

    # On another machine than the driver's the folder of the alias is not there yet, though PYTHONPATH names it.
    from .alias import install_alias

    install_alias()

    from . import cpu, patches, vllm_cpu  # noqa: F401  (importing cpu registers the platform)

    patches.apply_all()
    vllm_cpu.check_loaded()
