"""Lengths of prompts and answers, and model folders of every wrong kind: what is said names the setting."""

import json

import pytest

from tests.unit.checks.check_configs import config_with, found
from tests.unit.checks.data_rows import checked, rows
from verl_ext.checks import Checks, State
from verl_ext.checks.model import check_context, check_lengths, check_model
from verl_ext.tiny.chain_sums import verl_row


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from verl_ext.tiny.tokenizer import make_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def long_and_short(tmp_path):
    long = verl_row([9] * 12, 40, "train")
    return checked(tmp_path, [*rows(20), long, *rows(19, first=20)])[1], long


def lengths(tokenizer, read, **values):
    checks = Checks()
    checks.run("data", check_lengths, config_with(**values), tokenizer, read)
    return checks


@pytest.mark.bad_input
def test_prompts_over_the_length_are_refused_by_row_and_setting(tmp_path, tokenizer):
    read, _ = long_and_short(tmp_path)
    (problem,) = lengths(tokenizer, read).problems
    for words in ("1 prompts are longer than data.max_prompt_length=16", "row 20 of", "24)", "filter_overlong_prompts"):
        assert words in problem
    assert not lengths(tokenizer, read, **{"data.max_prompt_length": 24}).problems


def test_prompts_over_the_length_that_are_filtered_or_cut_on_purpose_are_said(tmp_path, tokenizer):
    read, _ = long_and_short(tmp_path)
    for values, words in (
        ({"data.filter_overlong_prompts": True}, "verl leaves them out"),
        ({"data.truncation": "left"}, "cut off"),
    ):
        checks = lengths(tokenizer, read, **values)
        assert not checks.problems and words in found(checks, State.WARNING)[0]
    too_few = {"data.filter_overlong_prompts": True, "data.max_prompt_length": 5}
    (problem,) = lengths(tokenizer, read, **too_few).problems
    assert "leaves 0, fewer than data.train_batch_size=32" in problem


@pytest.mark.bad_input
def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path, tokenizer):
    from transformers import AutoTokenizer

    plain = AutoTokenizer.from_pretrained(tokenizer)
    plain.chat_template = None
    plain.save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink(missing_ok=True)
    read, _ = long_and_short(tmp_path)
    assert "custom_chat_template" in lengths(str(tmp_path / "plain"), read).problems[0]
    assert "cannot be loaded" in lengths(str(tmp_path / "none"), read).problems[0]


def model(tmp_path, *names, **values):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in names:
        (folder / name).write_text("{}")
    checks = Checks()
    checks.run("model", check_model, config_with(**{"actor_rollout_ref.model.path": str(folder), **values}))
    return checks.problems


WHOLE = ("config.json", "model.safetensors", "tokenizer.json")


def test_a_whole_model_folder_passes(tmp_path):
    assert model(tmp_path, *WHOLE) == []


SAID = ("no config.json", "no weights", "no tokenizer")


@pytest.mark.bad_input
@pytest.mark.parametrize(("missing", "words"), list(zip(WHOLE, SAID, strict=True)))
def test_what_is_missing_of_a_model_folder_is_named(tmp_path, missing, words):
    (problem,) = model(tmp_path, *(name for name in WHOLE if name != missing))
    assert words in problem


def test_all_that_is_missing_of_a_model_folder_is_named(tmp_path):
    assert len(model(tmp_path)) == 3


def test_a_hubs_name_passes_but_not_offline_without_a_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    config = config_with(**{"actor_rollout_ref.model.path": "nobody/no-such-model"})
    checks = Checks()
    assert checks.run("model", check_model, config) == "nobody/no-such-model"
    assert "not in the local cache" in checks.findings[0].text
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    checks.run("model", check_model, config)
    assert "not in the local cache" in checks.problems[0] and "HF_HUB_OFFLINE=1" in checks.problems[0]


def context_problems(folder, configuration, prompt, response, **values):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(configuration))
    given = {"actor_rollout_ref.model.path": str(folder), "actor_rollout_ref.rollout.max_model_len": None}
    lengths = {"data.max_prompt_length": prompt, "data.max_response_length": response}
    checks = Checks()
    checks.run("model", check_context, config_with(**{**given, **lengths, **values}))
    return found(checks)


TRAINER = "actor_rollout_ref.model.override_config"
ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides"


@pytest.mark.bad_input
@pytest.mark.parametrize("configuration", [{"max_position_embeddings": 4096},
                                           {"text_config": {"max_position_embeddings": 4096}}])  # fmt: skip
def test_answers_beyond_the_models_context_are_refused(tmp_path, configuration):
    folder = tmp_path / "model"
    assert context_problems(folder, configuration, 1024, 3072) == []
    (problem,) = context_problems(folder, configuration, 1024, 8192)
    assert "data.max_response_length=8192: at most 3072 is accepted with data.max_prompt_length=1024" in problem
    assert f"+{TRAINER}.max_position_embeddings=9216 +{ENGINE}.max_position_embeddings=9216" in problem
    (problem,) = context_problems(
        folder, configuration, 1024, 3072, **{"actor_rollout_ref.rollout.max_model_len": 8192}
    )
    assert "actor_rollout_ref.rollout.max_model_len=8192: at most 4096" in problem


@pytest.mark.bad_input
def test_a_stretched_context_is_stretched_for_the_engine_too(tmp_path):
    stretched = {"max_position_embeddings": 32768}
    configuration, lengths = {"max_position_embeddings": 4096}, (1024, 8192)
    (problem,) = context_problems(tmp_path / "m", configuration, *lengths, **{TRAINER: stretched})
    assert "max_position_embeddings=32768: vLLM reads" in problem
    assert f"+{ENGINE}.max_position_embeddings=32768" in problem
    nested = {"model_config": stretched}
    for trainer in (stretched, nested):
        assert context_problems(tmp_path / "m", configuration, *lengths, **{TRAINER: trainer, ENGINE: stretched}) == []
    # A context that is made shorter counts as well.
    shorter = {TRAINER: {"max_position_embeddings": 1024}}
    (problem,) = context_problems(tmp_path / "m", configuration, 512, 1024, **shorter)
    assert "at most 512 is accepted" in problem


def test_a_context_that_is_not_known_here_is_said_to_be_unknown(tmp_path):
    said = check_context(config_with(**{"actor_rollout_ref.model.path": "nobody/no-such-model"})).text
    assert "not known here" in said
    assert context_problems(tmp_path / "m", {}, 1024, 8192) == []
