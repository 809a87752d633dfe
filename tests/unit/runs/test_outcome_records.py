# SPDX-License-Identifier: Apache-2.0
"""Recording outcomes and replaying them."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_ext.allocation import Allocation, AllocationSettings, Stop
from verl_ext.runs.line_file import NotWrittenError
from verl_ext.runs.outcome_records import OutcomeRecorder, RecordError, read_record
from verl_ext.simulate import summary
from verl_ext.simulation.replay import ReplayBackend
from verl_ext.simulation.simulated_backend import SimulatedBackend
from verl_ext.simulation.simulation import simulate
from verl_ext.simulation.simulation_settings import WorldSettings

KEYS = [f"key-{i}" for i in range(60)]


def allocation(prompts, allocator="uniform", stop=60):
    rule = {"name": allocator} if isinstance(allocator, str) else allocator
    return Allocation.from_settings({"allocator": rule, "stop": {"groups": stop}}, prompts)


class Recorded:
    """A recorded run."""

    def __init__(self, path, allocator="uniform", **faults):
        rates = np.linspace(0, 1, len(KEYS))
        self.backend = SimulatedBackend(rates, 1, **faults)
        self.allocation = allocation(KEYS, allocator)
        self.ledger = self.allocation.ledger
        self.recorder = OutcomeRecorder(path, KEYS)
        self.generated = []

    def step(self, number, stop=12):
        class Spy:
            def generate(_, requests):
                outcomes = self.backend.generate(requests)
                rows = {request.group.uid: request.group.prompt for request in requests}
                self.generated += [(KEYS[rows[o.group]], number, o.session, o.correct, o.score, o.response_tokens)
                                   for o in outcomes]  # fmt: skip
                return outcomes

        self.allocation.stop = Stop(stop)
        collected = self.allocation.collect(number, self.recorder.around(Spy(), number))
        self.recorder.end_step()
        return collected


def rows_of(path):
    table = read_record(path)
    return [tuple(row[c] for c in ("prompt", "step", "session", "correct", "score", "tokens"))
            for row in table.to_pylist()]  # fmt: skip


def test_every_rollout_is_recorded_once_also_where_groups_wait(tmp_path):
    carrying = {"name": "sara", "max_staleness": 1, "margin": 1.0}
    run = Recorded(tmp_path / "record", carrying, unscorable=0.1, failing=0.05)
    waited = sum(len(run.step(number, stop=6).waiting) for number in range(1, 6))
    assert waited > 0
    rows = rows_of(tmp_path / "record")
    assert sorted(rows, key=str) == sorted(run.generated, key=str)
    assert len({row[:3] for row in rows}) == len(rows) == run.ledger.issued
    assert sum(row[3] is None for row in rows) > 0
    table = read_record(tmp_path / "record")
    assert sum(table["failed"].to_pylist()) == run.ledger.rollouts_by_fate["failed"] > 0


def test_no_text_is_in_it(tmp_path):
    Recorded(tmp_path / "record").step(1)
    (file,) = (tmp_path / "record").iterdir()
    assert pq.read_schema(file).names == ["prompt", "step", "round", "session", "correct", "score", "tokens", "failed"]


def test_a_resumed_run_replaces_the_steps_it_repeats(tmp_path):
    run = Recorded(tmp_path)
    for number in range(1, 6):
        run.step(number)
    again = Recorded(tmp_path)
    again.step(4)
    assert sorted(set(read_record(tmp_path)["step"].to_pylist())) == [1, 2, 3, 4]
    assert sorted(set(read_record(tmp_path / "earlier-1")["step"].to_pylist())) == [4, 5], "nothing recorded is lost"


def test_a_full_disk_is_named_and_leaves_no_part_of_a_file(tmp_path, monkeypatch):
    run = Recorded(tmp_path)
    run.step(1)

    def full(table, path):
        path.write_bytes(b"PAR1")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(NotWrittenError, match="step-000002.parquet could not be written: .*No space left on device"):
        run.step(2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001.parquet"]


@pytest.mark.bad_input
def test_faults_are_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RecordError, match="is a file"):
        OutcomeRecorder(tmp_path / "file", KEYS)
    with pytest.raises(RecordError, match="no recorded outcomes"):
        read_record(tmp_path / "nothing")
    Recorded(tmp_path / "r").step(1)
    table = read_record(tmp_path / "r").drop_columns(["score"])
    pq.write_table(table, tmp_path / "cut.parquet")
    with pytest.raises(RecordError, match="no column score"):
        read_record(tmp_path / "cut.parquet")


@pytest.mark.bad_input
@pytest.mark.parametrize("content", [b"", b"PAR1 no table PAR1"])
def test_a_file_that_is_no_table_is_named(content, tmp_path):
    (tmp_path / "step-000001.parquet").write_bytes(content)
    with pytest.raises(RecordError, match=r"step-000001.parquet: .*; expected a Parquet file with prompt"):
        read_record(tmp_path)


@pytest.mark.bad_input
@pytest.mark.parametrize("column, value, message", [
    ("prompt", None, "is null in row 1; accepted: dictionary"),
    ("step", None, "is null in row 1; accepted: int32"),
    ("tokens", None, "is null in row 1; accepted: int32"),
    ("failed", None, "is null in row 1; accepted: bool"),
    ("step", "one", "is of type string: .*; accepted: int32"),
    ("step", 2**40, "is of type int64: .*; accepted: int32"),
    ("tokens", -5, "is -5 in row 1; accepted: 0 or more"),
])  # fmt: skip
def test_values_that_cannot_be_are_named_with_file_and_column(column, value, message, tmp_path):
    rows = {"prompt": ["a", "b"], "step": [1, 1], "session": [0, 0], "correct": [True, None], "score": [1.0, None],
            "tokens": [5, 5], "failed": [False, False]}  # fmt: skip
    file = tmp_path / "x.parquet"
    pq.write_table(pa.table(rows), file)
    assert read_record(file)["prompt"].to_pylist() == ["a", "b"]
    rows[column] = ["1" if isinstance(value, str) else rows[column][0], value]
    pq.write_table(pa.table(rows), file)
    with pytest.raises(RecordError, match=f"{file}: column {column} {message}"):
        read_record(file)


def record_uniform(path, steps=10):
    run = Recorded(path)
    for number in range(1, steps + 1):
        run.step(number)
    return run


def test_replaying_the_same_rule_gives_its_outcomes(tmp_path):
    """Uniform on the recording of uniform, all prompts each step: the same counts of right answers, step by step."""
    run = Recorded(tmp_path)
    recorded = {}
    for number in (1, 2, 3):
        for group in run.step(number, stop=60).started:
            recorded[number, KEYS[group.prompt]] = group.successes
    backend = ReplayBackend(read_record(tmp_path), seed=7)
    again = allocation(backend.keys)
    for number in (1, 2, 3):
        backend.begin_step()
        collected = again.collect(number, backend)
        seen = {(number, backend.keys[group.prompt]): group.successes for group in collected.started}
        assert seen == {key: n for key, n in recorded.items() if key[0] == number}
    assert backend.reused == 0


def test_the_nearest_visit_comes_first_and_all_are_used_before_any_again(tmp_path):
    run = Recorded(tmp_path)
    for number in (1, 5):
        run.step(number, stop=60)
    table = read_record(tmp_path)
    backend = ReplayBackend(table, seed=0)
    from verl_ext.allocation import Group, Request

    group = Group("g1", 3, offered_at=4)
    request = Request(group, 20)
    tokens = [outcome.response_tokens for outcome in backend.generate([request])]
    key = backend.keys[3]
    at = {step: sorted(r["tokens"] for r in table.to_pylist() if r["prompt"] == key and r["step"] == step)
          for step in (1, 5)}  # fmt: skip
    assert sorted(tokens[:8]) == at[5] and sorted(tokens[8:16]) == at[1]
    assert tokens[16:] == tokens[:4] and backend.reused == 4


def test_population_recorded(tmp_path):
    record_uniform(tmp_path / "record")
    world = WorldSettings(steps=5, batch=8, record=str(tmp_path / "record"))
    sara = AllocationSettings(allocator={"name": "sara"})
    a, b, other = (simulate("recorded", world, sara, seed) for seed in (0, 0, 1))
    assert a == b and a["rollouts"] > 0 and a["prompts"] == 60
    assert json.dumps(a) != json.dumps(other)
    right = [row[3] for row in rows_of(tmp_path / "record")]
    assert a["accuracy"] == pytest.approx(sum(right) / len(right), abs=0.02)
    assert "accuracy, recorded" in summary(a)
    grpo = simulate("recorded", world, AllocationSettings(), 0)
    assert a["rollouts_per_effective_group"] != grpo["rollouts_per_effective_group"]


def test_unscored_outcomes_stay_unscored(tmp_path):
    run = Recorded(tmp_path, unscorable=1.0)
    run.step(1)
    backend = ReplayBackend(read_record(tmp_path))
    assert np.isnan(backend.rates()).all()
    result = simulate("recorded", WorldSettings(steps=1, batch=4, record=str(tmp_path)), AllocationSettings())
    assert result["accuracy"] is None and result["ledger"]["fates"]["unscored"] == result["rollouts"]
