"""Rollout workers that carry a group over several rounds.

A round is one awaited call to each worker. The worker runs the sessions it was asked for, has them scored and put into
TransferQueue a group at a time, and returns the outcomes; the trajectories stay in TransferQueue. Sessions are numbered
on from the group's earlier rounds, so that a key `{uid}_{session}_{index}` is never written twice.

Against verl 0.9.1's own worker this saves, around every rollout: the building of an agent loop by Hydra (reused where
the loop keeps no state), the reward call and the TransferQueue put (one of each a group), and the polling.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import hydra
import ray
import torch
import transfer_queue as tq
from verl.experimental.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap, _agent_loop_registry
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils.rollout_trace import rollout_trace_attr
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_ext.allocation import RoundError
from verl_ext.rollout.engine_client import GroupLLMClient
from verl_ext.rollout.group_stream import GroupStream, StreamingSessions
from verl_ext.rollout.lengths import PromptTooLong, end_tokens, refuse_long_prompts
from verl_ext.rollout.logs import show_own_logs
from verl_ext.rollout.outcomes import OutcomeError, OutcomeRule
from verl_ext.rollout.reward_calls import RewardError, RewardWorkers, maker
from verl_ext.rollout.round_errors import storage_problem
from verl_ext.rollout.scoring import GroupScoring
from verl_ext.rollout.sessions import (
    PROGRESS,
    GroupRequest,
    GroupRun,
    Progress,
    SessionReply,
    fault_of,
    scored_reply,
)
from verl_ext.rollout.trajectories import row_fields
from verl_ext.rollout.validation import ValidationSessions

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

# Ray hides the class behind an actor class; this is the one verl wrote.
_VerlWorker = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__


class _InlineExecutor:
    """Stands for the event loop in verl's single-turn agent loop, which uses it for `run_in_executor` alone.

    verl hands the tokenisation of every prompt and answer to a thread; for hundreds of short ones the hand-over costs
    more than the work, and the threads contend with the event loop for the interpreter.

    Replaces: verl.experimental.agent_loop.agent_loop.AgentLoopBase.loop (verl 0.9.1)
    """

    def run_in_executor(self, executor: None, function: Callable[[], Any]) -> asyncio.Future:
        future = asyncio.get_running_loop().create_future()
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
        return future


class AllocatedAgentLoopWorker(StreamingSessions, ValidationSessions, GroupScoring, _VerlWorker):
    """verl's agent-loop worker with rounds beside its own generate_sequences (which validation goes on using)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.llm_client = GroupLLMClient.wrap(self.llm_client)
        self._init_rounds()

    def _init_rounds(self) -> None:
        show_own_logs()
        # Rows are small: torch's threads would only spin beside the engine's.
        torch.set_num_threads(1)
        outcome = self.config.allocation.outcome
        self._outcome_rule = OutcomeRule(key=outcome.key, threshold=outcome.threshold)
        self.rewards = RewardWorkers(
            list(self.reward_loop_worker_handles or []), maker(self.config), self.config.allocation.reward_deadline_s
        )
        self._agent_loops: dict[str, Any] = {}
        self._end_tokens = end_tokens(getattr(self, "tokenizer", None), getattr(self, "model_config", None))
        self._init_streaming()

    async def generate_round(
        self, groups: list[GroupRequest], global_steps: int, deadline_s: float
    ) -> list[SessionReply]:
        """Run the requested sessions of all groups; returns when each is scored and stored, has failed, or is overdue.

        Args:
            groups: requests of this worker's share of the round.
            global_steps: the training step; the policy's version is global_steps - 1.
            deadline_s: sessions still running after this many seconds are cancelled and reported as failed.
        """
        started_at = time.monotonic()
        sampling_params = self._sampling_params()
        runs = (self._run_group(group, sampling_params, global_steps, deadline_s) for group in groups)
        replies = await asyncio.gather(*runs)
        for group_replies in replies:
            for reply in group_replies:
                reply.started_at = started_at
        return [reply for group_replies in replies for reply in group_replies]

    def _sampling_params(self) -> dict[str, Any]:
        rollout = self.config.actor_rollout_ref.rollout
        return {
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "repetition_penalty": 1.0,
            "logprobs": rollout.calculate_log_probs,
        }

    async def _run_group(
        self,
        group: GroupRequest,
        sampling_params: dict[str, Any],
        global_steps: int,
        deadline_s: float,
        partition: str = "train",
        run: GroupRun | None = None,
    ) -> list[SessionReply]:
        """Sessions, reward and storing of one group; through `run` another task can cut it off before it is stored."""
        run, client = run or GroupRun(group), self.llm_client
        overdue: set[asyncio.Task] = set()
        grouped = isinstance(client, GroupLLMClient)
        async with client.group(group.uid, group.n, global_steps) if grouped else nullcontext():
            for session in range(group.first, group.first + group.n) if not run.aborted else ():
                task = asyncio.create_task(self._counted_session(run, session, sampling_params, global_steps))
                run.tasks[task] = session
            if run.tasks:
                _, overdue = await asyncio.wait(run.tasks, timeout=deadline_s)
            if overdue:
                await self._end_sessions([run])
                await asyncio.wait(overdue, timeout=5.0)

        outputs: dict[int, list[AgentLoopOutput]] = {}
        replies: dict[int, SessionReply] = {}
        validates = partition == "val"
        for task, session in run.tasks.items():
            if run.aborted and (not task.done() or task.cancelled() or task.exception() is not None):
                continue  # run.progress has its tokens
            if task in overdue:
                message = f"session {session} of group {group.uid} did not end within {deadline_s:g} s"
                tokens = run.tokens(session)
                replies[session] = SessionReply(group.uid, session, None, None, *tokens, failed=True, error=message)
                logger.error("%s (allocation.%s): ended", message, "val_deadline_s" if validates else "deadline_s")
            elif (error := task.exception()) is not None:
                if isinstance(error, RoundError):
                    raise error
                too_long = isinstance(error, PromptTooLong)
                replies[session] = SessionReply(group.uid, session, failed=True, error=repr(error), too_long=too_long)
                if not too_long:
                    logger.error("session %s of group %s failed", session, group.uid, exc_info=error)
                elif session == group.first:
                    logger.error("a prompt of data_source %r is left out: %s", group.prompt.get("data_source"), error)
            elif fault := fault_of(task.result()):
                replies[session] = SessionReply(group.uid, session, failed=True, error=fault)
                logger.error("session %s of group %s failed: %s", session, group.uid, fault)
            else:
                outputs[session] = task.result()

        if not run.aborted:
            until = time.monotonic() + deadline_s
            run.scoring = asyncio.create_task(self._score(group, outputs, global_steps, until, validates))
            await asyncio.wait([run.scoring])
        if run.aborted:
            return run.aborted_replies(outputs)
        scores = run.scoring.result()
        keys, rows, tags = [], [], []
        for session, session_outputs in outputs.items():
            rule = None if validates else self._outcome_rule
            reply = scored_reply(group, session, session_outputs, scores[session], global_steps, rule)
            reply.truncated = self._truncated(session_outputs)
            replies[session] = reply
            if reply.score is None:
                continue
            fields = self._prompt_fields(group, session, global_steps)
            try:
                session_rows = [row_fields(self, output, fields) for output in session_outputs]
            except Exception as error:  # of one session's outputs: the others are whole
                logger.error("session %s of group %s cannot be stored", session, group.uid, exc_info=error)
                tokens = reply.prompt_tokens, reply.response_tokens
                replies[session] = SessionReply(group.uid, session, None, None, *tokens, failed=True, error=repr(error))
                continue
            rows += session_rows
            for key, tag in reply.rows:
                keys.append(key)
                tags.append(tag)
        if keys:
            fields = list_of_dict_to_tensordict(rows)
            try:
                await tq.async_kv_batch_put(keys=keys, fields=fields, tags=tags, partition_id=partition)
            except Exception as error:
                raise RoundError(storage_problem(group.uid, len(keys), error)) from error
        now = time.monotonic()
        for reply in replies.values():
            reply.scored_at = now
        return [replies[session] for session in sorted(replies)]

    def _prompt_fields(self, group: GroupRequest, session: int, global_steps: int) -> dict[str, Any]:
        fields = {k: v for k, v in group.prompt.items() if k not in ("agent_name", "__rollout_n__", "__do_sample__")}
        return fields | {"uid": group.uid, "session_id": session, "global_steps": global_steps}

    async def _counted_session(
        self, run: GroupRun, session: int, sampling_params: dict[str, Any], global_steps: int
    ) -> list[AgentLoopOutput]:
        run.progress[session] = Progress()
        PROGRESS.set(run.progress[session])  # in this task's own context
        with rollout_trace_attr(trace=False):  # as verl's V1 worker: a trace would be without its step and sample
            return await self._run_session(run.group, session, sampling_params, global_steps)

    async def _run_session(
        self, group: GroupRequest, session: int, sampling_params: dict[str, Any], global_steps: int
    ) -> list[AgentLoopOutput]:
        default = self.config.actor_rollout_ref.rollout.agent.default_agent_loop
        agent_loop = self._agent_loop(group.prompt.get("agent_name") or default)
        output = await agent_loop.run(sampling_params, **self._prompt_fields(group, session, global_steps))
        return output if isinstance(output, list) else [output]

    def _agent_loop(self, name: str) -> Any:
        """An agent loop, built as verl builds it; kept for reuse only where it is verl's stateless single-turn loop."""
        loop = self._agent_loops.get(name)
        if loop is not None:
            return loop
        if name not in _agent_loop_registry:
            raise ValueError(f"agent loop {name!r} is not registered; registered: {sorted(_agent_loop_registry)}")
        loop = hydra.utils.instantiate(
            config=_agent_loop_registry[name],
            trainer_config=DictConfigWrap(config=self.config),
            server_manager=self.llm_client,
            tokenizer=self.tokenizer,
            processor=self.processor,
            hf_model_type=self.hf_model_type,
            dataset_cls=self.dataset_cls,
            data_config=DictConfigWrap(self.config.data),
            tools=ToolListWrap(self.tools),
        )
        if self.config.data.get("truncation") != "left":
            refuse_long_prompts(loop)
        if type(loop) is SingleTurnAgentLoop:
            loop.loop = _InlineExecutor()
            self._agent_loops[name] = loop
        return loop


class AllocatedAgentLoopManager(AgentLoopManagerTQ):
    """verl's agent-loop manager whose workers also run rounds."""

    worker_class: type = AllocatedAgentLoopWorker

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(self.worker_class)
        self._stream: GroupStream | None = None

    @property
    def stream(self) -> GroupStream:
        """Groups in flight on the workers: one for all who use them, since what is complete is told once."""
        if self._stream is None:
            self._stream = GroupStream(self.agent_loop_workers)
        return self._stream

    def answers_within(self, deadline_s: float) -> float:
        """Seconds after which a group that has not come back never will."""
        # Generating and scoring have deadline_s each; the last answer's reward may begin just before the end.
        return 2 * deadline_s + self.config.allocation.reward_deadline_s + 60.0

    def generate_round(self, groups: list[GroupRequest], global_steps: int, deadline_s: float) -> list[SessionReply]:
        """One synchronous round: a share of the groups to each worker, all replies back.

        Raises:
            RoundError: a worker or a server died, a worker did not answer within the deadlines of generating and
                scoring and a minute more, or TransferQueue is full.
            RewardError: the reward does not answer at all.
            OutcomeError: the reward's answer cannot be read as correct or wrong.
        """
        workers = self.agent_loop_workers
        shares: list[list[GroupRequest]] = [[] for _ in workers]
        load = [0] * len(workers)
        for group in groups:
            i = load.index(min(load))
            shares[i].append(group)
            load[i] += group.n
        calls = {
            worker.generate_round.remote(share, global_steps, deadline_s): share
            for worker, share in zip(workers, shares, strict=True)
            if share
        }
        most_s = self.answers_within(deadline_s)
        _, late = ray.wait(list(calls), num_returns=len(calls), timeout=most_s)
        if late:
            stuck = [group.uid for call in late for group in calls[call]]
            raise RoundError(
                f"{len(late)} of {len(calls)} rollout workers did not answer within {most_s:g} s (twice "
                f"allocation.deadline_s={deadline_s:g} s, and some more); groups waiting: {', '.join(stuck[:10])}"
                + (f" and {len(stuck) - 10} more" if len(stuck) > 10 else "")
            )
        try:
            replies = [reply for call in calls for reply in ray.get(call)]
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, OutcomeError | RewardError | RoundError):
                raise error.cause from error
            raise
        except ray.exceptions.RayActorError as error:
            raise RoundError(f"a rollout worker died in a round of {len(groups)} groups: {error}") from error
        return replies
