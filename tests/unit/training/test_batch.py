"""How rows are laid out over ranks and mini-batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from verl.utils.tensordict_utils import make_iterator

from verl_ext.training.batch import StepBudget, spread_padding


@given(st.data(), st.integers(1, 5), st.integers(1, 5), st.integers(1, 6))
def test_every_mini_batch_gets_its_share_of_real_rows(data, ranks, mini_batches, per_slice):
    total = ranks * mini_batches * per_slice
    real = data.draw(st.integers(min(mini_batches, total), total))
    is_padding = data.draw(st.permutations([False] * real + [True] * (total - real)))
    order = spread_padding(is_padding, ranks, mini_batches)
    assert sorted(order) == list(range(total))
    per_rank = total // ranks
    assert all(i // per_rank == at // per_rank for at, i in enumerate(order)), "a row changed its rank"
    counts = [0] * mini_batches
    for at, i in enumerate(order):
        counts[at % per_rank // per_slice] += not is_padding[i]
    assert sum(counts) == real and min(counts) >= 1
    if real < total:
        assert max(counts) - min(counts) <= 1


def test_without_padding_the_order_stays():
    assert spread_padding([False] * 12, 2, 3) == list(range(12))


@pytest.mark.parametrize(("flags", "ranks", "slices"), [([False] * 7, 2, 2), ([False] + [True] * 3, 1, 2)])
def test_what_cannot_be_laid_out_is_refused(flags, ranks, slices):
    with pytest.raises(ValueError, match="rows"):
        spread_padding(flags, ranks, slices)


def test_the_budget_is_said_in_full():
    budget = StepBudget(32, 16, 3072, 8, 2, 1, 2)
    text = budget.describe()
    assert budget.rows == 256 and budget.optimizer_steps == 2
    for part in ("32 groups of 16", "3072 rollouts", "256 rows", "2 mini-batches", "2 optimizer steps", "2 ranks"):
        assert part in text


def test_verls_shuffling_of_rows_would_undo_it():
    """Which is why the actor's `shuffle` is refused."""
    padding = [False] * 5 + [True] * 3
    order = spread_padding(padding, ranks=1, mini_batches=4)
    rows = TensorDict({"padding": torch.tensor(padding)[order]}, batch_size=8)

    def alone(seed, **kwargs):
        parts = make_iterator(rows, mini_batch_size=2, epochs=1, seed=seed, dataloader_kwargs=kwargs)
        return any(bool(part["padding"].all()) for part in parts)

    assert not any(alone(seed, shuffle=False) for seed in range(50))
    assert any(alone(seed, shuffle=True) for seed in range(50))
