# SPDX-License-Identifier: Apache-2.0
"""From run folders to numbers, sentences, tables and files."""

import json
import math
import re

import pytest

from tests.unit.runs.run_folders import write_compared_run as write_run
from verl_ext.compare import build
from verl_ext.launch.comparison_plan import CompareError
from verl_ext.reports.compared_runs import find, load
from verl_ext.reports.comparison import compare


def numbers(root, **more):
    return compare([load(folder) for folder in find(root, [])], more.pop("baseline", "cpu/grpo"), **more)


def edit(folder, change):
    """Rewrite the records of metrics.jsonl."""
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        change(record)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_accuracy_at_equal_rollouts_and_to_target(root):
    found = numbers(root)
    assert found["common"]["rollouts"] == 1280  # 20 steps of 64; dapo goes on to 2560
    sara, dapo = found["recipes"]["cpu/sara"], found["recipes"]["cpu/dapo"]
    expected = 0.4 + 0.5 * (1 - math.exp(-2 * 1.28))
    assert sara["at_equal_rollouts"]["mean"] == pytest.approx(expected, abs=0.03)
    assert dapo["at_equal_rollouts"]["mean"] < dapo["final"]["mean"]
    reach = sara["to_target"]["rollouts"]
    assert reach["reached"] == 3 and reach["ratio"]["mean"] == pytest.approx(0.5, abs=0.06)
    assert reach["ratio"]["low"] <= reach["ratio"]["mean"] <= reach["ratio"]["high"] < 1
    assert dapo["to_target"]["steps"]["ratio"]["mean"] == pytest.approx(0.5, abs=0.1)  # twice as many a step
    assert sara["totals"]["hours"]["mean"] == pytest.approx(20 * 3.6 / 3600)
    best = [max(p["accuracy"] for p in run["points"]) for run in found["runs"] if run["recipe"] == "cpu/grpo"]
    assert found["target"] <= min(best) < found["target"] + 0.01


def test_what_separates_is_said_and_what_does_not(root):
    found = numbers(root)
    assert found["differences"]["cpu/sara"]["separates"] and not found["differences"]["cpu/dapo"]["separates"]
    assert found["sentences"][0].startswith("cpu/sara separates: at 1,280 rollouts")
    assert "Not separated from cpu/grpo: cpu/dapo." in found["sentences"]


def test_nothing_separates(tmp_path):
    for recipe in ("a", "b"):
        for seed in range(3):
            write_run(tmp_path / f"{recipe}-seed{seed}", seed=seed, noise=0.03)
    found = numbers(tmp_path, baseline="a")
    assert found["sentences"][0].startswith("Nothing separates: at 1,280 rollouts")
    assert "b's" in found["sentences"][0]


def test_one_seed_says_nothing(tmp_path):
    for recipe, speed in (("a", 1), ("b", 3)):
        write_run(tmp_path / f"{recipe}-seed0", speed=speed)
    found = numbers(tmp_path, baseline="a")
    assert found["sentences"][0].startswith("Nothing can be said to separate")
    assert found["recipes"]["b"]["final"]["low"] is None


def test_not_reached(root):
    found = numbers(root, target=0.8)
    grpo, sara = (found["recipes"][name]["to_target"]["rollouts"] for name in ("cpu/grpo", "cpu/sara"))
    assert grpo == {"reached": 0, "of": 3, "needed": None, "ratio": None}
    assert sara["reached"] == 3 and sara["ratio"] is None
    said = next(sentence for sentence in found["sentences"] if sentence.startswith("Short of 0.8: "))
    assert "cpu/grpo (3 of 3 runs)" in said and "cpu/sara" not in said


def test_fates_and_effective_groups_are_the_ledgers(root):
    found = numbers(root)["recipes"]["cpu/dapo"]
    assert found["fates"] == {"trained": 48 * 60, "abandoned": 76 * 60, "surplus": 4 * 60}
    assert found["rollouts_per_effective_group"]["mean"] == pytest.approx(128 / 6)


def test_calibration(root):
    pairs = numbers(root)["recipes"]["cpu/sara"]["predictions"]
    assert {p["what"] for p in pairs} == {"SARA: mixed within the probe", "DPS: mixed"}
    assert len(pairs) == 2 * 5 * 3 and all(p["steps"] == 4 for p in pairs)
    assert all(p["predicted"] == pytest.approx(0.6) and 0.3 < p["realised"] < 0.4
               for p in pairs if p["what"].startswith("SARA"))  # fmt: skip


def test_an_audit_counts_once_a_run(tmp_path):
    write_run(tmp_path / "a-seed0")
    edit(tmp_path / "a-seed0", lambda r: r["data"].update({
        "allocation/audit_groups": r["step"], "allocation/p_eff_audited": 0.01 * r["step"],
        "allocation/p_eff_audited_predicted": 0.444}))  # fmt: skip
    (pair,) = load(tmp_path / "a-seed0").predictions()
    assert pair["predicted"] == pytest.approx(0.444) and pair["realised"] == pytest.approx(0.2)


def test_runs_from_elsewhere_need_no_note(tmp_path):
    folder = write_run(tmp_path / "cpu-sara-seed4", seed=4, note=False)
    data = load(folder)
    assert (data.recipe, data.seed, data.complete) == ("cpu-sara", 4, True)
    assert find(None, [str(tmp_path / "*-seed*")]) == [folder]
    assert not load(write_run(tmp_path / "b-seed0", upto=7)).complete


def test_verls_own_trainer_has_no_allocation_metrics(tmp_path):
    write_run(tmp_path / "sync-seed0", note=False)

    def change(record):
        record["data"] = {k: v for k, v in record["data"].items() if not k.startswith("allocation/")}
        record["data"]["response_length/mean"] = 3.0

    edit(tmp_path / "sync-seed0", change)
    data = load(tmp_path / "sync-seed0")
    assert data.totals["rollouts"] == 20 * 64 and data.totals["tokens"] == 20 * 64 * 3


def test_a_broken_ledger_is_said(root):
    path = root / "cpu-sara-seed1" / "ledger.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:5] + lines[6:]) + "\n")
    found = numbers(root)
    assert "The ledger of a run does NOT add up; see below." in found["sentences"]
    assert any("cpu-sara-seed1" in fault for fault in found["recipes"]["cpu/sara"]["faults"])


@pytest.mark.bad_input
@pytest.mark.parametrize("more, message", [
    ({"baseline": "cpu/x"}, "baseline='cpu/x'; accepted: cpu/dapo, cpu/grpo, cpu/sara"),
    ({"target": 1.5}, "target=1.5; accepted"),
])  # fmt: skip
def test_settings_are_refused_by_name(root, more, message):
    with pytest.raises(CompareError, match=re.escape(message)):
        numbers(root, **more)


@pytest.mark.bad_input
def test_the_same_seed_twice_is_refused(root, tmp_path):
    write_run(tmp_path / "copy-seed0", recipe="cpu/grpo")
    with pytest.raises(CompareError, match="both cpu/grpo with seed 0"):
        compare([load(f) for f in find(root, [str(tmp_path / "copy-seed0")])])


def test_files(root, tmp_path, monkeypatch):
    output = tmp_path / "report"
    found = build(find(root, []), output, "A <b>title</b> & more")
    assert found["baseline"] == "cpu/grpo"  # without recipes named, the one called grpo
    text = (output / "index.html").read_text()
    assert "A &lt;b&gt;title&lt;/b&gt; &amp; more" in text
    own = re.sub(r"<script>.*?</script>", "<script>", text, flags=re.S)  # what Vega may write is seen in a browser
    assert not re.search(r'<(script|link|img|iframe)[^>]+(src|href)="(?!data:)', own) and len(own) < len(text) / 2
    inside = json.loads(re.search(r'<script type="application/json" id="comparison">(.*?)</script>', text, re.S)[1])
    assert inside == json.loads((output / "comparison.json").read_text())
    for name in ("accuracy.png", "shares.png"):
        assert (output / name).read_bytes().startswith(b"\x89PNG")
    shown = f"{found['recipes']['cpu/sara']['final']['mean']:.3f}"
    assert shown in text and "9 runs" in text and "not reached" not in text
    monkeypatch.setattr("verl_ext.compare.draw_all", lambda comparison, folder: [])  # a second each
    again = build(find(root, []), output, "x", recipes=["cpu/sara", "cpu/dapo"])
    assert again["baseline"] == "cpu/sara"


def test_runs_that_were_not_validated_are_shown_all_the_same(root, tmp_path):
    for folder in find(root, []):
        edit(folder, lambda r: r.update(data={k: v for k, v in r["data"].items() if not k.startswith("val-core")}))
    found = build(find(root, []), tmp_path / "report", "t")
    assert found["sentences"] == ["Held-out accuracy was not measured in all runs: nothing can be said about it."]
    assert 'id="fates"' in (tmp_path / "report" / "index.html").read_text()
