"""Allocators: how many rollouts each prompt gets, when, and which groups enter the batch."""

from .base import Allocator, AllocatorSettings
from .dynamic_sampling import DynamicSampling, DynamicSamplingSettings
from .sara import Sara, SaraSettings
from .sara_rule import sara_verdicts
from .uniform import Uniform

__all__ = [
    "Allocator",
    "AllocatorSettings",
    "DynamicSampling",
    "DynamicSamplingSettings",
    "Sara",
    "SaraSettings",
    "Uniform",
    "sara_verdicts",
]
