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
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import hydra
import ray
import torch
import transfer_queue as tq
from verl.experimental.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap, _agent_loop_registry
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_ext.training.llm_client import GroupLLMClient
from verl_ext.training.logs import show_own_logs
from verl_ext.training.outcomes import OutcomeError, OutcomeRule, read_outcome
from verl_ext.training.trajectories import reward_batch, row_fields, row_key, row_tag

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

# Ray hides the class behind an actor class; this is the one verl wrote.
_VerlWorker = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__


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
    min_version: int = 0
    max_version: int = 0
    rows: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """(key, tag) of the session's rows in TransferQueue; empty where it failed or could not be scored."""

    error: str = ""
    started_at: float = 0.0
    """Wall clock at which the worker began its share of the round."""
    scored_at: float = 0.0
    """Wall clock at which the session was scored and stored."""


class _InlineExecutor:
    """Stands for the event loop in verl's single-turn agent loop, which uses it for `run_in_executor` alone.

    verl hands the tokenisation of every prompt and answer to a thread; for hundreds of short ones the hand-over costs
    more than the work, and the threads contend with the event loop for the interpreter.
    """

    def run_in_executor(self, executor: None, function: Callable[[], Any]) -> asyncio.Future:
        future = asyncio.get_running_loop().create_future()
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
        return future


class AllocatedAgentLoopWorker(_VerlWorker):
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
        self._reward_workers = cycle(self.reward_loop_worker_handles or [])
        self._agent_loops: dict[str, Any] = {}

    async def generate_round(
        self, groups: list[GroupRequest], global_steps: int, deadline_s: float
    ) -> list[SessionReply]:
        """Run the requested sessions of all groups; returns when each is scored and stored, has failed, or is overdue.

        Args:
            groups: requests of this worker's share of the round.
            global_steps: the training step; the policy's version is global_steps - 1.
            deadline_s: sessions still running after this many seconds are cancelled and reported as failed.
        """
        started_at = time.time()
        rollout = self.config.actor_rollout_ref.rollout
        sampling_params = {
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "repetition_penalty": 1.0,
            "logprobs": rollout.calculate_log_probs,
        }
        runs = (self._run_group(group, sampling_params, global_steps, deadline_s) for group in groups)
        replies = await asyncio.gather(*runs)
        for group_replies in replies:
            for reply in group_replies:
                reply.started_at = started_at
        return [reply for group_replies in replies for reply in group_replies]

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        """A prompt of validation, which verl submits and waits for: verl's keys and marks, scored and put by group."""
        if not trajectory["validate"]:
            return await super()._run_prompt(prompt, sampling_params, trajectory, trace)
        uid, global_steps = prompt["uid"], prompt["global_steps"]
        n = prompt.pop("__rollout_n__", self.config.actor_rollout_ref.rollout.val_kwargs.n)
        await tq.async_kv_put(key=uid, partition_id="val", tag={"status": "running"})
        status = "failure"
        try:
            group = GroupRequest(uid, 0, int(n), prompt)
            deadline_s = self.config.allocation.deadline_s
            replies = await self._run_group(group, sampling_params, global_steps, deadline_s, partition="val")
            if not any(reply.failed for reply in replies):
                status = "finished"
        except Exception:
            logger.exception("validation of prompt %s failed", uid)
        await tq.async_kv_put(key=uid, partition_id="val", tag={"status": status})

    async def _run_group(
        self,
        group: GroupRequest,
        sampling_params: dict[str, Any],
        global_steps: int,
        deadline_s: float,
        partition: str = "train",
    ) -> list[SessionReply]:
        client = self.llm_client
        async with client.group(group.uid) if isinstance(client, GroupLLMClient) else nullcontext():
            sessions = range(group.first, group.first + group.n)
            run = self._run_session
            tasks = {asyncio.create_task(run(group, s, sampling_params, global_steps)): s for s in sessions}
            _, overdue = await asyncio.wait(tasks, timeout=deadline_s)
            for task in overdue:
                task.cancel()
            if overdue:
                await asyncio.wait(overdue, timeout=5.0)

        outputs: dict[int, list[AgentLoopOutput]] = {}
        replies: dict[int, SessionReply] = {}
        for task, session in tasks.items():
            if task in overdue:
                message = f"session {session} of group {group.uid} did not end within {deadline_s:g} s"
                replies[session] = SessionReply(group.uid, session, failed=True, error=message)
                logger.error("%s (allocation.deadline_s): cancelled", message)
            elif (error := task.exception()) is not None:
                replies[session] = SessionReply(group.uid, session, failed=True, error=repr(error))
                logger.error("session %s of group %s failed", session, group.uid, exc_info=error)
            elif not task.result() or not task.result()[-1].response_ids:
                replies[session] = SessionReply(group.uid, session, failed=True, error="the session gave no tokens")
            else:
                outputs[session] = task.result()

        scores = await self._score(group, outputs, global_steps)
        keys, rows, tags = [], [], []
        for session, session_outputs in outputs.items():
            rule = self._outcome_rule if partition == "train" else None
            reply = _reply(group, session, session_outputs, scores[session], global_steps, rule)
            reply.truncated = len(session_outputs[-1].response_ids) >= self.rollout_config.response_length
            replies[session] = reply
            if reply.score is None:
                continue
            fields = self._prompt_fields(group, session, global_steps)
            for (key, tag), output in zip(reply.rows, session_outputs, strict=True):
                keys.append(key)
                tags.append(tag)
                rows.append(row_fields(self, output, fields))
        if keys:
            await tq.async_kv_batch_put(
                keys=keys, fields=list_of_dict_to_tensordict(rows), tags=tags, partition_id=partition
            )
        now = time.time()
        for reply in replies.values():
            reply.scored_at = now
        return [replies[session] for session in sorted(replies)]

    def _prompt_fields(self, group: GroupRequest, session: int, global_steps: int) -> dict[str, Any]:
        fields = {k: v for k, v in group.prompt.items() if k not in ("agent_name", "__rollout_n__", "__do_sample__")}
        return fields | {"uid": group.uid, "session_id": session, "global_steps": global_steps}

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
        if type(loop) is SingleTurnAgentLoop:
            loop.loop = _InlineExecutor()
            self._agent_loops[name] = loop
        return loop

    async def _score(
        self, group: GroupRequest, outputs: dict[int, list[AgentLoopOutput]], global_steps: int
    ) -> dict[int, tuple[Any, dict[str, Any]]]:
        """(score, reward_extra_info) a session; one reward call for the group, one a session if that call fails."""
        scores: dict[int, tuple[Any, dict[str, Any]]] = {}
        plain = []
        for session, session_outputs in outputs.items():
            final = session_outputs[-1]
            if final.reward_score is not None:
                scores[session] = final.reward_score, final.extra_fields.get("reward_extra_info", {})
            elif len(session_outputs) > 1:
                scores[session] = await self._score_alone(group, session, session_outputs, global_steps)
            else:
                plain.append(session)
        if plain:
            fields = [self._prompt_fields(group, session, global_steps) for session in plain]
            batch = reward_batch([outputs[session][-1] for session in plain], fields)
            try:
                results = await next(self._reward_workers).compute_score_batch.remote(batch)
                for session, result in zip(plain, results, strict=True):
                    scores[session] = result["reward_score"], result.get("reward_extra_info", {})
            except Exception as error:
                # One answer's reward raised and took the batch with it: find out whose, keep the others.
                logger.warning("scoring group %s at once failed (%r); scoring one by one", group.uid, error)
                alone = [self._score_alone(group, s, outputs[s], global_steps) for s in plain]
                scores.update(zip(plain, await asyncio.gather(*alone), strict=True))
        return scores

    async def _score_alone(
        self, group: GroupRequest, session: int, outputs: list[AgentLoopOutput], global_steps: int
    ) -> tuple[Any, dict[str, Any]]:
        fields = self._prompt_fields(group, session, global_steps)
        fields["extra_info"] = dict(fields.get("extra_info") or {})
        try:
            await self._compute_score(outputs, kwargs=fields)
        except Exception as error:
            logger.error("the reward of session %s of group %s raised: not scored", session, group.uid, exc_info=error)
            return None, {}
        return outputs[-1].reward_score, outputs[-1].extra_fields.get("reward_extra_info", {})


def _reply(
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
    correct, score = read_outcome(*scored, rule) if rule is not None else (None, scored[0])
    versions = [
        version
        for output in outputs
        for name in ("min_global_steps", "max_global_steps")
        if (version := output.extra_fields.get(name)) is not None
    ] or [global_steps - 1]
    reply = SessionReply(
        group.uid,
        session,
        correct=correct,
        score=score,
        prompt_tokens=len(outputs[0].prompt_ids),
        response_tokens=sum(len(output.response_ids) for output in outputs),
        min_version=min(versions),
        max_version=max(versions),
    )
    if score is None:
        return reply
    for index, output in enumerate(outputs):
        output.reward_score = score
        output.extra_fields["reward_extra_info"] = scored[1]
        lengths = len(output.prompt_ids), len(output.response_ids)
        own_versions = output.extra_fields.get("min_global_steps"), output.extra_fields.get("max_global_steps")
        reply.rows.append((row_key(group.uid, session, index), row_tag(*lengths, global_steps, *own_versions)))
    return reply


class RoundError(RuntimeError):
    """A round of rollouts that could not be completed; says which workers and groups."""


class AllocatedAgentLoopManager(AgentLoopManagerTQ):
    """verl's agent-loop manager whose workers also run rounds."""

    worker_class: type = AllocatedAgentLoopWorker

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(self.worker_class)

    def generate_round(
        self, groups: list[GroupRequest], global_steps: int, deadline_s: float
    ) -> list[SessionReply]:
        """One synchronous round: a share of the groups to each worker, all replies back.

        Raises:
            RoundError: a worker died, or did not answer within the deadline and a grace of a minute.
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
        grace_s = 60.0
        _, late = ray.wait(list(calls), num_returns=len(calls), timeout=deadline_s + grace_s)
        if late:
            stuck = [group.uid for call in late for group in calls[call]]
            raise RoundError(
                f"{len(late)} of {len(calls)} rollout workers did not answer within allocation.deadline_s="
                f"{deadline_s:g} s and {grace_s:g} s more; groups waiting: {', '.join(stuck[:10])}"
                + (f" and {len(stuck) - 10} more" if len(stuck) > 10 else "")
            )
        try:
            return [reply for call in calls for reply in ray.get(call)]
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, OutcomeError):
                raise error.cause from error
            raise
        except ray.exceptions.RayActorError as error:
            raise RoundError(f"a rollout worker died in a round of {len(groups)} groups: {error}") from error
