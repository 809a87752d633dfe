"""The tiny task: prompts, sloppy adder, reward, tokenizer, settings and cache. No Ray, no real pre-training."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from collections import Counter
from math import comb
from random import Random

import pyarrow.parquet as pq
import pytest
import torch

from verl_ext.tiny import policy_store as store
from verl_ext.tiny import prepare
from verl_ext.tiny.chain_sums import (
    difficulty,
    draw_digits,
    draw_pretraining_pair,
    draw_prompts,
    is_held_out,
    prompt_text,
    quotas,
    sloppy_total,
)
from verl_ext.tiny.measure import measure, sample_answers, success_probabilities
from verl_ext.tiny.policy import encode_pairs, learning_rate_factor, make_policy, pretrain
from verl_ext.tiny.reward import compute_score
from verl_ext.tiny.task_settings import DIFFICULTIES, MIXES, PolicySettings, TinySettings, data_key, policy_key
from verl_ext.tiny.tokenizer import END_ID, PAD_ID, START_ID, make_tokenizer

POLICY = PolicySettings()
SMALL = PolicySettings(steps=3, batch_size=16, warmup_steps=1, hidden_size=16, intermediate_size=32)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny operations only lose time to threads, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sampled(mix="balanced", size=2000, held_out=False, seed=0):
    return draw_prompts(size, MIXES[mix], held_out, POLICY, seed)


def test_no_held_out_sum_is_trained_on_in_any_order():
    train = {tuple(sorted(d)) for d in sampled(size=4096)}
    val = {tuple(sorted(d)) for d in sampled(size=256, held_out=True)}
    rng = Random(3)
    corpus = {tuple(sorted(int(c) for c in draw_pretraining_pair(POLICY, rng)[0][:-1].split("+"))) for _ in range(5000)}
    assert not train & val
    assert not corpus & val


def test_held_out_ignores_order_and_takes_about_its_percentage():
    for digits in itertools.permutations((9, 8, 3, 0)):
        assert is_held_out(digits, 50) == is_held_out((0, 3, 8, 9), 50)
    multisets = list(itertools.combinations_with_replacement(range(10), 5))
    share = sum(is_held_out(m, 20) for m in multisets) / len(multisets)
    assert abs(share - 0.2) < 4 * (0.2 * 0.8 / len(multisets)) ** 0.5


@pytest.mark.parametrize("mix", sorted(MIXES))
@pytest.mark.parametrize("held_out", [False, True])
def test_mix_and_no_duplicates(mix, held_out):
    prompts = sampled(mix, 1000, held_out)
    assert len(set(prompts)) == 1000
    assert all(2 <= len(p) <= 8 and all(0 <= d <= 9 for d in p) for p in prompts)
    count = Counter(map(difficulty, prompts))
    assert set(count) <= set(range(DIFFICULTIES))
    for level, share in enumerate(MIXES[mix]):
        assert abs(count[level] - 1000 * share) <= 1


def test_prompts_are_in_random_order():
    first, last = sampled(size=1000)[:500], sampled(size=1000)[500:]
    gap = sum(map(difficulty, first)) / 500 - sum(map(difficulty, last)) / 500
    assert abs(gap) < 0.6  # sorted by difficulty, it would be about 3.5


def test_same_seed_same_prompts():
    assert sampled(seed=1) == sampled(seed=1)
    assert sampled(seed=1) != sampled(seed=2)
    pairs = [[draw_pretraining_pair(POLICY, rng) for _ in range(50)] for rng in (Random(5), Random(5), Random(6))]
    assert pairs[0] == pairs[1] != pairs[2]


def test_chains_of_one_length_and_difficulty_are_equally_likely():
    settings = dataclasses.replace(POLICY, max_digits=2)
    possible = [d for d in itertools.product(range(10), repeat=2) if difficulty(d) == 1]
    rng, draws = Random(0), 45_000
    count = Counter(draw_digits(1, settings, rng) for _ in range(draws))
    assert set(count) == set(possible)
    expected = draws / len(possible)
    chi2 = sum((count[d] - expected) ** 2 / expected for d in possible)
    assert chi2 < 90  # 44 degrees of freedom: above 90 in 1 of 20,000 cases


def test_lengths_are_equally_likely_among_those_possible():
    rng = Random(0)
    count = Counter(len(draw_digits(5, POLICY, rng)) for _ in range(3000))
    assert set(count) == {6, 7, 8}  # five nines make 45 only
    assert all(abs(c - 1000) < 120 for c in count.values())


def test_too_few_prompts_is_an_error():
    two = dataclasses.replace(POLICY, max_digits=2)
    with pytest.raises(ValueError, match=r"train_size=60 .* difficulty 0, but only"):
        draw_prompts(60, (1, 0, 0, 0, 0, 0), False, two, 0)
    with pytest.raises(ValueError, match="max_digits=2"):
        draw_prompts(10, (0, 0, 0, 0, 0, 1), False, two, 0)


@pytest.mark.parametrize("size", [1, 7, 100, 4096])
def test_quotas_add_up(size):
    for shares in MIXES.values():
        counts = quotas(size, shares)
        assert sum(counts) == size
        assert all(abs(c - size * s) < 1 for c, s in zip(counts, shares, strict=True))


@pytest.mark.parametrize("digits", [(1, 2), (9, 8), (9, 9, 9), (9, 8, 7, 6, 5), (9, 9, 9, 9, 9, 9)])
@pytest.mark.parametrize("forget", [0.0, 0.5, 0.25, 1.0])
def test_sloppy_adder_forgets_each_ten_independently(digits, forget):
    carries, draws = difficulty(digits), 4000
    exact = {
        sum(digits) - 10 * lost: comb(carries, lost) * forget**lost * (1 - forget) ** (carries - lost)
        for lost in range(carries + 1)
    }
    rng = Random(1)
    count = Counter(sloppy_total(digits, forget, rng) for _ in range(draws))
    assert set(count) <= {total for total, p in exact.items() if p > 0}
    for total, p in exact.items():
        assert abs(count[total] / draws - p) <= 4.5 * (p * (1 - p) / draws) ** 0.5


@pytest.mark.parametrize("answer, truth", [("30", "30"), ("0", "0"), ("7", "7")])
def test_right_answer(answer, truth):
    assert compute_score("chain_sums", answer, truth, {"index": 3}, anything=1) == {"score": 1.0, "acc": True}


@pytest.mark.parametrize(
    "answer",
    ["20", "", "030", "30 ", " 30", "+30", "-30", "30\n", "30.0", "3", "300", "3O", "3_0", "30=30", "30<|im_end|>",
     "\u0663\u0660", "\uff13\uff10", "\x00"],
)  # fmt: skip
def test_wrong_answer(answer):
    assert compute_score("chain_sums", answer, "30") == {"score": 0.0, "acc": False}


@pytest.mark.parametrize("answer", [None, 30, b"30", ["30"], 30.0])
def test_an_answer_that_is_not_text_is_not_scored(answer):
    with pytest.raises(TypeError, match="solution_str"):
        compute_score("chain_sums", answer, "30")


@pytest.mark.parametrize(
    "truth, error", [(30, TypeError), (None, TypeError), ("", ValueError), ("030", ValueError), ("x", ValueError)]
)
def test_bad_ground_truth(truth, error):
    with pytest.raises(error, match="ground_truth"):
        compute_score("chain_sums", "30", truth)


def test_one_token_a_byte(tokenizer):
    for text in ["9+8+7+6=", "\n", "a b\t c\r\n", "don't", "é€😀", "".join(map(chr, range(128))), "1234 5"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("\n", add_special_tokens=False)) == 1


def test_special_tokens(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD_ID, END_ID)
    special = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    assert special == [PAD_ID, START_ID, END_ID]
    assert tokenizer.encode("30<|im_end|>") == [*b"30", END_ID]
    assert tokenizer.decode([*b"30", END_ID], skip_special_tokens=True) == "30"
    assert len(tokenizer) <= POLICY.vocab_size


def test_chat_template_renders_the_prompt_alone(tokenizer):
    user = [{"role": "user", "content": "9+8="}]
    for generation in (False, True):
        assert tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=generation) == "9+8="
    turns = [*user, {"role": "assistant", "content": "17"}, {"role": "user", "content": "1+1="}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "9+8=17<|im_end|>\n1+1="


def test_tokenizer_loads_as_verl_loads_it(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    make_policy(SMALL).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded) is type(tokenizer)
    assert loaded.encode("9+8=\n17<|im_end|>") == [*b"9+8=\n17", END_ID]
    assert loaded.chat_template == tokenizer.chat_template
    assert (loaded.pad_token_id, loaded.eos_token_id) == (PAD_ID, END_ID)


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


@pytest.mark.parametrize(
    "change",
    [
        {"seed": -1}, {"min_digits": 1}, {"max_digits": 1}, {"held_out_percent": 0}, {"forget_probability": 1.5},
        {"vocab_size": 256}, {"hidden_size": 130}, {"num_kv_heads": 3}, {"steps": 0}, {"learning_rate": 0.0},
        {"learning_rate": float("nan")}, {"beta2": 1.0}, {"clip_norm": "1"}, {"max_position_embeddings": 8},
        {"threads": 0}, {"shards": 0}, {"batch_size": 2.5}, {"steps": True},
    ],
)  # fmt: skip
def test_bad_policy_settings(change):
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=rf"{name} must be .*got {value!r}"):
        PolicySettings(**change)


@pytest.mark.parametrize(
    "change",
    [{"mix": "easy"}, {"train_size": 0}, {"val_size": 1.0}, {"seed": None}, {"shares": (1.0,)}, {"shares": (0.5,) * 6}],
)
def test_bad_settings(change):
    with pytest.raises(ValueError, match=rf"{next(iter(change))} must be"):
        TinySettings(**change)


def test_keys_follow_what_the_content_depends_on():
    assert policy_key(POLICY) != policy_key(dataclasses.replace(POLICY, learning_rate=1e-3))
    assert policy_key(POLICY) == policy_key(dataclasses.replace(POLICY, threads=7))
    base = TinySettings()
    assert data_key(base) != data_key(TinySettings(mix="sparse"))
    assert data_key(base) != data_key(TinySettings(seed=1))
    assert data_key(base) == data_key(TinySettings(policy=dataclasses.replace(POLICY, steps=1)))
    assert data_key(base) != data_key(TinySettings(policy=dataclasses.replace(POLICY, held_out_percent=30)))


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
    with pytest.raises(ValueError, match="seed must be an integer of at least 0, got -1"):
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
