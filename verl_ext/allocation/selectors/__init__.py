"""Selectors: which prompts are offered next."""

from .base import Selector, SelectorSettings
from .shuffled import Shuffled

__all__ = ["Selector", "SelectorSettings", "Shuffled"]
