"""Makes what this package logs visible in Ray's actors, whose root logger shows verl's own messages only."""

from __future__ import annotations

import logging
import os


def show_own_logs() -> None:
    """Send the log of `verl_ext` to standard error, once a process; the level is VERL_LOGGING_LEVEL's, or INFO."""
    own = logging.getLogger("verl_ext")
    if not own.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        own.addHandler(handler)
        own.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))
        own.propagate = False
