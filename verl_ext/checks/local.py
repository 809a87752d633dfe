# SPDX-License-Identifier: Apache-2.0
"""The checks that need no cluster, in the order that they are made before every run."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.allocation import Stop
from verl_ext.allocation.compose import Async
from verl_ext.checks.allocation_settings import check_config, warnings_of
from verl_ext.checks.async_modes import async_problems
from verl_ext.checks.numbers import number_problems
from verl_ext.checks.versions import check_versions, version_warnings
from verl_ext.rollout.outcomes import OutcomeRule
from verl_ext.runs.checkpoints import TRACKER
from verl_ext.runs.own_folder import COMMAND
from verl_ext.runs.records import ABOUT, CONFIG, LEDGER, METRICS
from verl_ext.training.training_settings import VERLS_OWN, TrainingSettings

from .data import Rows, check_data, check_storage, files_of
from .findings import Checks, Problems, Seen, State, missing_setting
from .memory import check_memory
from .model import check_attention, check_context, check_lengths, check_model
from .unread import check_unread
from .wandb_login import check_wandb

DATA = ("data.train_files", "data.val_files")
FILES = (CONFIG, ABOUT, LEDGER, METRICS, COMMAND, TRACKER)
"""Files of a run's folder."""

_SECTIONS = (
    *(f"actor_rollout_ref.{part}" for part in ("actor.optim", "model", "rollout.agent", "rollout.val_kwargs")),
    "algorithm",
    "data",
    *(f"reward.{part}" for part in ("custom_reward_function", "reward_manager", "reward_model")),
    "trainer.v1.sampler",
    "transfer_queue.backend.SimpleStorage",
)
"""Settings that have others under them, which are looked at without asking; what they stand in has, too."""

_SECTIONS_OR_NULL = (
    "actor_rollout_ref.model.override_config",
    "algorithm.filter_groups",
    "algorithm.rollout_correction",
    "data.apply_chat_template_kwargs",
    "data.custom_cls",
    "distillation",
)


def check_settings(config: DictConfig, checks: Checks) -> TrainingSettings | None:
    """What the configuration says by itself. Imports nothing of verl.

    Returns:
        The settings of `allocation`; None for verl's own trainer, and where there is a problem.
    """
    checks.run("configuration", _resolvable, config)
    if checks.problems:
        return None
    settings = checks.run("settings", _settings, config)
    checks.run("unread keys", check_unread, config)
    checks.run("versions", _versions, config)
    checks.run("folders", _folders, config)
    checks.run("W&B", check_wandb, config)
    return settings


def check_inputs(config: DictConfig, checks: Checks) -> dict[str, Any]:
    """Engine, data files and model: what has to be on this machine. Imports nothing of verl.

    Returns:
        By setting the `Rows` that were read, and `tokenizer`, its path; None for what cannot be read here.
    """
    model = [config.actor_rollout_ref.model.path]
    if other := config.actor_rollout_ref.model.get("tokenizer_path"):
        model.append(other)
    checks.run("engine", _engine, config)
    found = {"tokenizer": checks.run("model", _unless_made, config, model, check_model, config)}
    if found["tokenizer"]:
        checks.run("model", check_context, config)
    for name in DATA:
        if name.split(".")[1] not in config.data:
            checks.add("data", State.PROBLEM, f"{name} is missing: give it a file, or a list of files")
            found[name] = None
            continue
        found[name] = checks.run("data", _unless_made, config, files_of(config, name), check_data, config, name)
    return found


def check_with_verl(config: DictConfig, checks: Checks, settings: TrainingSettings | None, inputs: dict) -> None:
    """What verl itself knows of its settings, the reward, and the prompts' lengths. Imports verl: choose the platform
    first."""
    from .verl_side import check_choices, validate

    checks.run("verl", check_choices, config)
    checks.run("verl", validate, config)
    checks.run("model", check_attention, config)
    tried = {}
    for name in DATA:
        tried |= {source: row for source, row in (inputs[name].by_source if inputs.get(name) else {}).items()
                  if source not in tried}  # fmt: skip
    checks.run("reward", _reward, config, settings, list(tried.values()))
    if number_problems(config):
        checks.skip("data", "memory, storage, prompts' lengths: the numbers among the settings have to be right first")
        return
    checks.run("memory", check_memory, config)
    if validation := inputs.get("data.val_files"):
        waiting = settings.rules.allocator.most_waiting(settings.stop.groups) if settings else 0
        checks.run("data", check_storage, config, validation, waiting)
    for name in DATA:
        if inputs.get("tokenizer") and inputs.get(name) and not _has_media(config, inputs[name]):
            checks.run("data", check_lengths, config, inputs["tokenizer"], inputs[name])


def _resolvable(config: DictConfig) -> Seen:
    try:
        OmegaConf.to_container(config, resolve=True)
    except Exception as error:
        raise Problems(missing_setting(error) or " ".join(str(error).split())) from error
    if problems := _not_sections(config):
        raise Problems(*problems)
    return Seen("composes, and every reference in it can be resolved")


def _not_sections(config: DictConfig) -> list[str]:
    """What is a single value, but should have settings under it: the checks after this one could not name it."""
    problems = {}
    for section in _SECTIONS:
        names = section.split(".")
        for depth in range(1, len(names) + 1):
            setting = ".".join(names[:depth])
            if not isinstance(value := OmegaConf.select(config, setting), DictConfig):
                problems[setting] = f"{setting}={value!r}: settings under it are accepted, not a single value"
                break
    for setting in _SECTIONS_OR_NULL:
        if any(setting.startswith(f"{above}.") for above in problems):
            continue
        if not isinstance(value := OmegaConf.select(config, setting), DictConfig | None):
            problems[setting] = f"{setting}={value!r}: null or settings under it are accepted, not a single value"
    return list(problems.values())


def _settings(config: DictConfig) -> Seen:
    if (mode := config.trainer.v1.trainer_mode) in VERLS_OWN:
        if problems := number_problems(config) or async_problems(config):
            raise Problems(*problems)
        return Seen(f"trainer.v1.trainer_mode={mode}: verl's own trainer; nothing under allocation is used")
    if problems := _taken_away(config):
        raise Problems(*problems)
    settings, budget = check_config(config)
    return Seen(budget.describe(), settings, warnings_of(config))


def _taken_away(config: DictConfig) -> list[str]:
    """Settings of `allocation` that are missing: rollout workers read them from the configuration as they are."""
    given = OmegaConf.to_container(config.allocation, resolve=True) if config.get("allocation") is not None else {}
    parts = {"": (TrainingSettings, given)} | {
        f"{name}.": (kind, given.get(name))
        for name, kind in (("stop", Stop), ("async", Async), ("outcome", OutcomeRule))
    }
    return [
        f"allocation.{part}{name} is missing: `~allocation.{part}{name}` cannot take it away; give it a value"
        for part, (kind, found) in parts.items()
        for name in (field.rstrip("_") for field in kind.__dataclass_fields__)
        if isinstance(found, dict) and found and name not in found
    ]


def _versions(config: DictConfig) -> Seen:
    check_versions(config.trainer.device)
    seen = "verl and what else is relied upon have the versions needed"
    return Seen(seen, warnings=version_warnings(config.trainer.device))


_ENGINES = {"vllm": "vllm", "sglang": "sglang"}
"""Name in verl -> module."""


def _engine(config: DictConfig) -> Seen:
    name = config.actor_rollout_ref.rollout.name
    if (module := _ENGINES.get(name)) and find_spec(module) is None:
        installed = [other for other, found in _ENGINES.items() if find_spec(found)]
        there = ", ".join((*installed, "hf (docs/installation.md)"))
        raise Problems(
            f"actor_rollout_ref.rollout.name={name}: {module} is not installed here; accepted: pip install "
            f'"verl[{name}]==0.9.1" in an environment of its own, or an engine that is here: {there}'
        )
    return Seen(f"actor_rollout_ref.rollout.name={name}" + (": is installed" if module else ""))


def _folders(config: DictConfig) -> Seen:
    trainer, problems = config.trainer, []
    wanted = {"trainer.default_local_dir": trainer.default_local_dir}
    if OmegaConf.select(config, "allocation.record") not in (None, "auto"):
        wanted["allocation.record"] = config.allocation.record
    for setting, path in wanted.items():
        if not isinstance(path, str) or not path:
            problems.append(f"{setting}={path!r}: a folder's path is accepted")
        elif "://" not in path and (fault := _not_writable(path)):
            problems.append(f"{setting}={path}: {fault}")
        else:
            files = FILES if setting == "trainer.default_local_dir" else ()
            folders = [name for name in files if Path(os.path.expanduser(path), name).is_dir()]
            said = "in it is a folder; a file is expected: move it away"
            problems += [f"{setting}={path}: {name} {said}" for name in folders]
    if trainer.resume_mode == "resume_path":
        path = trainer.resume_from_path
        if not isinstance(path, str) or "global_step_" not in path or not os.path.isdir(path):
            problems.append(f"trainer.resume_from_path={path!r}: an existing folder global_step_N is accepted")
    if problems:
        raise Problems(*problems)
    return Seen(f"trainer.default_local_dir={trainer.default_local_dir} can be written")


def _not_writable(given: str) -> str | None:
    path = Path(os.path.expanduser(given))
    if path.parts and path.parts[0].startswith("~"):
        return f"{path.parts[0]} is no user's home here"
    path = path.absolute()
    try:
        there = next(folder for folder in (path, *path.parents) if folder.exists())
    except OSError as error:
        return f"cannot be a folder: {error.strerror}"
    if not there.is_dir():
        return f"{there} is a file"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written by this user"


def _unless_made(config: DictConfig, paths: list[str], check, *args) -> Seen:
    """A check of paths, but where they are the tiny task's, which is made on first use.

    Raises:
        Problems: the tiny task is to be made where nothing can be written.
    """
    if config.get("tiny") is not None:
        from verl_ext.tiny.policy_store import default_cache, tiny_paths

        made = tiny_paths(config.tiny.mix)
        own = {str(made.model), str(made.train), str(made.val)}
        if paths and all(path in own and not os.path.exists(path) for path in paths):
            if fault := _not_writable(str(made.train.parent.parent)):
                raise Problems(
                    f"VERL_EXT_CACHE={default_cache()}: {fault}; accepted: a folder for the tiny task that can be "
                    "written (unset: ~/.cache/verl_ext)"
                )
            return Seen(f"{paths[0]}: made when the run starts (tiny.mix={config.tiny.mix})")
    return check(*args)


def _reward(config: DictConfig, settings: TrainingSettings | None, rows) -> Seen:
    from verl_ext.checks.reward_trial import check_reward

    warnings: list[str] = []
    said = check_reward(config, settings, rows, warnings.append)
    return Seen(said, warnings=tuple(warnings))


def _has_media(config: DictConfig, rows: Rows) -> bool:
    """Whether prompts carry images, video or sound, whose tokens only verl's processor can count."""
    keys = [config.data.get(f"{kind}_key") for kind in ("image", "video", "audio")]
    return any(key in rows.columns for key in keys)
