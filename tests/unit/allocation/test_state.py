"""Saved whole or not at all, loaded strictly, no pickle; randomness by name; and what the core may import."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import verl_ext
from verl_ext.allocation import StateError, load_state, rng_for, save_state
from verl_ext.allocation import state as state_module

STATE = {
    "pool": {"epoch": 3, "mask": np.packbits(np.arange(40) % 3 == 0), "empty": np.zeros((0, 2))},
    "numbers": [1, 2.5, None, True, "x", {"deep": np.arange(3)}],
    "big": 2**100,
    "scalar": np.float64(0.1),
}


def same(a, b):
    if isinstance(a, dict):
        return set(a) == set(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return np.array_equal(a, b) and np.asarray(a).dtype == np.asarray(b).dtype


def test_round_trip_and_replacement(tmp_path):
    save_state(tmp_path / "deep" / "folder", STATE)
    assert same(load_state(tmp_path / "deep" / "folder"), STATE)
    save_state(tmp_path / "deep" / "folder", {"other": np.arange(5)})
    assert same(load_state(tmp_path / "deep" / "folder"), {"other": np.arange(5)})
    assert len(list((tmp_path / "deep" / "folder").iterdir())) == 2


@pytest.mark.parametrize("dies_at", [1, 2])
def test_a_crash_leaves_the_old_state_whole(tmp_path, monkeypatch, dies_at):
    save_state(tmp_path, STATE)
    calls, replace = [], os.replace

    def dying(source, target):
        calls.append(target)
        if len(calls) == dies_at:
            raise OSError("power cut")
        replace(source, target)

    monkeypatch.setattr(state_module.os, "replace", dying)
    with pytest.raises(OSError, match="power cut"):
        save_state(tmp_path, {"other": np.arange(50)})
    monkeypatch.undo()
    assert same(load_state(tmp_path), STATE)


@pytest.mark.bad_input
def test_damage_is_named(tmp_path):
    with pytest.raises(StateError, match="is missing"):
        load_state(tmp_path)
    path = save_state(tmp_path, STATE)
    text = path.read_text()
    document = json.loads(text)
    for change, named in (
        ({"version": 99}, "version 99"),
        ({"format": "other"}, "not a state"),
        ({"state": {**document["state"], "big": 7}}, "checksum"),
        ({"arrays": "allocation-none.npz"}, "allocation-none.npz, which is missing"),
    ):
        path.write_text(json.dumps({**document, **change}))
        with pytest.raises(StateError, match=named):
            load_state(tmp_path)
    path.write_text(text[:-20])
    with pytest.raises(StateError, match="not JSON"):
        load_state(tmp_path)
    path.write_text(text)
    arrays = next(tmp_path.glob("*.npz"))
    payload = bytearray(arrays.read_bytes())
    payload[len(payload) // 2] ^= 1
    arrays.write_bytes(payload)
    with pytest.raises(StateError, match="damaged"):
        load_state(tmp_path)


@pytest.mark.parametrize("bad", [object(), {1: 2}, np.array([None]), {"__array__": "a0"}, {1, 2}])
def test_what_cannot_be_saved_is_refused(tmp_path, bad):
    with pytest.raises(TypeError, match="state"):
        save_state(tmp_path, {"inner": bad})
    assert not list(tmp_path.glob("*.json"))


def test_streams_of_randomness_are_named():
    first = rng_for(1, "collect", 7).random(4).tolist()
    assert first == rng_for(1, "collect", 7).random(4).tolist()
    others = [rng_for(2, "collect", 7), rng_for(1, "collect", 8), rng_for(1, "pool", 7), rng_for(1, "collec", "t", 7)]
    assert all(other.random(4).tolist() != first for other in others)


def test_the_core_imports_nothing_heavy():
    code = (
        "import sys, verl_ext.allocation, verl_ext.simulation.simulated_backend, verl_ext.testing\n"
        "heavy = {'verl', 'ray', 'torch', 'vllm', 'transfer_queue', 'hydra', 'omegaconf', 'transformers', 'pandas'}\n"
        "heavy |= {'pytest', 'hypothesis'}\n"
        "print(sorted(heavy & {name.split('.')[0] for name in sys.modules}))"
    )
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(verl_ext.__file__))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "[]"
