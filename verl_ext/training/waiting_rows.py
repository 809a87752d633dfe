"""Trajectories that wait in TransferQueue between steps, saved with the rules' state and put back on a resume.

Only they are saved: the trained batch is still in TransferQueue when verl saves, and is not wanted. Tensors go to a
safetensors file, what else the rollout brought to JSON, and the prompt's own fields come from the data set again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transfer_queue as tq
from safetensors.torch import load, save
from tensordict import TensorDict
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_ext.allocation.state import StateError, check_keys
from verl_ext.files import UnsafePathError, inside, private_folder, write_whole

Row = tuple[str, dict[str, Any]]
"""Key and tag of a row in TransferQueue."""


def _column(data: TensorDict, name: str) -> list[Any]:
    """One value a row, whichever of its several forms TransferQueue gave the field."""
    value = data.get(name)
    if isinstance(value, torch.Tensor):
        return list(value.unbind()) if value.is_nested else list(value)
    return list(data[name])


def save_rows(
    folder: str, rows: list[Row], prompts: list[int], prompt_fields: set[str], partition: str
) -> dict[str, Any]:
    """Write the rows' trajectories into `folder`.

    Args:
        rows: keys and tags.
        prompts: row of the pool, a row.
        prompt_fields: fields that the data set gives again.

    Returns:
        JSON state that `load_rows` takes; it names the file by its content.

    Raises:
        StateError: a rollout carries a field that is neither a tensor nor JSON (images, for one), by name.
    """
    if not rows:
        return {"rows": [], "file": None}
    keys = [key for key, _ in rows]
    data = tq.kv_batch_get(keys=keys, partition_id=partition)
    tensors: dict[str, torch.Tensor] = {}
    others: list[dict[str, Any]] = [{} for _ in rows]
    for name in data.keys():
        if name in prompt_fields:
            continue
        column = _column(data, name)
        if all(isinstance(value, torch.Tensor) for value in column):
            tensors[f"{name}/lengths"] = torch.tensor([len(value) if value.ndim else -1 for value in column])
            tensors[f"{name}/values"] = torch.cat([value.reshape(1) if value.ndim == 0 else value for value in column])
            continue
        for other, value in zip(others, column, strict=True):
            other[name] = value.item() if isinstance(value, torch.Tensor) else value
    try:
        state_rows = [
            {"key": key, "tag": tag, "prompt": prompt, "fields": json.loads(json.dumps(other, default=_plain))}
            for (key, tag), prompt, other in zip(rows, prompts, others, strict=True)
        ]
    except TypeError as error:
        raise StateError(
            f"waiting rollouts cannot be saved: {error}; use an allocator that keeps nothing between steps, "
            f"or trainer.save_freq=-1"
        ) from error
    payload = save(tensors)
    file = f"waiting-{hashlib.blake2b(payload, digest_size=8).hexdigest()}.safetensors"
    write_whole(private_folder(folder) / file, payload, private=True)
    return {"rows": state_rows, "file": file}


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def load_rows(
    folder: str, state: Mapping[str, Any], prompt_fields: Callable[[int], dict[str, Any]], partition: str
) -> list[tuple[Row, int]]:
    """Put saved trajectories back into TransferQueue.

    Returns:
        ((key, tag), row of the pool), a row.

    Raises:
        StateError: the file is missing or is not what was saved.
    """
    check_keys("waiting rows", state, ("rows", "file"))
    if not state["rows"]:
        return []
    try:
        payload = inside(folder, state["file"]).read_bytes()
    except UnsafePathError as error:
        raise StateError(f"the waiting rollouts' file: {error}") from error
    except OSError as error:
        raise StateError(f"the waiting rollouts' file is missing: {error}") from error
    if f"waiting-{hashlib.blake2b(payload, digest_size=8).hexdigest()}.safetensors" != state["file"]:
        raise StateError(f"{state['file']} in {folder} is not what was saved")
    tensors = load(payload)
    columns: dict[str, list[torch.Tensor]] = {}
    for name in {name.rpartition("/")[0] for name in tensors}:
        lengths = tensors[f"{name}/lengths"].tolist()
        values = tensors[f"{name}/values"].split([max(1, n) if n < 0 else n for n in lengths])
        columns[name] = [value[0] if n < 0 else value for n, value in zip(lengths, values, strict=True)]
    fields = []
    for i, row in enumerate(state["rows"]):
        uid, session, _ = row["key"].split("_")
        own = {name: column[i] for name, column in columns.items()}
        place = {"uid": uid, "session_id": int(session), "global_steps": row["tag"]["global_steps"]}
        fields.append(prompt_fields(row["prompt"]) | own | row["fields"] | place)
    rows = [(row["key"], row["tag"]) for row in state["rows"]]
    tq.kv_batch_put(
        keys=[key for key, _ in rows],
        fields=list_of_dict_to_tensordict(fields),
        tags=[tag for _, tag in rows],
        partition_id=partition,
    )
    return [(row, saved["prompt"]) for row, saved in zip(rows, state["rows"], strict=True)]
