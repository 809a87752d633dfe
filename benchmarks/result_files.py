"""Result files of benchmarks: JSON with a line for each entry, so that a new measurement is a short difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_result(path: Path, record: dict[str, Any]) -> None:
    """Write a record with one line a key, and one line an entry where a value is a list or dictionary of such."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f" {json.dumps(key)}: {_value(value)}" for key, value in record.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _value(value: Any) -> str:
    if isinstance(value, dict) and any(isinstance(entry, dict | list) for entry in value.values()):
        return "{\n" + ",\n".join(f"  {json.dumps(key)}: {_line(entry)}" for key, entry in value.items()) + "\n }"
    if isinstance(value, list) and any(isinstance(entry, dict | list) for entry in value):
        return "[\n" + ",\n".join(f"  {_line(entry)}" for entry in value) + "\n ]"
    return _line(value)


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
