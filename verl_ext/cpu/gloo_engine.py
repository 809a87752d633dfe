# SPDX-License-Identifier: Apache-2.0
"""Sends the trainer's weights to engines with processes of their own (`separate_async`) over Gloo. All of verl 0.9.1's
transports need CUDA or an NPU.

Chosen by `actor_rollout_ref.rollout.checkpoint_engine.backend=gloo`. Importing this module registers it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Generator
from datetime import timedelta
from typing import Any

import ray
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from verl.checkpoint_engine.base import (
    CheckpointEngine,
    CheckpointEngineRegistry,
    TensorMeta,
    merge_weight_chunks,
    split_weight_chunks,
)
from verl.workers.rollout.utils import ensure_async_iterator

_ALIGNED = 16
"""Bytes: a chunk begins at a multiple, so that it can be read as any type."""

Weights = Generator[tuple[str, torch.Tensor], None, None]


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    """Actor rank 0 broadcasts buckets of weights to all ranks of the engines.

    What a bucket holds travels through a TCP store beside the group. Store and group are made anew for each sync, so
    that engines may come and go in between.

    Args:
        bucket_size: most bytes of a bucket. A larger weight is cut into several.
        is_master: whether this is actor rank 0.
        timeout_s: seconds to wait for another rank (`checkpoint_engine.engine_kwargs.gloo.timeout_s`).
    """

    def __init__(self, bucket_size: int, is_master: bool = False, timeout_s: float = 600.0) -> None:
        self.bucket_size, self.is_master, self.timeout = bucket_size, is_master, timedelta(seconds=timeout_s)
        self.finalize()

    def prepare(self) -> dict[str, Any] | None:
        """The master opens the store, and says where."""
        if not self.is_master:
            return None
        host = ray.util.get_node_ip_address().strip("[]")
        self.store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self.timeout)
        return {"host": host, "port": self.store.port}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Actor rank 0 is rank 0 and the engines' ranks follow; the other actor ranks stay out (-1)."""
        size = 1 + rollout_world_size

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks, "world_size": [size] * len(ranks), "master": [metadata[0]] * len(ranks)}

        return arguments([0] + [-1] * (actor_wg_world_size - 1)), arguments(list(range(1, size)))

    def init_process_group(self, rank: int, world_size: int, master: dict[str, Any]) -> None:
        """Join the group; every rank waits here for the others."""
        self.rank = rank
        if rank < 0:
            return
        if self.store is None:
            self.store = TCPStore(master["host"], master["port"], is_master=False, timeout=self.timeout)
        self.group = ProcessGroupGloo(PrefixStore("gloo", self.store), rank, world_size, self.timeout)

    def finalize(self) -> None:
        """Leave the group and close the store."""
        self.rank, self.group, self.store = -1, None, None

    @torch.no_grad()
    async def send_weights(self, weights: Weights, global_steps: int | None = None) -> None:
        """Send all weights. An actor rank out of the group only makes them: that is collective among actor ranks."""
        if self.rank < 0:
            async for _ in ensure_async_iterator(weights):
                pass
            return
        number = 0
        async for metas, bucket in self._buckets(weights):
            self._describe(number, metas)
            await self._broadcast(bucket)
            number += 1
        self._describe(number, [])

    @torch.no_grad()
    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield every weight once it is whole."""
        async for weight in merge_weight_chunks(self._chunks(), self.bucket_size):
            yield weight

    async def _buckets(self, weights: Weights) -> AsyncGenerator[tuple[list[TensorMeta], torch.Tensor], None]:
        """Fill buckets with chunks of weights. A bucket is overwritten once the next is asked for."""
        bucket = torch.empty(self.bucket_size, dtype=torch.uint8)
        metas, end = [], 0
        whole = ((name, weight.detach().cpu().contiguous()) for name, weight in weights)
        async for meta, chunk in split_weight_chunks(whole, self.bucket_size):
            start = -(-end // _ALIGNED) * _ALIGNED
            if start + meta.chunk_size > self.bucket_size:
                yield metas, bucket[:end]
                metas, start = [], 0
            meta.offset, end = start, start + meta.chunk_size
            bucket[start:end] = chunk
            metas.append(meta)
        if metas:
            yield metas, bucket[:end]

    async def _chunks(self) -> AsyncGenerator[tuple[TensorMeta, torch.Tensor], None]:
        """Chunks of weights as their buckets arrive; each bucket has memory of its own."""
        number = 0
        while metas := await self._described(number):
            bucket = torch.empty(metas[-1].offset + metas[-1].chunk_size, dtype=torch.uint8)
            await self._broadcast(bucket)
            for meta in metas:
                yield meta, bucket[meta.offset : meta.offset + meta.chunk_size]
            number += 1

    def _describe(self, number: int, metas: list[TensorMeta]) -> None:
        said = [vars(meta) | {"shape": list(meta.shape), "dtype": str(meta.dtype)} for meta in metas]
        self.store.set(str(number), json.dumps(said))

    async def _described(self, number: int) -> list[TensorMeta]:
        """What a bucket holds; nothing behind the last."""
        said = json.loads(await asyncio.to_thread(self.store.get, str(number)))
        types = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
        return [TensorMeta(**m | {"shape": torch.Size(m["shape"]), "dtype": types[m["dtype"]]}) for m in said]

    async def _broadcast(self, data: torch.Tensor) -> None:
        # In a thread: the actor goes on answering Ray meanwhile.
        await asyncio.to_thread(lambda: self.group.broadcast(data, 0).wait())
