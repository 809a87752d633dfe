"""Every rollout has one place; no movement of more than there is."""

import json
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.allocation.helpers import examples
from verl_ext.allocation import Fate, Ledger, LedgerError, Outcome, StateError


def outcomes(*tokens):
    return [Outcome("g", i, True, 1.0, 2, t) for i, t in enumerate(tokens)]


@settings(max_examples=examples(50))
@given(data=st.data())
def test_adds_up_after_any_movements(data):
    """Random movements against a plain list of rollouts in places."""
    ledger, flight = Ledger(), 0
    undecided, waiting = [], []
    fates = {fate: [] for fate in Fate}
    lost = dict.fromkeys(Fate, 0)
    records = []
    for step in range(data.draw(st.integers(1, 25))):
        act = data.draw(st.sampled_from(["issue", "returned", "settle", "wait", "unwait", "lose", "abort", "record"]))
        n = data.draw(st.integers(0, 4))
        fate = data.draw(st.sampled_from(list(Fate)))
        tokens = outcomes(*data.draw(st.lists(st.integers(0, 50), min_size=n, max_size=n)))
        if act == "issue":
            ledger.issue(n)
            flight += n
        elif act == "returned":
            if n > flight:
                with pytest.raises(LedgerError):
                    ledger.returned(tokens)
            else:
                ledger.returned(tokens)
                flight -= n
                undecided += tokens
        elif act == "lose":
            if n > flight:
                with pytest.raises(LedgerError):
                    ledger.lose(n, fate)
            else:
                ledger.lose(n, fate)
                flight -= n
                lost[fate] += n
        elif act == "abort":
            ledger.abort()
            lost[Fate.FAILED] += flight
            fates[Fate.ABORTED] += undecided
            flight, undecided = 0, []
        elif act == "record":
            records.append(ledger.step_record(step))
        else:
            source = waiting if act == "unwait" else undecided
            moved, rest = source[:n], source[n:]
            move = {"settle": partial(ledger.settle, fate=fate), "wait": ledger.wait, "unwait": ledger.unwait}[act]
            if len(moved) < n:
                with pytest.raises(LedgerError):
                    move(moved + tokens[len(moved) :])
                continue
            move(moved)
            if act == "settle":
                undecided, fates[fate] = rest, fates[fate] + moved
            elif act == "wait":
                undecided, waiting = rest, waiting + moved
            else:
                waiting, undecided = rest, undecided + moved
        ledger.check()
        assert (ledger.in_flight, ledger.undecided, ledger.waiting) == (flight, len(undecided), len(waiting))
        for place, settled in fates.items():
            assert ledger.rollouts_by_fate[place.value] == len(settled) + lost[place]
            assert ledger.tokens_by_fate[place.value] == sum(o.response_tokens for o in settled)
    records.append(ledger.step_record(99))
    assert sum(record["issued"] for record in records) == ledger.issued
    for fate in Fate:
        assert sum(record["fates"][fate.value] for record in records) == ledger.rollouts_by_fate[fate.value]
    copy = Ledger()
    copy.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert copy.state_dict() == ledger.state_dict()


def test_a_record_is_a_line_of_json_with_step_and_total():
    ledger = Ledger()
    for step in (1, 2):
        ledger.issue(3)
        back = outcomes(5, 7)
        ledger.returned(back)
        ledger.settle(back[:1], Fate.TRAINED)
        ledger.wait(back[1:])
        ledger.lose(1)
        record = json.loads(json.dumps(ledger.step_record(step)))
        assert record["issued"] == 3 and record["fates"]["trained"] == 1 and record["fates"]["failed"] == 1
        assert record["fate_tokens"]["trained"] == 5 and record["tokens"] == 12 and record["prompt_tokens"] == 4
        assert record["waiting"] == step and record["waiting_tokens"] == 7 * step
        assert record["issued_total"] == 3 * step and record["fates_total"]["trained"] == step


def test_a_step_without_update_is_reclassified_within_the_step():
    ledger = Ledger()
    back = outcomes(5, 7)
    ledger.issue(2)
    ledger.returned(back)
    ledger.settle(back, Fate.TRAINED)
    ledger.reclassify(back, Fate.TRAINED, Fate.SKIPPED)
    assert ledger.step_record(0)["fates"]["skipped"] == 2
    with pytest.raises(LedgerError, match="from skipped into trained"):
        ledger.reclassify(back, Fate.SKIPPED, Fate.TRAINED)


def test_what_does_not_add_up_is_named():
    ledger = Ledger()
    ledger.issue(2)
    ledger.in_flight = 1
    with pytest.raises(LedgerError, match="2 issued"):
        ledger.check()
    ledger.in_flight, ledger.tokens = 2, 4
    with pytest.raises(LedgerError, match="4 generated"):
        ledger.step_record(0)
    with pytest.raises(LedgerError, match="-1"):
        ledger.issue(-1)


def test_state_is_strict():
    ledger = Ledger()
    ledger.issue(2)
    state = ledger.state_dict()
    with pytest.raises(StateError, match="do not|issued"):
        Ledger().load_state_dict({**state, "issued": 3})
    with pytest.raises(StateError, match="missing \\['tokens'\\]"):
        Ledger().load_state_dict({k: v for k, v in state.items() if k != "tokens"})
    fates = {k: v for k, v in state["rollouts_by_fate"].items() if k != "stale"}
    with pytest.raises(StateError, match="stale"):
        Ledger().load_state_dict({**state, "rollouts_by_fate": fates})
