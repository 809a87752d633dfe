# SPDX-License-Identifier: Apache-2.0
"""Check for a W&B account before the start. verl asks for it only once model and engines are loaded."""

from __future__ import annotations

import configparser
import contextlib
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from omegaconf import DictConfig, OmegaConf

from verl_ext.launch.join_cluster import cluster_address

from .findings import Problems, Seen

_GIVEN = "ray_kwargs.ray_init.runtime_env.env_vars"
_NO_ACCOUNT = ("offline", "dryrun", "disabled")


def check_wandb(config: DictConfig) -> Seen:
    """Where `trainer.logger` names W&B, whether a key for it is found here, in the places that W&B itself looks at.

    Without one it is a warning where a cluster is joined: the trainer may run on a machine that has one.

    Raises:
        Problems: no key, and no cluster is joined; an address of W&B that is none, or an environment of the run that
            is no mapping.
    """
    logger = config.trainer.logger
    # "tracking" is verl's old name for it.
    if not {"wandb", "tracking"} & ({logger} if isinstance(logger, str) else set(logger or ())):
        return Seen("trainer.logger does not name it")
    given = OmegaConf.select(config, _GIVEN)
    if not isinstance(given, DictConfig | None):
        raise Problems(f"{_GIVEN}={given!r}: null or a mapping of variables to their texts is accepted")
    environment = {**os.environ, **(given or {})}
    settings = _settings(environment)
    mode = environment.get("WANDB_MODE") or settings.get("mode") or "online"
    if mode in _NO_ACCOUNT:
        return Seen(f"mode {mode}: no account is needed")
    url = environment.get("WANDB_BASE_URL") or settings.get("base_url") or "https://api.wandb.ai"
    host = _host(url)
    if not host:
        raise Problems(f"WANDB_BASE_URL={url!r}: an address such as https://api.wandb.ai is accepted")
    if any(environment.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return Seen("the environment has a key")
    if settings.get("api_key") or _in_netrc(environment, host):
        return Seen(f"there is a key for {url}")
    said = (
        f"trainer.logger={logger}: no key for {url} is found here (WANDB_API_KEY, ~/.netrc, W&B's settings), "
        "and without one the trainer ends once all is loaded: run `wandb login`, set WANDB_MODE=offline, or leave "
        "wandb out of trainer.logger"
    )
    if cluster_address(config) is None:
        raise Problems(said)
    return Seen("no key is found", warnings=(said,))


def _host(url: Any) -> str | None:
    """The address's host, with its port; None of what is no address."""
    with contextlib.suppress(ValueError):
        if isinstance(url, str) and (parts := urlsplit(url)).scheme in ("http", "https"):
            return parts.netloc or None
    return None


def _path(value: Any) -> Path:
    # Not Path's own, which raises where `~name` is no user's.
    return Path(os.path.expanduser(str(value)))


def _settings(environment: Mapping[str, str]) -> dict[str, str]:
    """W&B's settings files: the user's, then those of the folder (`wandb offline` writes them)."""
    parser = configparser.ConfigParser(interpolation=None)
    user = _path(environment.get("WANDB_CONFIG_DIR") or "~/.config/wandb")
    try:
        parser.read([user / "settings", Path(str(environment.get("WANDB_DIR") or ".")) / "wandb" / "settings"])
    except (configparser.Error, OSError, UnicodeError):
        return {}
    return dict(parser["default"]) if parser.has_section("default") else {}


def _in_netrc(environment: Mapping[str, str], host: str) -> bool:
    places = [environment["NETRC"]] if environment.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for path in map(_path, places):
        try:
            if found := netrc.netrc(path).authenticators(host):
                return bool(found[2])
        except (netrc.NetrcParseError, OSError, UnicodeError):
            continue
    return False
