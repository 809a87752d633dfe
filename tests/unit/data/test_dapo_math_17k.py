"""DAPO-Math-17K: every prompt once, nothing lost in silence, nothing half-written taken for done."""

import fcntl
import json
import random

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from tests.unit.data.data_files import PUBLISHED, lines, published, write_rows
from verl_ext.allocation.prompt_pool import prompt_key
from verl_ext.data import dapo_math_17k, scan
from verl_ext.data import dataset_files as store
from verl_ext.data.dapo_math_17k import main, prepare
from verl_ext.data.fold import Fold
from verl_ext.data.rows import SCHEMA, DataError
from verl_ext.training.prompts import PromptRows


def rows_of(path):
    return pq.read_table(path).to_pylist()


def test_copies_are_folded_and_every_row_is_accounted_for(source, tmp_path):
    output = tmp_path / "out" / "dapo.parquet"
    counts = prepare(output, [source])["counts"]
    assert counts == {
        "rows": 35, "kept_rows": 20, "conflicting_rows": 10, "empty_rows": 5, "prompts": 7, "kept": 4,
        "conflicting": 2, "empty": 1, "copies_least": 5, "copies_median": 5, "copies_most": 5,
    }  # fmt: skip
    rows = rows_of(output)
    assert pq.read_schema(output).equals(SCHEMA)
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["1", "2", "3", "4"]
    assert all(row["extra_info"]["n"] == 5 and row["data_source"] == "math_dapo" for row in rows)
    # The first copy's: its UUID, its style.
    assert rows[1]["extra_info"]["index"] == "00000000-0000-0000-0000-00000000000a"
    assert rows[1]["reward_model"]["style"] == "rule-lighteval/MATH_v2"
    listed = lines(tmp_path / "out/dapo.dropped.jsonl")
    dropped = {line["prompt"][0]["content"].split("\n\n")[1]: line for line in listed}
    assert dropped["Which of two?"]["answers"] == {"1": 4, "2": 1}
    assert dropped["Sometimes?"]["answers"] == {"": 3, "7": 2}
    assert dropped["Who knows?"]["reason"] == "empty answer" and dropped["Who knows?"]["row"] == 5
    assert len(dropped) == 3


def test_keys_are_those_of_the_pool_through_verls_own_data_set(source, tmp_path):
    output = tmp_path / "dapo.parquet"
    prepare(output, [source])

    class DataSet:
        dataframe = datasets.load_dataset("parquet", data_files=str(output), cache_dir=str(tmp_path))["train"]

        def __len__(self):
            return len(self.dataframe)

    pool = PromptRows(DataSet(), OmegaConf.create({"shuffle": False, "prompt_key": "prompt"}))
    assert pool.keys == [row["extra_info"]["key"] for row in rows_of(output)]
    assert pool.duplicates == 0


def test_against_a_plain_loop_over_shuffled_rows_in_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "BATCH", 7)
    rng = random.Random(3)
    given = []
    for i in range(40):
        answers = rng.choice([["1"], ["1"], ["1", " 1 "], ["1", "2"], [""], [None, ""], ["1", None]])
        for copy in range(rng.randint(1, 9)):
            row = published(f"Question {i}?", answers[copy % len(answers)], seed=100 * i + copy)
            if i % 5 == 0:
                row["prompt"] = [{"content": "Be brief.", "role": "system"}, *row["prompt"]]
            if copy % 2:
                row["prompt"][-1]["content"] = row["prompt"][-1]["content"].replace(" ", "  ", 3) + "\n"
            given.append(row)
    rng.shuffle(given)
    cut = len(given) // 3
    files = [write_rows(tmp_path / "a.parquet", given[:cut], row_group_size=10),
             write_rows(tmp_path / "b.parquet", given[cut:])]  # fmt: skip
    output = tmp_path / "out.parquet"
    prepare(output, files)
    expected = {}
    for row in given:
        same = json.dumps([[m["role"], " ".join(m["content"].split())] for m in row["prompt"]])
        answer = (row["reward_model"]["ground_truth"] or "").strip()
        first, answers, n = expected.get(same, (row, set(), 0))
        expected[same] = (first, answers | {answer}, n + 1)
    wanted = [
        (first["prompt"], first["extra_info"]["index"], n)
        for first, answers, n in expected.values()
        if answers == {"1"}
    ]
    assert 5 < len(wanted) < 35
    assert [(row["prompt"], row["extra_info"]["index"], row["extra_info"]["n"]) for row in rows_of(output)] == wanted


def test_a_finished_output_is_recognised_and_not_made_again(source, tmp_path, monkeypatch, capsys):
    output = tmp_path / "dapo.parquet"
    report = prepare(output, [source])
    before = output.stat().st_mtime_ns
    monkeypatch.setattr(dapo_math_17k, "scan", lambda files: pytest.fail("read again"))
    assert prepare(output, [source]) == report
    assert output.stat().st_mtime_ns == before and "is there already: 35 rows" in capsys.readouterr().out


REPORTS = {"no_object": b"[]", "not_utf8": b"\xff\xfe{}"}


@pytest.mark.parametrize("change", ["input", "template", "cut_off", "no_report", "broken_report", *REPORTS])
def test_anything_else_is_made_anew(source, tmp_path, change):
    output, report = tmp_path / "dapo.parquet", tmp_path / "dapo.report.json"
    prepare(output, [source])
    whole = output.read_bytes()
    template = "dapo"
    if change == "input":
        write_rows(source, [published("Another?", "5")])
    elif change == "template":
        template = "boxed"
    elif change == "cut_off":
        output.write_bytes(whole[:-10])
    elif change in REPORTS:
        report.write_bytes(REPORTS[change])
    elif change == "no_report":
        report.unlink()
    else:
        report.write_text(report.read_text()[:20])
    prepare(output, [source], template)
    rows = rows_of(output)
    if change == "input":
        assert len(rows) == 1
    elif change == "template":
        assert rows[0]["prompt"][0]["content"].startswith("What is 0 + 1?\n\n")
        assert "boxed" in rows[0]["prompt"][0]["content"]
        assert rows[0]["extra_info"]["key"] == prompt_key("math_dapo", rows[0]["prompt"], "1")
    else:
        assert output.read_bytes() == whole
    assert store.finished(output, json.loads(report.read_text())["made_from"])


def test_a_run_that_is_cut_off_leaves_nothing_that_looks_done(source, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    output = folder / "dapo.parquet"

    def cut_off(*args):
        yield [{**row, "extra_info": {"index": None, "key": "k", "n": 1}} for row in [published("One?", "1")]]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(dapo_math_17k, "_rows", cut_off)
        prepare(output, [source])
    assert list(folder.iterdir()) == []
    assert prepare(output, [source])["counts"]["kept"] == 4


def test_temporary_files_of_killed_runs_are_removed_and_those_of_living_ones_left(source, tmp_path):
    names = [f".dapo{ending}.{letter * 32}.tmp" for letter, ending in
             (("a", ".parquet"), ("b", ".dropped.jsonl"), ("c", ".report.json"), ("d", ".parquet"))]  # fmt: skip
    others = [".other.parquet." + "a" * 32 + ".tmp", ".dapo.parquet.mine.tmp"]
    for name in (*names, *others):
        (tmp_path / name).write_bytes(b"PAR1")
    with (tmp_path / names[-1]).open("rb") as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        prepare(tmp_path / "dapo.parquet", [source])
    assert {path.name for path in tmp_path.glob(".*.tmp")} == {names[-1], *others}


def test_a_temporary_file_is_held_while_it_is_written(tmp_path):
    seen = []

    def batches():
        seen.extend(tmp_path.glob(".o.parquet.*.tmp"))
        store._remove_abandoned(tmp_path / "o.parquet")
        yield [{**published("One?", "1"), "extra_info": {"index": None, "key": "k", "n": 1}}]

    store.write(tmp_path / "o.parquet", {}, batches(), [], {"kept": 1})
    assert len(seen) == 1 and not seen[0].exists() and (tmp_path / "o.parquet").is_file()


@pytest.mark.bad_input
def test_an_output_is_not_written_over_its_input(source, tmp_path):
    before = source.read_bytes()
    (tmp_path / "link.parquet").symlink_to(source)
    for given, output in ((source, source), (source, tmp_path / "link.parquet"), (tmp_path / "link.parquet", source),
                          (tmp_path, source)):  # fmt: skip
        with pytest.raises(SystemExit, match=f"{output.name}: would be written over while it is an input"):
            main(["--input", str(given), "--output", str(output)])
    assert source.read_bytes() == before and source.is_file()


@pytest.mark.bad_input
@pytest.mark.parametrize("output", ["folder.parquet", "report/o.parquet", "/proc/x.parquet", "/dev/null/x.parquet"])
def test_an_output_that_cannot_be_written_is_named(source, tmp_path, output):
    (tmp_path / "folder.parquet").mkdir()
    (tmp_path / "report/o.report.json").mkdir(parents=True)
    message = "(folder.parquet|o.report.json): is a folder|/x.parquet: cannot be written.*is accepted"
    with pytest.raises(SystemExit, match=message):
        main(["--input", str(source), "--output", str(tmp_path / output)])


def test_a_failed_second_run_does_not_leave_the_first_report(source, tmp_path, monkeypatch):
    output = tmp_path / "dapo.parquet"
    prepare(output, [source])
    monkeypatch.setattr(store, "_check", lambda *args: (_ for _ in ()).throw(AssertionError("short")))
    with pytest.raises(AssertionError, match="short"):
        prepare(output, [source], "boxed")
    assert not (tmp_path / "dapo.report.json").exists()


def test_what_is_read_back_is_checked(tmp_path):
    row = {**published("One?", "1"), "extra_info": {"index": None, "key": "k", "n": 1}}
    with pytest.raises(AssertionError, match="2 rows with 1 different keys where 2"):
        store.write(tmp_path / "x.parquet", {}, [[row], [row]], [], {"kept": 2})
    assert not (tmp_path / "x.parquet").exists()


def bad(**changes):
    row = published("Good?", "1")
    row.update(changes)
    return row


MALFORMED = [
    (bad(prompt=None), r"row 3, column 'prompt': no message"),
    (bad(prompt=[]), r"row 3, column 'prompt': no message"),
    (bad(prompt=[{"role": "user", "content": " \n"}]), r"row 3, column 'prompt.content': empty"),
    (bad(prompt=[{"role": None, "content": "x"}]), r"row 3, column 'prompt.role': empty"),
    (bad(data_source=None, prompt=[{"role": "user", "content": "new"}]), r"row 3, column 'data_source': empty"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("row", "message"), MALFORMED, ids=[message[7:30] for _, message in MALFORMED])
def test_malformed_rows_are_named(tmp_path, row, message):
    path = write_rows(tmp_path / "bad.parquet", [published(f"{i}?", "1") for i in range(3)] + [row])
    with pytest.raises(DataError, match=f"bad.parquet, {message}"):
        prepare(tmp_path / "out.parquet", [path])
    assert not (tmp_path / "out.parquet").exists()


def test_the_row_is_that_of_the_file_not_of_the_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "BATCH", 4)
    rows = [published(f"{i}?", "1") for i in range(11)]
    rows[9]["prompt"] = [{"role": "system", "content": "s"}, {"role": "user", "content": None}]
    with pytest.raises(DataError, match="row 9, column 'prompt.content'"):
        prepare(tmp_path / "out.parquet", [write_rows(tmp_path / "bad.parquet", rows)])


@pytest.mark.bad_input
def test_missing_and_mistyped_columns_are_named(tmp_path):
    good = pa.Table.from_pylist([published("One?", "1")], schema=PUBLISHED)
    for table, message in [
        (good.drop_columns(["reward_model"]), "column 'reward_model': missing .*the file has data_source, prompt"),
        (good.set_column(1, "prompt", pa.array(["One?"])), "column 'prompt': a list of messages.*got string"),
        (good.set_column(3, "reward_model", pa.array([{"style": "rule"}])), "reward_model.ground_truth.*no such field"),
        (good.set_column(3, "reward_model", pa.array([{"ground_truth": [1.5]}])), "reward_model.ground_truth.*list"),
        (good.set_column(0, "data_source", pa.array([3])), "column 'data_source': text is needed, got int64"),
        (good.set_column(2, "ability", pa.array([3])), "column 'ability': text is needed.*got int64"),
        (good.set_column(3, "reward_model", pa.array([{"ground_truth": "1", "style": 3}])), "model.style.*int64"),
        (good.set_column(4, "extra_info", pa.array(["x"])), "column 'extra_info': named fields.*got string"),
    ]:
        pq.write_table(table, tmp_path / "bad.parquet")
        with pytest.raises(DataError, match=message):
            prepare(tmp_path / "out.parquet", [tmp_path / "bad.parquet"])


def test_whole_numbers_as_answers_are_taken(tmp_path):
    table = pa.Table.from_pylist([published("One?", "1")], schema=PUBLISHED)
    pq.write_table(table.set_column(3, "reward_model", pa.array([{"ground_truth": 34}])), tmp_path / "a.parquet")
    prepare(tmp_path / "out.parquet", [tmp_path / "a.parquet"])
    assert rows_of(tmp_path / "out.parquet")[0]["reward_model"] == {"style": "rule", "ground_truth": "34"}


@pytest.mark.bad_input
def test_files_that_are_none_are_named(tmp_path, capsys):
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "rows.csv").write_text("a,b")
    (tmp_path / "empty").mkdir()
    for given, message in [
        ("cut.parquet", "cut.parquet: is not a whole Parquet file"),
        ("none.parquet", "none.parquet: does not exist"),
        ("rows.csv", "rows.csv: ends in '.csv'; accepted are .parquet"),
        ("empty", "empty: the folder has no"),
    ]:
        with pytest.raises(SystemExit, match=message):
            main(["--input", str(tmp_path / given), "--output", str(tmp_path / "out.parquet")])
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path / "out.csv")])
    assert "a name ending in .parquet is accepted" in capsys.readouterr().err


def test_a_foreign_prompt_is_not_put_otherwise(tmp_path):
    row = published("One?", "1", prompt=[{"role": "user", "content": "Plain question?"}])
    path = write_rows(tmp_path / "a.parquet", [row])
    with pytest.raises(DataError, match="row 0, column 'prompt.content': the prompt is not wrapped"):
        prepare(tmp_path / "out.parquet", [path], "boxed")
    assert prepare(tmp_path / "out.parquet", [path], "dapo")["counts"]["kept"] == 1


def test_a_download_of_another_size_is_refused(source, tmp_path, monkeypatch):
    monkeypatch.setattr(dapo_math_17k, "download", lambda *args: [source])
    with pytest.raises(DataError, match="35 rows where 1,700,000 to 1,899,999 are expected"):
        prepare(tmp_path / "out.parquet")


def test_without_a_hub_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SystemExit, match="hub data set BytedTsinghua-SIA/DAPO-Math-17k: cannot be downloaded.*--input"):
        main(["--output", str(tmp_path / "out.parquet")])


@pytest.mark.bad_input
def test_all_prompts_dropped_is_an_error(tmp_path):
    path = write_rows(tmp_path / "a.parquet", [published("One?", ""), published("One?", None)])
    with pytest.raises(DataError, match="no prompt is left: 2 rows"):
        prepare(tmp_path / "out.parquet", [path])


def test_a_third_answer_and_late_agreement_are_counted():
    fold = Fold()
    for answer, copies in (("1", 3), ("2", 1), ("1", 2), ("3", 4)):
        fold.add("q", answer, copies, 0, 0)
    assert fold.prompts[0].answers == {"1": 5, "2": 1, "3": 4} and fold.prompts[0].copies == 10
