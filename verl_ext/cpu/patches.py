# SPDX-License-Identifier: Apache-2.0
"""The few places of verl 0.9.1 that no setting reaches on a CPU. One function a place, each with its reason.

Every one is covered by ``tests/contract/test_platform_contract.py``, which fails when verl changes there.
"""

from __future__ import annotations

import functools
import sys

from verl_ext.after_import import after_import

_MARK = "_verl_ext_patched"


def apply_all() -> None:
    """Apply every patch of this module, once. Called by the plugin, only where ``VERL_PLATFORM=cpu``."""
    single_gloo_backend()
    without_ascend_checkpoint_engine()
    # verl.utils.model imports much of transformers: only the processes that use it should pay for it.
    after_import("verl.utils.model", value_head_without_flash_attention)
    after_import("verl.workers.engine.fsdp.transformer_impl", reference_without_pinned_memory)
    after_import("verl.utils.fsdp_utils", saved_weights_of_their_own)
    after_import("verl.checkpoint_engine", gloo_checkpoint_engine)


def without_ascend_checkpoint_engine() -> None:
    """Skip verl's engine for Ascend, which imports vLLM before it looks for a device: seven seconds in every process,
    also in those that never use vLLM.

    ``verl.checkpoint_engine`` takes an ImportError here as "not available" and goes on.

    Replaces: verl.checkpoint_engine.hccl_checkpoint_engine (verl 0.9.1)
    """
    sys.modules.setdefault("verl.checkpoint_engine.hccl_checkpoint_engine", None)


def single_gloo_backend() -> None:
    """Pass one backend for the device "cpu". verl joins "cpu:gloo" with "{device}:{backend}", and torch refuses the
    second entry.

    Must run before ``verl.workers.engine_workers`` imports the function by name.

    Replaces: verl.utils.distributed.initialize_global_process_group_ray (verl 0.9.1)
    """
    from verl.utils import distributed

    original = distributed.initialize_global_process_group_ray
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def initialize_global_process_group_ray(timeout_second=None, backend=None):
        return original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    setattr(initialize_global_process_group_ray, _MARK, True)
    distributed.initialize_global_process_group_ray = initialize_global_process_group_ray


def value_head_without_flash_attention() -> None:
    """Load the critic with PyTorch's own attention. verl hard-codes ``attn_implementation="flash_attention_2"``, which
    needs a GPU, and reports the failure as a missing value head.

    Replaces: verl.utils.model.load_valuehead_model (verl 0.9.1)
    """
    from verl.utils import model

    if hasattr(model.load_valuehead_model, _MARK):
        return

    @functools.wraps(model.load_valuehead_model)
    def load_valuehead_model(local_path, torch_dtype, model_config, trust_remote_code):
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            pretrained_model_name_or_path=local_path,
            torch_dtype=torch_dtype,
            config=model_config,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
        )

    setattr(load_valuehead_model, _MARK, True)
    model.load_valuehead_model = load_valuehead_model


def reference_without_pinned_memory() -> None:
    """Keep the reference policy's weights in plain memory. verl always offloads them to pinned memory, which torch has
    only beside an accelerator.

    Replaces: verl.workers.engine.fsdp.transformer_impl.CPUOffloadPolicy (verl 0.9.1)
    """
    from verl.workers.engine.fsdp import transformer_impl

    policy = transformer_impl.CPUOffloadPolicy
    if hasattr(policy, _MARK):
        return

    def unpinned(pin_memory: bool = False):
        return policy(pin_memory=False)

    setattr(unpinned, _MARK, True)
    transformer_impl.CPUOffloadPolicy = unpinned


def saved_weights_of_their_own() -> None:
    """Copy the weights that are set aside. verl keeps what `.detach().cpu()` returns, on a CPU the live weights: in
    separate_async, pi_old of the later mini-batches would be the policy that is being trained.

    Replaces: verl.utils.fsdp_utils.fsdp2_sharded_save_to_cpu (verl 0.9.1)
    """
    from verl.utils import fsdp_utils

    original = fsdp_utils.fsdp2_sharded_save_to_cpu
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def fsdp2_sharded_save_to_cpu(model):
        state, spec = original(model)
        return {name: (weight.clone(), own_spec) for name, (weight, own_spec) in state.items()}, spec

    setattr(fsdp2_sharded_save_to_cpu, _MARK, True)
    fsdp_utils.fsdp2_sharded_save_to_cpu = fsdp2_sharded_save_to_cpu


def gloo_checkpoint_engine() -> None:
    """Register the transport of weights that needs no accelerator, beside verl's own."""
    import verl_ext.cpu.gloo_engine  # noqa: F401
