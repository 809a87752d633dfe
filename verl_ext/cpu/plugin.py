# SPDX-License-Identifier: Apache-2.0
"""What ``import verl`` loads in every process (entry point ``verl.plugins`` and ``VERL_USE_EXTERNAL_MODULES``).

Does nothing unless ``VERL_PLATFORM=cpu``.
"""

from verl_ext.cpu.activate import cpu_asked_for, refuse_accelerator

if cpu_asked_for():
    refuse_accelerator()

    # On another machine than the driver's the folder of the alias is not there yet, though PYTHONPATH names it.
    from verl_ext.cpu.version_alias import install_alias

    install_alias()

    from verl_ext.cpu import patches, platform, vllm_linear  # noqa: F401  (importing platform registers it)

    patches.apply_all()
    vllm_linear.check_loaded()
