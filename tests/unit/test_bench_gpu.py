"""`make bench-gpu`: what its runs compose to, what it says of what is missing, and the figures it reads."""

from __future__ import annotations

import json

import pytest

from benchmarks import bench_gpu
from benchmarks.gpu import measured_run, random_task, stages
from verl_ext.checks import Checks
from verl_ext.checks.local import check_settings
from verl_ext.configuration import compose_config


def all_runs(folder):
    sizes = {"steps": 4}
    for gpu in (False, True):
        yield from ((f"A {gpu} {name}", run) for name, run in stages.tiny_runs(stages._HF, gpu, **sizes).items())
    yield from ((f"B {name}", run) for name, run in stages.tiny_runs(stages._VLLM, True, **sizes).items())
    yield from ((f"C {name}", run) for name, run in stages.large_runs(folder, size="tiny", **sizes).items())


FEW = ("A False sara LoRA merged", "B sara FSDP 1", "C sara streaming, carry")


@pytest.mark.parametrize("names", [FEW, pytest.param(None, marks=pytest.mark.long)], ids=["few", "all"])
def test_the_runs_compose_and_their_settings_fit_together(tmp_path, names):
    runs = dict(all_runs(tmp_path))
    assert set(FEW) <= set(runs)
    for name, overrides in runs.items():
        if names is not None and name not in names:
            continue
        config = compose_config(list(overrides))
        checks = Checks(say=lambda finding: None)
        check_settings(config, checks)
        checks.stop_if_short()
        on_gpu = name.startswith(("A True", "B", "C"))
        assert config.trainer.device == ("cuda" if on_gpu else "cpu"), name
        kind = config.actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype
        assert (kind == "bf16") == (config.actor_rollout_ref.rollout.dtype == "bfloat16"), name


def test_without_a_gpu_the_other_stages_say_what_they_need(tmp_path, monkeypatch, capsys):
    for module in (bench_gpu, stages):
        monkeypatch.setattr(module, "cuda_here", lambda: False)
    monkeypatch.setattr(bench_gpu, "run", lambda folder, overrides, limit: {"seconds": 1.0, "folder": folder.name})
    assert bench_gpu.main(["--stages", "A,B,C", "--out", str(tmp_path / "gpu.json"), "--folder", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert record["kind"] == "rehearsal on a CPU" and record["versions"]["verl"] and record["machine"]["cores"]
    assert list(record["A"]) == list(bench_gpu.REHEARSAL)
    assert record["A"]["sara saved"]["folder"] == record["A"]["sara saved+resumed"]["folder"] == "sara-saved"
    assert record["B"] == record["C"] == {"left_out": "needs a CUDA device"}
    assert "stage B left out: it needs a CUDA device" in capsys.readouterr().out


def test_a_run_that_fails_is_written_down_and_the_next_one_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_gpu, "cuda_here", lambda: False)
    monkeypatch.setattr(
        bench_gpu, "run", lambda folder, o, limit: {"failed": "exit status 1: x"} if "streaming" in folder.name else {}
    )
    assert bench_gpu.main(["--stages", "A", "--out", str(tmp_path / "gpu.json"), "--folder", str(tmp_path)]) == 1
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert record["A"]["sara streaming"] == {"failed": "exit status 1: x"} and "sara saved" in record["A"]
    assert bench_gpu.main(["--stages", "A", "--minutes", "0", "--out", str(tmp_path / "gpu.json")]) == 0
    assert "left_out" in json.loads((tmp_path / "gpu.json").read_text())["A"]["sara saved"]


def test_an_unknown_stage_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench_gpu.main(["--stages", "A,E"])
    assert "--stages E: accepted are A, B, C, D" in capsys.readouterr().err


def test_figures_are_medians_without_the_first_step_and_the_worst_of_all(tmp_path):
    difference = "training/rollout_probs_diff_max"
    steps = [
        {"timing_s/step": s, "timing_s/gen": s / 2, "allocation/step_rollouts": 100, difference: d}
        for s, d in ((50.0, 0.5), (2.0, 0.1), (4.0, 0.2), (3.0, 0.3))
    ]
    lines = [{"step": 0, "data": {"val": 1}}, *({"step": n + 1, "data": data} for n, data in enumerate(steps))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = measured_run.figures(tmp_path, "Sleep mode freed 12.50 GiB memory\nPrefix cache hit rate: 62.1%, x\n")
    assert found["steps"] == 4 and found["phase_s"] == {"step": 3.0, "gen": 1.5}
    assert found["rollouts_a_second"] == 33.33 and found["probability_difference_max"] == 0.5
    assert found["sleep_freed_gib"] == 12.5 and found["prefix_cache_hit_percent"] == 62.1


def test_the_random_task_has_prompts_of_every_rate_and_its_reward_their_rates(tmp_path):
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    model, prompts = random_task.write(tmp_path, "tiny")
    rates = [json.loads(row["reward_model"]["ground_truth"])[1] for row in pq.read_table(prompts).to_pylist()]
    assert len(rates) == random_task.PROMPTS
    assert 0.2 < rates.count(0.0) / len(rates) < 0.4 and 0.2 < rates.count(1.0) / len(rates) < 0.4
    for rate in (0.0, 0.3, 1.0):
        right = [
            random_task.compute_score("x", f"answer {n}", json.dumps([7, rate]))["acc"] for n in range(2000)
        ]
        assert abs(sum(right) / 2000 - rate) < 4 * (rate * (1 - rate) / 2000) ** 0.5 + 1e-9
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert len(tokenizer) == random_task.VOCABULARY
    assert tokenizer.decode([65, 300, 2000]) and tokenizer("prompt 001").input_ids == list(b"prompt 001")
