"""The mathematics reward: right, wrong, or unscored under a name. The last tests run the real math-verify."""

from __future__ import annotations

import logging
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from omegaconf import OmegaConf

from verl_ext.rewards import math_verify
from verl_ext.rewards.math_verify import compute_score
from verl_ext.rewards.worker_pool import close_pools, shared_pool
from verl_ext.rollout.outcomes import OutcomeRule, read_outcome
from verl_ext.typed_settings import SettingError

QUICK = {"deadline_s": 0.7, "memory_mb": 512}


def score(answer, truth, extra_info=None, **settings):
    return compute_score("math_dapo", answer, truth, extra_info, **settings)


@pytest.fixture
def no_worker(monkeypatch):
    """What plain text decides needs no worker process."""

    def refuse(settings):
        raise AssertionError("a worker was asked")

    monkeypatch.setattr(math_verify, "shared_pool", refuse)


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("Answer: 34", "34", True),
        ("Answer: 35", "34", False),
        ("Answer: **34**", "34", True),
        ("**Answer: 35**", "34", False),
        ("Answer: 034", "34", True),
        ("Answer: +34", "34", True),
        ("Answer: -34", "34", False),
        ("Answer: -0", "0", True),
        ("Answer: 1/2", "\\frac{1}{2}", True),
        ("Answer: $-\\dfrac{2}{4}$", "\\frac{-1}{2}", True),
        ("Answer: 0.5", "1/2", True),
        ("Answer: .50", "0.5", True),
        ("Answer: 1/3", "\\frac{1}{2}", False),
        ("Answer: 6/3", "2", True),
        ("\\boxed{34}", "$34$", True),
        ("\\boxed{34}", "\\boxed{34}", True),
        ("\\boxed{34}", 34, True),
        ("\\boxed{34}", np.int64(34), True),
        ("\\boxed{34}", ["33", "34"], True),
        ("\\boxed{34}", np.array(["33", "34"], dtype=object), True),
        ("\\boxed{34}", ("33", 35), False),
        ("\\boxed{\\sqrt{x}}", "\\sqrt{x}", True),
        ("\\boxed{" + "7" * 100_000 + "}", "34", False),
        ("\\boxed{" + "7" * 100_000 + "}", "7" * 100_000, True),
        ("\\boxed{" + "(" * 50_000 + "}", "34", False),
        ("Answer: ", "34", False),
        ("no answer " * 10_000, "34", False),
        ("", "34", False),
    ],
)
def test_plain_answers(no_worker, answer, truth, right):
    result = score(answer, truth)
    assert (result["score"], result["acc"], result["unscored"]) == (float(right), right, None)
    reading = read_outcome(result["score"], result, OutcomeRule())
    assert (reading.correct, reading.score) == (right, float(right))
    assert isinstance(result["pred"], str) and len(result["pred"]) <= 200


@pytest.mark.parametrize("answer", [None, 34, math.nan, b"Answer: 34", ["Answer: 34"]])
def test_a_response_that_is_no_text_is_unscored(no_worker, answer):
    result = score(answer, "34")
    assert result == {"score": None, "acc": None, "pred": "[INVALID]", "unscored": "not_text"}
    reading = read_outcome(result["score"], result, OutcomeRule())
    assert (reading.correct, reading.score) == (None, None)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "truth", [None, "", " $ $ ", [], ["34", ""], [None], True, math.nan, b"34", {"34": 1}, [["34"]]]
)
def test_a_truth_that_is_no_answer_is_an_error_in_the_data(no_worker, truth):
    with pytest.raises((TypeError, ValueError), match="ground_truth="):
        score("Answer: 34", truth)


def test_scores_are_settings_and_acc_is_not(no_worker):
    assert score("Answer: 3", "34", wrong_score=-1)["score"] == -1.0
    assert score("Answer: 3", "34", wrong_score=-1)["acc"] is False
    assert score("Answer: 34", "34", right_score=2.5)["score"] == 2.5
    assert score("Answer: 34\n\\boxed{3}", "34", style="answer")["acc"] is True


@pytest.mark.parametrize(
    ("setting", "answer", "expected"),
    [
        ("score", "Answer: 34", (1.0, True, None)),
        ("wrong", "Answer: 34", (0.0, False, None)),
        ("unscored", "Answer: 34", (None, None, "truncated")),
    ],
)
def test_a_truncated_response(no_worker, setting, answer, expected):
    def seen(extra_info):
        result = score(answer, "34", extra_info, truncated=setting)
        return result["score"], result["acc"], result["unscored"]

    assert seen({"truncated": True}) == expected
    assert seen({"truncated": False}) == (1.0, True, None)


def test_not_knowing_whether_a_response_was_truncated_is_said_once(no_worker, caplog):
    math_verify._warn_of_missing_truncation.cache_clear()
    with caplog.at_level(logging.WARNING, logger=math_verify.__name__):
        for extra_info in (None, {}, {"index": 3}):
            assert score("Answer: 34", "34", extra_info, truncated="wrong")["acc"] is True
            assert score("Answer: 34", "34", extra_info)["acc"] is True
    assert len(caplog.records) == 1


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"deadline": 3},
            r"reward_kwargs.deadline=3; accepted: the settings deadline_s, .*unfinished_box",
        ),
        ({"deadline_s": 0}, r"deadline_s=0.0; accepted: a positive number"),
        ({"deadline_s": "5"}, r"deadline_s='5'"),
        ({"deadline_s": math.inf}, r"deadline_s=inf"),
        ({"truncated": "drop"}, r"truncated='drop'; accepted: score \| wrong \| unscored"),
        ({"truncated": True}, r"truncated=True"),
        ({"unfinished_box": "last"}, r"unfinished_box='last'; accepted: wrong \| earlier"),
        ({"style": "last"}, r"style='last'; accepted: any \| answer \| boxed"),
        ({"workers": 0}, r"workers=0; accepted: an integer of 1 or more"),
        ({"workers": 1.5}, r"workers=1.5"),
        ({"memory_mb": 64}, r"memory_mb=64; accepted: an integer of 256 or more"),
        ({"wrong_score": 1}, r"wrong_score=1.0; accepted: a number below right_score=1.0"),
        ({"wrong_score": 0, "right_score": -1.0}, r"wrong_score=0.0; accepted: a number below right_score=-1.0"),
        ({"wrong_score": None}, r"wrong_score=None; accepted: a number"),
        ({"max_answer_chars": True}, r"max_answer_chars=True"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(SettingError, match=message):
        score("Answer: 34", "34", **settings)


def test_verl_loads_it_with_settings_from_the_configuration(no_worker):
    from verl.trainer.ppo.reward import get_custom_reward_fn

    function = {"path": "pkg://verl_ext.rewards.math_verify", "name": "compute_score"}
    function["reward_kwargs"] = {"truncated": "wrong", "wrong_score": -1}
    loaded = get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": function}}))
    call = {"data_source": "x", "ground_truth": "34", "extra_info": {"truncated": True}}
    assert loaded(solution_str="Answer: 34", **call)["score"] == -1.0
    # What verl adds where there is a reward model is no setting.
    assert loaded(solution_str="", reward_router_address="a:1", reward_model_tokenizer=object(), **call)["acc"] is False


def test_a_wrong_setting_is_refused_before_ray_starts(no_worker):
    from verl_ext.checks.reward_trial import check_reward
    from verl_ext.training.training_settings import TrainingSettings

    function = {"path": "pkg://verl_ext.rewards.math_verify", "name": "compute_score", "reward_kwargs": {}}
    manager = {"source": "register", "name": "naive"}
    config = OmegaConf.create(
        {
            "reward": {
                "custom_reward_function": function,
                "reward_model": {"enable": False},
                "reward_manager": manager,
            }
        }
    )
    row = {"data_source": "math_dapo", "reward_model": {"ground_truth": "34"}, "extra_info": {"index": "x"}}
    settings = TrainingSettings({}, {}, {})
    assert "'acc': False" in check_reward(config, settings, [row])
    config.reward.custom_reward_function.reward_kwargs = {"truncated": "drop"}
    with pytest.raises(SettingError, match=r"reward_kwargs.truncated='drop'; accepted: score \| wrong \| unscored"):
        check_reward(config, settings, [row])


def test_validation_logs_acc_and_majority_and_skips_the_names(no_worker):
    from verl.trainer.ppo.metric_utils import process_validation_metrics

    results = [score(answer, "34") for answer in ("Answer: 34", "none")]
    infos = {name: [result[name] for result in results] for name in results[0]}
    metrics = process_validation_metrics(["math_dapo"] * 2, ["a"] * 2, infos)["math_dapo"]
    assert set(metrics) == {"score", "acc"}
    assert metrics["acc"]["mean@2"] == 0.5 and "maj@2/mean" in metrics["acc"]


# ---------------------------------------------------------------- with math-verify


@pytest.fixture(scope="module", autouse=True)
def end_workers():
    yield
    close_pools()


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("\\boxed{\\frac12}", "0.5", True),
        ("Answer: $1/2$", "\\frac{1}{2}", True),
        ("Answer: 1,234", "1234", True),
        ("Answer: 0.333333", "1/3", True),
        ("Answer: 0.3", "1/3", False),
        ("Answer: 1/0", "1", False),
        ("Answer: x = 5", "5", True),
        ("Answer: The area is $12\\pi$ in all", "12\\pi", True),
        ("Answer: $1+x$", "x+1", True),
        ("Answer: $\\{2, 1\\}$", "\\{1, 2\\}", True),
        ("Answer: $(2, 1)$", "(1, 2)", False),
        ("Answer: $\\sqrt{8}$", "2\\sqrt{2}", True),
        ("Answer: $\\sqrt{8}$", ["3", "2\\sqrt{2}"], True),
        ("Answer: 3.14", "\\pi", False),
        ("Answer: \\frac{1}{2", "34", False),
        ("Answer: ]]]\\frac{\x00\ud800", "34", False),
        ('Answer: __import__("os").system("true")', "34", False),
    ],
)
def test_answers_that_need_mathematics(answer, truth, right):
    result = score(answer, truth, **QUICK)
    assert (result["acc"], result["unscored"]) == (right, None)


def test_pathological_answers_are_bounded_and_the_others_keep_their_verdicts():
    bad = {
        "\\boxed{\\sin(9^{9^{9^9}})}": "deadline",
        "\\boxed{" + "(" * 400 + "1" + ")" * 400 + "}": "deadline",
    }
    # A number too large to be written out is not 5/2, and needs no time.
    good = {"\\boxed{9^{9^{9^9}}}": False, "\\boxed{2+\\frac{\\sqrt{1}}{2}}": True}
    answers = [answer for pair in zip(bad, good, strict=True) for answer in pair]
    with ThreadPoolExecutor(4) as threads:
        results = dict(zip(answers, threads.map(lambda answer: score(answer, "5/2", **QUICK), answers), strict=True))
    assert {answer: results[answer]["unscored"] for answer in bad} == bad
    assert {answer: results[answer]["acc"] for answer in good} == good
    settings = math_verify._settings(frozenset(QUICK.items()))
    assert len(shared_pool(settings.pool).pids()) <= settings.workers
