"""Rows in verl's format, one schema for all data sets, so that any of them can be trained or validated on together."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa

from verl_ext.allocation.prompt_pool import prompt_key

SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        # index: the published row's own; key: the prompt pool's; n: rows of the published file folded into this one.
        ("extra_info", pa.struct([("index", pa.string()), ("key", pa.string()), ("n", pa.int64())])),
    ]
)


class DataError(ValueError):
    """A file that cannot be used; names the file, and where there is one, the row (counted from 0) and the column."""

    def __init__(self, file: Any, message: str, row: int | None = None, column: str | None = None) -> None:
        where = [str(file)]
        if row is not None:
            where.append(f"row {row}")
        if column is not None:
            where.append(f"column {column!r}")
        super().__init__(f"{', '.join(where)}: {message}")


def verl_row(
    data_source: str,
    messages: list[dict[str, str]],
    ground_truth: str,
    *,
    ability: str,
    index: str | None = None,
    n: int = 1,
    style: str = "rule",
) -> dict[str, Any]:
    """One row of verl's RLHF format under `SCHEMA`; `extra_info.key` is the key of the prompt in the pool."""
    return {
        "data_source": data_source,
        "prompt": messages,
        "ability": ability,
        "reward_model": {"style": style, "ground_truth": ground_truth},
        "extra_info": {"index": index, "key": prompt_key(data_source, messages, ground_truth), "n": n},
    }


def answer_text(value: Any) -> str:
    """An answer as text: stripped; a whole number without its decimal point; nothing for None and what is not finite.

    Raises:
        TypeError: the value is neither text nor a number.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"text or a number is accepted, got {type(value).__name__}: {value!r}")
    if isinstance(value, float):
        if not math.isfinite(value):
            return ""
        if value.is_integer():
            return str(int(value))
    return str(value)
