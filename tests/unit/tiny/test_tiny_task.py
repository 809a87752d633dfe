"""The tiny task: prompts, sloppy adder, reward, tokenizer and settings."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from math import comb
from random import Random

import pytest

from verl_ext.tiny.chain_sums import (
    difficulty,
    draw_digits,
    draw_pretraining_pair,
    draw_prompts,
    is_held_out,
    quotas,
    sloppy_total,
)
from verl_ext.tiny.policy import make_policy
from verl_ext.tiny.reward import compute_score
from verl_ext.tiny.task_settings import DIFFICULTIES, MIXES, PolicySettings, TinySettings, data_key, policy_key
from verl_ext.tiny.tokenizer import END_ID, PAD_ID, START_ID, make_tokenizer

POLICY = PolicySettings()
SMALL = PolicySettings(steps=3, batch_size=16, warmup_steps=1, hidden_size=16, intermediate_size=32)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


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
    with pytest.raises(ValueError, match=rf"tiny.{name}={value!r}; accepted: "):
        PolicySettings(**change)


@pytest.mark.parametrize(
    "change",
    [{"mix": "easy"}, {"train_size": 0}, {"val_size": 1.0}, {"seed": None}, {"shares": (1.0,)}, {"shares": (0.5,) * 6}],
)
def test_bad_settings(change):
    with pytest.raises(ValueError, match=rf"tiny.{next(iter(change))}=.*; accepted: "):
        TinySettings(**change)


def test_keys_follow_what_the_content_depends_on():
    assert policy_key(POLICY) != policy_key(dataclasses.replace(POLICY, learning_rate=1e-3))
    assert policy_key(POLICY) == policy_key(dataclasses.replace(POLICY, threads=7))
    base = TinySettings()
    assert data_key(base) != data_key(TinySettings(mix="sparse"))
    assert data_key(base) != data_key(TinySettings(seed=1))
    assert data_key(base) == data_key(TinySettings(policy=dataclasses.replace(POLICY, steps=1)))
    assert data_key(base) != data_key(TinySettings(policy=dataclasses.replace(POLICY, held_out_percent=30)))


