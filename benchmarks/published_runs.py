"""The simulated runs behind `benchmarks.published`: one function an experiment, a dictionary of numbers a seed.

The world is a toy: 10,000 prompts with normal logits, of which a share of .328 is mixed in a group of 8, mean success
rate .35; 128 groups a step; three models of how a batch turns into progress (`verl_ext.simulation.updates`). With
groups of 64 the two that differ most stand for the three.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf, nan
from typing import Any

import numpy as np
from scipy.special import expit, ndtri

from verl_ext.allocation import AllocationSettings, Stop
from verl_ext.simulation.population import effective_share, solve_logits
from verl_ext.simulation.simulation import Simulation
from verl_ext.simulation.simulation_settings import LengthSettings, WorldSettings

UPDATES = ("linear", "adam1k", "adam20k")
EXTREMES = ("linear", "adam1k")
PROMPTS, BATCH, SHARE, TARGET = 10_000, 128, 0.328, 0.65
LONGEST = 320
"""Steps after which a target counts as not reached."""

Numbers = dict[str, float]


@lru_cache(maxsize=16)
def share_for(size: int) -> float:
    """Share of the same population that is mixed in a group of ``size``."""
    location, sd = solve_logits(SHARE, 0.35, 8)
    return effective_share(expit(location + sd * ndtri((np.arange(2048) + 0.5) / 2048)), size)


def world(update: str, size: int, **more: Any) -> WorldSettings:
    settings = {"prompts": PROMPTS, "batch": BATCH, "steps": 1, "effective_share": share_for(size), "update": update}
    return WorldSettings(**{**settings, **more})


def rules(
    allocator: str = "uniform", selector: str = "shuffled", keep: int | None = None, by: str = "max_variance",
    budget: int | None = None, steps: int = LONGEST, **settings: Any,
) -> AllocationSettings:  # fmt: skip
    """The three parts. ``budget``: rollouts a step; null: ample, no rule ends short for want of it."""
    size = settings.setdefault("group_size", 8)
    chosen = {"name": selector, **({"rounds": steps} if selector == "cero" else {})}
    down = {"name": "none"} if keep is None else {"name": by, "keep": keep}
    stop = Stop(rollouts=budget or 60 * BATCH * size)
    return AllocationSettings(chosen, {"name": allocator, **settings}, down, stop, max_rounds=40)


@dataclass
class Course:
    """A run by step: held-out accuracy after it, and what it used so far."""

    accuracy: np.ndarray
    rollouts: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray
    effective: np.ndarray
    """Effective groups trained on so far."""
    groups: np.ndarray
    """Groups trained on so far."""
    short: int = 0
    """Steps with fewer groups than a batch."""

    def at(self, target: float, what: str = "rollouts") -> float:
        """How much of ``what`` (or of steps) was used when the accuracy first reached ``target``; infinite: never."""
        if self.accuracy[-1] < target:
            return inf
        i = int(np.argmax(self.accuracy >= target))
        if i == 0:
            return 0.0
        used = np.arange(len(self.accuracy)) if what == "steps" else getattr(self, what)
        part = (target - self.accuracy[i - 1]) / (self.accuracy[i] - self.accuracy[i - 1])
        return float(used[i - 1] + part * (used[i] - used[i - 1]))


def course(
    update: str, chosen: AllocationSettings, seed: int, steps: int = LONGEST, target: float | None = TARGET, **more: Any
) -> Course:
    """Run until the accuracy is reached, or for all ``steps`` without a target."""
    settings = world(update, chosen.allocator["group_size"], **more)
    run = Simulation.of_world("u_shaped", settings, chosen, seed)
    lines, short = [(run.accuracy(), 0, 0, 0, 0, 0)], 0
    for _ in range(settings.warmup_steps):
        run.step()
    for _ in range(steps):
        done = run.step()
        used = (
            done.rollouts, len(done.kept), done.tokens, sum(group.mixed for group in done.groups), len(done.groups)
        )  # fmt: skip
        lines.append((run.accuracy(), *(a + b for a, b in zip(lines[-1][1:], used, strict=True))))
        short += done.short_by > 0
        if target is not None and lines[-1][0] >= target:
            break
    return Course(*np.array(lines, float).T, short)


# ---------------------------------------------------- collection, frozen

WAVES = {
    "waves of 1B": {"gen_multiple": 1},
    "waves of 3B": {"gen_multiple": 3},
    "one for one": {"refill": "one_for_one"},
}


LENGTHS = (1, 2, 4)
"""Mean length of wrong answers over that of right ones."""


def collection(seed: int) -> Numbers:
    """Ratios of rollouts and tokens per effective group on a frozen population, by how long wrong answers are."""
    found: Numbers = {}
    still = {"frozen": True, "held_out": 1}
    for factor in LENGTHS:
        length = LengthSettings(wrong_factor=factor)
        sara = course("linear", rules("sara"), seed, 20, None, length=length, **still)
        for name, waves in WAVES.items() if factor == 1 else [("waves of 1B", WAVES["waves of 1B"])]:
            ds = course("linear", rules("dynamic_sampling", **waves), seed, 20, None, length=length, **still)
            tokens, rollouts = (_per_group(sara, what) / _per_group(ds, what) for what in ("tokens", "rollouts"))
            found[f"tokens, wrong x{factor}, {name}"] = tokens
            found[f"tokens over rollouts, wrong x{factor}, {name}"] = tokens / rollouts
            if factor == 1:
                found[f"rollouts, {name}"] = rollouts
                if name == "waves of 1B":
                    warm = course("linear", rules("sara", "dps"), seed, 20, None, warmup_steps=50, **still)
                    found["SARA + DPS, warm"] = _per_group(warm, "rollouts") / _per_group(ds, "rollouts")
                    found["SARA + DPS, warm, to uniform's cost"] = warm.rollouts[-1] / (20 * BATCH * 8)
    return found


def _per_group(done: Course, what: str) -> float:
    return float(getattr(done, what)[-1] / done.effective[-1])


# ---------------------------------------------------- learning, groups of 8


def learning(seed: int) -> Numbers:
    """Rollouts to the target accuracy at a full batch of effective groups each step, relative to dynamic sampling."""
    found: Numbers = {}
    for update in UPDATES:
        sara = course(update, rules("sara"), seed)
        both = course(update, rules("sara", "dps"), seed)
        found[f"SARA + DPS to uniform's cost a step, {update}"] = both.rollouts[-1] / (
            (len(both.rollouts) - 1) * BATCH * 8
        )
        for name, waves in WAVES.items():
            ds = course(update, rules("dynamic_sampling", **waves), seed)
            found[f"SARA / {name}, {update}"] = sara.at(TARGET) / ds.at(TARGET)
            found[f"SARA + DPS / {name}, {update}"] = both.at(TARGET) / ds.at(TARGET)
    return found


DRIFT_STEPS, DRIFTS = 40, (0.0, 0.1, 0.3)


def drifting(seed: int) -> Numbers:
    """Share of a full batch that is effective while the policy learns and every prompt walks at random."""
    methods = {
        "uniform": rules("uniform"),
        "DPS": rules("uniform", "dps"),
        "SARA": rules("sara", budget=6 * BATCH * 8),
        "SARA + DPS": rules("sara", "dps", budget=6 * BATCH * 8),
    }
    found: Numbers = {}
    for drift in DRIFTS:
        for name, chosen in methods.items():
            done = course("linear", chosen, seed, DRIFT_STEPS, None, drift=drift, held_out=1)
            found[f"{name}, drift {drift}"] = float(done.effective[-1] / (DRIFT_STEPS * BATCH))
    return found


EQUAL_STEPS = 150


def equal_budget(seed: int) -> Numbers:
    """At uniform's rollouts a step: effective share of the groups trained on, and accuracy after 150 steps."""
    methods = {
        "uniform": rules(),
        "CERO": rules("uniform", "cero", budget=BATCH * 8, steps=EQUAL_STEPS),
        "DPS": rules("uniform", "dps", budget=BATCH * 8),
        "MoPPS": rules("uniform", "mopps", budget=BATCH * 8),
    }
    found: Numbers = {}
    for update in UPDATES:
        done = {name: course(update, chosen, seed, EQUAL_STEPS, None) for name, chosen in methods.items()}
        for name, run in done.items():
            found[f"effective share, {name}, {update}"] = float(run.effective[-1] / run.groups[-1])
            less = run.effective[-1] / run.groups[-1] - done["uniform"].effective[-1] / done["uniform"].groups[-1]
            found[f"effective share, {name} less uniform, {update}"] = float(less)
            found[f"accuracy gained on uniform, {name}, {update}"] = run.accuracy[-1] - done["uniform"].accuracy[-1]
            found[f"rollouts, {name}, {update}"] = run.rollouts[-1] / done["uniform"].rollouts[-1]
    return found


# ---------------------------------------------------- Pilot-Commit, groups of 64

AMPLE_64 = 30 * BATCH * 64


def pilot_commit(seed: int) -> Numbers:
    """Rollouts to the target of GRPO and of dynamic sampling over Pilot-Commit's, and its cost of a step."""
    found: Numbers = {}
    for update in EXTREMES:
        pc = course(update, rules("pilot_commit", group_size=64, budget=AMPLE_64), seed)
        grpo = course(update, rules("uniform", group_size=64), seed)
        dapo = course(update, rules("dynamic_sampling", group_size=64, gen_multiple=3, budget=AMPLE_64), seed)
        found[f"GRPO / Pilot-Commit, {update}"] = grpo.at(TARGET) / pc.at(TARGET)
        found[f"DAPO / Pilot-Commit, {update}"] = dapo.at(TARGET) / pc.at(TARGET)
        found[f"rollouts a step to GRPO's, {update}"] = pc.rollouts[-1] / ((len(pc.rollouts) - 1) * BATCH * 64)
    return found


VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "16 + 48, [.125, .75]": {},
    "4 + 60": {"n_pilot": 4},
    "32 + 32": {"n_pilot": 32},
    "any mixed": {"p_lower": 0.001, "p_upper": 0.999},
    "[.25, .75]": {"p_lower": 0.25},
    "[.0625, .5]": {"p_lower": 0.0625, "p_upper": 0.5},
}


def robustness(seed: int) -> Numbers:
    """Rollouts to the target of GRPO over those of Pilot-Commit with other splits and bands; linear updates."""
    grpo = course("linear", rules("uniform", group_size=64), seed).at(TARGET)
    default = grpo
    found: Numbers = {}
    for name, settings in VARIANTS.items():
        used = course("linear", rules("pilot_commit", group_size=64, budget=AMPLE_64, **settings), seed).at(TARGET)
        default = used if not settings else default
        found[f"GRPO / Pilot-Commit, {name}"] = grpo / used
        found[f"over the default's, {name}"] = default / used
    return found


# ---------------------------------------------------- PODS

COSTS = (0.25, 1.0, 4.0, 16.0, inf)
"""Cost of a row in the update over that of a generated rollout; infinite: generation is free."""
BASELINE_STEPS = 80


def pods(seed: int) -> Numbers:
    """Time of GRPO over that of PODS 64 -> 16, to the best accuracy that GRPO has in 80 steps."""
    found: Numbers = {}
    for update in EXTREMES:
        baselines = {
            size: course(update, rules("uniform", group_size=size), seed, BASELINE_STEPS, None) for size in (16, 64)
        }
        best = {size: float(base.accuracy.max()) for size, base in baselines.items()}
        run = course(update, rules("uniform", group_size=64, keep=16), seed, target=max(best.values()))
        for size, base in baselines.items():
            for cost in COSTS:
                ratio = _time(base, best[size], cost) / _time(run, best[size], cost)
                found[f"GRPO {size} / PODS, c_u/c_g {cost:g}, {update}"] = ratio
    return found


def _time(done: Course, target: float, cost: float) -> float:
    """Of generation and update to the target, in units of a generated rollout; of the update's rows if it is free."""
    if cost == inf:
        return done.at(target, "rows")
    return done.at(target) + cost * done.at(target, "rows")


RATIOS = (2, 4, 8, 16)
KEPT, DOWN_STEPS = 8, 30
OTHERS = ("random", "max_reward", "percentile")


def downsampling(seed: int) -> Numbers:
    """Accuracy gained in 30 steps with 8 of n rollouts kept, and max_variance's less the other rule's; linear updates.

    The other models see the same rows of the same prompts: they differ in the scale alone.
    """
    found: Numbers = {}
    for ratio in RATIOS:
        gain = {}
        for by in ("max_variance", *OTHERS):
            chosen = rules("uniform", group_size=KEPT * ratio, keep=KEPT, by=by)
            done = course("linear", chosen, seed, DOWN_STEPS, None)
            gain[by] = float(done.accuracy[-1] - done.accuracy[0])
            found[f"gain, {by}, n/m {ratio}"] = gain[by]
        for by in OTHERS:
            found[f"gain over {by}, n/m {ratio}"] = gain["max_variance"] - gain[by]
    return found


EXPERIMENTS: dict[str, tuple[Callable[[int], Numbers], int]] = {
    "collection": (collection, 5),
    "learning": (learning, 3),
    "drifting": (drifting, 3),
    "equal_budget": (equal_budget, 3),
    "pilot_commit": (pilot_commit, 3),
    "robustness": (robustness, 3),
    "pods": (pods, 3),
    "downsampling": (downsampling, 3),
}
"""Experiments with their number of seeds."""


def interval(values: list[float]) -> dict[str, Any]:
    """Mean with its 95 % interval over the seeds (Student's t); None where a target was not reached by some seed."""
    from scipy.special import stdtrit

    numbers = np.asarray(values, float)
    if not np.isfinite(numbers).all():
        finite = numbers[np.isfinite(numbers)]
        return {"mean": None, "low": None, "high": None, "seeds": len(numbers), "finite": len(finite), "values": values}
    mean, n = float(numbers.mean()), len(numbers)
    half = float(stdtrit(n - 1, 0.975) * numbers.std(ddof=1) / n**0.5) if n > 1 else nan
    return {"mean": mean, "low": mean - half, "high": mean + half, "seeds": n, "finite": n, "values": values}
