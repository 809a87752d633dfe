"""The backend of `collect` inside verl: rounds go to the rollout workers, trajectories stay in TransferQueue."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import transfer_queue as tq

from verl_ext.allocation.groups import Outcome, Request
from verl_ext.training.prompts import PromptRows
from verl_ext.training.rollout_worker import AllocatedAgentLoopManager, GroupRequest
from verl_ext.training.waiting_rows import Row, load_rows, save_rows

logger = logging.getLogger(__name__)

PARTITION = "train"


class TransferQueueBackend:
    """One synchronous round at a time; remembers keys and tags of the rollouts of the step, never their tokens."""

    manager: AllocatedAgentLoopManager

    def __init__(self, prompts: PromptRows, deadline_s: float) -> None:
        self.prompts = prompts
        self.deadline_s = deadline_s
        self.global_steps = 0
        self.round_gaps: list[float] = []
        """Seconds from the last rollout of a round scored to the workers' start on the next, in this step."""
        self._last_scored_at = 0.0
        self._rows: dict[tuple[str, int], list[Row]] = {}
        self._prompt: dict[str, int] = {}

    def begin_step(self, global_steps: int) -> None:
        """The rollouts from here on belong to this training step."""
        self.global_steps = global_steps
        self.round_gaps = []
        self._last_scored_at = 0.0

    def generate(self, requests: Sequence[Request]) -> list[Outcome]:
        """Run one round; every session asked for comes back, as an outcome or as a failure."""
        self._prompt |= {request.group.uid: request.group.prompt for request in requests}
        groups = [
            GroupRequest(request.group.uid, request.first, request.n, self.prompts.fetch(request.group.prompt))
            for request in requests
        ]
        replies = self.manager.generate_round(groups, self.global_steps, self.deadline_s)
        if self._last_scored_at:
            self.round_gaps.append(min(reply.started_at for reply in replies) - self._last_scored_at)
        self._last_scored_at = max(reply.scored_at for reply in replies)
        outcomes = []
        for reply in replies:
            if reply.rows:
                self._rows[reply.uid, reply.session] = reply.rows
            outcomes.append(
                Outcome(
                    group=reply.uid,
                    session=reply.session,
                    correct=reply.correct,
                    score=reply.score,
                    prompt_tokens=reply.prompt_tokens,
                    response_tokens=reply.response_tokens,
                    failed=reply.failed,
                    truncated=reply.truncated,
                    policy_version=reply.min_version or 0,
                    rows=max(1, len(reply.rows)),
                )
            )
        return outcomes

    def rows(self, outcomes: Sequence[Outcome]) -> tuple[list[str], list[dict[str, Any]]]:
        """Keys and tags of the rows of these rollouts, in their order."""
        pairs = [pair for outcome in outcomes for pair in self._rows[outcome.group, outcome.session]]
        return [key for key, _ in pairs], [tag for _, tag in pairs]

    def forget(self, outcomes: Sequence[Outcome]) -> None:
        """The rows of these rollouts are the trainer's now: it clears them after the step."""
        for outcome in outcomes:
            self._rows.pop((outcome.group, outcome.session), None)
            self._prompt.pop(outcome.group, None)

    def release(self, outcomes: Sequence[Outcome]) -> int:
        """Free the rows of these rollouts in TransferQueue; returns how many rows there were."""
        keys = [key for outcome in outcomes for key, _ in self._rows.get((outcome.group, outcome.session), [])]
        self.forget(outcomes)
        if keys:
            tq.kv_clear(keys=keys, partition_id=PARTITION)
        return len(keys)

    def waiting_state(self, folder: str) -> dict[str, Any]:
        """Save the trajectories that wait for a later step into `folder`: all that is known here between two steps."""
        rows = [row for session_rows in self._rows.values() for row in session_rows]
        prompts = [self._prompt[key.split("_")[0]] for key, _ in rows]
        fields = set(self.prompts.fetch(prompts[0])) if rows else set()
        return save_rows(folder, rows, prompts, fields, PARTITION)

    def load_waiting_state(self, folder: str, state: dict[str, Any]) -> None:
        """Put saved trajectories back into TransferQueue."""
        for (key, tag), prompt in load_rows(folder, state, self.prompts.fetch, PARTITION):
            uid, session, _ = key.split("_")
            self._rows.setdefault((uid, int(session)), []).append((key, tag))
            self._prompt[uid] = prompt
