# SPDX-License-Identifier: Apache-2.0
"""Where Hydra finds the configuration, and how it is composed without a command line.

The files lie in `configs/` and `recipes/` of the repository, and inside the package once it is installed. Nothing of
verl is imported here.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton
from omegaconf import DictConfig, OmegaConf

from verl_ext.tiny.policy_store import tiny_paths

CONFIG_MODULE = "verl_ext.configs"
CONFIG_PATH = f"pkg://{CONFIG_MODULE}"


def _verl_config_dir() -> str:
    """The folder of verl's configuration, found without importing verl, whose platform is chosen at its first import.

    Raises:
        ModuleNotFoundError: verl is not installed.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("verl is not installed in this environment; verl_ext needs it")
    return os.path.join(spec.submodule_search_locations[0], "trainer", "config")


def _searchpath() -> list[str]:
    """Where Hydra looks beside verl_ext's own configuration: verl's, and that of every package with rules.

    Such a package names its configuration, laid out as verl_ext's, by an entry point of the group `verl_ext.configs`.
    """
    packages = {f"pkg://{point.value}" for point in entry_points(group="verl_ext.configs")}
    return [f"file://{_verl_config_dir()}", *sorted(packages)]


def verl_defaults() -> DictConfig:
    """verl's configuration as verl has it, all of it in one file."""
    return OmegaConf.load(os.path.join(_verl_config_dir(), "_generated_ppo_trainer.yaml"))


def group_options(group: str) -> list[str]:
    """Names of a group's choices, e.g. `uniform` of `allocation/allocator`, `cpu/sara` of `recipe`.

    Looks in this package's configuration and in those of packages with rules.
    """
    names = set()
    for package in (CONFIG_MODULE, *(point.value for point in entry_points(group="verl_ext.configs"))):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            root = Path(folder, group)
            names |= {str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.yaml")}
    return sorted(name for name in names if name.rpartition("/")[2] != "base")


def _of_whole(function: Callable[[tuple[int, ...]], int]) -> Callable[..., int | None]:
    """A function of whole numbers; None where one is none, which the checks name."""
    return lambda *numbers: function(numbers) if all(type(number) is int for number in numbers) else None


def _smollm2_path(part: str) -> str:
    from verl_ext.smollm2.prepare import smollm2_paths  # pyarrow: only where it is needed

    return str(getattr(smollm2_paths(), part))


OmegaConf.register_new_resolver("verl_ext_sum", _of_whole(sum), replace=True)
OmegaConf.register_new_resolver("verl_ext_product", _of_whole(math.prod), replace=True)
OmegaConf.register_new_resolver("verl_ext_searchpath", _searchpath, replace=True)
OmegaConf.register_new_resolver("smollm2_path", _smollm2_path, replace=True)
OmegaConf.register_new_resolver("tiny_path", lambda part, mix: str(getattr(tiny_paths(mix), part)), replace=True)


def compose_config(overrides: Sequence[str] = (), name: str = "main") -> DictConfig:
    """Compose a configuration as the commands do.

    Args:
        overrides: Hydra overrides, as on the command line.
        name: the file in `configs/`: `main`, `simulate`, `compare`.
    """
    # A command that Hydra has composed may compose others.
    outer = Singleton.get_state()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module(CONFIG_MODULE, version_base=None):
            return compose(name, overrides=list(overrides))
    finally:
        Singleton.set_state(outer)
