# SPDX-License-Identifier: Apache-2.0
"""Validation on the rollout workers: verl submits all prompts and waits; all else is as in a round."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import ray
import transfer_queue as tq

from verl_ext.allocation import RoundError
from verl_ext.rollout.sessions import GroupRequest

logger = logging.getLogger(__name__)


class ValidationSessions:
    """The part of a rollout worker that runs prompts of validation."""

    broken_by: str | None = None
    """What ended sessions of a validation that no other session would survive."""

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
            deadline_s = self.config.allocation.val_deadline_s
            replies = await self._run_group(group, sampling_params, global_steps, deadline_s, partition="val")
            if not any(reply.failed for reply in replies):
                status = "finished"
        except Exception as error:
            logger.exception("validation of prompt %s failed", uid)
            if isinstance(error, RoundError):
                self.broken_by = str(error)
        await tq.async_kv_put(key=uid, partition_id="val", tag={"status": status})

    async def broken(self) -> str | None:
        """What ended this worker's part in validation for good."""
        return self.broken_by


def look_at(workers: Sequence[Any]) -> None:
    """Whether a validation on these workers can come to an end.

    Raises:
        RoundError: a worker or a server died, or TransferQueue is full.
    """
    try:
        broken = [said for said in ray.get([worker.broken.remote() for worker in workers]) if said]
    except ray.exceptions.RayActorError as error:
        raise RoundError(f"a rollout worker died in validation: {error}") from error
    if broken:
        raise RoundError(f"in validation: {broken[0]}")
