"""Stream Parquet rows in verl's format. Arrow, not Python, finds the different prompts of a batch.

A batch of 65,536 rows with 17,000 different prompts costs 17,000 Python calls, and its memory alone is held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from verl_ext.data.dataset_files import open_parquet
from verl_ext.data.fold import Fold
from verl_ext.data.rows import DataError

BATCH = 1 << 16
# Between role and content, messages, and prompt and answer: control characters that stand in no prompt.
_FIELD, _MESSAGE, _ANSWER = "\x1f", "\x1e", "\x1d"
_NEEDED = {"data_source": "text", "prompt": "messages with role and content", "reward_model": "ground_truth in it"}


def check_columns(path: Path, schema: pa.Schema) -> None:
    """Check that a file has verl's columns, and of which types.

    Raises:
        DataError: a column is missing or of another type; names both.
    """
    for name, what in _NEEDED.items():
        if name not in schema.names:
            raise DataError(path, f"missing ({what}); the file has {', '.join(schema.names)}", column=name)
    prompt = schema.field("prompt").type
    listed = pa.types.is_list(prompt) or pa.types.is_large_list(prompt)
    fields = _fields(prompt.value_type) if listed else {}
    for name in ("role", "content"):
        if not _is_text(fields.get(name)):
            raise DataError(path, f"a list of messages with role and content as text is needed, got {prompt}",
                            column="prompt")  # fmt: skip
    answer = _fields(schema.field("reward_model").type).get("ground_truth")
    if not (_is_text(answer) or answer is not None and (pa.types.is_integer(answer) or pa.types.is_null(answer))):
        raise DataError(path, f"text or whole numbers are needed, got {answer or 'no such field'}",
                        column="reward_model.ground_truth")  # fmt: skip
    if not _is_text(schema.field("data_source").type):
        raise DataError(path, f"text is needed, got {schema.field('data_source').type}", column="data_source")
    style = _fields(schema.field("reward_model").type).get("style")
    ability = schema.field("ability").type if "ability" in schema.names else None
    for name, kind in (("reward_model.style", style), ("ability", ability)):
        if not _is_text_or_none(kind):
            raise DataError(path, f"text is needed, or no such column; got {kind}", column=name)
    extra = schema.field("extra_info").type if "extra_info" in schema.names else pa.null()
    if not (pa.types.is_struct(extra) or pa.types.is_null(extra)):
        raise DataError(path, f"named fields are needed, or no such column; got {extra}", column="extra_info")


def scan(files: Sequence[Path]) -> tuple[Fold, int]:
    """All prompts of the files, folded, and the number of rows read.

    Raises:
        DataError: a file cannot be read, a column is missing, or a prompt is empty; names file, row and column.
    """
    fold, total = Fold(), 0
    for number, path in enumerate(files):
        row = 0
        with open_parquet(path) as file:
            check_columns(path, file.schema_arrow)
            for batch in _batches(path, file, ["prompt", "reward_model"]):
                _add(fold, batch, number, path, row)
                row += batch.num_rows
            if row != file.metadata.num_rows:
                raise DataError(path, f"{row} rows could be read of the {file.metadata.num_rows} it says it has")
        total += row
    return fold, total


def fetch(files: Sequence[Path], wanted: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """The rows at the (file, row) places, which must rise; only the row groups that hold one are read."""
    for number, path in enumerate(files):
        rows = np.array([row for file, row in wanted if file == number], dtype=np.int64)
        if not len(rows):
            continue
        with open_parquet(path) as file:
            columns = [name for name in ("data_source", "prompt", "ability", "reward_model", "extra_info")
                       if name in file.schema_arrow.names]  # fmt: skip
            start = 0
            for group in range(file.metadata.num_row_groups):
                end = start + file.metadata.row_group(group).num_rows
                here = rows[(rows >= start) & (rows < end)]
                if len(here):
                    yield from _take(_batches(path, file, columns, [group]), here - start)
                start = end


def _take(batches: Iterator[pa.RecordBatch], rows: np.ndarray) -> Iterator[dict[str, Any]]:
    start = 0
    for batch in batches:
        here = rows[(rows >= start) & (rows < start + batch.num_rows)] - start
        if len(here):
            yield from batch.take(pa.array(here)).to_pylist()
        start += batch.num_rows
        if start > rows[-1]:
            return


def _batches(
    path: Path, file: pq.ParquetFile, columns: list[str], groups: list[int] | None = None
) -> Iterator[pa.RecordBatch]:
    try:
        yield from file.iter_batches(batch_size=BATCH, columns=columns, row_groups=groups)
    except (pa.ArrowException, OSError) as error:
        raise DataError(path, f"cannot be read ({error})") from error


def _add(fold: Fold, batch: pa.RecordBatch, number: int, path: Path, row: int) -> None:
    prompts, rewards = batch.column("prompt"), batch.column("reward_model")
    lengths = pc.fill_null(pc.list_value_length(prompts), 0)
    _refuse(pc.equal(lengths, 0), path, row, "prompt", "no message in it")
    messages = prompts.flatten()
    owner = np.repeat(np.arange(len(lengths)), lengths.to_numpy(zero_copy_only=False))
    role, content = pc.struct_field(messages, "role"), pc.struct_field(messages, "content")
    for name, values in (("role", role), ("content", content)):
        blank = pc.fill_null(pc.equal(pc.utf8_trim_whitespace(values), ""), True)
        if pc.any(blank).as_py():
            raise DataError(path, "empty", row + int(owner[pc.index(blank, True).as_py()]), f"prompt.{name}")
    identity = pc.binary_join_element_wise(_text(role), _text(content), _FIELD)
    if len(messages) != len(prompts):
        offsets = np.concatenate([[0], np.cumsum(lengths.to_numpy(zero_copy_only=False))])
        identity = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), identity), _MESSAGE)
    answers = pc.fill_null(_text(pc.struct_field(rewards, "ground_truth")), "")
    codes = pc.binary_join_element_wise(identity, answers, _ANSWER).dictionary_encode().indices
    _, first, copies = np.unique(codes.to_numpy(), return_index=True, return_counts=True)
    order = np.argsort(first)
    where = pa.array(first[order])
    for place, count, text, answer in zip(
        first[order].tolist(), copies[order].tolist(), identity.take(where).to_pylist(),
        answers.take(where).to_pylist(), strict=True,
    ):  # fmt: skip
        fold.add(text, answer, count, number, row + place)


def _refuse(bad: pa.Array, path: Path, row: int, column: str, message: str) -> None:
    if pc.any(bad).as_py():
        raise DataError(path, message, row + pc.index(bad, True).as_py(), column)


def _text(values: pa.Array) -> pa.Array:
    return values if pa.types.is_string(values.type) else values.cast(pa.string())


def _is_text(kind: pa.DataType | None) -> bool:
    return kind is not None and (pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_text_or_none(kind: pa.DataType | None) -> bool:
    if kind is None or pa.types.is_null(kind):
        return True
    return _is_text(kind.value_type if pa.types.is_dictionary(kind) else kind)


def _fields(kind: pa.DataType) -> dict[str, pa.DataType]:
    if not pa.types.is_struct(kind):
        return {}
    return {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
