"""Down-samplers: which rollouts of a committed group reach the update."""

from .downsampler import DownSampler, DownSamplerSettings, KeepFew, KeepSettings
from .max_reward import MaxReward, max_reward_subset
from .max_variance import MaxVariance, max_variance_mask, max_variance_subset
from .none import KeepAll
from .percentile import Percentile, percentile_subset
from .random import Random

__all__ = [
    "DownSampler",
    "DownSamplerSettings",
    "KeepAll",
    "KeepFew",
    "KeepSettings",
    "MaxReward",
    "MaxVariance",
    "Percentile",
    "Random",
    "max_reward_subset",
    "max_variance_mask",
    "max_variance_subset",
    "percentile_subset",
]
