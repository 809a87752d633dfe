"""Validation sets, GSM8K and Countdown."""

import json
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.data.data_files import lines, published, write_lines, write_rows
from verl_ext.allocation.prompt_pool import prompt_key
from verl_ext.data import countdown, gsm8k, training_sets, validation_sets
from verl_ext.data.rows import SCHEMA, DataError, answer_text
from verl_ext.data.templates import TEMPLATES, ask, question_of
from verl_ext.data.validation_sets import SETS, main, prepare


def rows_of(path):
    return pq.read_table(path).to_pylist()


def problems(n, **columns):
    return [{"id": i, "problem": f"Find {i}.", "answer": str(i), **columns} for i in range(n)]


def test_32_copies_are_one_prompt_with_n(tmp_path, capsys):
    given = [published(f"Problem {i}", str(i), seed=i) for i in range(30) for _ in range(32)]
    path = write_rows(tmp_path / "aime-2024.parquet", given)
    main(["--input", f"aime_2024={path}", "--output", str(tmp_path / "out")])
    rows = rows_of(tmp_path / "out/aime_2024.parquet")
    assert len(rows) == 30 and {row["extra_info"]["n"] for row in rows} == {32}
    assert {row["data_source"] for row in rows} == {"aime_2024"}
    assert rows[3]["prompt"] == ask("Problem 3", "dapo")
    assert "actor_rollout_ref.rollout.val_kwargs.n=32" in capsys.readouterr().out
    assert list((tmp_path / "out").glob("*.parquet")) == [tmp_path / "out/aime_2024.parquet"]


def test_problems_of_any_file_get_the_same_question(tmp_path):
    floats = [{"id": i, "problem": f"Find {i}.", "answer": float(i), "url": "u"} for i in range(83)]
    pq.write_table(pa.Table.from_pylist(floats), tmp_path / "amc.parquet")
    write_lines(tmp_path / "aime25.jsonl", problems(30))
    write_lines(tmp_path / "math.jsonl", [{**row, "unique_id": f"u{row['id']}"} for row in problems(500)])
    for name, file in (("amc", "amc.parquet"), ("aime_2025", "aime25.jsonl"), ("math_500", "math.jsonl")):
        prepare(name, tmp_path / f"{name}_out.parquet", [tmp_path / file])
    outputs = [tmp_path / f"{name}_out.parquet" for name in ("amc", "aime_2025", "math_500")]
    amc, aime, math = map(rows_of, outputs)
    assert [len(amc), len(aime), len(math)] == [83, 30, 500]
    assert amc[5]["reward_model"]["ground_truth"] == "5" and math[5]["extra_info"]["index"] == "u5"
    assert amc[5]["prompt"] == aime[5]["prompt"] == ask("Find 5.", "dapo")
    # verl reads all validation files into one data set.
    together = datasets.concatenate_datasets(
        [datasets.load_dataset("parquet", data_files=str(o), cache_dir=str(tmp_path))["train"] for o in outputs]
    )
    assert len(together) == 613 and all(pq.read_schema(output).equals(SCHEMA) for output in outputs)
    assert amc[5]["extra_info"]["key"] == prompt_key("amc", amc[5]["prompt"], "5")


def test_training_sets_are_read_with_their_own_columns(tmp_path, capsys):
    """Rows as the published files have them: an answer as text, whole solutions beside it, a problem twice."""
    deepmath = [{"question": f"Find {i}.", "final_answer": str(i), "difficulty": 5.0, "r1_solution_1": "x" * 100}
                for i in range(7)]  # fmt: skip
    polaris = [*problems(5, difficulty="3/8"), *problems(1), {"id": 9, "problem": "Find 4.", "answer": "5"}]
    inputs = [f"deepmath={write_rows(tmp_path / 'd.parquet', deepmath, schema=None)}",
              f"polaris={write_lines(tmp_path / 'p.jsonl', polaris)}"]  # fmt: skip
    arguments = ["--input", *inputs, "--output", str(tmp_path / "out")]
    main(arguments, sets=training_sets.SETS, kind="training")
    made = {name: rows_of(tmp_path / f"out/{name}.parquet") for name in ("deepmath", "polaris")}
    assert [row["reward_model"]["ground_truth"] for row in made["deepmath"]] == [str(i) for i in range(7)]
    assert {row["data_source"] for row in made["polaris"]} == {"polaris"}
    # A copy is folded; a prompt with two answers is dropped and listed.
    assert [row["reward_model"]["ground_truth"] for row in made["polaris"]] == ["0", "1", "2", "3"]
    assert "Find 4." in (tmp_path / "out/polaris.dropped.jsonl").read_text()
    with pytest.raises(SystemExit):
        main(["--input", f"aime_2024={tmp_path / 'p.jsonl'}"], sets=training_sets.SETS, kind="training")
    assert "deepmath, math_train, polaris" in capsys.readouterr().err


@pytest.mark.bad_input
def test_another_number_of_prompts_is_refused_unless_asked_for(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", problems(29) + [{"id": 29, "problem": "Find it.", "answer": None}])
    with pytest.raises(SystemExit, match="aime_2025: 29 prompts with an answer where 30 are published.*1 without"):
        main(["--input", f"aime_2025={path}", "--output", str(tmp_path)])
    main(["--input", f"aime_2025={path}", "--output", str(tmp_path), "--any-count"])
    assert len(rows_of(tmp_path / "aime_2025.parquet")) == 29
    assert lines(tmp_path / "aime_2025.dropped.jsonl")[0]["row"] == 29


def test_a_finished_set_is_recognised(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", problems(30))
    report = prepare("aime_2025", tmp_path / "o.parquet", [path])
    monkeypatch.setattr(validation_sets, "read", lambda path: pytest.fail("read again"))
    assert prepare("aime_2025", tmp_path / "o.parquet", [path]) == report


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"statement": "x", "answer": "1"}, "row 1, column 'problem': missing; accepted are problem, question"),
        ({"problem": " ", "answer": "1"}, "row 1, column 'problem': a question is needed"),
        ({"problem": "x"}, "row 1, column 'answer': missing"),
        ({"problem": "x", "answer": [1]}, "row 1, column 'answer': text or a number is accepted, got list"),
        ({"prompt": [{"role": "user", "content": ""}]}, "row 1, column 'prompt.content': empty"),
        ({"prompt": []}, "row 1, column 'prompt.content': empty"),
        ({"prompt": ["x"]}, "row 1, column 'prompt': messages with role and content are needed, got 'x'"),
        ({"prompt": [{"content": "x"}]}, "row 1, column 'prompt.role': text is needed, got None"),
        ({"prompt": [{"role": "user"}]}, "row 1, column 'prompt.content': text is needed, got None"),
        ({"prompt": ask("x", "dapo"), "reward_model": "1"}, "row 1, column 'reward_model': an object.*got '1'"),
        ({"prompt": ask("x", "dapo"), "extra_info": "1"}, "row 1, column 'extra_info': an object.*got '1'"),
        ([1], "row 1: is not a JSON object but a list"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(tmp_path, row, message):
    path = write_lines(tmp_path / "a.jsonl", [*problems(1), row])
    with pytest.raises(DataError, match=f"a.jsonl, {message}"):
        prepare("aime_2025", tmp_path / "o.parquet", [path])


@pytest.mark.bad_input
def test_a_torn_line_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"problem": "x", "answer": "1"}\n{"problem": "y"')
    with pytest.raises(DataError, match="row 1: is not a JSON object"):
        prepare("aime_2025", tmp_path / "o.parquet", [path])


@pytest.mark.bad_input
def test_lines_that_are_not_utf8_are_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"problem": "x", "answer": "1"}\n{"problem": "\xe9", "answer": "1"}\n')
    with pytest.raises(SystemExit, match="a.jsonl, row 1: is not a JSON object.*utf-8"):
        main(["--input", f"aime_2025={path}", "--output", str(tmp_path)])
    path.write_bytes(b'{"question": "\xe9", "answer": "#### 1"}\n')
    with pytest.raises(SystemExit, match="a.jsonl, row 0: is not a JSON object.*utf-8"):
        gsm8k.main(["--train", str(path), "--output", str(tmp_path)])


@pytest.mark.bad_input
def test_an_answer_that_is_not_finite_is_dropped_and_listed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"problem": "Is {n} it?", "answer": {n}}}\n' for n in ("1e999", "-1e999", "1")))
    counts = prepare("aime_2025", tmp_path / "o.parquet", [path], any_count=True)["counts"]
    assert (counts["kept"], counts["empty"]) == (1, 2)
    assert [line["row"] for line in lines(tmp_path / "o.dropped.jsonl")] == [0, 1]


@pytest.mark.bad_input
def test_no_output_is_written_over_any_input(tmp_path):
    first = write_lines(tmp_path / "a.jsonl", problems(30))
    main(["--input", f"aime_2025={first}", "--output", str(tmp_path)])
    made = tmp_path / "aime_2025.parquet"
    before = made.read_bytes()
    for inputs in ([f"aime_2025={made}"], [f"aime_2024={made}", f"aime_2025={first}"]):
        with pytest.raises(SystemExit, match="aime_2025.parquet: would be written over while it is an input"):
            main(["--input", *inputs, "--output", str(tmp_path)])
    with pytest.raises(DataError, match="would be written over"):
        prepare("aime_2025", made, [made])
    row = {"question": "How many?", "answer": "#### 1"}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "gsm8k_test.parquet")
    good = write_lines(tmp_path / "g.jsonl", [row])
    for given in (["--test", str(tmp_path / "gsm8k_test.parquet")],
                  ["--train", str(tmp_path / "gsm8k_test.parquet"), "--test", str(good)]):  # fmt: skip
        with pytest.raises(SystemExit, match="gsm8k_test.parquet: would be written over"):
            gsm8k.main([*given, "--output", str(tmp_path)])
    assert made.read_bytes() == before and not (tmp_path / "aime_2024.parquet").exists()


@pytest.mark.bad_input
def test_outputs_that_cannot_be_written_are_named(tmp_path):
    row = {"question": "How many?", "answer": "#### 1"}
    path = write_lines(tmp_path / "g.jsonl", [row])
    with pytest.raises(SystemExit, match="/proc/gsm8k_train.parquet: cannot be written"):
        gsm8k.main(["--train", str(path), "--output", "/proc"])
    (tmp_path / "gsm8k_train.parquet").mkdir()
    with pytest.raises(SystemExit, match="gsm8k_train.parquet: is a folder"):
        gsm8k.main(["--train", str(path), "--output", str(tmp_path)])


@pytest.mark.bad_input
def test_an_input_of_a_set_that_is_not_made_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--sets", "amc", "--input", "aime_2024=ok.jsonl", "--output", str(tmp_path)])
    assert "--input aime_2024=ok.jsonl: not one of --sets amc" in capsys.readouterr().err


def test_command_line_names_what_is_accepted(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--input", "amc_1999=x.parquet"])
    assert "NAME=FILE is accepted, with NAME one of aime_2024, aime_2025, amc, math_500" in capsys.readouterr().err
    assert set(SETS) == {"aime_2024", "aime_2025", "amc", "math_500"}


@pytest.mark.parametrize("question", ["How many?", "Sets {1} and {question}, \\frac{1}{2}?"])
def test_templates_hold_any_question(question):
    assert question_of(ask(question, "dapo")[0]["content"]) == question
    assert all(question in ask(question, template)[0]["content"] for template in TEMPLATES)


@pytest.mark.parametrize(
    ("given", "text"),
    [(34.0, "34"), (2.5, "2.5"), (7, "7"), (" 3 ", "3"), (None, ""), (float("nan"), ""), (float("inf"), "")],
)
def test_answers_as_text(given, text):
    assert answer_text(given) == text


def test_gsm8k(tmp_path, capsys):
    rows = [{"question": f"How many in {i}?", "answer": f"Count.\n#### {answer}"}
            for i, answer in enumerate(["1,234", "$5", "-7", "0.5"])]  # fmt: skip
    train = write_lines(tmp_path / "train.jsonl", [*rows, rows[0]])
    gsm8k.main(["--train", str(train), "--output", str(tmp_path)])
    made = rows_of(tmp_path / "gsm8k_train.parquet")
    assert [row["reward_model"]["ground_truth"] for row in made] == ["1234", "5", "-7", "0.5"]
    assert made[0]["data_source"] == "openai/gsm8k" and made[0]["extra_info"]["n"] == 2
    assert not (tmp_path / "gsm8k_test.parquet").exists()
    test = write_lines(tmp_path / "test.jsonl", [rows[0], {"question": "What?", "answer": "no number"}])
    with pytest.raises(SystemExit, match="test.jsonl, row 1, column 'answer': no line '#### ANSWER'"):
        gsm8k.main(["--test", str(test), "--output", str(tmp_path)])


@pytest.mark.reasoning_gym
def test_countdown_is_scored_by_its_own_scorer_and_splits_share_no_puzzle(tmp_path, capsys):
    import reasoning_gym

    sizes = ["--train-size", "60", "--val-size", "20", "--output", str(tmp_path)]
    countdown.main(sizes)
    train, val = rows_of(tmp_path / "countdown_train.parquet"), rows_of(tmp_path / "countdown_val.parquet")
    assert (len(train), len(val)) == (60, 20)
    score = reasoning_gym.create_dataset("countdown", size=1).score_answer
    puzzles = []
    for row in train + val:
        entry = json.loads(row["reward_model"]["ground_truth"])
        assert score(entry["answer"], entry) == 1.0 and score("1+1", entry) < 1.0
        assert 3 <= len(entry["metadata"]["numbers"]) <= 4
        puzzles.append((tuple(sorted(entry["metadata"]["numbers"])), entry["metadata"]["target"]))
    assert len(set(puzzles)) == 80
    capsys.readouterr()
    countdown.main(sizes)
    assert "are there already" in capsys.readouterr().out


class Drawn:
    """reasoning-gym's data set: every other draw fails, the others differ."""

    def __init__(self, *name, **settings):
        pass

    def __getitem__(self, i):
        if i % 2:
            raise ValueError("Failed to generate valid expression after 100 attempts")
        return {"question": "q", "answer": "a", "metadata": {"numbers": [i], "target": 1, "source_index": i}}


def test_countdown_outlives_draws_that_fail_and_says_how_far_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(countdown, "_generator", lambda: (Drawn, "0"))
    monkeypatch.setattr(countdown, "_SAY_EVERY_S", 0.0)
    countdown.prepare(tmp_path, 4, 2)
    assert len(rows_of(tmp_path / "countdown_train.parquet")) == 4
    assert "puzzles of 6" in capsys.readouterr().out


@pytest.mark.bad_input
def test_countdown_refuses_what_cannot_be_made_or_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(countdown, "_generator", lambda: (Drawn, "0"))
    with pytest.raises(SystemExit):
        countdown.main(["--numbers", "50", "60", "--output", str(tmp_path)])
    assert "--numbers 50 60: two numbers from 2 to 15 that do not fall are accepted" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="/countdown_val.parquet: cannot be written"):
        countdown.main(["--train-size", "2", "--val-size", "1", "--output", "/dev/null/x"])
    (tmp_path / "countdown_val.parquet").mkdir()
    with pytest.raises(SystemExit, match="countdown_val.parquet: is a folder"):
        countdown.main(["--train-size", "2", "--val-size", "1", "--output", str(tmp_path)])


def test_without_reasoning_gym_the_error_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(SystemExit, match="reasoning_gym: cannot be imported.*pip install reasoning-gym"):
        countdown.main(["--output", str(tmp_path)])
