"""Groups in flight on the driver: an error in one takes no other along, and nobody waits for what has left."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray

from verl_ext.allocation import RoundError
from verl_ext.rollout import group_stream as streaming
from verl_ext.rollout.group_stream import GroupStream
from verl_ext.rollout.outcomes import OutcomeError
from verl_ext.rollout.sessions import GroupRequest, SessionReply


class Worker:
    """A worker on which every group is complete at once, but for those that stay until they are aborted."""

    def __init__(self, errors=None, stay=()) -> None:
        self.errors, self.stay = errors or {}, set(stay)
        self.groups: dict[str, GroupRequest] = {}
        for name in ("submit_groups", "next_groups", "abort_groups", "clear_stream"):
            setattr(self, name, SimpleNamespace(remote=self._later(getattr(self, f"_{name}"))))

    @staticmethod
    def _later(method):
        return lambda *given: lambda: method(*given)

    def _report(self, uid):
        n = self.groups.pop(uid).n
        return uid, self.errors.get(uid) or [SessionReply(uid, session) for session in range(n)]

    def _submit_groups(self, groups, *_):
        self.groups |= {group.uid: group for group in groups}

    def _next_groups(self):
        assert self.groups, "the driver waits for what never comes"
        return [self._report(uid) for uid in list(self.groups) if uid not in self.stay]

    def _abort_groups(self, uids):
        return [self._report(uid) for uid in uids if uid in self.groups]

    def _clear_stream(self):
        self.groups = {}


@pytest.fixture
def stream(monkeypatch):
    calls = SimpleNamespace(
        get=lambda calls: [call() for call in calls], wait=lambda calls, **_: (calls[:1], calls[1:]),
        exceptions=ray.exceptions,
    )  # fmt: skip
    monkeypatch.setattr(streaming, "ray", calls)

    def make(uids, **worker):
        made = GroupStream([Worker(**worker)])
        made.submit([GroupRequest(uid, 0, 2, {}) for uid in uids], 1, 60.0, 60.0)
        for *_, call in list(made._sent.values()):
            call()
        return made

    return make


def test_a_group_that_was_taken_is_not_waited_for_when_the_step_breaks_off(stream):
    """The loop aborts what it holds to be in flight: also the group whose replies it could not take in."""
    made = stream(["a", "b"], stay=["b"])
    assert {reply.uid for reply in made.next()} == {"a"}
    assert [reply.uid for reply in made.abort(["a", "b"])] == ["b", "b"] and len(made) == 0
    assert made.abort(["a", "b"]) == []


@pytest.mark.parametrize("error", [OutcomeError("no 'acc'"), RoundError("full")])
def test_an_error_is_raised_once_and_the_other_groups_come_back(stream, error):
    made = stream(["a", "b", "c", "d"], errors={"b": error}, stay=["d"])
    with pytest.raises(type(error), match=str(error)):
        made.next()
    assert {reply.uid for reply in made.next()} == {"a"}
    assert [reply.uid for reply in made.abort(["b", "c", "d"])] == ["c", "c", "d", "d"]
    assert len(made) == 0 and made._load == [0]


def test_an_error_among_aborted_groups_leaves_the_others_to_the_next_call(stream):
    made = stream(["a", "b", "c"], errors={"b": RoundError("full")}, stay=["a", "b", "c"])
    with pytest.raises(RoundError, match="full"):
        made.abort(["a", "b", "c"])
    assert [reply.uid for reply in made.abort(["a", "b", "c"])] == ["a", "a", "c", "c"] and len(made) == 0
