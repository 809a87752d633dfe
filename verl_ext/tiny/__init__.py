"""A task and a policy small enough to train by reinforcement learning on a laptop: see `chain_sums.py`."""

from verl_ext.tiny.policy_store import TinyPaths, default_cache, ensure_tiny
from verl_ext.tiny.task_settings import MIXES, PolicySettings, TinySettings

__all__ = ["MIXES", "PolicySettings", "TinyPaths", "TinySettings", "default_cache", "ensure_tiny"]
