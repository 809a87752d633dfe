"""Equal answers are judged once; a failure is shared by those who wait for it, and forgotten."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from verl_ext.rewards.verdicts import Verdicts


def test_equal_questions_at_the_same_time_are_judged_once():
    verdicts, calls, go = Verdicts(8), [], threading.Event()

    def judge():
        calls.append(1)
        assert go.wait(10)
        return True

    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(verdicts.get, "a", judge) for _ in range(8)]
        assert verdicts.get("b", lambda: False) is False
        go.set()
        assert [future.result() for future in futures] == [True] * 8
    assert len(calls) == 1 and verdicts.get("b", judge) is False


def test_a_failure_reaches_all_that_wait_and_is_tried_again_later():
    verdicts, begun, known = Verdicts(8), threading.Event(), threading.Event()

    class Question:
        def __hash__(self):
            return 0

        def __eq__(self, other):
            known.set()  # somebody asks what is already asked
            return True

    def fail():
        begun.set()
        assert known.wait(30)
        raise ValueError("deadline")

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(verdicts.get, Question(), fail)
        assert begun.wait(30)
        second = threads.submit(verdicts.get, Question(), lambda: True)
        for future in (first, second):
            with pytest.raises(ValueError, match="deadline"):
                future.result(30)
    assert verdicts.get(Question(), lambda: True) is True


def test_only_the_latest_are_kept():
    verdicts = Verdicts(2)
    for question in ("a", "b", "a", "c"):
        verdicts.get(question, lambda: True)
    asked = []
    for question in ("c", "a", "b"):
        verdicts.get(question, lambda question=question: asked.append(question) or True)
    assert asked == ["b"]
