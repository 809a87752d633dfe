# SPDX-License-Identifier: Apache-2.0
"""Check the settings of a comparison before its first run, which may take hours."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_ext.launch.comparison_plan import CompareError
from verl_ext.masking import masked_override
from verl_ext.reports.comparison import check_target
from verl_ext.reports.toy_runs import load_all

_LISTS = {
    "recipes": "recipes=[cpu/grpo,cpu/sara]",
    "seeds": "seeds=[0,1,2]",
    "overrides": "\"overrides=['a=b']\"",
    "folders": "\"folders=['copied/*']\"",
    "slurm.options": "\"slurm.options=['--nodes=4']\"",
}
_OF_TEXTS = ("overrides", "folders", "slurm.options")


def check_settings(settings: dict[str, Any]) -> None:
    """Refuse settings that cannot be read.

    Raises:
        CompareError: names the setting, what it is, and what is accepted.
    """
    for name, example in _LISTS.items():
        value: Any = settings
        for part in name.split("."):
            value = value[part]
        if not isinstance(value, list):
            raise CompareError(f"{name}={_shown(value)}; accepted: a list, e.g. {example}")
        for item in value if name in _OF_TEXTS else ():
            if not isinstance(item, str):
                raise CompareError(f"{name}: {item!r}; accepted: texts, each quoted, e.g. {example}")
    for name in ("root", "output"):
        if not isinstance(settings[name], str) or not settings[name]:
            raise CompareError(f"{name}={settings[name]!r}; accepted: a folder")
    for name, what in (("title", "a text"), ("baseline", "a recipe's name")):
        if not isinstance(settings[name], str | None):
            raise CompareError(f"{name}={settings[name]!r}; accepted: null, or {what}")
    check_target(settings["target"])


def _shown(value: Any) -> str:
    return repr(masked_override(value)) if isinstance(value, str) else repr(value)


def check_baseline(baseline: str | None, recipes: Sequence[str], folders: Sequence[Path]) -> None:
    """Refuse a baseline that is neither planned nor in a folder given.

    Raises:
        CompareError: names those accepted; or a folder cannot be read.
    """
    known = dict.fromkeys([*recipes, *(run.recipe for folder in folders for run in load_all(folder))])
    if baseline is not None and baseline not in known:
        raise CompareError(f"baseline={baseline!r}; accepted: {', '.join(known)}")


def prepare_output(output: Path) -> None:
    """Make the report's folder.

    Raises:
        CompareError: it cannot be made, or not be written to.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CompareError(f"output={str(output)!r}: {error.strerror}; accepted: a folder to write to") from error
    if not os.access(output, os.W_OK | os.X_OK):
        raise CompareError(f"output={str(output)!r}: not writable; accepted: a folder to write to")
