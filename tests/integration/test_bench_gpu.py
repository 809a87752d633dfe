"""The smallest part of `make bench-gpu`'s rehearsal: the real stack, with Hugging Face code in vLLM's place."""

from __future__ import annotations

import json

import pytest

from benchmarks import bench_gpu

pytestmark = pytest.mark.real_stack


def test_a_streaming_run_is_measured_without_an_engine(tmp_path):
    out = tmp_path / "gpu.json"
    wanted = ["--stages", "A", "--runs", "sara streaming", "--steps", "2", "--minutes", "14"]
    code = bench_gpu.main([*wanted, "--out", str(out), "--folder", str(tmp_path)])
    (found,) = json.loads(out.read_text())["A"].values()
    assert code == 0, found
    assert found["steps"] == 2 and found["ledger"] == "adds up" and found["rollouts_a_step"] >= 256
    # Rollouts and trainer run the same model in fp32.
    assert found["probability_difference_max"] < 1e-3
    assert {"step", "gen", "update_actor", "update_weights"} <= set(found["phase_s"])
