"""Allocators: how many rollouts each prompt gets, when, and which groups enter the batch."""

from .allocator import Allocator, AllocatorSettings
from .dynamic_sampling import DynamicSampling, DynamicSamplingSettings
from .hora import Hora, HoraSettings, hora_allocation
from .knapsack import Knapsack, KnapsackSettings, knapsack_allocation
from .marginal_signal import MarginalSignal, MarginalSignalSettings
from .pilot_commit import PilotCommit, PilotCommitSettings
from .reinforce_ada import ReinforceAda, ReinforceAdaSettings
from .sara import Sara, SaraSettings
from .sara_rule import sara_verdicts
from .uniform import Uniform
from .vip import Vip, VipSettings, vip_allocation

__all__ = [
    "Allocator",
    "AllocatorSettings",
    "DynamicSampling",
    "DynamicSamplingSettings",
    "Hora",
    "HoraSettings",
    "Knapsack",
    "KnapsackSettings",
    "MarginalSignal",
    "MarginalSignalSettings",
    "PilotCommit",
    "PilotCommitSettings",
    "ReinforceAda",
    "ReinforceAdaSettings",
    "Sara",
    "SaraSettings",
    "Uniform",
    "Vip",
    "VipSettings",
    "hora_allocation",
    "knapsack_allocation",
    "sara_verdicts",
    "vip_allocation",
]
