"""The tiny policy: its pre-training, how it is measured, made and kept. No Ray, no real pre-training."""

from __future__ import annotations

import dataclasses
import json
import threading

import pyarrow.parquet as pq
import pytest
import torch

from verl_ext.tiny import policy_store as store
from verl_ext.tiny import prepare
from verl_ext.tiny.chain_sums import draw_prompts, prompt_text
from verl_ext.tiny.measure import measure, sample_answers, success_probabilities
from verl_ext.tiny.policy import encode_pairs, learning_rate_factor, make_policy, pretrain
from verl_ext.tiny.reward import compute_score
from verl_ext.tiny.task_settings import MIXES, PolicySettings, TinySettings
from verl_ext.tiny.tokenizer import END_ID, PAD_ID

POLICY = PolicySettings()
SMALL = PolicySettings(steps=3, batch_size=16, warmup_steps=1, hidden_size=16, intermediate_size=32)


def test_size_of_the_policy():
    model = make_policy(POLICY)
    assert 0.50e6 < sum(p.numel() for p in model.parameters()) < 0.55e6
    assert model.config.tie_word_embeddings and model.config.model_type == "qwen2"
    assert model.config.eos_token_id == model.generation_config.eos_token_id == END_ID


def test_labels_cover_the_answer_only():
    ids, labels = encode_pairs([("9+8=", "17"), ("1+1+1=", "3")])
    assert ids.tolist() == [[*b"9+8=17", END_ID, PAD_ID], [*b"1+1+1=3", END_ID]]
    assert labels.tolist() == [[-100] * 4 + [*b"17", END_ID, -100], [-100] * 6 + [*b"3", END_ID]]


def test_learning_rate_schedule():
    factors = [learning_rate_factor(step, POLICY) for step in range(POLICY.steps)]
    assert factors[0] == pytest.approx(1 / 30)
    assert factors[29] == factors[30] == 1.0
    assert factors[-1] == pytest.approx(1 / 1170)
    assert factors[30:] == sorted(factors[30:], reverse=True)


def test_pretraining_is_deterministic_and_leaves_torch_alone():
    torch.manual_seed(7)
    torch.set_num_threads(3)
    threads, before = torch.get_num_threads(), torch.get_rng_state()
    one = pretrain(SMALL).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    same = pretrain(dataclasses.replace(SMALL, threads=1)).state_dict()
    other = pretrain(dataclasses.replace(SMALL, seed=1)).state_dict()
    assert all(torch.equal(one[k], same[k]) for k in one)
    assert any(not torch.equal(one[k], other[k]) for k in one)


def test_gradient_of_shards_is_that_of_the_batch():
    whole = pretrain(dataclasses.replace(SMALL, shards=1)).state_dict()
    cut = pretrain(dataclasses.replace(SMALL, shards=5)).state_dict()
    for name in whole:
        torch.testing.assert_close(whole[name], cut[name], rtol=1e-3, atol=1e-4)


def test_exact_success_probability_agrees_with_sampling():
    torch.manual_seed(0)
    model = make_policy(SMALL).eval()
    weight = model.get_input_embeddings().weight
    with torch.no_grad():  # all but a few tokens impossible, so that right answers turn up
        model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(weight))
        bias = torch.full((SMALL.vocab_size,), -30.0)
        bias[[*b"12"]], bias[END_ID] = 0.0, 0.5
        model.lm_head.bias = torch.nn.Parameter(bias)
    p, greedy = success_probabilities(model, ["9+3=", "1+1+0=", "9+8="], ["12", "2", "17"])
    a, e = 1 / (2 + 2.718281828**0.5), 2.718281828**0.5 / (2 + 2.718281828**0.5)
    assert p.tolist() == pytest.approx([a * a * e, a * e, 0.0], abs=1e-6)
    assert greedy.tolist() == [False, False, False]
    n = 4000
    answers = sample_answers(model, ["9+3="] * n, torch.Generator().manual_seed(0))
    assert abs(answers.count("12") / n - p[0].item()) < 4 * (p[0].item() / n) ** 0.5
    assert None in answers  # three tokens without an end
    got = measure(model, ["9+3=", "1+1+0="], ["12", "2"], rollouts=4)
    q = p[:2]
    assert got.effective_share == pytest.approx((1 - q**4 - (1 - q) ** 4).mean().item())
    assert got.mean == pytest.approx(q.mean().item())


def held_out(mix="balanced"):
    digits = draw_prompts(256, MIXES[mix], True, POLICY, 0)
    return [prompt_text(d) for d in digits], [str(sum(d)) for d in digits]


def loaded(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def test_the_policy_of_the_package_is_that_of_the_default_settings():
    assert json.loads((store.SHIPPED / "tiny_settings.json").read_text()) == dataclasses.asdict(POLICY)
    model = loaded(store.SHIPPED)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    # the figures of MIXES' docstring
    assert measure(model, *held_out()).mean == pytest.approx(0.444, abs=0.001)
    assert measure(model, *held_out("sparse")).mean == pytest.approx(0.384, abs=0.001)


def test_the_policy_of_the_package_is_used_as_it_lies(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "write_policy", None)
    paths = store.ensure_tiny("sparse", cache=tmp_path)
    assert paths.model == store.SHIPPED and paths.val.is_file()
    assert not list(tmp_path.glob("policy-*"))


def test_a_policy_of_another_seed_is_made_in_the_cache(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(store, "write_policy", lambda folder, settings: made.append(settings))
    paths = [store.ensure_tiny(cache=tmp_path, policy_seed=seed) for seed in (1, 1, 2)]
    assert made == [PolicySettings(seed=1), PolicySettings(seed=2)]
    assert paths[0] == paths[1] != paths[2] and paths[0].model.parent == tmp_path.resolve()
    assert paths[0].train == paths[2].train == store.ensure_tiny(cache=tmp_path).train
    with pytest.raises(ValueError, match="tiny.seed=-1; accepted: an integer >= 0"):
        store.ensure_tiny(cache=tmp_path, policy_seed=-1)


@pytest.mark.parametrize("seed", [0, pytest.param(None, marks=pytest.mark.long)])
def test_the_policy_is_made_anew_by_the_command(seed, tmp_path, capsys, monkeypatch):
    """Small settings: how it is written. All of them (long): what comes out is as good as what the package has.

    Other processors and builds of torch give other weights of the same settings: held-out success between .417 and .460
    was seen on six machines.
    """
    if seed is not None:
        monkeypatch.setattr(prepare, "PolicySettings", lambda seed: SMALL)
    prepare.main(["--out", str(tmp_path / "cache"), "--policy", str(tmp_path / "policy"), "--measure"])
    printed = capsys.readouterr().out
    assert f"model {tmp_path / 'policy'}" in printed and "held-out: 256 prompts" in printed
    names = {path.name for path in store.SHIPPED.iterdir()}
    assert {path.name for path in (tmp_path / "policy").iterdir()} == names
    model, shipped = loaded(tmp_path / "policy"), loaded(store.SHIPPED)
    if seed is not None:
        rounded = {name: tensor.bfloat16().float() for name, tensor in pretrain(SMALL).state_dict().items()}
        assert all(torch.equal(tensor, rounded[name]) for name, tensor in model.state_dict().items())
    else:
        assert measure(model, *held_out()).mean == pytest.approx(measure(shipped, *held_out()).mean, abs=0.05)
    with pytest.raises(SystemExit):
        prepare.main(["--out", str(tmp_path / "cache"), "--policy", str(tmp_path / "policy")])
    assert "policy" in capsys.readouterr().err


def test_prepare_writes_verl_rows_and_is_done_once(tmp_path, monkeypatch, capsys):
    settings = TinySettings(train_size=50, val_size=20, policy=SMALL)
    paths = store.prepare(tmp_path, settings)
    rows = pq.read_table(paths.train).to_pylist()
    assert [row["extra_info"]["index"] for row in rows] == list(range(50))
    for row in rows:
        (message,) = row["prompt"]
        digits = [int(c) for c in message["content"][:-1].split("+")]
        assert message == {"role": "user", "content": prompt_text(digits)}
        assert row["data_source"] == "chain_sums" and row["ability"]
        assert row["reward_model"] == {"style": "rule", "ground_truth": str(sum(digits))}
        assert row["extra_info"]["difficulty"] == sum(digits) // 10
        assert compute_score("chain_sums", str(sum(digits)), row["reward_model"]["ground_truth"])["acc"]
    assert pq.read_table(paths.val).num_rows == 20
    assert (paths.model / "model.safetensors").is_file()
    capsys.readouterr()
    monkeypatch.setattr(store, "write_policy", None)
    monkeypatch.setattr(store, "_write_data", None)
    assert store.prepare(tmp_path, settings) == paths
    assert "found" in capsys.readouterr().out


def test_left_overs_of_a_killed_process_are_removed(tmp_path):
    settings = TinySettings(train_size=5, val_size=5, policy=SMALL)
    paths = store.locate(tmp_path, settings)
    left_over = tmp_path / f".{paths.model.name}.abc.tmp"
    left_over.mkdir(parents=True)
    store.prepare(tmp_path, settings)
    assert paths.model.is_dir() and not left_over.exists()


def test_a_failed_attempt_leaves_nothing_that_looks_finished(tmp_path, monkeypatch):
    settings = TinySettings(train_size=5, val_size=5, policy=SMALL)

    def fail(folder, _):
        (folder / "model.safetensors").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(store, "write_policy", fail)
    with pytest.raises(OSError, match="disk full"):
        store.prepare(tmp_path, settings)
    assert not [path for path in tmp_path.iterdir() if "policy" in path.name and path.suffix != ".lock"]


def test_concurrent_calls_make_each_part_once(tmp_path, monkeypatch):
    settings = TinySettings(train_size=5, val_size=5, policy=SMALL)
    written = []

    def write(folder, _):
        written.append(folder)
        threading.Event().wait(0.2)
        (folder / "model.safetensors").write_text("whole")

    monkeypatch.setattr(store, "write_policy", write)
    found = []
    threads = [threading.Thread(target=lambda: found.append(store.prepare(tmp_path, settings))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 1
    assert len(found) == 4 and len(set(found)) == 1
    assert (found[0].model / "model.safetensors").read_text() == "whole"
