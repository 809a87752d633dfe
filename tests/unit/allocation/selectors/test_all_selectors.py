"""What holds for every selector: composition, determinism, resuming, and prompts that are out."""

import numpy as np
import pytest
from omegaconf import OmegaConf

from tests.unit.allocation.helpers import check_step, decisions, u_shaped
from tests.unit.allocation.selectors.selector_runs import ByHand, SelectorRun, same_state
from verl_ext import configs
from verl_ext.allocation import PromptPool, StateError, load_state, make_selector, save_state
from verl_ext.allocation.registry import selectors

SELECTORS = {"cero": {"rounds": 25}, "dps": {}, "mopps": {"forget": 0.8}, "greso": {}}
ALLOCATORS = {"uniform": {}, "dynamic_sampling": {"gen_multiple": "auto"}, "sara": {}}


def make(selector, allocator="sara", rates=None, **rest):
    rates = u_shaped(0.35, size=150) if rates is None else rates
    return SelectorRun(
        rates, selector, allocator, chooses=SELECTORS[selector], settings=ALLOCATORS[allocator],
        **({"groups": 5} | rest),
    )  # fmt: skip


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("selector", SELECTORS)
def test_composes_repeats_and_resumes(selector, allocator, tmp_path):
    """The ledger adds up, the same seed decides the same, and so does a run resumed from disk at any step."""
    one, two = make(selector, allocator), make(selector, allocator)
    resumed = make(selector, allocator)
    for step in range(1, 7):
        save_state(tmp_path, resumed.state_dict())
        resumed = make(selector, allocator)
        resumed.load_state_dict(load_state(tmp_path))
        done = one.step(step)
        check_step(one, done, one.ledger.step_record(step))
        again, later = two.step(step), resumed.step(step)
        assert decisions(again) == decisions(done) == decisions(later)
        assert done.metrics.keys() == later.metrics.keys()
        assert all(np.isfinite(value) for value in done.metrics.values())
        for run in (two, resumed):
            assert same_state(run.selector.state_dict(), one.selector.state_dict())
    assert one.selector.metrics()


@pytest.mark.parametrize("selector", sorted(set(SELECTORS) - {"greso"}))
def test_another_seed_chooses_otherwise(selector):
    def first(seed):
        return ByHand(selector, 300, groups=10, seed=seed, **SELECTORS[selector]).step()

    assert first(0) == first(0) != first(1)


@pytest.mark.parametrize("rate", [0.0, 1.0, np.nan])
@pytest.mark.parametrize("selector", SELECTORS)
def test_ends_on_dead_data(selector, rate):
    run = make(selector, rates=np.full(30, rate))
    for step in range(1, 9):
        done = run.step(step)
        check_step(run, done, run.ledger.step_record(step))
        assert done.groups == []


@pytest.mark.parametrize("selector", SELECTORS)
def test_small_asks_never_repeat_a_prompt_and_end_with_the_pool(selector):
    run = ByHand(selector, 23, groups=2, **SELECTORS[selector])
    for _ in range(3):
        run.begin()
        rows = []
        while more := run.selector.select(2):
            assert len(more) <= 2
            rows += more
        assert len(rows) == len(set(rows)) and (len(rows) == 23 or selector == "greso")
        run.selector.end_step()


@pytest.mark.parametrize("selector", SELECTORS)
def test_retired_prompts_stay_out_and_deferred_ones_come_back(selector):
    run = ByHand(selector, 40, groups=4, **SELECTORS[selector])
    run.begin()
    run.selector.end_step()
    for row in range(10):
        run.pool.retire(row)
    for row in range(10, 20):
        run.pool.defer(row)
    offered = set()
    epoch = run.pool.epoch
    while run.pool.epoch == epoch:
        assert not offered & set(range(20)), "offered although retired or deferred"
        assert run.number < 40, "the epoch never ends"
        offered = set(run.step(lambda row: (4, 8)))
    run.begin()
    assert set(run.selector.select(40)) == set(range(10, 40))


def test_an_epoch_of_repeated_offers_ends_after_as_many_as_it_has_prompts():
    pool = PromptPool([str(i) for i in range(6)])
    pool.begin_step()
    pool.mark_offered([0, 1])
    pool.defer(5)  # 2, 3 and 4 are open
    for again in range(3):
        pool.begin_step()
        assert pool.epoch == 0
        state = pool.state_dict()
        pool.mark_offered([again % 2])
        other = PromptPool([str(i) for i in range(6)])
        other.load_state_dict(state)
        assert same_state(other.state_dict(), state)
    pool.begin_step()
    assert pool.epoch == 1 and pool.eligible().all()


@pytest.mark.parametrize("selector", SELECTORS)
def test_state_of_another_pool_is_refused(selector):
    run = ByHand(selector, 20, **SELECTORS[selector])
    empty = run.selector.state_dict()
    run.step(lambda row: (4, 8))
    other = ByHand(selector, 21, **SELECTORS[selector])
    other.selector.load_state_dict(empty)
    other.begin()
    other = ByHand(selector, 21, **SELECTORS[selector])
    other.selector.load_state_dict(run.selector.state_dict())
    with pytest.raises(StateError, match="20 prompts and the pool has 21"):
        other.begin()
    with pytest.raises(StateError, match="missing"):
        other.selector.load_state_dict({})


@pytest.mark.parametrize("selector", SELECTORS)
def test_the_configuration_has_every_setting_with_its_default(selector):
    path = next(iter(configs.__path__)) + f"/allocation/selector/{selector}.yaml"
    lines = open(path).read().splitlines()
    root = OmegaConf.create({"trainer": {"total_training_steps": 25}, "allocation": {"seed": 0}})
    root.allocation.selector = OmegaConf.load(path)
    values = OmegaConf.to_container(root.allocation.selector, resolve=True)
    assert values.pop("name") == selector
    assert make_selector(selector, **values).settings == make_selector(selector, **SELECTORS[selector] | (
        {"forget": 1.0} if selector == "mopps" else {})).settings  # fmt: skip
    assert set(values) == set(selectors.settings_type(selector).__dataclass_fields__)
    keys = [i for i, line in enumerate(lines) if line and not line.startswith("#")]
    grouped = {"beta", "upper", "price_rate"}  # share the comment of the key above
    assert all(lines[i - 1].startswith("#") or lines[i].split(":")[0] in grouped for i in keys)
