# SPDX-License-Identifier: Apache-2.0
"""Settings of a simulated run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_ext.typed_settings import build, require

POPULATIONS = ("uniform", "u_shaped", "all_solved", "all_hopeless", "recorded")
UPDATES = ("linear", "adam1k", "adam20k")


@dataclass(frozen=True)
class LengthSettings:
    """Response lengths: log-normal, wrong answers longer than right ones."""

    mean_tokens: float = 400.0
    """Mean length of a right answer, before the limit."""
    sigma: float = 0.6
    """Standard deviation of the log length."""
    wrong_factor: float = 2.0
    """Mean length of a wrong answer over that of a right one."""
    max_tokens: int = 4096
    """The length limit."""

    def __post_init__(self) -> None:
        for name in ("mean_tokens", "wrong_factor"):
            value = getattr(self, name)
            require(0 < value < float("inf"), f"simulation.length.{name}", value, "a number above 0")
        require(self.sigma >= 0, "simulation.length.sigma", self.sigma, "a number of 0 or more")
        require(self.max_tokens >= 1, "simulation.length.max_tokens", self.max_tokens, "an integer of 1 or more")


@dataclass(frozen=True)
class WorldSettings:
    """The world that rollouts are allocated in: prompts, and what training on groups does to them."""

    prompts: int = 17_000
    """Prompts of the pool. With ``population=recorded`` the table's own number."""
    steps: int = 200
    """Steps that are counted."""
    batch: int = 128
    """Groups of a step's batch (B)."""
    warmup_steps: int = 0
    """Steps before those, not counted: selectors get to know the prompts."""
    frozen: bool = False
    """True: success rates never change."""
    effective_share: float | None = None
    """P(a group of group_size is mixed) over the population, when the run begins; with ``u_shaped`` only. null: .33."""
    mean: float = 0.35
    """Mean success rate of ``u_shaped``, when the run begins."""
    update: Literal["linear", "adam1k", "adam20k"] = "linear"
    """How the groups of a batch turn into progress, see `verl_ext.simulation.updates`; it decides rankings more than
    the rules do."""
    pace: int = 200
    """Steps in which uniform GRPO (128 prompts x 8) takes the mean success rate to ``goal``; sets the learning rate."""
    goal: float = 0.75
    """See ``pace``."""
    topics: int = 50
    """Topics of the prompts; a fifth of the progress is made within a topic."""
    own: float = 0.8
    """Logits that a trained prompt itself gains per unit of its group's signal sqrt(p (1 - p)): about .3 a visit."""
    diminish: float | None = None
    """Visits after which a prompt's group brings half the progress; null: never."""
    drift: float = 0.0
    """Standard deviation, in logits a step, of a random walk of every prompt, whatever is trained on."""
    held_out: int = 4_000
    """Prompts on which accuracy is measured, never trained on."""
    record: str | None = None
    """The table to replay, for ``population=recorded``: what ``allocation.record`` of a training run wrote."""
    length: LengthSettings = field(default_factory=LengthSettings)
    """Response lengths."""
    slots: int | None = None
    """Answers that the engines generate at once, each a token a second; null: as many as are asked for."""
    update_s: float = 0.0
    """Seconds of an update, on the clock of ``slots`` or of ``rounds: streaming``."""
    engines: Literal["colocated", "separate"] = "colocated"
    """``colocated``: they rest during an update; ``separate``: the next step's rollouts are made meanwhile."""

    def __post_init__(self) -> None:
        share, with_slots = self.effective_share, "an integer of 1 or more with simulation."
        whole, above, zero = "an integer of 1 or more", "null or above 0", "a number of 0 or more"
        for fits, name, accepted in (
            *((getattr(self, n) >= 1, n, whole) for n in ("prompts", "steps", "batch", "pace", "topics", "held_out")),
            (self.warmup_steps >= 0, "warmup_steps", "an integer of 0 or more"),
            *((0 < getattr(self, name) < 1, name, "a number in (0, 1)") for name in ("mean", "goal")),
            (self.update in UPDATES, "update", " | ".join(UPDATES)),
            *((getattr(self, name) >= 0, name, zero) for name in ("own", "drift", "update_s")),
            (self.diminish is None or self.diminish > 0, "diminish", above),
            (self.slots is None or self.slots >= 1, "slots", f"null, or {whole}"),
            (not self.update_s or self.slots is not None, "slots", f"{with_slots}update_s={self.update_s}"),
            (self.engines == "colocated" or self.slots is not None, "slots", f"{with_slots}engines=separate"),
            (share is None or 0 < share < 1, "effective_share", "null, or a number in (0, 1)"),
        ):
            require(fits, f"simulation.{name}", getattr(self, name), accepted)


def world_settings(population: str, values: Mapping[str, Any]) -> WorldSettings:
    """From configuration values of ``simulation``.

    Raises:
        SettingError: a setting is unknown, of the wrong type, out of range, or of no use with this population.
    """
    require(population in POPULATIONS, "population", population, " | ".join(POPULATIONS))
    settings = build(WorldSettings, "simulation", values)
    require(
        population == "u_shaped" or settings.effective_share is None,
        "simulation.effective_share", settings.effective_share, f"null with population={population}",
    )  # fmt: skip
    if population == "recorded":
        require(
            bool(settings.record), "simulation.record", settings.record, "a recorded table with population=recorded"
        )
    else:
        require(not settings.record, "simulation.record", settings.record, f"null with population={population}")
    return settings
