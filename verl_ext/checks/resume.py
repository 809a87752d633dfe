# SPDX-License-Identifier: Apache-2.0
"""Whether the checkpoint that a run would resume from is one of the same rules, data order and sizes."""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_ext.allocation import StateError, load_state
from verl_ext.runs.checkpoints import TrackerError, resume_step
from verl_ext.training.identity import differences, identity, other_run
from verl_ext.training.training_settings import TrainingSettings, resolve_budget

from .findings import Problems, Seen


def check_resume(config: DictConfig, settings: TrainingSettings, folder: str | os.PathLike[str]) -> Seen:
    """The state beside the weights that would be resumed from; the trainer looks at the data's digest besides.

    Args:
        folder: the run's.

    Raises:
        Problems: the state is of another rule, setting or version, and `allocation.resume=strict`.
    """
    trainer = config.trainer
    if trainer.resume_mode == "disable" or settings.resume == "fresh":
        return Seen("no state of the rules is resumed from")
    if trainer.resume_mode == "resume_path":
        checkpoint = Path(os.path.expanduser(trainer.resume_from_path))
    else:
        try:
            step = resume_step(folder)
        except TrackerError:
            step = None  # the trainer mends it, or says what is wrong
        if not step:
            return Seen(f"{folder}: no checkpoint to resume from")
        checkpoint = Path(folder, f"global_step_{step}")
    state = checkpoint / "allocation"
    try:
        saved = load_state(state)["identity"]
    except StateError as error:
        raise Problems(f"{error}; allocation.resume=fresh starts the rules anew") from error
    saved = {name: value for name, value in saved.items() if name != "training prompts"}
    data = OmegaConf.to_container(config.data, resolve=True)
    if differing := differences(saved, identity(settings, resolve_budget(config, settings), data)):
        raise Problems(other_run(state, differing))
    return Seen(f"{checkpoint}: of the same rules")
