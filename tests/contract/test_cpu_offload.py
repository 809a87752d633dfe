"""The reference policy's weights on a machine without an accelerator."""

from __future__ import annotations

import inspect

import pytest
import torch
from verl.workers.engine.fsdp import transformer_impl

from verl_ext.cpu.patches import reference_without_pinned_memory


def test_offload_patch_is_still_needed_and_still_fits(monkeypatch):
    policy = transformer_impl.CPUOffloadPolicy
    assert "CPUOffloadPolicy(pin_memory=True)" in inspect.getsource(transformer_impl.FSDPEngine._build_fsdp_module)
    assert policy(pin_memory=True).pin_memory is True
    if not torch.accelerator.is_available():
        with pytest.raises(RuntimeError, match="(?i)accelerator|NVIDIA driver"):
            torch.zeros(1).pin_memory()
    monkeypatch.setattr(transformer_impl, "CPUOffloadPolicy", policy)
    for _ in range(2):
        reference_without_pinned_memory()
        made = transformer_impl.CPUOffloadPolicy(pin_memory=True)
        assert isinstance(made, policy) and made.pin_memory is False
