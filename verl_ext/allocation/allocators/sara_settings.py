"""Settings of SARA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..settings import require
from .base import AllocatorSettings
from .sara_judges import make_judge
from .sara_rule import SaraRule, sara_rule


@dataclass(frozen=True)
class SaraSettings(AllocatorSettings):
    """Settings of SARA.

    The guarantee that an abandoned group would have been effective with probability below tau is conditional on the
    prior being right; on a U-shaped population the uniform prior over-predicts that probability three- to sixfold.
    ``top_up`` costs fewer rollouts per effective group than uniform sampling only if P(effective | abandoned) is at
    most e (k - n*) / k, e being the effective share; it reverses above e of about 0.65. ``stop`` always costs fewer.
    """

    probe: int | None = 4
    """n*, the length of a pure prefix at which a group is abandoned; the primary knob. null if ``tau_low`` is given."""
    tau_low: float | None = None
    """Abandon where the probability of becoming mixed is below this, strictly. It does not carry over to another
    ``group_size``: at 64, 0.45 means a probe of 35. Given together with ``probe`` only if the two agree."""
    chunk: int | None = None
    """Rollouts a round while probing; null: the whole probe. With ``top_up`` smaller chunks only add rounds."""
    window: int | Literal["adaptive"] = "adaptive"
    """Prompts of a wave. ``adaptive``: what is missing over the running commit rate; or a fixed number."""
    margin: float = 0.0
    """Share of prompts an adaptive wave has beyond that (or, negative, short of it)."""
    commit: Literal["top_up", "stop"] = "top_up"
    """``top_up``: committed groups get all ``group_size`` rollouts; ``stop``: they keep what the probe gave, which
    makes groups of unequal size and pays only where update noise does not matter."""
    max_staleness: int = 0
    """Versions of the weights that a committed group beyond the batch may wait for a later step, before its top-up; it
    enters that step's batch first. 0: it is surplus. With 1, ``margin: 0.1`` costs almost nothing and saves rounds."""
    audit_fraction: float = 0.0
    """Share of abandoned groups completed all the same, never trained on: a live estimate of P(effective | abandoned)
    beside what is predicted. They ride in rounds made anyway and within the budget, else they are not completed."""
    alpha: float = 1.0
    """Prior pseudo-count of successes."""
    beta: float = 1.0
    """Prior pseudo-count of failures."""
    carry_prior: bool = False
    """False: every prompt starts from the prior in every step; True: from its own discounted posterior."""
    discount: float = 0.7
    """With ``carry_prior``: weight of a prompt's earlier outcomes at each further visit. At most 0.8, since with an
    undiscounted prior a prompt is in the end never sampled again."""
    effective: Literal["outcome", "spread"] = "outcome"
    """What a group with signal is: ``outcome``, with right and wrong outcomes; ``spread``, with scores spread over more
    than ``tolerance``, for graded rewards. Not with scores shaped by length, whose spread says nothing."""
    tolerance: float = 0.0
    """With ``spread``: a difference between highest and lowest score that still counts as none."""
    score_low: float = 0.0
    """With ``spread``: the lowest score."""
    score_high: float = 1.0
    """With ``spread``: the highest score."""
    levels: int = 5
    """With ``spread``: equally spaced levels of the prior from lowest to highest score, scores taken to the nearest."""
    concentration: float = 2.0
    """With ``spread``: pseudo-count of the Dirichlet prior over all levels; 2 with two levels is the uniform prior."""
    growth: float = 1.3
    """Factor of an adaptive wave's size, for each wave after the second."""
    cap: float = 8.0
    """Most prompts of an adaptive wave, in units of ``stop.groups``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("alpha", "beta", "concentration"):
            value = getattr(self, name)
            require(0 < value < float("inf"), f"allocator.{name}", value, "a finite number above 0")
        require(not self.carry_prior or self.effective == "outcome", "allocator.carry_prior", self.carry_prior,
                "false with effective=spread: the carried prior is over right and wrong outcomes")  # fmt: skip
        require(0 < self.discount <= 0.8, "allocator.discount", self.discount, "a number in (0, 0.8]")
        require(0 <= self.tolerance < float("inf"), "allocator.tolerance", self.tolerance, "a number of 0 or more")
        require(self.levels >= 2, "allocator.levels", self.levels, "an integer of 2 or more")
        require(self.score_low < self.score_high, "allocator.score_high", self.score_high,
                f"a number above score_low={self.score_low}")  # fmt: skip
        require(self.effective == "outcome" or self.tolerance < self.score_high - self.score_low, "allocator.tolerance",
                self.tolerance, f"less than score_high - score_low={self.score_high - self.score_low}")  # fmt: skip
        make_judge(self)  # checks probe and tau_low
        require(self.chunk is None or self.chunk >= 1, "allocator.chunk", self.chunk, "null or an integer of 1 or more")
        window = self.window
        require(window == "adaptive" or window >= 1, "allocator.window", window, "adaptive, or an integer of 1 or more")
        require(-1 < self.margin <= 10, "allocator.margin", self.margin, "a number in (-1, 10]")
        require(self.max_staleness >= 0, "allocator.max_staleness", self.max_staleness, "an integer of 0 or more")
        require(0 <= self.audit_fraction <= 1, "allocator.audit_fraction", self.audit_fraction, "a number in [0, 1]")
        require(1 <= self.growth <= 10, "allocator.growth", self.growth, "a number in [1, 10]")
        require(0 < self.cap <= 1000, "allocator.cap", self.cap, "a number in (0, 1000]")

    def rule(self) -> SaraRule:
        """The verdicts on outcomes that these settings mean."""
        return sara_rule(self.group_size, self.probe, self.tau_low, self.alpha, self.beta)
