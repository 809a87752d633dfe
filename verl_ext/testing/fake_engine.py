"""A fake engine: rollout workers whose model is a latent success rate and a length distribution.

For tests of scale and faults only, and named so. Everything around the model is real: Ray actors, rounds,
TransferQueue, the collector. Outcomes are a function of the seed, the prompt and the session, so that a run repeats.

Use it in place of vLLM's rollouts with
`actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl_ext.testing.fake_engine.FakeEngineManager`.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import transfer_queue as tq
from verl.experimental.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics

from verl_ext.rollout.sessions import PROGRESS, GroupRequest
from verl_ext.rollout.worker import AllocatedAgentLoopManager, AllocatedAgentLoopWorker


@dataclass(frozen=True)
class FakeEngineSettings:
    """What the fake model does; read from the key `fake_engine` of the configuration where there is one."""

    seed: int = 0
    """Seed of success rates, lengths and outcomes."""

    logit_mean: float = -1.2
    """Mean of the logits of the prompts' success rates."""

    logit_std: float = 5.5
    """Their standard deviation; 5.5 gives an effective share of about a third at 8 rollouts."""

    prompt_tokens: int = 8
    """Tokens of a prompt."""

    mean_tokens: float = 3.0
    """Mean of the response's length, cut at data.max_response_length."""

    length_sigma: float = 0.0
    """Standard deviation of the log of a log-normal length, whose tail is long; 0: lengths are geometric."""

    seconds_per_token: float = 0.0
    """Time a session takes, a token."""

    slots: int = 0
    """Sessions that a worker, which stands for one engine, generates at once; the others queue. 0: all."""

    fail_share: float = 0.0
    """Share of sessions that raise."""

    refuse_share: float = 0.0
    """Share of prompts all of whose sessions raise."""

    unscored_share: float = 0.0
    """Share of sessions whose reward is None."""

    hang_share: float = 0.0
    """Share of sessions that never end by themselves."""

    hang_prompt: str = ""
    """Text of the one prompt whose sessions never end by themselves; empty: none."""

    right_token: int = 2
    """First token of a right answer: what a real reward, where there is one, can tell it by."""

    wrong_token: int = 2
    """First token of a wrong one."""


def latent_rate(settings: FakeEngineSettings, prompt: str) -> float:
    """The success rate of a prompt: logistic of a normal drawn from the seed and the prompt's text."""
    z = _rng(settings.seed, prompt).standard_normal()
    return float(1.0 / (1.0 + np.exp(-(settings.logit_mean + settings.logit_std * z))))


def _rng(seed: int, *parts: Any) -> np.random.Generator:
    digest = hashlib.blake2b(repr((seed, *parts)).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


class FakeEngineWorker(AllocatedAgentLoopWorker):
    """A rollout worker without model and tokenizer; where it has verl's reward workers, they score."""

    def __init__(
        self, config: Any, llm_client: Any = None, teacher_client: Any = None, reward_workers: list[Any] | None = None
    ) -> None:
        self.config = config
        self.processor = self.mm_processor_kwargs = None
        self.llm_client = None
        self.reward_loop_worker_handles = reward_workers
        self.rollout_config = SimpleNamespace(
            response_length=config.data.max_response_length,
            max_model_len=config.actor_rollout_ref.rollout.max_model_len,
        )
        tq.init()
        self.background_tasks = set()
        self._init_rounds()
        self.set_model(FakeEngineSettings(**(config.get("fake_engine") or {})))

    def set_model(self, settings: FakeEngineSettings) -> None:
        """Another fake model from the next round on; starting a worker anew takes seconds."""
        self.fake = settings
        self._slots = asyncio.Semaphore(settings.slots) if settings.slots else nullcontext()
        self._busy_s = 0.0
        self.version: int | None = None
        self._awake, self._rests = asyncio.Event(), asyncio.Event()
        self._awake.set()

    async def rest(self) -> None:
        """The trainer has the devices: what is being generated stops where it is."""
        self._awake.clear()
        self._rests.set()

    async def wake(self, version: int) -> None:
        """Weights of this version have come, and generation goes on."""
        self.version = version
        self._rests.clear()
        self._awake.set()

    def slots_busy(self) -> float:
        """Seconds of slots in use since the model was set, by the lengths of the answers."""
        return self._busy_s

    async def _generate(self, length: int) -> None:
        """Hold a slot for as long as the answer takes; cut off, its tokens are those that there was time for."""
        seconds, progress = self.fake.seconds_per_token, PROGRESS.get()
        progress.prompt_tokens = self.fake.prompt_tokens
        async with self._slots:
            left = seconds * length
            try:
                while left > 0:
                    await self._awake.wait()
                    started = time.monotonic()
                    try:
                        await asyncio.wait_for(self._rests.wait(), left)
                    except asyncio.TimeoutError:
                        started = -math.inf  # the whole rest
                    finally:
                        left = max(0.0, left - (time.monotonic() - started))
            finally:
                progress.response_tokens = length - math.ceil(left / seconds)
                self._busy_s += seconds * length - left

    async def _run_session(
        self, group: GroupRequest, session: int, sampling_params: dict[str, Any], global_steps: int
    ) -> list[AgentLoopOutput]:
        fake = self.fake
        text = str(group.prompt["raw_prompt"])
        rng = _rng(fake.seed, text, group.uid, session)
        fate, luck = rng.random(2)
        if fake.length_sigma:
            location = np.log(fake.mean_tokens) - fake.length_sigma**2 / 2
            drawn = np.ceil(rng.lognormal(location, fake.length_sigma))
        else:
            drawn = rng.geometric(1.0 / fake.mean_tokens)
        length = int(min(drawn, self.rollout_config.response_length))
        oldest = global_steps - 1 if self.version is None else self.version
        if fake.seconds_per_token:
            await self._generate(length)
        if _rng(fake.seed, "refused", text).random() < fake.refuse_share:
            raise RuntimeError("fake engine: a prompt that it refuses")
        if fate < fake.fail_share:
            raise RuntimeError("fake engine: a session that fails")
        if fate < fake.fail_share + fake.hang_share or fake.hang_prompt and fake.hang_prompt in text:
            await asyncio.Event().wait()
        correct = bool(luck < latent_rate(fake, text))
        score = float(correct) if fate < 1.0 - fake.unscored_share else float("nan")
        answer = [fake.right_token if correct else fake.wrong_token] + [2] * (length - 1)
        newest = oldest if self.version is None else self.version
        extra_fields = {"min_global_steps": oldest, "max_global_steps": newest}
        if not self.rewards:
            extra_fields["reward_extra_info"] = {"acc": correct}
        return [
            AgentLoopOutput(
                prompt_ids=[1] * fake.prompt_tokens,
                response_ids=answer,
                response_mask=[1] * length,
                response_logprobs=[-0.1] * length,
                reward_score=None if self.rewards else score,
                num_turns=2,
                metrics=AgentLoopMetrics(),
                extra_fields=extra_fields,
            )
        ]


class FakeEngineManager(AllocatedAgentLoopManager):
    """Runs rounds on fake engines."""

    worker_class = FakeEngineWorker

    def set_model(self, settings: FakeEngineSettings) -> None:
        """Give all workers another fake model."""
        ray.get([worker.set_model.remote(settings) for worker in self.agent_loop_workers])

    def rest(self) -> None:
        """Stop all engines where they are."""
        ray.get([worker.rest.remote() for worker in self.agent_loop_workers])

    def wake(self, version: int) -> None:
        """Weights of this version for all engines, which go on."""
        ray.get([worker.wake.remote(version) for worker in self.agent_loop_workers])

    def slots_busy(self) -> list[float]:
        """Seconds of slots in use since the model was set, by worker."""
        return ray.get([worker.slots_busy.remote() for worker in self.agent_loop_workers])
