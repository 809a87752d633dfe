# SPDX-License-Identifier: Apache-2.0
"""Data files: that they are there, have the columns verl needs, and enough different prompts. No verl, no torch."""

from __future__ import annotations

import contextlib
import heapq
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, ListConfig

from verl_ext.allocation.prompt_pool import prompt_key
from verl_ext.training.training_settings import VERLS_OWN

from .findings import Problems, Seen

ROWS_READ = 200_000
"""Rows of a data set whose content is looked at; all are counted."""

SOURCES_KEPT = 100
"""Data sources of which a row is kept, for the reward to be tried on."""

LONGEST_KEPT = 1_000
"""Prompts, the longest of a data set, whose tokens are counted later."""


@dataclass
class Rows:
    """What was seen of a data set."""

    setting: str
    """data.train_files or data.val_files."""
    columns: set[str] = field(default_factory=set)
    """Columns of all files."""
    total: int = 0
    """Rows of all files."""
    read: int = 0
    """Rows whose content was looked at."""
    keys: set[str] = field(default_factory=set)
    """Keys of the prompts read, each once."""
    repeated: int = 0
    """Rows that repeat an earlier prompt with the same answer."""
    by_source: dict[Any, dict[str, Any]] = field(default_factory=dict)
    """The first row of each data_source."""
    longest: list[tuple[int, int, str, int, Any]] = field(default_factory=list)
    """(bytes of text, order, file, row of the file, prompt) of the longest prompts, as a heap."""


def files_of(config: DictConfig, setting: str) -> list[str]:
    """The paths that a setting names, one or several."""
    value = config.data[setting.partition(".")[2]]
    paths = list(value) if isinstance(value, list | ListConfig) else [value]
    return [os.path.expanduser(str(path)) for path in paths if path is not None]


def check_data(config: DictConfig, setting: str) -> Seen:
    """The files of `data.train_files` or `data.val_files`.

    Returns:
        Its value is a `Rows`, or None where the rows can be read by verl alone.

    Raises:
        Problems: a file that is missing, unreadable or of another kind, an absent column, a row in another form, too
            few prompts; all that are found, by file and row.
    """
    paths = files_of(config, setting)
    if not paths:
        raise Problems(f"{setting}={config.data[setting.partition('.')[2]]!r}: names no file; accepted: Parquet files")
    problems, rows, elsewhere = [], Rows(setting), []
    custom = (config.data.get("custom_cls") or {}).get("path")
    for path in paths:
        if "://" in path or custom:
            elsewhere.append(path)
        elif not os.path.isfile(path):
            what = "is a folder" if os.path.isdir(path) else f"does not exist{how_to_make(path)}"
            problems.append(f"{setting}: {path} {what}; accepted: Parquet files (prompt, data_source, reward_model)")
        elif not path.endswith((".parquet", ".json", ".jsonl")):
            problems.append(f"{setting}: {path} is neither .parquet nor .json nor .jsonl, which is all verl reads")
        else:
            problems += _read(config, path, rows)
    if elsewhere and not problems:
        why = f"data.custom_cls.path={custom}" if custom else f"{elsewhere[0]} is remote"
        return Seen(f"{setting}: read by verl alone ({why})")
    if not problems:
        problems += _too_few(config, rows)
    if problems:
        raise Problems(*problems)
    return _seen(rows)


def how_to_make(path: str) -> str:
    """The command that makes a missing file, where its name is one of ours."""
    from verl_ext.data.validation_sets import SETS

    folder, name = os.path.split(path.removesuffix(".parquet"))
    family = name.partition("_")[0]
    if name == "dapo_math_17k":
        words = f"dapo_math_17k --output {path}"
    elif name in SETS:
        words = f"validation_sets --sets {name} --output {folder or '.'}"
    elif family in ("gsm8k", "countdown"):
        words = f"{family} --output {folder or '.'}"
    else:
        return ""
    return f" (python -m verl_ext.data.{words} makes it)"


def check_storage(config: DictConfig, rows: Rows, waiting: int = 0) -> Seen:
    """Whether TransferQueue holds a validation pass: verl sends `data.val_batch_size` prompts at a time, or all.

    Args:
        rows: of data.val_files.
        waiting: rollouts that wait in it between two steps.

    Raises:
        Problems: the rows that do not fit would be lost, and their prompts count as wrong.
    """
    most, batch = config.data.get("val_max_samples"), config.data.get("val_batch_size")
    prompts = min(rows.total, most) if isinstance(most, int) and most > 0 else rows.total
    at_once = min(prompts, batch or prompts) * config.actor_rollout_ref.rollout.val_kwargs.n
    storage = config.transfer_queue.backend
    capacity = storage.SimpleStorage.total_storage_size if storage.storage_backend == "SimpleStorage" else None
    if capacity is not None and at_once + waiting > capacity:
        raise Problems(
            f"transfer_queue.backend.SimpleStorage.total_storage_size={capacity} is too small for a validation pass of "
            f"{at_once} rollouts beside {waiting} waiting; accepted: {at_once + waiting} or more, or a smaller "
            f"data.val_batch_size"
        )
    return Seen(f"data.val_files: {at_once} rollouts of validation at once")


def _seen(rows: Rows) -> Seen:
    text = f"{rows.setting}: {rows.total} prompts"
    if rows.read < rows.total:
        text += f", the first {rows.read} looked at"
    warnings = ()
    if rows.repeated:
        text += f", {len(rows.keys)} of them different"
        warnings = (
            f"{rows.setting}: {rows.repeated} of {rows.read} rows repeat an earlier prompt with the same answer"
            + ("; each is trained on once an epoch" if rows.setting == "data.train_files" else ""),
        )
    return Seen(text, rows, warnings)


def _too_few(config: DictConfig, rows: Rows) -> list[str]:
    if not rows.total:
        return [f"{rows.setting}: holds no prompts (0 rows)"]
    if rows.setting != "data.train_files":
        return []
    batch = config.data.train_batch_size
    if not isinstance(batch, int):
        return []
    most = config.data.get("train_max_samples", -1)
    used = min(rows.total, most) if isinstance(most, int) and most > 0 else rows.total
    limited = f" (data.train_max_samples={most})" if used < rows.total else ""
    if used < batch:
        return [f"data.train_files holds {used} prompts{limited}, fewer than data.train_batch_size={batch}"]
    if config.trainer.v1.trainer_mode not in VERLS_OWN and rows.read == rows.total and len(rows.keys) < batch:
        return [
            f"data.train_files holds {len(rows.keys)} different prompts in {rows.total} rows, fewer than "
            f"data.train_batch_size={batch}: a prompt is offered once a step"
        ]
    return []


def _read(config: DictConfig, path: str, rows: Rows) -> list[str]:
    """Look at one file; its problems."""
    prompt_column, by_rule = config.data.get("prompt_key", "prompt"), not config.reward.reward_model.enable
    needed = [prompt_column, "data_source"] + (["reward_model"] if by_rule else [])
    try:
        columns, total, records = _records(path, [*needed, "extra_info"])
    except Exception as error:
        return [f"{rows.setting}: {path} cannot be read: {' '.join(str(error).split())}"]
    if total and (missing := [name for name in needed if name not in columns]):
        hint = " (data.prompt_key)" if prompt_column in missing else ""
        names = ", ".join(map(repr, missing))
        return [f"{rows.setting}: {path} has no column {names}{hint}; its columns are {columns}"]
    rows.total += total
    rows.columns.update(columns)
    try:
        for number, record in enumerate(records):
            if rows.read >= ROWS_READ:
                break
            fault = _fault(record, prompt_column, by_rule)
            if fault:
                return [f"{rows.setting}: row {number} of {path}: {fault}"]
            _take(rows, record, record[prompt_column], number, path)
    except Exception as error:
        return [f"{rows.setting}: {path} cannot be read: {' '.join(str(error).split())}"]
    return []


def _fault(record: dict[str, Any], prompt_column: str, by_rule: bool) -> str | None:
    prompt = record.get(prompt_column)
    if not isinstance(prompt, list) or not prompt or not all(isinstance(message, dict) for message in prompt):
        return f"{prompt_column} is {_short(prompt)}; accepted: a list of messages with role and content"
    for number, message in enumerate(prompt):
        # A list holds text beside images, video or sound.
        for name, kinds, said in (("role", str, "text"), ("content", str | list, "text, or a list of parts")):
            if not isinstance(value := message.get(name), kinds):
                return f"{name} of message {number} of {prompt_column} is {_short(value)}; accepted: {said}"
    if not isinstance(source := record.get("data_source"), str):
        return f"data_source is {_short(source)}; accepted: text, the name that the reward knows"
    reward = record.get("reward_model")
    if by_rule and (not isinstance(reward, dict) or "ground_truth" not in reward):
        return f"reward_model is {_short(reward)}; accepted: a struct with ground_truth, the right answer"
    if by_rule and _is_empty(reward["ground_truth"]):
        return f"ground_truth of reward_model is {_short(reward['ground_truth'])}; accepted: the right answer"
    if said := _no_json(truth := (reward or {}).get("ground_truth") if isinstance(reward, dict | None) else None):
        return f"ground_truth of reward_model is {_short(truth)}, which holds {said}; accepted: {_JSON}"
    if said := _no_json(prompt):
        return f"{prompt_column} holds {said}; accepted: {_JSON}"
    if not isinstance(extra := record.get("extra_info"), dict | None):
        return f"extra_info is {_short(extra)}; accepted: null or a struct"
    return None


_JSON = "text, numbers, true and false, and lists and structs of them"


def _no_json(value: Any) -> str | None:
    """What a value holds that has no JSON form, of which a prompt's key is made."""
    try:
        prompt_key("", "", value)
    except (TypeError, ValueError) as error:
        return str(error).partition(": ")[2].removesuffix(" has no JSON form") or str(error)
    return None


def _is_empty(truth: Any) -> bool:
    """Whether nothing can be compared with it. 0 and False can."""
    if isinstance(truth, str):
        return not truth.strip()
    if isinstance(truth, list | dict):
        return all(map(_is_empty, truth.values() if isinstance(truth, dict) else truth))
    return truth is None


def _take(rows: Rows, record: dict[str, Any], prompt: list[dict[str, Any]], number: int, path: str) -> None:
    rows.read += 1
    if len(rows.by_source) < SOURCES_KEPT:
        rows.by_source.setdefault(record.get("data_source"), record)
    key = prompt_key(record.get("data_source"), prompt, (record.get("reward_model") or {}).get("ground_truth"))
    if key in rows.keys:
        rows.repeated += 1
        return
    rows.keys.add(key)
    size = sum(len(str(message["content"]).encode("utf-8", "replace")) for message in prompt)
    entry = (size, -rows.read, path, number, prompt)
    if len(rows.longest) < LONGEST_KEPT:
        heapq.heappush(rows.longest, entry)
    else:
        heapq.heappushpop(rows.longest, entry)


def _records(path: str, wanted: list[str]) -> tuple[list[str], int, Iterator[dict[str, Any]]]:
    """Columns, number of rows, and the rows' wanted columns one after the other."""
    if path.endswith(".parquet"):
        import pyarrow.parquet as pq

        file = pq.ParquetFile(path)
        columns = file.schema_arrow.names
        batches = file.iter_batches(batch_size=2_000, columns=[name for name in wanted if name in columns])
        return columns, file.metadata.num_rows, (row for batch in batches for row in batch.to_pylist())
    with open(path, encoding="utf-8") as source:
        text = source.read()
    records = json.loads(text) if text.lstrip().startswith("[") else _json_lines(text)
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ValueError("it holds no JSON objects, one a line or in one list")
    return sorted({name for record in records for name in record}), len(records), iter(records)


def _json_lines(text: str) -> Any:
    """The values of a text with one a line; the value of a text that is one object over several lines."""
    records = []
    # Other ends of lines than these may stand within JSON's strings.
    for line_number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if not records:
                with contextlib.suppress(ValueError):
                    return json.loads(text)
            raise ValueError(
                f"row {len(records)} (line {line_number}) is not JSON: {error.msg} at column {error.colno}; "
                "accepted: an object a line"
            ) from error
    return records


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
