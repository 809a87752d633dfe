"""The rewards of a group's answers: asked for together, and one at a time where that fails.

`GroupScoring` is a part of the rollout worker, as `StreamingSessions` is.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from typing import Any

import ray
from verl.experimental.agent_loop import AgentLoopOutput

from verl_ext.rollout.outcomes import UNSCORED
from verl_ext.rollout.sessions import GroupRequest
from verl_ext.rollout.trajectories import at_limit, reward_batch

logger = logging.getLogger(__name__)


class GroupScoring:
    """The part of a rollout worker that has answers scored."""

    def _truncated(self, outputs: list[AgentLoopOutput]) -> bool:
        """Whether the response was cut off at its longest: it may also have ended by itself with the last token."""
        final = outputs[-1]
        ended = final.response_mask[-1] and final.response_ids[-1] in self._end_tokens
        return at_limit(self, final) and not ended

    def _reward_fields(
        self, group: GroupRequest, session: int, outputs: list[AgentLoopOutput], global_steps: int, validates: bool
    ) -> dict[str, Any]:
        """The prompt's fields for the reward: extra_info is a copy, and says whether the response was cut off
        (`truncated`) and whether it is one of validation (`validate`)."""
        fields = self._prompt_fields(group, session, global_steps)
        said = {"truncated": self._truncated(outputs), "validate": validates}
        fields["extra_info"] = dict(fields.get("extra_info") or {}) | said
        return fields

    async def _score(
        self,
        group: GroupRequest,
        outputs: dict[int, list[AgentLoopOutput]],
        global_steps: int,
        until: float,
        validates: bool,
    ) -> dict[int, tuple[Any, dict[str, Any]]]:
        """(score, reward_extra_info) a session; one reward call for the group, one a session if that call fails.

        Answers whose reward raises, hangs, or cannot be had before `until` (monotonic clock) get None for a score.
        """
        scores: dict[int, tuple[Any, dict[str, Any]]] = {}
        plain = []
        for session, session_outputs in outputs.items():
            final = session_outputs[-1]
            if final.reward_score is not None:
                scores[session] = final.reward_score, final.extra_fields.get("reward_extra_info")
            elif len(session_outputs) > 1:
                fields = self._reward_fields(group, session, session_outputs, global_steps, validates)
                scores[session] = await self._score_alone(group, session, session_outputs, fields, until)
            else:
                plain.append(session)
        if plain:
            by_session = {s: self._reward_fields(group, s, outputs[s], global_steps, validates) for s in plain}
            batch = reward_batch([outputs[session][-1] for session in plain], list(by_session.values()))
            try:
                results = await self.rewards.call(lambda worker: worker.compute_score_batch.remote(batch))
                for session, result in zip(plain, results, strict=True):
                    scores[session] = result["reward_score"], result.get("reward_extra_info", {})
            except (TimeoutError, ray.exceptions.RayError) as error:
                # One answer's reward raised or hung and took the batch with it: find out whose, keep the others.
                logger.warning("scoring group %s at once failed (%r); scoring one by one", group.uid, error)
                apart = not isinstance(error, ray.exceptions.RayTaskError)
                alone = [self._score_alone(group, s, outputs[s], by_session[s], until, apart) for s in plain]
                scores.update(zip(plain, await asyncio.gather(*alone), strict=True))
        return scores

    async def _score_alone(
        self,
        group: GroupRequest,
        session: int,
        outputs: list[AgentLoopOutput],
        fields: dict[str, Any],
        until: float,
        apart: bool = False,
    ) -> tuple[Any, dict[str, Any]]:
        """One answer's (score, reward_extra_info), by verl's own code, which sends a session's outputs together.

        Args:
            fields: of `_reward_fields`.
            apart: on a worker where nothing else is scored meanwhile.
        """
        whose = f"session {session} of group {group.uid}"

        async def ask(worker: Any) -> tuple[Any, dict[str, Any]]:
            asking, final = copy.copy(self), copy.copy(outputs[-1])
            asking.reward_loop_worker_handles = [worker]
            extra_info = dict(fields.get("extra_info") or {})
            await asking._compute_score([*outputs[:-1], final], kwargs=fields | {"extra_info": extra_info})
            return final.reward_score, final.extra_fields.get("reward_extra_info", {})

        try:
            if not apart:
                try:
                    return await self.rewards.call(ask)
                except ray.exceptions.RayTaskError:
                    raise
                except (TimeoutError, ray.exceptions.RayActorError):
                    pass
            return await self.rewards.call_apart(ask, until, whose) or (None, {UNSCORED: "hung"})
        except ray.exceptions.RayError as error:
            logger.error("the reward of %s raised: not scored", whose, exc_info=error)
            return None, {UNSCORED: "raised"}
