"""Data sets of every wrong kind: what is said names the file, the row or the setting."""

import datetime
import decimal
import json

import pytest

from tests.unit.checks.check_configs import config_with, found
from tests.unit.checks.data_rows import changed, checked, rows, without
from verl_ext.checks import Checks, Problems, State
from verl_ext.checks import data as data_checks
from verl_ext.checks.data import Rows, check_data, check_storage

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
