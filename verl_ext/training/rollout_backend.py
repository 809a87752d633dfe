"""The backend of `collect` inside verl: requests go to the rollout workers, trajectories stay in TransferQueue."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import transfer_queue as tq

from verl_ext.allocation.groups import Group, Outcome, Request
from verl_ext.rollout.sessions import GroupRequest, SessionReply
from verl_ext.rollout.worker import AllocatedAgentLoopManager
from verl_ext.training.all_zero import Sample, StepTally
from verl_ext.training.prompts import PromptRows
from verl_ext.training.waiting_rows import Row, load_rows, save_rows

logger = logging.getLogger(__name__)

PARTITION = "train"


class TransferQueueBackend:
    """One synchronous round at a time (`generate`), or groups in flight one by one (`submit`, `next`, `abort`).

    Remembers keys and tags of the rollouts of the step, never their tokens.
    """

    manager: AllocatedAgentLoopManager

    def __init__(self, prompts: PromptRows, deadline_s: float) -> None:
        self.prompts = prompts
        self.deadline_s = deadline_s
        self.global_steps = 0
        self.round_gaps: list[float] = []
        """Seconds between two rounds of this step in which no worker works on them; streaming, of each group: from the
        arrival of the outcomes to that of the next ones, less the longest work of a worker. Each of the two is measured
        by one clock of one host."""
        self.tally = StepTally()
        """What the rewards of the step said."""
        self._arrived_at: dict[str, float] = {}
        self._rows: dict[tuple[str, int], list[Row]] = {}
        self._prompt: dict[str, int] = {}
        self._streaming = False

    def begin_step(self, global_steps: int, carried: bool = False) -> None:
        """The rollouts from here on belong to this training step.

        Args:
            carried: what is in flight goes on in it; else it is of a step that broke off, and cleared.
        """
        self.global_steps = global_steps
        self.round_gaps = []
        self.tally = StepTally()
        self._arrived_at = {}
        self._streaming = carried

    def generate(self, requests: Sequence[Request]) -> list[Outcome]:
        """Run one round; every session asked for comes back, as an outcome or as a failure."""
        replies = self.manager.generate_round(self._outgoing(requests), self.global_steps, self.deadline_s)
        self._note_gap("round", replies)
        return self._outcomes(replies)

    def _note_gap(self, name: str, replies: Sequence[SessionReply]) -> None:
        now = time.monotonic()
        if name in self._arrived_at:
            work = max(0.0, *(reply.scored_at - reply.started_at for reply in replies))
            self.round_gaps.append(now - self._arrived_at[name] - work)
        self._arrived_at[name] = now

    def submit(self, requests: Sequence[Request]) -> None:
        """Begin these sessions."""
        stream = self.manager.stream
        if not self._streaming and len(stream):  # of a step that broke off
            stream.clear()
        self._streaming = True
        most_s = self.manager.answers_within(self.deadline_s)
        stream.submit(self._outgoing(requests), self.global_steps, self.deadline_s, most_s)

    def next(self) -> list[Outcome]:
        """Wait for a group whose sessions are scored and stored, or have failed.

        Raises:
            RoundError: what `GroupStream.next` raises.
        """
        replies = self.manager.stream.next()
        uid = replies[0].uid
        self._note_gap(uid, replies)
        return self._outcomes(replies)

    def abort(self, groups: Sequence[Group]) -> list[Outcome]:
        """Cut off what is in flight of these groups; its tokens are those that the engine had generated."""
        return self._outcomes(self.manager.stream.abort([group.uid for group in groups]))

    def _outgoing(self, requests: Sequence[Request]) -> list[GroupRequest]:
        self._prompt |= {request.group.uid: request.group.prompt for request in requests}
        return [
            GroupRequest(request.group.uid, request.first, request.n, self.prompts.fetch(request.group.prompt))
            for request in requests
        ]

    def _outcomes(self, replies: Sequence[SessionReply]) -> list[Outcome]:
        outcomes = []
        for reply in replies:
            if reply.rows:
                self._rows[reply.uid, reply.session] = reply.rows
            self.tally.add(reply)
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
                    aborted=reply.aborted,
                    error=reply.error if reply.failed else "",
                    last_version=reply.max_version,
                )
            )
        return outcomes

    def rows(self, outcomes: Sequence[Outcome]) -> tuple[list[str], list[dict[str, Any]]]:
        """Keys and tags of the rows of these rollouts, in their order."""
        pairs = [pair for outcome in outcomes for pair in self._rows[outcome.group, outcome.session]]
        return [key for key, _ in pairs], [tag for _, tag in pairs]

    def samples(self) -> list[Sample]:
        """The first answers of each verdict in the step, while their rows are still in TransferQueue."""
        found = [(verdict, reply) for verdict, kept in self.tally.kept.items() for reply in kept]
        keys = [reply.rows[-1][0] for _, reply in found if reply.rows]
        fields = ["responses", "extra_fields"]
        data = tq.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=fields) if keys else {}
        stored = zip(*(data[name] for name in fields), strict=True) if keys else iter(())
        tokenizer = getattr(self.prompts.dataset, "tokenizer", None)
        samples = []
        for verdict, reply in found:
            tokens, reward = reply.answer, reply.error
            if reply.rows:
                response, extra = next(stored)
                tokens, reward = response.tolist(), extra.get("reward_extra_info")
            prompt = self.prompts.fetch(self._prompt[reply.uid])
            samples.append(
                Sample(
                    prompt=str([message["content"] for message in prompt["raw_prompt"]][-1]),
                    response=str(tokens) if tokenizer is None else tokenizer.decode(tokens),
                    truth=(prompt.get("reward_model") or {}).get("ground_truth"),
                    reward=reward,
                    verdict=verdict,
                )
            )
        return samples

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

    def waiting_rows(self) -> list[Row]:
        """The trajectories that wait for a later step: all that is known here between two steps."""
        return [row for session_rows in self._rows.values() for row in session_rows]

    def end(self, groups: Sequence[Group]) -> list[str]:
        """The run ends: what is in flight of these groups is cut off, and their rows in TransferQueue are freed.

        Returns:
            Keys in TransferQueue all the same, of rollouts that nobody waits for; they are freed, too.
        """
        if self._streaming and len(self.manager.stream):
            self.abort(groups)
        known = {key for key, _ in self.waiting_rows()}
        self._rows, self._prompt = {}, {}
        keys = set((tq.kv_list(PARTITION) or {}).get(PARTITION, {}))
        if keys:
            tq.kv_clear(keys=sorted(keys), partition_id=PARTITION)
        return sorted(keys - known)

    def waiting_state(self, folder: str, rows: list[Row]) -> dict[str, Any]:
        """Save these trajectories into `folder`."""
        prompts = [self._prompt[key.split("_")[0]] for key, _ in rows]
        fields = set(self.prompts.fetch(prompts[0])) if rows else set()
        return save_rows(folder, rows, prompts, fields, PARTITION)

    def load_waiting_state(self, folder: str, state: dict[str, Any]) -> None:
        """Put saved trajectories back into TransferQueue."""
        for (key, tag), prompt in load_rows(folder, state, self.prompts.fetch, PARTITION):
            uid, session, _ = key.split("_")
            self._rows.setdefault((uid, int(session)), []).append((key, tag))
            self._prompt[uid] = prompt
