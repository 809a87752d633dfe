"""Dynamic sampling: refills, fates and what is surplus; and uniform allocation beside it."""

import numpy as np
import pytest

from tests.unit.allocation.helpers import Run, u_shaped
from verl_ext.allocation import Fate, SettingError, Verdict, make_allocator
from verl_ext.allocation.allocators.dynamic_sampling import greso_wave


@pytest.mark.parametrize("multiple, first", [(1, 16), (3, 48), (0.5, 8)])
def test_waves(multiple, first):
    run = Run(u_shaped(0.35, 2000), "dynamic_sampling", groups=16, rollouts=5000, settings={"gen_multiple": multiple})
    waves = []
    generate = run.backend.generate
    run.backend.generate = lambda requests: (waves.append(len(requests)), generate(requests))[1]
    collected = run.step(0)
    assert set(waves) == {first}
    assert all(request.requested == 8 for request in collected.started)
    mixed = [group for group in collected.started if group.mixed]
    assert collected.groups == mixed[:16]
    assert [group.fate for group in mixed[16:]] == [Fate.SURPLUS] * len(mixed[16:])
    rest = [group for group in collected.started if not group.mixed]
    assert all(group.fate is Fate.FILTERED and group.verdict is Verdict.ABANDON for group in rest)


def test_waves_of_greso():
    """As published: a batch of 256, waves of 64 to 384, 1.25 missing / (1 - saturated share)."""
    assert greso_wave(256, 0, 0, 256) == 384  # the first
    assert greso_wave(100, 128, 384, 256) == 375  # 1.25 x 100 / (1/3)
    assert greso_wave(101, 128, 384, 256) == 378 and greso_wave(120, 128, 384, 256) == 384
    assert greso_wave(10, 128, 384, 256) == 64 and greso_wave(10, 0, 384, 256) == 384
    assert greso_wave(1, 1, 1, 1) == 1 and greso_wave(3, 0, 0, 3) == 4
    run = Run(u_shaped(0.35, 2000), "dynamic_sampling", groups=16, settings={"gen_multiple": "greso"})
    waves = []
    generate = run.backend.generate
    run.backend.generate = lambda requests: (waves.append(len(requests)), generate(requests))[1]
    collected = run.step(0)
    mixed = [group.mixed for group in collected.started]
    seen, expected = 0, []
    while sum(mixed[:seen]) < 16:
        last = expected[-1] if expected else 0
        expected.append(greso_wave(16 - sum(mixed[:seen]), sum(mixed[seen - last : seen]), last, 16))
        seen += expected[-1]
    assert waves == expected and waves[0] == 24 and len(waves) > 1 and collected.short_by == 0


def test_one_for_one_wastes_nothing():
    run = Run(u_shaped(0.35, 2000), "dynamic_sampling", groups=16, rollouts=5000, max_rounds=40,
              settings={"refill": "one_for_one"})  # fmt: skip
    collected = run.step(0)
    assert (
        collected.short_by == 0 and collected.metrics["surplus_groups"] == 0 and collected.metrics["fate/surplus"] == 0
    )


def test_the_budget_ends_a_step():
    run = Run(np.zeros(500), "dynamic_sampling", groups=4, rollouts=100)
    assert run.step(0).rollouts == 96  # twelve groups of eight


@pytest.mark.parametrize("settings, named", [
    ({"gen_multiple": 0}, "gen_multiple=0"),
    ({"gen_multiple": "often"}, "gen_multiple='often'; accepted: an integer or a number or auto | greso"),
    ({"refill": "never"}, "refill='never'; accepted: waves | one_for_one"),
])  # fmt: skip
def test_settings_are_checked_by_name(settings, named):
    with pytest.raises(SettingError) as error:
        make_allocator("dynamic_sampling", **settings)
    assert named in str(error.value)


def test_uniform_is_one_round_of_the_pools_order():
    run = Run(u_shaped(0.35, 100), "uniform", groups=16, seed=3)
    order = np.random.default_rng(0).permutation(100)
    run.pool._make_order = lambda epoch: order
    collected = run.step(0)
    assert [group.prompt for group in collected.groups] == order[:16].tolist()
    assert collected.rounds == 1 and collected.rollouts == len(collected.kept) == 128
    assert any(group.saturated for group in collected.groups)
    assert 0 < collected.metrics["effective_share"] < 1
    short = Run(u_shaped(0.35, 100), "uniform", groups=16, rollouts=70).step(0)
    assert short.rollouts == 64 and short.short_by == 8
