"""Batch arithmetic: what a training step costs and how its rows are laid out over ranks and mini-batches. Pure Python.

verl pads a batch to a multiple of `ppo_mini_batch_size * rollout.n` and sizes mini-batches by `rollout.n`, so groups of
varying size change the number of optimizer steps. Here the number of mini-batches is what is fixed: any number of
rows is padded to ranks x mini-batches, and the padding is spread so that no mini-batch consists of padding alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepBudget:
    """What one training step may use, resolved from the configuration."""

    prompts: int
    """Groups that a full batch has (allocation.stop.groups)."""

    group_size: int
    """Rollouts of a finished group."""

    rollouts: int
    """Rollouts a step may issue at the most (allocation.stop.rollouts)."""

    rows_per_group: int
    """Rollouts of a group that reach the update (the down-sampler's keep, or the group size)."""

    mini_batches: int
    """Mini-batches of the actor's update in one PPO epoch."""

    ppo_epochs: int
    """Passes of the update over the batch."""

    ranks: int
    """Data-parallel ranks; rows are padded to a multiple of ranks x mini_batches."""

    min_group_rows: int = 2
    """Rows a group needs to be trained on: an advantage relative to the group needs two."""

    @property
    def rows(self) -> int:
        return self.prompts * self.rows_per_group

    @property
    def optimizer_steps(self) -> int:
        return self.mini_batches * self.ppo_epochs

    def describe(self) -> str:
        return (
            f"a training step: {self.prompts} groups of {self.group_size} rollouts wanted, "
            f"at most {self.rollouts} rollouts issued; "
            f"{self.rows} rows trained at the most ({self.rows_per_group} a group) in {self.mini_batches} mini-batches "
            f"x {self.ppo_epochs} epochs = {self.optimizer_steps} optimizer steps on {self.ranks} ranks"
        )


def spread_padding(is_padding: Sequence[bool], ranks: int, mini_batches: int) -> list[int]:
    """An order of the rows in which every mini-batch has its share of real rows.

    Args:
        is_padding: one flag a row, in an order where rank r holds the r-th of `ranks` equal parts, each of which is cut
            into `mini_batches` equal slices; mini-batch j is slice j of all ranks.
        ranks: data-parallel ranks.
        mini_batches: mini-batches a PPO epoch.

    Returns:
        Indices into the rows. No row changes its rank; a batch without padding keeps its order. The real rows of any
        two mini-batches differ by at most one in number.

    Raises:
        ValueError: the number of rows is no multiple of ranks x mini_batches, or fewer real rows than mini-batches.
    """
    total = len(is_padding)
    if total % (ranks * mini_batches):
        raise ValueError(f"{total} rows cannot be cut into {ranks} ranks x {mini_batches} mini-batches")
    if not any(is_padding):
        return list(range(total))
    if total - sum(map(bool, is_padding)) < mini_batches:
        raise ValueError(f"fewer real rows ({total - sum(map(bool, is_padding))}) than mini-batches ({mini_batches})")
    per_rank, per_slice = total // ranks, total // (ranks * mini_batches)
    real_in_slice = [0] * mini_batches
    order: list[int] = []
    for rank in range(ranks):
        rows = range(rank * per_rank, (rank + 1) * per_rank)
        real = [i for i in rows if not is_padding[i]]
        padding = [i for i in rows if is_padding[i]]
        base, extra = divmod(len(real), mini_batches)
        poorest = sorted(range(mini_batches), key=lambda j: (real_in_slice[j], j))[:extra]
        for j in range(mini_batches):
            share = base + (j in poorest)
            real_in_slice[j] += share
            order += real[:share] + padding[: per_slice - share]
            real, padding = real[share:], padding[per_slice - share :]
    return order
