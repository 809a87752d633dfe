"""A task and a policy small enough to train by reinforcement learning on a laptop: see `chain_sums.py`."""

from verl_ext.tiny.settings import MIXES, PolicySettings, TinySettings
from verl_ext.tiny.store import TinyPaths, default_cache, ensure_tiny

__all__ = ["MIXES", "PolicySettings", "TinyPaths", "TinySettings", "default_cache", "ensure_tiny"]
