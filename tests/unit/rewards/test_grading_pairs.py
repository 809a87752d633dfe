"""All pairs of the benchmark through the reward: no false positive, none unscored, and the known misses only."""

import pytest

from benchmarks.bench_grading import TABLES, ours, outcome, pairs, responses
from verl_ext.rewards.worker_pool import close_pools

KNOWN_MISSES = {
    ("\\{x: x>2\\}", "(2,\\infty)"),
    ("\\text{B}", "B. 12"),
    ("5", "5 (since 6 is too large)"),
    ("2\\pi n + \\frac{\\pi}{3}, n\\in\\mathbb{Z}", "\\frac{\\pi}{3}+2\\pi n, n\\in\\mathbb{Z}"),
    ("20\\text{ mph}", "20 miles per hour"),
    ("7:00 p.m.", "7 p.m."),
    ("\\text{A, C}", "A, C"),
}
"""(truth, answer) of false negatives; they are read as text, or not at all."""


@pytest.fixture(scope="module", autouse=True)
def end_workers():
    yield
    close_pools()


@pytest.mark.parametrize("table", TABLES)
def test_every_pair_in_every_form(table):
    wrong = {}
    for pair in pairs(table):
        for response in responses(pair):
            if (seen := outcome(ours(pair.truth, response), pair.right)) != "right":
                wrong[pair.truth, pair.answer] = seen
    assert wrong == {pair: "false negative" for pair in wrong.keys() & KNOWN_MISSES}


def test_the_table_is_large_and_has_both_verdicts_of_every_kind():
    table = list(pairs("grading_pairs"))
    assert len(table) >= 200 and len(set(table)) == len(table)
    for kind in {pair.kind for pair in table}:
        assert {pair.right for pair in table if pair.kind == kind} == {True, False}
