"""Selectors: which prompts are offered next."""

from .cero import Cero, CeroSettings
from .dps import Dps, DpsSettings
from .greso import Greso, GresoSettings
from .mopps import Mopps, MoppsSettings
from .selector import Selector, SelectorSettings
from .shuffled import Shuffled

__all__ = [
    "Cero",
    "CeroSettings",
    "Dps",
    "DpsSettings",
    "Greso",
    "GresoSettings",
    "Mopps",
    "MoppsSettings",
    "Selector",
    "SelectorSettings",
    "Shuffled",
]
