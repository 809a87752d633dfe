# SPDX-License-Identifier: Apache-2.0
"""verl's own checks of its settings, and names that verl would look up only during the run."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable

from omegaconf import DictConfig, OmegaConf

from .findings import Problems, Seen


def validate(config: DictConfig) -> Seen:
    """verl's `validate_config` and its dataclass of the rollout's settings.

    Raises:
        Exception: whatever verl says.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config
    from verl.utils.device import auto_set_device

    auto_set_device(config)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        validate_config(
            config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
        )
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    return Seen("verl's own validate_config passes")


def _estimators() -> list[str]:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    return [str(getattr(name, "value", name)) for name in ADV_ESTIMATOR_REGISTRY]


def _losses() -> list[str]:
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    return list(POLICY_LOSS_REGISTRY)


def _loggers() -> list[str]:
    from verl.utils.tracking import Tracking

    return [*Tracking.supported_backend, "tracking"]


def _engines() -> list[str]:
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    return [name for name, _ in _ROLLOUT_REGISTRY]


CHOICES: dict[str, Callable[[], list[str]]] = {
    "algorithm.adv_estimator": _estimators,
    "actor_rollout_ref.actor.policy_loss.loss_mode": _losses,
    "actor_rollout_ref.rollout.name": _engines,
    "trainer.logger": _loggers,
    "trainer.resume_mode": lambda: ["auto", "disable", "resume_path"],
    "data.truncation": lambda: ["error", "left", "right", "middle"],
}
"""Setting -> the names verl knows."""


def check_choices(config: DictConfig) -> Seen:
    """Names that verl looks up in a registry, some of them in the first step only.

    Raises:
        Problems: every name that verl does not know, with those it does.
    """
    from verl.utils.import_utils import import_external_libs

    # Where a user registers names of their own.
    external = config.actor_rollout_ref.model.get("external_lib")
    try:
        import_external_libs(external)
    except Exception as error:
        raise Problems(f"actor_rollout_ref.model.external_lib={external}: cannot be imported: {error}") from error
    problems = []
    for setting, known in CHOICES.items():
        value = OmegaConf.select(config, setting)
        given = [value] if isinstance(value, str) or value is None else list(value)
        problems += [
            f"{setting}={name}: accepted are {', '.join(sorted(set(known())))}" for name in given if name not in known()
        ]
    if problems:
        raise Problems(*problems)
    return Seen(f"{', '.join(CHOICES)}: known to verl")
