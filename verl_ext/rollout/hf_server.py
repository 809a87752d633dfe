"""A rollout server that generates with the model's own Hugging Face code: one process and one device a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import ray
import torch
from omegaconf import DictConfig
from verl.utils import normalize_token_ids
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name, get_torch_device
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.rollout.replica import TokenOutput

from verl_ext.rollout.hf_decoder import Request, Sampling, decode
from verl_ext.rollout.lengths import end_tokens

GATHER_S = 0.005
"""Requests that arrive within so long of each other start in one batch."""


class HFServer:
    """The methods that verl calls on a server; `hf.HFReplica` starts it as a Ray actor.

    Waiting requests with the same sampling parameters are generated together, up to rollout.max_num_seqs at once; those
    that come meanwhile wait until the batch has ended.
    """

    def __init__(self, config: Any, model_config: DictConfig) -> None:
        from transformers import AutoModelForCausalLM

        self.config, self.model_config = omega_conf_to_dataclass(config), omega_conf_to_dataclass(model_config)
        self.model = AutoModelForCausalLM.from_pretrained(
            self.model_config.local_path, config=self.model_config.hf_config, attn_implementation="sdpa",
            dtype=PrecisionType.to_dtype(self.config.dtype), trust_remote_code=self.model_config.trust_remote_code,
        )  # fmt: skip
        self.model.to(get_device_name()).eval().requires_grad_(False)
        self.global_steps: int | None = None
        self._ends = end_tokens(self.model_config.tokenizer, self.model_config)
        self._received: set[str] = set()
        self._entries: dict[str, tuple[Request, asyncio.Future]] = {}
        self._waiting: list[str] = []
        self._model_in_use = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self._runner: asyncio.Task | None = None

    async def address(self) -> str:
        """A name for the load balancer; the server is reached by Ray alone."""
        return f"{ray.util.get_node_ip_address()}/{ray.get_runtime_context().get_actor_id()}"

    async def generate(
        self, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str, priority: int = 0, **media: Any
    ) -> TokenOutput:
        """Tokens in, tokens out.

        Raises:
            ValueError: images and the like, a sampling parameter that is not known, or a prompt that leaves no room.
        """
        if given := sorted(name for name, value in media.items() if value):
            raise ValueError(f"actor_rollout_ref.rollout.name=hf generates from text alone; it was given {given}")
        prompt = list(normalize_token_ids(prompt_ids))
        room = self.config.max_model_len - len(prompt)
        if room < 1:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens leaves no room in rollout.max_model_len={self.config.max_model_len}"
            )
        most = sampling_params.get("max_tokens") or sampling_params.get("max_new_tokens") or self.config.response_length
        request = Request(prompt, Sampling.read(sampling_params), min(most, room))
        ended = asyncio.get_running_loop().create_future()
        self._entries[request_id] = (request, ended)
        self._waiting.append(request_id)
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())
        try:
            await ended
        finally:
            del self._entries[request_id]
        return TokenOutput(
            token_ids=request.tokens,
            log_probs=request.log_probs if sampling_params.get("logprobs") else None,
            stop_reason="aborted" if request.aborted else "completed",
            extra_fields={"global_steps": self.global_steps},
        )

    async def _run(self) -> None:
        """Batch after batch, until nothing waits."""
        while self._waiting:
            seen = 0
            while len(self._waiting) > seen:
                seen = len(self._waiting)
                await asyncio.sleep(GATHER_S)
            await self._open.wait()
            async with self._model_in_use:
                # Those that are no longer known were cancelled.
                self._waiting = [name for name in self._waiting if name in self._entries]
                if self._waiting:
                    await self._batch()

    async def _batch(self) -> None:
        sampling = self._entries[self._waiting[0]][0].sampling
        names = [name for name in self._waiting if self._entries[name][0].sampling == sampling]
        futures = dict(self._entries[name] for name in names[: self.config.max_num_seqs])
        self._waiting = [name for name in self._waiting if self._entries[name][0] not in futures]
        call = asyncio.get_running_loop().call_soon_threadsafe

        def ended(request: Request) -> None:
            call(_end, futures[request])

        try:
            await asyncio.to_thread(decode, self.model, list(futures), self._ends, ended)
        except Exception as error:
            for future in futures.values():
                _end(future, error)

    async def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End these requests, each with what it has generated; unknown ones are passed over."""
        for name in request_ids:
            if name in self._entries:
                request, future = self._entries[name]
                request.aborted = True
                if name in self._waiting:
                    self._waiting.remove(name)
                    _end(future)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End all requests; later ones wait for `resume_generation`, whatever `reject_request` says."""
        self._open.clear()
        await self.abort_requests(list(self._entries))

    async def resume_generation(self) -> None:
        """Generate for those that wait."""
        self._open.set()

    async def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Take a part of the policy's new weights.

        Raises:
            KeyError: a name that the model does not have.
        """
        async with self._model_in_use:
            own = self.model.state_dict()
            if unknown := sorted(weights.keys() - own.keys()):
                raise KeyError(f"weights that {type(self.model).__name__} does not have: {', '.join(unknown[:3])}")
            for name, weight in weights.items():
                own[name].copy_(weight)
        self._received |= weights.keys()

    async def end_update(self, global_steps: int | None) -> None:
        """All parts of the new weights have come; from here on they are those of version `global_steps`.

        Raises:
            ValueError: some did not come.
        """
        missing = {name for name, _ in self.model.named_parameters()} - self._received
        self._received.clear()
        if missing:
            raise ValueError(f"weights that did not come: {', '.join(sorted(missing)[:3])} ({len(missing)} in all)")
        self.global_steps = global_steps

    async def sleep(self) -> None:
        """Give the device's memory to the trainer, once nothing is generated."""
        await self._move("cpu")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the device's memory back. There is no cache of keys and values between batches."""
        await self._move(get_device_name())

    async def clear_kv_cache(self) -> None:
        """Nothing: each batch has a cache of its own."""

    async def _move(self, device: str) -> None:
        if self.config.free_cache_engine:
            async with self._model_in_use:
                self.model.to(device)
                get_torch_device().empty_cache()


def _end(future: asyncio.Future, error: Exception | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
