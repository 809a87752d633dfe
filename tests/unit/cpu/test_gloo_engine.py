"""Weights that travel over Gloo arrive as they were, whatever their sizes and the bucket's."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("verl.checkpoint_engine")

from verl_ext.cpu.gloo_engine import GlooCheckpointEngine  # noqa: E402

KIB = 1024


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    """Sizes around a bucket of one KiB, types that begin anywhere, and one that is not contiguous."""
    made = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=made)

    return {
        "byte": torch.randint(0, 255, (3,), generator=made, dtype=torch.uint8),
        "half": normal(5).to(torch.bfloat16),
        "single": normal(7, 3),
        "exactly a bucket": normal(256),
        "double": normal(2).double(),
        "several buckets": normal(20, 50),
        "after it": normal(1),
        "transposed": normal(4, 6).T,
        "number": torch.tensor(3.5),
    }


def sync(engines: list[GlooCheckpointEngine], actors: int, weights: dict[str, torch.Tensor]):
    """One sync as verl's manager makes it, each rank in a thread; what the engines' ranks got."""
    metadata = [engine.prepare() for engine in engines]
    given = GlooCheckpointEngine.build_topology(actors, len(engines) - actors, metadata)
    arguments = [
        {name: values[i] for name, values in side.items()} for side in given for i in range(len(side["rank"]))
    ]
    made = []

    def generator(rank):
        for item in weights.items():
            made.append(rank)
            yield item

    async def receive(engine):
        return [(name, weight) async for name, weight in engine.receive_weights(global_steps=1)]

    def run(rank):
        engine = engines[rank]
        engine.init_process_group(**arguments[rank])
        return asyncio.run(engine.send_weights(generator(rank)) if rank < actors else receive(engine))

    with ThreadPoolExecutor(len(engines)) as pool:
        results = list(pool.map(run, range(len(engines))))
    for engine in engines:
        engine.finalize()
    assert sorted(made) == [rank for rank in range(actors) for _ in weights], "each actor rank makes every weight"
    return results[actors:]


@pytest.mark.parametrize("bucket", [KIB, 1 << 20], ids=["several buckets", "one bucket"])
@pytest.mark.parametrize(("actors", "engines"), [(1, 1), (2, 3)])
def test_every_rank_gets_every_weight_at_every_sync(bucket, actors, engines):
    ranks = [GlooCheckpointEngine(bucket, is_master=i == 0, timeout_s=30.0) for i in range(actors + engines)]
    for seed in range(2):
        weights = weights_of(seed)
        for received in sync(ranks, actors, weights):
            assert [name for name, _ in received] == list(weights)
            for name, weight in received:
                assert weight.dtype == weights[name].dtype and torch.equal(weight, weights[name]), name


def test_a_rank_that_never_comes_is_an_error_within_the_time_limit():
    master = GlooCheckpointEngine(KIB, is_master=True, timeout_s=1.0)
    place = master.prepare()
    with pytest.raises(RuntimeError, match="(?i)time"):
        master.init_process_group(rank=0, world_size=2, master=place)
