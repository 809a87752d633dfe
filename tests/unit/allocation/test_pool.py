"""Epochs without loss, no prompt twice in a step, and the state."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.allocation.helpers import examples, keys
from verl_ext.allocation import PromptPool, StateError, prompt_key


@settings(max_examples=examples(60))
@given(size=st.integers(1, 12), draws=st.lists(st.integers(0, 9), max_size=30), seed=st.integers(0, 9), data=st.data())
def test_every_epoch_offers_every_prompt_once(size, draws, seed, data):
    """With prompts retired and deferred at random, against a plain model of the rules."""
    pool = PromptPool(keys(size), seed=seed)
    retired, deferred, offered, epoch = set(), set(), set(), 0
    for n in draws:
        pool.begin_step()
        in_step = []
        for row in pool.take(n):
            if not set(range(size)) - retired - deferred - offered:
                epoch, offered, deferred = epoch + 1, set(), set()  # all were offered: the next epoch began
            assert row not in retired | deferred | offered and row not in in_step
            offered.add(row)
            in_step.append(row)
        if len(in_step) < n:  # everything that may be offered was
            rest = set(range(size)) - retired - deferred - offered
            assert rest <= set(in_step)
            if not rest:
                assert not set(range(size)) - retired - set(in_step)
        if in_step and data.draw(st.booleans()):
            row = data.draw(st.sampled_from(in_step))
            act, where = data.draw(st.sampled_from([(pool.retire, retired), (pool.defer, deferred)]))
            act(row)
            where.add(row)


def test_a_draw_over_the_edge_goes_on_in_the_next_order():
    orders = {0: [4, 3, 2, 1, 0], 1: [0, 1, 2, 3, 4], 2: [2, 0, 1, 4, 3]}
    asked = []
    pool = PromptPool(keys(5), order=lambda epoch: asked.append(epoch) or np.array(orders[epoch]))
    taken = []
    for _ in range(3):
        pool.begin_step()
        taken.append(pool.take(3))
    # Epoch 1 begins with 0, which its step had already; 0 and the next in line come first in the step after.
    assert taken == [[4, 3, 2], [1, 0, 2], [0, 1, 3]]
    assert asked == [0, 1] and pool.epoch == 1


def test_fewer_when_exhausted_and_clear_when_all_are_retired():
    pool = PromptPool(keys(4))
    pool.begin_step()
    assert sorted(pool.take(9)) == [0, 1, 2, 3] and pool.take(1) == []
    for row in range(4):
        pool.retire(row)
    pool.begin_step()
    assert pool.take(2) == [] and pool.all_retired and not pool.eligible().any()
    assert pool.metrics()["retired"] == 4
    pool.readmit()
    pool.begin_step()
    assert len(pool.take(2)) == 2


def test_selectors_that_choose_by_themselves():
    pool = PromptPool(keys(4))
    pool.begin_step()
    pool.mark_offered([2, 0])
    assert pool.eligible().tolist() == [False, True, False, True]
    with pytest.raises(ValueError, match="row 2 is offered in this step"):
        pool.mark_offered([2])
    pool.defer(1)
    with pytest.raises(ValueError, match="row 1 is deferred"):
        pool.mark_offered([1])
    pool.begin_step()
    first, second = pool.take(2)  # 3 is what the epoch has left; 1 is back with the next one
    assert first == 3 and second != 3 and pool.epoch == 1 and pool.metrics()["deferred"] == 0


def test_bad_keys_and_orders_are_named():
    with pytest.raises(ValueError, match="rows 0 and 2 have the same key 'a'"):
        PromptPool(["a", "b", "a"])
    with pytest.raises(ValueError, match="no prompts"):
        PromptPool([])
    pool = PromptPool(keys(3), order=lambda epoch: np.array([0, 1, 1]))
    with pytest.raises(ValueError, match="epoch 0 is no permutation"):
        pool.take(1)


@pytest.mark.parametrize("stopped", range(6))
def test_state_comes_back_at_any_step(stopped):
    def step(pool):
        pool.begin_step()
        rows = pool.take(4)
        pool.retire(rows[0])
        pool.defer(rows[-1])
        return rows, pool.metrics()

    whole, broken = PromptPool(keys(31), seed=5), PromptPool(keys(31), seed=5)
    expected = [step(whole) for _ in range(9)]
    found = [step(broken) for _ in range(stopped)]
    resumed = PromptPool(keys(31), seed=5)
    resumed.load_state_dict(broken.state_dict())
    found += [step(resumed) for _ in range(9 - stopped)]
    assert found == expected


def test_state_is_strict_and_small():
    pool = PromptPool(keys(8000), seed=1)
    state = pool.state_dict()
    assert sum(v.nbytes for v in state.values() if isinstance(v, np.ndarray)) <= 13 * 8000
    for other, named in ((PromptPool(keys(8001), seed=1), "keys"), (PromptPool(keys(8000), seed=2), "order")):
        with pytest.raises(StateError, match=named):
            other.load_state_dict(state)
    with pytest.raises(StateError, match="missing \\['cursor'\\], unknown \\['cursors'\\]"):
        pool.load_state_dict({**{k: v for k, v in state.items() if k != "cursor"}, "cursors": 1})


def test_prompt_keys_are_the_content():
    chat = [{"role": "user", "content": "1+1="}]
    key = prompt_key("math", chat, "2")
    assert len(key) == 32 and key == prompt_key("math", np.array(chat, dtype=object), "2")
    assert key == prompt_key("math", [{"content": "1+1=", "role": "user"}], "2")
    assert (
        len({key, prompt_key("other", chat, "2"), prompt_key("math", chat, "3"), prompt_key("math", "1+1=", "2")}) == 4
    )
    assert prompt_key("m", "x", np.int64(3)) == prompt_key("m", "x", 3)
    assert prompt_key("a", "b,c", "d") != prompt_key("a", "b", "c,d")
    with pytest.raises(TypeError, match="object"):
        prompt_key("m", object(), "2")
