# SPDX-License-Identifier: Apache-2.0
"""The page of one run: what it says of the prompts and of the answers."""

import json
import re

import numpy as np
import pytest
import yaml

from tests.unit.runs.run_folders import add_prompts
from verl_ext.report import main
from verl_ext.reports.prompts_seen import prompt_charts, prompts_seen
from verl_ext.reports.run_page import latest, run_page
from verl_ext.runs.records import read_run


def set_config(folder, **groups):
    path = folder / "config.yaml"
    config = yaml.safe_load(path.read_text())
    for group, settings in groups.items():
        config.setdefault(group, {}).update(settings)
    path.write_text(yaml.safe_dump(config))


def cells(page, identifier):
    """Keys of a table's cells, row by row."""
    body = re.search(f'<table id="{identifier}".*?<tbody>(.*?)</tbody>', page, re.S)[1]
    return [re.findall('data-key="(.*?)"', row) for row in body.split("</tr>")[:-1]]


def test_the_prompts_are_those_of_the_record_and_of_the_data(run_folder):
    success = add_prompts(run_folder)
    seen, missing = prompts_seen(read_run(run_folder))
    assert missing == [] and len(seen.offers) == 60
    assert (seen.offers == 0).sum() == 10 and (seen.last_step[seen.offers == 0] == 0).all()
    assert seen.offers.sum() == 8 * 30 and seen.last_step.max() == 30
    assert (seen.right + seen.wrong + seen.unscored).sum() == 4 * 8 * 30
    assert seen.retired.sum() == 1 and seen.unscored[seen.retired] == seen.unscored.sum() > 0
    for level, expected in success.items():
        of = seen.difficulty == str(level)
        assert seen.right[of].sum() / (seen.right + seen.wrong)[of].sum() == pytest.approx(expected)
    charts = {chart.id: chart.spec["data"]["values"] for chart in prompt_charts(seen)}
    assert sum(row["prompts"] for row in charts["success"]) == 50
    assert sum(row["prompts"] for row in charts["offers"]) == 50
    assert sum(row["prompts"] for row in charts["last-seen"]) == 50
    assert sum(row["prompts"] * row["from"] for row in charts["offers"]) == 8 * 30


def test_the_page_has_a_row_a_difficulty_and_answers_of_each_verdict(run_folder, capsys):
    success = add_prompts(run_folder)
    assert main([str(run_folder)]) == 0
    assert f"Page: {run_folder / 'report.html'}" in capsys.readouterr().out
    page = (run_folder / "report.html").read_text()
    rows = cells(page, "prompts")
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert [float(row[8]) for row in rows] == pytest.approx([success[level] for level in range(3)])
    assert [row[3] for row in rows] == ["1", "0", "0"]
    answers = cells(page, "answers")
    assert [row[0] for row in answers] == ["right"] * 6 + ["wrong"] * 6 + ["unscored"] * 6
    assert [row[1] for row in answers[:6]] == ["30", "29", "28", "27", "26", "25"]
    assert "&lt;b&gt;so&lt;/b&gt;" in page and "<b>so</b>" not in page
    assert "The ledger adds up" in page and "does NOT add up" not in page


def test_without_records_the_page_says_how_to_get_them(run_folder):
    page = run_page(read_run(run_folder))
    assert "no recorded outcomes" in page and "allocation.record=auto records them" in page
    assert "allocation.answers=true keeps some" in page and 'id="fates"' in page


@pytest.mark.parametrize("files", [["gone.parquet"], None])
def test_without_the_data_set_the_sampled_prompts_are_shown(run_folder, files):
    add_prompts(run_folder)
    set_config(run_folder, data={"train_files": files})
    seen, [missing] = prompts_seen(read_run(run_folder))
    assert set(seen.difficulty) == {"all prompts"} and len(seen.offers) <= 50 and seen.offers.min() >= 1
    assert "Without difficulty" in missing and (files is None or "gone.parquet" in missing)


def test_a_checkpoint_of_other_prompts_says_nothing_of_these(run_folder):
    add_prompts(run_folder)
    state = run_folder / "global_step_30" / "allocation" / "allocation.json"
    state.write_text(state.read_text().replace('"keys"', '"keyz"'))
    assert prompts_seen(read_run(run_folder))[0].retired is None


def test_many_difficulties_become_a_few_classes(run_folder):
    import pyarrow as pa
    import pyarrow.parquet as pq

    add_prompts(run_folder)
    path = run_folder / "train.parquet"
    rows = pq.read_table(path).to_pylist()
    for i, row in enumerate(rows):
        row["extra_info"] = {"level": i / 10 if i else None}
    pq.write_table(pa.Table.from_pylist(rows), path)
    seen, _ = prompts_seen(read_run(run_folder))
    classes, counts = np.unique(seen.difficulty, return_counts=True)
    assert "not given" in classes and len(classes) == 6 and sorted(counts)[0] == 1 and sorted(counts)[1] >= 11
    assert len(cells(run_page(read_run(run_folder)), "prompts")) == 6


def test_the_latest_answers_are_of_different_prompts():
    answers = [{"verdict": "right", "prompt": str(i % 4), "step": i} for i in range(20)] + [{"verdict": "?"}]
    assert [one["step"] for one in latest(answers)] == [19, 18, 17, 16]


def test_a_damaged_line_of_answers_is_said_and_the_table_is_printed_all_the_same(run_folder, capsys):
    add_prompts(run_folder)
    (run_folder / "answers.jsonl").write_text("{broken\n" + json.dumps({"verdict": "right"}) + "\n")
    assert main([str(run_folder)]) == 0
    out = capsys.readouterr().out
    assert "The ledger adds up" in out and "No page: " in out and "answers.jsonl, line 1" in out
