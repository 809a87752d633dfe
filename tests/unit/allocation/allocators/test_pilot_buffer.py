"""Pilot-Commit's waiting groups: staleness, the buffer's order and size, and the groups as saved state."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.allocation.allocators.pilot_runs import SMALL, Half, step
from tests.unit.allocation.helpers import Run, check_step, decisions, u_shaped
from verl_ext.allocation import (
    Fate,
    Group,
    Outcome,
    Request,
    StateError,
    load_state,
    make_allocator,
    pack_groups,
    save_state,
    unpack_groups,
)


@settings(max_examples=12, deadline=None)
@given(
    staleness=st.integers(1, 4), share=st.sampled_from([0.3, 0.9]),
    order=st.sampled_from(["random", "max_variance", "most_recent", "least_recent"]),
    gaps=st.lists(st.integers(0, 3), min_size=7, max_size=7),
)  # fmt: skip
def test_staleness_is_exact_in_versions_and_not_in_steps(staleness, order, share, gaps):
    rates = np.where(np.random.default_rng(0).random(600) < share, 0.5, 0.0)
    run = Run(rates, "pilot_commit", groups=4, rollouts=4000,
              settings={**SMALL, "max_staleness": staleness, "buffer_order": order, "buffer_size": 40})  # fmt: skip
    version, held = 0, {}
    for number, gap in enumerate(gaps):
        version += gap  # 0: the step before made no update
        collected, record = step(run, number, version)
        check_step(run, collected, record)
        for group in collected.started:
            if group.offered_at != number:
                lag = version - held.pop(group.uid)
                assert (group.fate is Fate.STALE) == (lag > staleness)
                assert group.fate is not Fate.STALE or group.requested == 4
        assert not held, "a waiting group was forgotten"
        held = {group.uid: version if group.offered_at == number else group.version for group in collected.waiting}
        assert len(held) <= 40
        assert record["waiting"] == 4 * len(held) and all(g.returned == 4 for g in collected.waiting)
        assert record["fates"]["stale"] == 4 * collected.metrics["pilots_stale"]
        assert collected.metrics["lag_max"] <= staleness


def test_the_buffer_drops_the_oldest_and_prefers_what_it_is_told_to():
    run = Run(np.full(500, 0.5), "pilot_commit", groups=2,
              settings={**SMALL, "buffer_size": 9, "gen_multiple": 6.0, "wave": "full"})  # fmt: skip
    step(run, 0)
    before = [group.uid for group in run.allocator._waiting.groups]
    collected, record = step(run, 1)
    after = [group.uid for group in collected.waiting]
    assert len(before) == len(after) == 9 and collected.metrics["pilots_beyond_buffer"] > 0
    order = [group.uid for group in collected.started]
    dropped = [g.uid for g in collected.started if g.fate is Fate.SURPLUS]
    assert max(map(order.index, dropped)) < min(map(order.index, after))
    assert record["fates"]["surplus"] == 4 * len(dropped)

    run = Run(np.linspace(0.1, 0.9, 400), "pilot_commit", groups=3,
              settings={"n_pilot": 12, "group_size": 16, "p_lower": 0.05, "p_upper": 0.95,
                        "buffer_order": "max_variance", "wave": "full"})  # fmt: skip
    step(run, 0)
    collected, _ = step(run, 1)
    waited = [g for g in collected.started if g.offered_at == 0]
    pilot = {g.uid: abs(sum(o.correct for o in g.outcomes[:12]) - 6) for g in waited}
    used = [g.uid for g in collected.groups]
    assert set(used) <= set(pilot)
    assert max(pilot[uid] for uid in used) <= min(pilot[uid] for uid in pilot if uid not in used)


@pytest.mark.parametrize("order, offered_at", [("most_recent", {2}), ("least_recent", {1}), ("random", {0, 1, 2})])
def test_the_buffer_goes_by_age_if_told_to(order, offered_at):
    """Waves of 270 pilots that all qualify; each step commits 90, so that the oldest of three are used up by then."""
    run = Run(np.full(6000, 0.5), "pilot_commit", groups=90, backend=Half(),
              settings={**SMALL, "buffer_order": order, "wave": "full"})  # fmt: skip
    for number in range(3):
        run.step(number)
    assert {group.offered_at for group in run.step(3).groups} == offered_at


def test_an_epochs_end_flushes_the_buffer_if_told_to():
    """100 prompts, waves of 24: pilots of the first epoch wait over its end, or are dropped there."""
    for flush in (False, True):
        run = Run(np.full(100, 0.5), "pilot_commit", groups=8, backend=Half(),
                  settings={**SMALL, "flush": flush, "wave": "full", "max_staleness": 9})  # fmt: skip
        flushed, of, older = [], {}, 0
        for number in range(12):
            epoch = run.pool.epoch
            collected, record = step(run, number)
            check_step(run, collected, record)
            flushed.append(collected.metrics["pilots_flushed"])
            of.update((g.uid, run.pool.epoch) for g in collected.started if g.offered_at == number)
            stale = [group for group in collected.started if group.fate is Fate.STALE]
            assert len(stale) == flushed[-1] + collected.metrics["pilots_stale"]
            assert record["fates"]["stale"] == 4 * len(stale)
            older += sum(of[group.uid] < epoch for group in collected.groups)
        assert (sum(map(bool, flushed)) >= 2) == flush == (older == 0)
        saved = run.allocator.state_dict()
        other = make_allocator("pilot_commit", **SMALL)
        other.load_state_dict(saved)
        assert other.state_dict()["epochs"] == saved["epochs"] and len(saved["epochs"]) == len(collected.waiting)


@pytest.mark.parametrize("stopped", range(1, 6))
def test_a_resumed_run_decides_as_one_that_never_stopped(tmp_path, stopped):
    def fresh():
        return Run(u_shaped(0.4, 250), "pilot_commit", groups=4, seed=4, unscorable=0.05, failing=0.05,
                   settings={**SMALL, "n_pilot_kept": 3, "retire_after": 2, "gen_multiple": 5.0})  # fmt: skip

    def steps(run, numbers):
        return [(decisions(c), c.metrics["lag_mean"], r) for c, r in (step(run, number) for number in numbers)]

    whole, broken = fresh(), fresh()
    expected = steps(whole, range(8))
    found = steps(broken, range(stopped))
    assert broken.allocator._waiting.groups
    save_state(tmp_path, broken.state_dict())
    resumed = fresh()
    resumed.load_state_dict(load_state(tmp_path))
    assert found + steps(resumed, range(stopped, 8)) == expected


def test_waiting_groups_are_small_and_strict_as_state():
    groups = []
    for i in range(200):
        group = Group(f"s3g{i}", i, 3, requested=16, version=2)
        for s in range(16):
            lost = s == 5
            correct, score = (None, None) if lost else (s % 3 == 0, s / 7)
            group.add(Outcome(group.uid, s, correct, score, 90, 400 + s, lost, s == 2, 2, 1 + s % 2))
        group.set_aside([1, 2])
        groups.append(group)
    state = pack_groups(groups)
    arrays = sum(value.nbytes for value in state.values() if isinstance(value, np.ndarray))
    assert arrays / (200 * 16) <= 33
    again = unpack_groups(state)
    for old, new in zip(groups, again, strict=True):
        assert [getattr(old, name) for name in Group.__slots__] == [getattr(new, name) for name in Group.__slots__]
    assert pack_groups([])["uid"] == [] and unpack_groups(pack_groups([])) == []
    with pytest.raises(StateError, match="columns do not fit"):
        unpack_groups({**state, "correct": state["correct"][1:]})
    with pytest.raises(StateError, match="missing"):
        unpack_groups({key: value for key, value in state.items() if key != "rows"})
    groups[0].requested += 1
    (pending,) = unpack_groups(pack_groups(groups[:1]))
    assert pending.pending == 1 and pending.missing() == [16] and Request.again(pending).sessions == range(16, 17)


def test_a_waiting_prompt_is_not_offered_and_does_not_hold_an_epoch_open():
    run = Run(np.full(12, 0.5), "pilot_commit", groups=1, settings={**SMALL, "gen_multiple": 4.0, "max_staleness": 50})
    epochs = []
    for number in range(30):
        before = {group.prompt for group in run.allocator._waiting.groups}
        collected, record = step(run, number)
        check_step(run, collected, record)
        assert not before & {group.prompt for group in collected.started if group.offered_at == number}
        epochs.append(run.pool.epoch)
    assert epochs[-1] > 2 and collected.short_by == 0


def test_a_step_that_breaks_off_loses_its_waiting_groups_and_no_count():
    run = Run(np.full(300, 0.5), "pilot_commit", groups=4, settings=SMALL)
    step(run, 0)
    generate = run.backend.generate

    def broken(requests):
        raise ConnectionError("gone")

    run.backend.generate = broken
    with pytest.raises(ConnectionError):
        step(run, 1)
    run.ledger.check()
    assert run.ledger.waiting == 0 and run.ledger.rollouts_by_fate["aborted"] > 0
    run.ledger.step_record(1)
    run.backend.generate = generate
    collected, record = step(run, 2)
    check_step(run, collected, record)
    assert collected.short_by == 0
