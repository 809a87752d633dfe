"""Where rollouts go: pure Python, NumPy and SciPy; no verl, Ray, PyTorch or vLLM."""

from ..typed_settings import SettingError
from .allocation import Allocation
from .allocators import Allocator, AllocatorSettings, sara_verdicts
from .compose import AllocationSettings, Rules, Stop, check_composition, make_rules
from .conclude import Collected
from .context import StepContext
from .downsamplers import (
    DownSampler,
    max_reward_subset,
    max_variance_mask,
    max_variance_subset,
    percentile_subset,
)
from .group_statistics import GroupStatistics, group_statistics, normalised_over, reward_statistics
from .groups import Fate, Group, Outcome, Request, RoundError, Verdict
from .ledger import Ledger, LedgerError
from .posterior import abandonment_point, effective_probability, expected_variance, spread_probability
from .prompt_pool import PromptPool, prompt_key
from .registry import (
    make_allocator,
    make_downsampler,
    make_selector,
    register_allocator,
    register_downsampler,
    register_selector,
)
from .rounds import Backend
from .selectors import Selector, SelectorSettings
from .state import StateError, load_state, rng_for, save_state
from .streaming import StreamingBackend
from .waiting import pack_groups, unpack_groups

__all__ = [
    "Allocation",
    "AllocationSettings",
    "Allocator",
    "AllocatorSettings",
    "Backend",
    "Collected",
    "DownSampler",
    "Fate",
    "Group",
    "GroupStatistics",
    "Ledger",
    "LedgerError",
    "Outcome",
    "PromptPool",
    "Request",
    "RoundError",
    "Rules",
    "Selector",
    "SelectorSettings",
    "SettingError",
    "StateError",
    "StepContext",
    "Stop",
    "StreamingBackend",
    "Verdict",
    "abandonment_point",
    "check_composition",
    "effective_probability",
    "expected_variance",
    "group_statistics",
    "load_state",
    "make_allocator",
    "make_downsampler",
    "make_rules",
    "make_selector",
    "max_reward_subset",
    "max_variance_mask",
    "max_variance_subset",
    "normalised_over",
    "pack_groups",
    "percentile_subset",
    "prompt_key",
    "register_allocator",
    "register_downsampler",
    "register_selector",
    "reward_statistics",
    "rng_for",
    "sara_verdicts",
    "save_state",
    "spread_probability",
    "unpack_groups",
]
