# SPDX-License-Identifier: Apache-2.0
"""A record of every outcome of a run: a folder of Parquet files, one a step; no text of prompts or responses.

    recorder = OutcomeRecorder(path, pool.keys)
    collect(..., backend=recorder.around(backend, step))
    recorder.end_step()

Columns: prompt (the pool's stable key), step, round (of the step, from 1: one generate call), session, correct (null:
could not be scored), score, tokens (of the response), failed. A rollout is in it once, at the step that generated it,
also where its group waited. Streaming, the round is the number of the group's request in the step, and rollouts that
were aborted, which have no outcome, are left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from verl_ext.allocation.groups import Group, Outcome, Request
from verl_ext.files import next_path
from verl_ext.runs.line_file import not_written

SCHEMA = pa.schema(
    [
        pa.field("prompt", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("step", pa.int32(), nullable=False),
        pa.field("round", pa.int32(), nullable=False),
        pa.field("session", pa.int32(), nullable=False),
        pa.field("correct", pa.bool_()),
        pa.field("score", pa.float64()),
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("failed", pa.bool_(), nullable=False),
    ]
)
_OPTIONAL = {"round": 0, "failed": False}
"""Columns that a table from elsewhere may lack, and what stands for them."""

_FILE = re.compile(r"^step-(\d+)\.parquet$")


class RecordError(ValueError):
    """A recorded table is missing or not in the expected form."""


class OutcomeRecorder:
    """Writes the outcomes of each step as it ends, whole or not at all.

    Files of the first step recorded and of later ones are moved to a folder `earlier-N` when it begins: they are of a
    run that was cut off after the step that this one resumes from, or of another that was recorded here before.

    Args:
        path: the folder; made if missing.
        keys: the prompts' keys, by row of the pool.

    Raises:
        RecordError: the path is a file.
    """

    def __init__(self, path: str | os.PathLike[str], keys: Sequence[str]) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise RecordError(f"allocation.record={str(path)!r} is a file; accepted: a folder, one that need not exist")
        self._keys = keys
        self._step: int | None = None
        self._rows: list[tuple[int, int, Outcome]] = []
        self._begun = False

    def around(self, backend: Any, step: int, in_hand: Sequence[Group] = ()) -> RecordingBackend:
        """The backend, its outcomes recorded as those of ``step``, those of groups in hand when it begins included."""
        if not self._begun:
            self.path.mkdir(parents=True, exist_ok=True)
            if others := [file for number, file in _files(self.path) if number >= step]:
                earlier = next_path(self.path / "earlier-{}")
                earlier.mkdir()
                for file in others:
                    os.replace(file, earlier / file.name)
            self._begun = True
        self._step, self._rows = step, []
        return RecordingBackend(backend, self._rows, in_hand)

    def end_step(self) -> None:
        """Write the step's file.

        Raises:
            NotWrittenError: the disk is full, or the path is a folder.
        """
        if self._step is None:
            raise RuntimeError("OutcomeRecorder.end_step without a step: around(backend, step) comes first")
        rows, rounds, outcomes = ([found[i] for found in self._rows] for i in range(3))
        index = {row: i for i, row in enumerate(dict.fromkeys(rows))}
        prompts = pa.DictionaryArray.from_arrays(
            pa.array([index[row] for row in rows], pa.int32()),
            pa.array([self._keys[row] for row in index], pa.string()),
        )
        columns = [
            prompts,
            [self._step] * len(rows),
            rounds,
            [outcome.session for outcome in outcomes],
            [outcome.correct for outcome in outcomes],
            [outcome.score for outcome in outcomes],
            [outcome.response_tokens for outcome in outcomes],
            [outcome.failed for outcome in outcomes],
        ]
        table = pa.table(
            [c if isinstance(c, pa.Array) else pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)],
            schema=SCHEMA,
        )
        final = self.path / f"step-{self._step:06d}.parquet"
        partial = final.with_name(f".{final.name}.{os.getpid()}")
        try:
            pq.write_table(table, partial)
            os.replace(partial, final)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise not_written(final, error) from error
        self._step, self._rows = None, []


class RecordingBackend:
    """A backend that keeps what passes through; all else is the backend's own."""

    def __init__(self, backend: Any, rows: list[tuple[int, int, Outcome]], in_hand: Sequence[Group] = ()) -> None:
        self._backend = backend
        self._rows = rows
        self._round = 0
        self._groups = {group.uid: group for group in in_hand}

    def generate(self, requests: Sequence[Request]) -> Sequence[Outcome]:
        """The backend's round."""
        outcomes = self._backend.generate(requests)
        self._round += 1
        row_of = {request.group.uid: request.group.prompt for request in requests}
        self._rows.extend(
            (row_of[outcome.group], self._round, outcome) for outcome in outcomes if outcome.group in row_of
        )
        return outcomes

    def submit(self, requests: Sequence[Request]) -> None:
        """The backend's own."""
        self._backend.submit(requests)
        self._groups |= {request.group.uid: request.group for request in requests}

    def next(self) -> Sequence[Outcome]:
        """The backend's next group."""
        return self._keep(self._backend.next())

    def abort(self, groups: Sequence[Group]) -> Sequence[Outcome]:
        """What the backend says of them."""
        return self._keep(self._backend.abort(groups))

    def _keep(self, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        for outcome in outcomes:
            group = self._groups.get(outcome.group)
            if group is not None and not outcome.aborted:
                self._rows.append((group.prompt, group.requests, outcome))
        return outcomes


def read_record(path: str | os.PathLike[str]) -> pa.Table:
    """The whole record: a folder of step files, or one Parquet file with the same columns.

    Raises:
        RecordError: nothing there, a file cannot be read, a column is missing, or its values cannot be.
    """
    path = Path(path)
    files = [file for _, file in _files(path)] if path.is_dir() else [path] if path.is_file() else []
    if not files:
        raise RecordError(f"{path}: no recorded outcomes; expected a folder of step-*.parquet or a Parquet file")
    tables = []
    for file in files:
        try:
            have = pq.read_schema(file)
            table = pq.read_table(file, columns=[name for name in SCHEMA.names if name in have.names])
        except (pa.ArrowException, OSError) as error:
            raise RecordError(f"{file}: {error}; expected a Parquet file with {', '.join(SCHEMA.names)}") from error
        if missing := [name for name in SCHEMA.names if name not in (*have.names, *_OPTIONAL)]:
            raise RecordError(f"{file}: no column {', '.join(missing)}; expected {', '.join(SCHEMA.names)}")
        for name, value in _OPTIONAL.items():
            if name not in have.names:
                table = table.append_column(name, pa.array([value] * len(table)))
        tables.append(pa.table([_column(file, table[field.name], field) for field in SCHEMA], schema=SCHEMA))
    return pa.concat_tables(tables).unify_dictionaries()


def _column(file: Path, values: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    """The column in the record's type.

    Raises:
        RecordError: it has nulls or values that it cannot have; rows are counted from 0.
    """
    where = f"{file}: column {field.name}"
    if not field.nullable and values.null_count:
        row = pc.index(values.is_null(), True).as_py()
        raise RecordError(f"{where} is null in row {row}; accepted: {field.type} without null")
    try:
        cast = values.cast(field.type)
    except pa.ArrowException as error:
        raise RecordError(f"{where} is of type {values.type}: {error}; accepted: {field.type}") from error
    if field.name == "tokens" and (row := pc.index(pc.less(cast, 0), True).as_py()) >= 0:
        raise RecordError(f"{where} is {cast[row]} in row {row}; accepted: 0 or more")
    return cast


def _files(folder: Path) -> list[tuple[int, Path]]:
    found = [(int(match[1]), file) for file in folder.iterdir() if (match := _FILE.match(file.name))]
    return sorted(found)
