# SPDX-License-Identifier: Apache-2.0
"""verl_ext: a plugin for verl that decides where rollouts go in RLVR post-training."""

import sys
from importlib.util import find_spec

__version__ = "0.1.0"


def need_commands() -> None:
    """End the process with one line where the packages that the commands need are not there."""
    if missing := [name for name in ("numpy", "scipy", "hydra") if find_spec(name) is None]:
        sys.exit(
            f"verl_ext: {', '.join(missing)} not found by {sys.executable}: `source .venv/bin/activate` (made by "
            '`make setup`), or install the commands with pip install "verl_ext[train]"'
        )


# `python -m verl_ext.COMMAND`: what runs has not been loaded yet.
if sys.argv[:1] == ["-m"]:
    need_commands()
