"""What travels between the driver and the rollout workers about the sessions of a group, and how far they have come."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from verl.experimental.agent_loop import AgentLoopOutput

from verl_ext.rollout.outcomes import UNSCORED, OutcomeRule, plain, read_outcome, word
from verl_ext.rollout.trajectories import row_key, row_tag

logger = logging.getLogger(__name__)

_said: set[str] = set()


_SHOWN_TOKENS = 500


@dataclass(slots=True)
class GroupRequest:
    """The sessions asked of one group in one round, as it travels to a worker."""

    uid: str
    """The group; no underscore in it, since verl cuts keys at the first one."""

    first: int
    """Number of the first new session."""

    n: int
    """How many new sessions."""

    prompt: dict[str, Any]
    """The data set's fields of the prompt (raw_prompt, reward_model, data_source, ...)."""


@dataclass(slots=True)
class SessionReply:
    """What a worker says about one session; its trajectory, where there is one, is in TransferQueue."""

    uid: str
    session: int
    correct: bool | None = None
    score: float | None = None
    prompt_tokens: int = 0
    response_tokens: int = 0
    failed: bool = False
    truncated: bool = False
    aborted: bool = False
    """Cut off with its group; the tokens are those generated so far."""
    min_version: int = 0
    max_version: int = 0
    rows: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """(key, tag) of the session's rows in TransferQueue; empty where it failed or could not be scored."""

    error: str = ""
    """Why it failed; or why it could not be scored: the reward's word for it (see UNSCORED), or that of `Reading`."""
    answer: list[int] = field(default_factory=list)
    """The last tokens of an answer that could not be scored, for whoever looks for the reason."""
    too_long: bool = False
    """It failed because its prompt has more tokens than data.max_prompt_length."""
    started_at: float = 0.0
    """When the worker began its share of the round, by its monotonic clock: comparable with `scored_at` alone."""
    scored_at: float = 0.0
    """When the session was scored and stored, by the same clock."""


@dataclass(slots=True)
class Progress:
    """Tokens of a session that is being generated, as far as they are known."""

    prompt_tokens: int = 0
    response_tokens: int = 0


PROGRESS: ContextVar[Progress | None] = ContextVar("verl_ext_session_progress", default=None)
"""The session that the running task generates; whoever generates for it counts here."""


@dataclass(slots=True, eq=False)
class GroupRun:
    """The sessions of a group under way on a worker, so that they can be cut off."""

    group: GroupRequest
    tasks: dict[asyncio.Task, int] = field(default_factory=dict)
    """Session of each task."""
    progress: dict[int, Progress] = field(default_factory=dict)
    """By session."""
    scoring: asyncio.Task | None = None
    """The reward of the group, once all its sessions have ended."""
    whole: asyncio.Task | None = None
    """The group's task: sessions, reward, storing."""
    aborted: bool = False

    @property
    def pending(self) -> list[asyncio.Task]:
        """Sessions that have not ended."""
        return [task for task in self.tasks if not task.done()]

    def tokens(self, session: int) -> tuple[int, int]:
        """Tokens of a session's prompt, and of its response as far as it was generated."""
        known = self.progress.get(session, Progress())
        return known.prompt_tokens, known.response_tokens

    def aborted_replies(self, outputs: dict[int, list[AgentLoopOutput]]) -> list[SessionReply]:
        """What is said about a group that was cut off: all its sessions are aborted, also those that had ended."""
        replies = []
        for session in range(self.group.first, self.group.first + self.group.n):
            prompt_tokens, response_tokens = self.tokens(session)
            if session in outputs:
                prompt_tokens = len(outputs[session][0].prompt_ids)
                response_tokens = sum(len(output.response_ids) for output in outputs[session])
            replies.append(
                SessionReply(
                    self.group.uid, session, prompt_tokens=prompt_tokens, response_tokens=response_tokens, aborted=True
                )
            )
        return replies


def fault_of(outputs: Any) -> str | None:
    """What is wrong with what an agent loop returned for a session; None where nothing is."""
    if not outputs or outputs[-1] is None:
        return "the session gave no output"
    for number, output in enumerate(outputs):
        if not isinstance(output, AgentLoopOutput):
            return f"output {number} of the session is a {type(output).__name__}, not an AgentLoopOutput"
        if not output.response_ids:
            return f"output {number} of the session's {len(outputs)} has no tokens"
        if len(output.response_mask) != len(output.response_ids):
            return (
                f"output {number} of the session has {len(output.response_ids)} tokens, "
                f"but a response_mask of {len(output.response_mask)}"
            )
    return None


def _say_once(reason: str, said: str) -> None:
    if reason not in _said and len(_said) < 64:
        _said.add(reason)
        logger.warning("%s; said once, and counted as allocation/unscored/%s", said, reason)


def scored_reply(
    group: GroupRequest,
    session: int,
    outputs: list[AgentLoopOutput],
    scored: tuple[Any, dict[str, Any]],
    global_steps: int,
    rule: OutcomeRule | None,
) -> SessionReply:
    """The reply about a session that ran, with keys and tags of its rows; without rows where it could not be scored.

    Without a rule (validation) the score is taken as it is.
    """
    reading = read_outcome(*scored, rule)
    info = plain(scored[1]) if isinstance(scored[1], Mapping) else {}
    versions = [
        version
        for output in outputs
        for name in ("min_global_steps", "max_global_steps")
        if (version := output.extra_fields.get(name)) is not None
    ] or [global_steps - 1]
    reply = SessionReply(
        group.uid,
        session,
        correct=reading.correct,
        score=reading.score,
        prompt_tokens=len(outputs[0].prompt_ids),
        response_tokens=sum(len(output.response_ids) for output in outputs),
        min_version=min(versions),
        max_version=max(versions),
    )
    if reading.score is None:
        reply.error = word(info[UNSCORED]) if info.get(UNSCORED) else reading.reason
        reply.answer = list(outputs[-1].response_ids[-_SHOWN_TOKENS:])
        if reading.said:
            _say_once(reading.reason, reading.said)
        return reply
    for index, output in enumerate(outputs):
        output.reward_score = reading.score
        output.extra_fields["reward_extra_info"] = info
        lengths = len(output.prompt_ids), len(output.response_ids)
        own_versions = output.extra_fields.get("min_global_steps"), output.extra_fields.get("max_global_steps")
        reply.rows.append((row_key(group.uid, session, index), row_tag(*lengths, global_steps, *own_versions)))
    return reply
