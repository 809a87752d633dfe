"""Advice from a run's first steps."""

import json

import pytest
import yaml

from verl_ext.reports.advice import Beginning, advice, beginning
from verl_ext.reports.run_table import table
from verl_ext.runs.records import read_run

PLAIN = {"group_size": 8, "mixed": 0.9, "failed": 0.05, "solved": 0.05, "selector": "shuffled", "updating": 0.2}


@pytest.mark.parametrize("seen, words", [
    ({}, []),
    ({"group_size": 32}, ["rollout.n=4 to 8"]),
    ({"mixed": 0.3, "failed": 0.6, "solved": 0.1}, ["60% of the prompts came back all wrong and 10% all right"]),
    ({"mixed": 0.3, "failed": 0.6, "solved": 0.1, "selector": "greso"}, []),
    ({"updating": 0.7}, ["max_variance"]),
    ({"group_size": 16, "mixed": 0.5, "failed": 0.2, "solved": 0.3, "updating": 0.6},
     ["rollout.n", "=greso", "60% of a step"]),
])  # fmt: skip
def test_what_is_said_follows_from_what_is_seen(seen, words):
    found = advice(Beginning(**{**PLAIN, **seen}))
    assert len(found) == len(words) and all(word in line for word, line in zip(words, found, strict=True))


def test_a_run_says_what_it_shows(run_folder):
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        late = line["step"] > 20  # not looked at
        line["data"] |= {"allocation/selector/offered_mixed": 100 if late else 4,
                         "allocation/selector/offered_failed": 6, "allocation/selector/offered_solved": 2,
                         "timing_s/step": 10.0, "timing_s/old_log_prob": 1.0, "timing_s/update_actor": 5.0}  # fmt: skip
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = yaml.safe_load((run_folder / "config.yaml").read_text())
    config |= {"actor_rollout_ref": {"rollout": {"n": 8}}, "allocation": {"selector": {"name": "shuffled"}}}
    (run_folder / "config.yaml").write_text(yaml.safe_dump(config))
    run = read_run(run_folder)
    assert beginning(run) == Beginning(8, mixed=1 / 3, failed=0.5, solved=1 / 6, selector="shuffled", updating=0.6)
    assert "50% of the prompts came back all wrong and 17% all right" in table(run)


def test_a_run_that_does_not_say_gets_none(run_folder):
    assert beginning(read_run(run_folder)) is None
