"""A run over a simulated population, and what must hold after every step."""

from __future__ import annotations

import os

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit, ndtri

from verl_ext.allocation import Fate, PromptPool, Stop, Verdict, make_allocator, make_downsampler, make_selector
from verl_ext.simulation.simulated_backend import SimulatedBackend
from verl_ext.simulation.simulation import Simulation


def examples(n):
    """Examples of a property test, times the environment's EXAMPLES."""
    return n * int(os.environ.get("EXAMPLES", "1"))


def keys(n):
    return [f"prompt-{i}" for i in range(n)]


def u_shaped(effective_share, size=10_000, mean=0.35, group_size=8):
    """Success rates with a normal logit, solved for the mean and for the share of groups that end mixed."""
    normal = ndtri((np.arange(4001) + 0.5) / 4001)

    def middle(sd):
        return brentq(lambda m: expit(m + sd * normal).mean() - mean, -60, 60)

    def share(sd):
        p = expit(middle(sd) + sd * normal)
        return (1 - p**group_size - (1 - p) ** group_size).mean()

    sd = brentq(lambda sd: share(sd) - effective_share, 0.5, 40)
    return expit(middle(sd) + sd * ndtri((np.arange(size) + 0.5) / size))


class Run(Simulation):
    """A simulated run of rules by name."""

    def __init__(
        self, rates, allocator="sara", downsampler="none", groups=4, rollouts=None, max_rounds=8, seed=0,
        keep=None, backend=None, settings=None, selector="shuffled", chooses=None, rounds="barrier", async_=None,
        **faults,
    ):  # fmt: skip
        super().__init__(
            PromptPool(keys(len(rates)), seed=seed),
            make_selector(selector, **(chooses or {})),
            make_allocator(allocator, **(settings or {})),
            make_downsampler(downsampler, **({"keep": keep} if keep else {})),
            Stop(groups, rollouts),
            rounds=rounds, max_rounds=max_rounds, async_=async_, seed=seed,
            backend=backend or SimulatedBackend(rates, seed, **faults),
        )  # fmt: skip


def decisions(collected):
    """Everything a step decided."""
    return (
        [(g.uid, g.prompt, g.requested, g.verdict, g.fate) for g in collected.started],
        [(o.group, o.session) for o in collected.kept],
        collected.rounds,
        collected.rollouts,
    )


def check_step(run, collected, record):
    """The properties of one collected step; ``record`` is its line of the ledger."""
    assert collected.rollouts == record["issued"] <= run.stop.budget(run.allocator.group_size)
    assert collected.tokens == record["tokens"]
    assert collected.rounds <= run.max_rounds
    assert record["in_flight"] == 0
    assert record["issued_total"] == sum(record["fates_total"].values()) + record["waiting"]
    assert record["tokens_total"] == sum(record["fate_tokens_total"].values()) + record["waiting_tokens"]
    prompts = [group.prompt for group in collected.started]
    assert len(prompts) == len(set(prompts)), "a prompt was offered twice in a step"
    assert len(collected.groups) + collected.short_by == run.stop.groups
    assert collected.short_by >= 0
    everything = {(o.group, o.session) for g in collected.started for o in g.outcomes if not o.failed}
    kept = [(o.group, o.session) for o in collected.kept]
    dropped = [(o.group, o.session) for o in collected.dropped]
    waiting = [(o.group, o.session) for g in collected.waiting for o in g.outcomes if not o.failed]
    assert len(kept + dropped + waiting) == len(everything)
    assert set(kept + dropped + waiting) == everything
    for group in collected.started:
        assert group.pending == 0
        assert [o.session for o in group.outcomes] == list(range(group.requested))
        assert group.requested <= run.allocator.group_size
    for group in collected.groups:
        assert group.fate is Fate.TRAINED and group.verdict is Verdict.COMMIT
    assert all(o.correct is not None and np.isfinite(o.score) for o in collected.kept)
