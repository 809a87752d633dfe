"""Correct, wrong, or not scored: what a reward's answer means, whatever it is."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from verl_ext.rollout.outcomes import LARGEST, OutcomeError, OutcomeRule, as_number, plain, read_outcome, word

ACC = OutcomeRule()


def read(score, extra, rule=ACC):
    reading = read_outcome(score, extra, rule)
    return reading.correct, reading.score


@pytest.mark.parametrize(
    ("score", "extra", "expected"),
    [
        (1.0, {"acc": True, "score": 1.0}, (True, 1.0)),
        (-1.0, {"acc": False, "score": -1.0}, (False, -1.0)),
        (-0.7, {"acc": 1, "score": 1.0}, (True, -0.7)),
        (-1.0, {"acc": -1}, (False, -1.0)),
        (1, {}, (True, 1.0)),
        (0.0, {"score": 0.0}, (False, 0.0)),
        (1, {"score": 1, "unscored": None}, (True, 1.0)),
        (None, {"acc": True}, (None, None)),
        (1.0, {"acc": None}, (None, None)),
        (True, None, (True, 1.0)),
    ],
)
def test_outcome(score, extra, expected):
    assert read(score, extra) == expected


NUMBERS = [
    (True, 1.0), (np.True_, 1.0), (1, 1.0), (np.int64(1), 1.0), (np.float32(1), 1.0), (Fraction(2, 2), 1.0),
    (Decimal("1.0"), 1.0), (np.array(1.0), 1.0), (np.array([1]), 1.0), (torch.tensor(1.0), 1.0),
    (torch.tensor([[True]]), 1.0), (np.array([True], dtype=object), 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("value", "expected"), NUMBERS, ids=lambda value: f"{type(value).__name__}")
def test_a_finite_number_counts_whatever_its_class(value, expected):
    assert as_number(value) == expected
    assert read(value, {"acc": value}) == (True, expected)
    assert read(value, None) == (True, expected)


NO_NUMBERS = [
    ([1], "list"), ((1,), "tuple"), ({"a": 1}, "dict"), ({1}, "set"), (object(), "object"), (1 + 0j, "complex"),
    (np.complex64(1), "complex64"), (Decimal("sNaN"), "Decimal"), (Decimal("Infinity"), "Decimal"), (10**400, "int"),
    (10**5000, "int"), (Fraction(10**400, 1), "Fraction"), (np.array([1, 0]), "ndarray"), (np.array([]), "ndarray"),
    (torch.tensor([1.0, 0.0]), "Tensor"), (np.array(["1"]), "ndarray"), ("yes", "str"), ("", "str"), ("1", "str"),
    (np.str_("1"), "str"), (b"1", "bytes"), (bytearray(b"1"), "bytearray"), (math.nan, "nan"), (math.inf, "inf"),
    (-math.inf, "inf"), (np.float32("nan"), "float32"), (1e39, "too_large"), (-1e31, "too_large"),
]  # fmt: skip


@pytest.mark.bad_input
@pytest.mark.parametrize(("value", "kind"), NO_NUMBERS, ids=[f"{kind}-{i}" for i, (_, kind) in enumerate(NO_NUMBERS)])
def test_all_else_is_not_scored_for_a_reason_with_key_type_and_value(value, kind):
    reading = read_outcome(value, {"acc": True}, ACC)
    assert (reading.correct, reading.score, reading.reason) == (None, None, f"score_is_{kind}")
    assert "'score' is " in reading.said and type(value).__name__ in reading.said and "not scored" in reading.said
    assert read_outcome(value, None, None) == reading, "in validation as in training"
    if kind != "too_large":
        reading = read_outcome(1.0, {"acc": value}, ACC)
        assert (reading.correct, reading.score, reading.reason) == (None, None, f"acc_is_{kind}")


def test_none_is_not_scored_without_more_words():
    assert read_outcome(None, {"acc": True}, ACC).reason == read_outcome(1.0, {"acc": None}, ACC).reason == "no_score"
    assert not read_outcome(None, None, ACC).said


def test_scores_that_count_survive_float32():
    for score in (LARGEST, -LARGEST):
        assert read(score, {"acc": True}) == (True, score)
        group = torch.tensor([score, 0.0] * 512, dtype=torch.float32)
        assert torch.isfinite(group.sum()) and torch.isfinite(group.std())


def test_a_graded_value_needs_a_threshold():
    with pytest.raises(OutcomeError, match="allocation.outcome.threshold"):
        read_outcome(0.4, {"acc": 0.4}, ACC)
    rule = OutcomeRule(threshold=0.5)
    assert read(0.4, {"acc": 0.4}, rule) == (False, 0.4)
    assert read(0.5, {"acc": Fraction(1, 2)}, rule) == (True, 0.5)


@pytest.mark.bad_input
def test_a_reward_without_the_field_is_an_error_that_names_the_keys_seen():
    with pytest.raises(OutcomeError, match=r"allocation.outcome.key.*\['format', 'score'\]"):
        read_outcome(1.0, {"score": 1.0, "format": 1.0}, ACC)
    assert read(1.0, {"score": 1.0, "format": 1.0}, OutcomeRule(key="format")) == (True, 1.0)
    with pytest.raises(OutcomeError, match=r"keys seen \['3', 'None', 'score'\]"):
        read_outcome(1.0, {"score": 1.0, 3: 1.0, None: 2}, ACC)


def test_what_is_kept_of_a_reward_has_a_json_form_and_plain_values_are_as_they_were():
    values = {"acc": True, "pred": "7", "n": 3, "f": 0.5, "none": None, "steps": [1, [2.5]], "more": {"a": "b"}}
    assert plain(values) == values
    cycle = []
    cycle.append(cycle)
    odd = {
        3: Decimal("1.5"), None: {1, 2}, ("a", 1): (b"x", object()), "array": np.arange(2), "tensor": torch.ones(1),
        "big": 10**5000, "numpy": np.float64(2.5), "flag": np.True_, "cycle": cycle,
    }  # fmt: skip
    kept = json.loads(json.dumps(plain(odd)))
    assert kept["3"] == 1.5 and kept["None"] == [1, 2] and kept["array"] == [0, 1] and kept["tensor"] == [1.0]
    assert kept["numpy"] == 2.5 and kept["flag"] is True and kept["('a', 1)"][0] == "b'x'"


def test_a_reason_is_a_word():
    assert word("took too long: 3 s") == "took_too_long_3_s" and word(["a"]) == "a" and word(" ") == "unnamed"
    assert len(word("x" * 500)) == 60
