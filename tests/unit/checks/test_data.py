"""Data sets and model folders of every wrong kind: what is said names the file, the row or the setting."""

import datetime
import decimal
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.checks.check_configs import config_with, found
from verl_ext.checks import Checks, Problems, State, local
from verl_ext.checks import data as data_checks
from verl_ext.checks.data import Rows, check_data, check_storage
from verl_ext.checks.model import check_context, check_lengths, check_model
from verl_ext.checks.reward_trial import check_reward
from verl_ext.tiny.chain_sums import verl_row
from verl_ext.training.training_settings import TrainingSettings
from verl_ext.typed_settings import SettingError


def rows(n=40, first=0):
    return [verl_row([i // 10, i % 10, 1], i, "train") for i in range(first, first + n)]


def without(column, n=40):
    return [{name: value for name, value in row.items() if name != column} for row in rows(n)]


def changed(number, **values):
    given = rows()
    given[number] = given[number] | values
    return given


def checked(tmp_path, given, setting="data.train_files", suffix="parquet", **values):
    """(checks, rows read) of a data set."""
    path = tmp_path / f"set.{suffix}"
    if suffix == "parquet":
        schema = pa.Table.from_pylist(rows(1)).schema if not given else None
        pq.write_table(pa.Table.from_pylist(given, schema=schema), path)
    elif suffix == "json":
        path.write_text(json.dumps(given))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in given))
    config = config_with(**{setting: str(path), **values})
    checks = Checks()
    return checks, checks.run("data", check_data, config, setting)


WRONG = [
    ("no prompt", without("prompt"), ["has no column 'prompt'", "data.prompt_key", "data_source"]),
    ("no answer", without("reward_model"), ["has no column 'reward_model'"]),
    ("no source", without("data_source"), ["has no column 'data_source'"]),
    ("two columns", [{"question": "1+1=", "answer": "2"}] * 40, ["'prompt', 'data_source', 'reward_model'"]),
    ("empty", [], ["holds no prompts (0 rows)"]),
    ("one prompt", rows(1), ["holds 1 prompts", "data.train_batch_size=32"]),
    ("one prompt, often", rows(1) * 64, ["1 different prompts in 64 rows", "data.train_batch_size=32"]),
    ("too few different", rows(31) * 2, ["31 different prompts in 62 rows"]),
    ("a text", [row | {"prompt": "1+1="} for row in rows()], ["row 0 of", "prompt is '1+1='", "a list of messages"]),
    ("a row without messages", changed(7, prompt=[]), ["row 7 of", "prompt is []"]),
    ("a row without a prompt", changed(39, prompt=None), ["row 39 of", "prompt is None"]),
    ("a row without an answer", changed(3, reward_model=None), ["row 3 of", "reward_model is None", "ground_truth"]),
    ("truths that end", changed(4, reward_model={"style": "rule", "ground_truth": None}), ["row 4 of", "is None"]),
    ("empty truths", [row | {"reward_model": {"ground_truth": " "}} for row in rows()], ["ground_truth of"]),
    ("no true answers", [row | {"reward_model": {"ground_truth": [""]}} for row in rows()], ["ground_truth of"]),
    ("content null", changed(5, prompt=[{"role": "user", "content": None}]), ["row 5 of", "content of message 0"]),
    ("content a number", [row | {"prompt": [{"role": "user", "content": 7}]} for row in rows()], ["content", "is 7"]),
    ("no role", [row | {"prompt": [{"content": "1+1="}]} for row in rows()], ["role of message 0", "accepted: text"]),
    ("role null", changed(6, prompt=[{"role": None, "content": "1+1="}]), ["row 6 of", "role of message 0"]),
    ("source null", changed(8, data_source=None), ["row 8 of", "data_source is None"]),
    ("source a number", [row | {"data_source": 3} for row in rows()], ["row 0 of", "data_source is 3"]),
    ("more is text", [row | {"extra_info": "a"} for row in rows()], ["extra_info is 'a'; accepted: null"]),
    ("Decimal truths", [row | {"reward_model": {"ground_truth": decimal.Decimal("1.5")}} for row in rows()],
     ["row 0 of", "Decimal('1.5'), which holds Decimal", "accepted: text, numbers"]),
    ("dates", [row | {"reward_model": {"ground_truth": datetime.date(2026, 1, 2)}} for row in rows()],
     ["row 0 of", "which holds date"]),
    ("truths in bytes", [row | {"reward_model": {"ground_truth": b"7"}} for row in rows()],
     ["row 0 of", "b'7', which holds bytes"]),
    ("no truth", [row | {"reward_model": {"style": "rule"}} for row in rows()], ["row 0 of", "ground_truth"]),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("given", "words"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_training_data_is_refused(tmp_path, given, words):
    checks, read = checked(tmp_path, given)
    (problem,) = checks.problems
    assert read is None and "data.train_files" in problem
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize("truth", [0, 0.0, False, "0", ["", "7"], {"target": ["7"]}])
def test_truths_that_are_no_text_and_content_in_parts_are_taken(tmp_path, truth):
    prompts = [[{"role": "user", "content": [{"type": "text", "text": f"{i}+1="}]}] for i in range(40)]
    given = [row | {"prompt": prompt, "reward_model": {"ground_truth": truth}, "extra_info": None}
             for row, prompt in zip(rows(), prompts, strict=True)]  # fmt: skip
    assert checked(tmp_path, given)[0].problems == []


@pytest.mark.bad_input
def test_a_line_that_is_cut_off_is_named(tmp_path):
    path = tmp_path / "set.jsonl"
    lines = [json.dumps(row) for row in rows()]
    path.write_text("\n".join(lines)[:-9])
    checks = Checks()
    checks.run("data", check_data, config_with(**{"data.train_files": str(path)}), "data.train_files")
    assert "row 39 (line 40) is not JSON" in checks.problems[0] and "line 2" not in checks.problems[0]


def test_lines_of_json_end_where_json_says(tmp_path):
    path = tmp_path / "set.jsonl"
    prompts = [[{"role": "user", "content": f"{i}\u2028+1="}] for i in range(40)]
    given = [row | {"prompt": prompt} for row, prompt in zip(rows(), prompts, strict=True)]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in given), encoding="utf-8")
    checks = Checks()
    checks.run("data", check_data, config_with(**{"data.train_files": str(path)}), "data.train_files")
    assert checks.problems == []


def test_duplicates_are_counted_and_do_not_stop_a_run(tmp_path):
    checks, read = checked(tmp_path, rows() + rows(5) + rows(3))
    assert not checks.problems and (read.total, len(read.keys), read.repeated) == (48, 40, 8)
    (warning,) = found(checks, State.WARNING)
    assert "8 of 48 rows repeat an earlier prompt" in warning


def test_the_same_question_with_another_answer_is_another_prompt(tmp_path):
    other = rows(1)[0] | {"reward_model": {"style": "rule", "ground_truth": "7"}}
    checks, read = checked(tmp_path, [*rows(), other])
    assert len(read.keys) == 41 and not found(checks, State.WARNING)


def test_validation_data_may_be_small_and_may_repeat(tmp_path):
    checks, read = checked(tmp_path, rows(1) * 3, setting="data.val_files")
    assert not checks.problems and read.total == 3


@pytest.mark.bad_input
@pytest.mark.parametrize("values", [{}, {"data.val_batch_size": 126}, {"data.val_max_samples": 126}])
def test_a_validation_pass_that_storage_does_not_hold_is_refused(values):
    config = config_with(**{
        "data.val_max_samples": -1, "transfer_queue.backend.SimpleStorage.total_storage_size": 1000, **values,
        "actor_rollout_ref.rollout.val_kwargs.n": 8,
    })  # fmt: skip
    with pytest.raises(Problems, match=r"total_storage_size=1000 is too small for a validation pass of \d+ rollouts"):
        check_storage(config, Rows("data.val_files", total=200))
    fits = Rows("data.val_files", total=125)
    assert "1000 rollouts of validation at once" in check_storage(config, fits).text
    with pytest.raises(Problems, match="1000 rollouts beside 1 waiting; accepted: 1001 or more"):
        check_storage(config, fits, 1)


def test_max_samples_count(tmp_path):
    checks, _ = checked(tmp_path, rows(), **{"data.train_max_samples": 8})
    assert "holds 8 prompts (data.train_max_samples=8)" in checks.problems[0]


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_json_is_read_too(tmp_path, suffix):
    checks, read = checked(tmp_path, rows(), suffix=suffix)
    assert not checks.problems and read.total == 40 and read.by_source["chain_sums"]["prompt"] == rows(1)[0]["prompt"]
    (tmp_path / f"set.{suffix}").write_text('{"prompt": ')
    again = Checks()
    again.run("data", check_data, config_with(**{"data.train_files": str(tmp_path / f"set.{suffix}")}),
              "data.train_files")  # fmt: skip
    assert "cannot be read" in again.problems[0]


@pytest.mark.bad_input
def test_a_damaged_file_and_all_missing_ones_are_named(tmp_path):
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 and no more")
    files = [str(tmp_path / name) for name in ("damaged.parquet", "one.parquet", "two.parquet")]
    checks = Checks()
    checks.run("data", check_data, config_with(**{"data.train_files": files}), "data.train_files")
    assert len(checks.problems) == 3
    assert all(name in problem for name, problem in zip(files, checks.problems, strict=True))


def test_what_verl_alone_can_read_is_left_to_it():
    for values in ({"data.train_files": "hdfs://there/train.parquet"},
                   {"data.custom_cls": {"path": "mine.py", "name": "Mine"}, "data.train_files": "any"}):  # fmt: skip
        checks = Checks()
        assert checks.run("data", check_data, config_with(**values), "data.train_files") is None
        assert not checks.problems and "read by verl alone" in checks.findings[0].text


def test_of_a_large_set_the_first_rows_are_looked_at_and_all_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(data_checks, "ROWS_READ", 35)
    checks, read = checked(tmp_path, rows(35) + rows(35))
    assert not checks.problems and (read.total, read.read) == (70, 35)
    assert "the first 35 looked at" in str(checks.findings[0])


# ------------------------------------------------ lengths


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


# ------------------------------------------------ model


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


# ------------------------------------------------ reward

REWARDS = """
import time
def bare(data_source, solution_str, ground_truth, extra_info): return 1.0
def right(**kwargs): return {"score": 0.5, "acc": True}
def nameless(**kwargs): return {"score": 0.5, "correct": True}
def scoreless(**kwargs): return {"acc": True}
def graded(**kwargs): return 0.25
def none(**kwargs): return None
def raises(**kwargs): raise RuntimeError("no such answer")
def hangs(**kwargs): time.sleep(60)
"""


def reward(tmp_path, name, given=None, **values):
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    config = config_with(**{"reward.custom_reward_function.path": str(path),
                            "reward.custom_reward_function.name": name, **values})  # fmt: skip
    return check_reward(config, TrainingSettings.from_config(config), rows(1) if given is None else given)


@pytest.mark.parametrize(("name", "words"), [("bare", "scores 1.0"), ("right", "scores {'score': 0.5"),
                                             ("none", "scores None"), ("raises", "not scored")])  # fmt: skip
def test_a_reward_that_can_be_read(tmp_path, name, words):
    assert words in reward(tmp_path, name)


def test_a_reward_that_raises_is_warned_of(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    config = config_with(**{"reward.custom_reward_function.path": str(tmp_path / "rewards.py"),
                            "reward.custom_reward_function.name": "raises"})  # fmt: skip
    checks = Checks()
    checks.run("reward", local._reward, config, TrainingSettings.from_config(config), rows(1))
    warnings = found(checks, State.WARNING)
    assert len(warnings) == 2 and all("no such answer" in said and "not scored" in said for said in warnings)


@pytest.mark.bad_input
@pytest.mark.parametrize(("name", "words"), [("nameless", "keys seen .*correct.*score"), ("scoreless", "keys seen"),
                                             ("graded", "threshold"), ("nothing", "cannot be imported.*nothing"),
                                             ("hangs", "more than 0.2 s")])  # fmt: skip
def test_a_reward_that_cannot_be_read_is_refused(tmp_path, name, words, monkeypatch):
    monkeypatch.setattr("verl_ext.checks.reward_trial.ANSWER_S", 0.2)
    with pytest.raises(SettingError, match=words):
        reward(tmp_path, name)


def test_a_data_source_that_verl_has_no_reward_for(tmp_path):
    config = config_with(**{"reward.custom_reward_function.path": None})
    with pytest.raises(SettingError, match="data_source='chain_sums' is not known"):
        check_reward(config, TrainingSettings.from_config(config), rows(1))


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


def test_one_row_of_every_data_source_is_tried_with_an_empty_and_a_wrong_answer(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(
        "seen = []\n"
        "def mine(data_source, solution_str, **_):\n"
        "    if data_source == 'held_out' and solution_str:\n"
        "        return {'score': 1.0, 'correct': 1}\n"
        "    return {'score': 0.0, 'acc': bool(solution_str) and data_source == 'easy'}\n"
    )
    config = config_with(**{"reward.custom_reward_function.path": str(path),
                            "reward.custom_reward_function.name": "mine"})  # fmt: skip
    settings, warned = TrainingSettings.from_config(config), []
    train = [row | {"data_source": source} for source in ("sums", "easy") for row in rows(20)]
    given = checked(tmp_path, train)[1].by_source
    assert list(given) == ["sums", "easy"]
    assert "tried on 2 data sources" in check_reward(config, settings, list(given.values()), warned.append)
    (said,) = warned
    assert "a wrong answer to a prompt of data_source='easy' is right" in said
    held_out = rows(1)[0] | {"data_source": "held_out"}
    with pytest.raises(SettingError, match="of a wrong answer to a prompt of data_source='held_out'.*correct"):
        check_reward(config, settings, [*given.values(), held_out])
