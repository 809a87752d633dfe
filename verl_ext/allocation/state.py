"""Saved state: JSON and .npz without pickle, written atomically; and named streams of randomness."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..files import UnsafePathError, inside, private_folder, write_whole

FORMAT = "verl_ext.allocation"
VERSION = 3
_ARRAY = "__array__"
_FILE = "allocation.json"


class StateError(RuntimeError):
    """Saved state is missing, damaged, of another version, or does not fit what it is loaded into."""


def rng_for(seed: int, *names: str | int) -> np.random.Generator:
    """The stream of randomness that belongs to a name, e.g. ``rng_for(seed, "collect", step)``.

    A stream named after a step needs no saved state: a resumed run draws the same numbers.
    """
    digest = hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=16).digest()
    words = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4)]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([int(seed), *words])))


def check_keys(what: str, state: Mapping[str, Any], expected: Iterable[str]) -> None:
    """Refuse a state dict with keys missing or unknown.

    Raises:
        StateError: naming ``what`` and the keys.
    """
    expected = set(expected)
    missing, unknown = sorted(expected - set(state)), sorted(set(state) - expected)
    if missing or unknown:
        raise StateError(f"state of {what}: missing {missing}, unknown {unknown}")


def check_same(what: str, state: Mapping[str, Any], **here: Any) -> None:
    """Refuse a state dict whose values differ from those here.

    Raises:
        StateError: naming ``what``, the key, and both values.
    """
    for key, value in here.items():
        if state[key] != value:
            raise StateError(f"state of {what}: {key} was {state[key]!r} when saved and is {value!r} now")


def save_state(folder: str | os.PathLike[str], state: Mapping[str, Any]) -> Path:
    """Write nested dicts of JSON values and arrays into ``folder``; returns the path of the JSON file.

    The arrays' file is named after its content and written first, so that renaming the JSON file is the one point
    at which the new state replaces the old; a crash leaves either the old state or the new one, whole.

    Raises:
        TypeError: a value is neither JSON nor a plain array, or a key is not a string.
    """
    folder = private_folder(folder)
    arrays: dict[str, np.ndarray] = {}
    plain = _split(state, "", arrays)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    payload = buffer.getvalue()
    arrays_digest = _digest(payload)
    arrays_file = f"allocation-{arrays_digest[:16]}.npz"
    body = json.dumps(plain, sort_keys=True)
    document = {
        "format": FORMAT,
        "version": VERSION,
        "arrays": arrays_file,
        "arrays_checksum": arrays_digest,
        "checksum": _digest(body.encode()),
        "state": plain,
    }
    write_whole(folder / arrays_file, payload, private=True)
    write_whole(folder / _FILE, json.dumps(document, sort_keys=True, indent=1).encode(), private=True)
    for old in folder.glob("allocation-*.npz"):
        if old.name != arrays_file:
            old.unlink()
    return folder / _FILE


def load_state(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what :func:`save_state` wrote.

    Raises:
        StateError: a file is missing, damaged, or of another format or version, or leads out of the folder.
    """
    folder = Path(folder)
    try:
        path = inside(folder, _FILE)
    except UnsafePathError as error:
        raise StateError(str(error)) from error
    if not path.is_file():
        raise StateError(f"no allocation state in {folder}: {_FILE} is missing")
    try:
        document = json.loads(path.read_bytes())
    except ValueError as error:
        raise StateError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise StateError(f"{path} is not a state of {FORMAT}")
    if document.get("version") != VERSION:
        raise StateError(f"{path} has version {document.get('version')!r}; this code reads version {VERSION}")
    check_keys(str(path), document, ("format", "version", "arrays", "arrays_checksum", "checksum", "state"))
    if _digest(json.dumps(document["state"], sort_keys=True).encode()) != document["checksum"]:
        raise StateError(f"{path} is damaged: the checksum of its state does not match")
    try:
        arrays_path = inside(folder, document["arrays"])
    except UnsafePathError as error:
        raise StateError(f"{path} is damaged: {error}") from error
    if not arrays_path.is_file():
        raise StateError(f"{path} needs {arrays_path.name}, which is missing")
    payload = arrays_path.read_bytes()
    if _digest(payload) != document["arrays_checksum"]:
        raise StateError(f"{arrays_path} is damaged: its checksum does not match {path.name}")
    with np.load(io.BytesIO(payload), allow_pickle=False) as arrays:
        return _join(document["state"], arrays)


def _split(value: Any, path: str, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError(f"state {path or '.'}: arrays of objects cannot be saved")
        name = f"a{len(arrays)}"
        arrays[name] = value
        return {_ARRAY: name}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key == _ARRAY:
                raise TypeError(f"state {path or '.'}: key {key!r}; accepted: strings other than {_ARRAY}")
        return {key: _split(item, f"{path}.{key}", arrays) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_split(item, f"{path}[{i}]", arrays) for i, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"state {path or '.'}: {type(value).__name__} cannot be saved")


def _join(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, dict):
        if set(value) == {_ARRAY}:
            return arrays[value[_ARRAY]]
        return {key: _join(item, arrays) for key, item in value.items()}
    if isinstance(value, list):
        return [_join(item, arrays) for item in value]
    return value


def _digest(payload: bytes) -> str:
    return hashlib.blake2b(payload, digest_size=16).hexdigest()
