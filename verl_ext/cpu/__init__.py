# SPDX-License-Identifier: Apache-2.0
"""verl and vLLM on a machine without an accelerator.

Nothing here acts unless it was asked for (``trainer.device=cpu``, which sets ``VERL_PLATFORM=cpu`` for every process of
the run). Which process needs what, and who brings it there:

==============================  =======================================================================================
process                         what loads the CPU platform in it
==============================  =======================================================================================
driver                          :func:`activate_cpu_platform`, called before anything of verl is imported
TaskRunner, FSDP, agent-loop,   ``import verl`` -> ``VERL_USE_EXTERNAL_MODULES`` -> :mod:`verl_ext.cpu.plugin`
reward and vLLM server actors   (errors propagate; without it verl stops with "Unknown platform 'cpu'")
vLLM EngineCore and Worker      the ``vllm.general_plugins`` entry point -> :mod:`verl_ext.cpu.vllm_linear`; checked
                                by the plugin when verl's worker extension is imported there
every process                   ``PYTHONPATH`` -> the version alias of :mod:`verl_ext.cpu.version_alias`
==============================  =======================================================================================

This module imports neither verl nor torch, so that it can be used before either is loaded.
"""

from verl_ext.cpu.activate import CpuPlatformError, activate_cpu_platform, cpu_asked_for, cpu_environment

__all__ = ["CpuPlatformError", "activate_cpu_platform", "cpu_asked_for", "cpu_environment"]
