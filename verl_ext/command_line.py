# SPDX-License-Identifier: Apache-2.0
"""Run a command that Hydra composes, and answer a misspelt name by the nearest names."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf

from verl_ext.configuration import compose_config, group_options

MOST_NAMES = 30
GROUPS = (
    "recipe",
    "allocation/selector",
    "allocation/allocator",
    "allocation/downsampler",
    "hardware",
    "model",
    "tuning",
)


def run_command(command: Callable[[], None], config: str = "main") -> None:
    """Run a function decorated by `hydra.main`; what Hydra cannot compose ends the process with one short message.

    Args:
        config: name of the command's configuration, from which a misspelt setting's neighbours are taken.
    """
    # Without it Hydra prints its errors itself and exits.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        command()
    except HydraException as error:
        sys.exit(f"verl_ext: {explain(error, sys.argv[1:], config)}")


def explain(error: HydraException, words: Sequence[str], config: str = "main") -> str:
    """What Hydra could not compose, with the nearest names.

    Args:
        words: the command's overrides.
        config: name of its configuration.
    """
    if isinstance(error, MissingConfigException):
        return _unknown_choice(str(error)) or str(error)
    said = _unknown_setting(error, words, config) if isinstance(error, ConfigCompositionException) else None
    return said or _plain(error)


def _plain(error: BaseException) -> str:
    """The error, and the one behind it, which says what Hydra's own leaves out."""
    return "\n".join(dict.fromkeys(str(e) for e in (error, error.__cause__) if e is not None))


def nearest(name: str, known: Iterable[str]) -> str:
    """Advice for an unknown name: the nearest known names, and the list where it is short."""
    known = sorted(known)
    close = get_close_matches(name, known, n=3, cutoff=0.5)
    # A recipe without its family, a setting without its section.
    close += [one for one in known if one.rpartition("/")[2] == name and one not in close]
    said = f"; did you mean {' or '.join(close)}?" if close else ""
    return f"{said}\n  known are: {', '.join(known)}" if len(known) <= MOST_NAMES else said


def _unknown_choice(message: str) -> str | None:
    """For a group's choice that has no file, e.g. `recipe=cpu/sarra`."""
    found = re.search(r"Could not find '([^']+)'", message)
    if not found:
        return None
    parts = found[1].split("/")
    for cut in range(1, len(parts)):
        group, name = "/".join(parts[:cut]), "/".join(parts[cut:])
        if known := group_options(group):
            # The longest group: allocation/allocator, not allocation.
            deeper = group_options("/".join(parts[: cut + 1])) if cut + 1 < len(parts) else []
            if not deeper or group == "recipe":
                return f"{group}={name}: there is no such file{nearest(name, known)}"
    return None


def _unknown_setting(error: BaseException, words: Sequence[str], config: str) -> str | None:
    """For a setting that is not in the configuration, e.g. `allocation.allocator.probee=3`."""
    found = re.search(r"Could not override '([^']+)'", str(error))
    if not found:
        return None
    key = found[1]
    if "/" in key:
        return f"{key}: there is no such group{nearest(key, GROUPS)}"
    choices = [word for word in words if re.match(r"[+~]?[\w/]+=", word)]
    try:
        known = list(_keys(compose_config(choices, config)))
    except Exception:  # noqa: BLE001  (the neighbours are a courtesy; the error itself is what must be said)
        return None
    section, _, name = key.rpartition(".")
    siblings = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == section}
    close = [siblings[one] for one in get_close_matches(name, siblings, n=3, cutoff=0.7)]
    close = close or get_close_matches(key, known, n=3, cutoff=0.85)
    if close:
        said = f"; did you mean {' or '.join(close)}?"
    else:
        said = f"\n  {section or 'the configuration'} has: {', '.join(sorted(siblings))}" if siblings else ""
    return f"{key}: unknown setting{said}\n  (+{key}=... adds a key that is not in the configuration)"


def _keys(config: DictConfig, before: str = "") -> Iterable[str]:
    for name in config:
        node = config._get_node(name)
        yield f"{before}{name}"
        if OmegaConf.is_dict(node) and not node._is_none():
            yield from _keys(node, f"{before}{name}.")
