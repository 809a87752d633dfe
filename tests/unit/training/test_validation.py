"""Validation without a scored answer, with rewards that are no numbers, and what is logged of rollouts."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from tests.unit.training.in_process import Queue
from verl_ext.training.trainer import AllocatedReplayBuffer, PPOTrainerAllocated
from verl_ext.training.validation_metrics import NOTHING, numbers_alone

UIDS = [f"p{i}" for i in range(2) for _ in range(3)]
ACC = [True, False, True, False, False, True]


def validated(infos, uids=UIDS, expected=3):
    trainer = object.__new__(PPOTrainerAllocated)
    sources = [NOTHING if uid == NOTHING else "sums" for uid in uids]
    given = {("sums", uid): expected for uid in dict.fromkeys(uids) if uid != NOTHING}
    return trainer._val_metrics_update(sources, uids, copy.deepcopy(infos), np.ones(len(uids)).tolist(), given)


ODD = {
    "lists": [[1, 2], [3]] * 3, "dicts": [{"a": 1}] * 6, "sometimes a text": [1.0, "x", 2.0, None, 3.0, "y"],
    "first a list": [[1], 1.0, 2.0, 3.0, 4.0, 5.0], "huge": [10**400] * 6, "decimals": [Decimal("1.5")] * 6,
    "arrays": [np.arange(2)] * 6, "complex": [1j] * 6, "texts": ["a"] * 6, "pred": [["7"], ["8"]] * 3,
}  # fmt: skip


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ODD)
def test_no_value_of_a_reward_ends_a_validation(name):
    plain = {"reward": list(map(float, ACC)), "acc": list(ACC)}
    metrics = validated(plain | {name: ODD[name]})
    for metric, value in validated(plain).items():
        assert metrics[metric] == value, "and the others are as without it"
    if name == "sometimes a text":
        assert metrics["val-aux/sums/sometimes a text/mean@2"] == pytest.approx(1.5)
    if name == "decimals":
        assert metrics["val-aux/sums/decimals/mean@3"] == 1.5


def test_what_verl_would_do_with_such_values():
    """Or the test above would guard against nothing."""
    trainer = object.__new__(PPOTrainerSync)
    for name in ("first a list", "dicts", "sometimes a text", "pred"):
        infos = {"reward": list(map(float, ACC)), "acc": list(ACC), name: ODD[name]}
        with pytest.raises((TypeError, ValueError)):
            PPOTrainerSync._val_metrics_update(trainer, ["sums"] * 6, UIDS, infos, np.ones(6))


def test_values_that_are_left_out_are_said_once(caplog):
    warned = set()
    for _ in range(2):
        numbers_alone({"steps": [[1], 2.0], "style": ["a", "b"]}, warned)
    assert warned == {"steps"} and caplog.text.count("1 of 2 values of the reward's 'steps' are no numbers") == 1


@pytest.fixture
def queue(monkeypatch):
    return Queue(monkeypatch)


def sampled(monkeypatch, keys):
    batch = KVBatchMeta(partition_id="val", keys=keys, tags=[{} for _ in keys])
    monkeypatch.setattr(ReplayBuffer, "sample", lambda self, **_: (batch, {}))
    buffer = object.__new__(AllocatedReplayBuffer)
    buffer.pad_token = 5
    manager = SimpleNamespace(agent_loop_workers=[])
    buffer.collector = SimpleNamespace(backend=SimpleNamespace(manager=manager))
    return buffer.sample(1, "val", 2)[0]


def test_a_batch_without_a_scored_answer_has_a_row_that_stands_for_none(monkeypatch, queue):
    batch = sampled(monkeypatch, [])
    assert batch.keys == [f"{NOTHING}_0_0"] and queue.rows["val"][batch.keys[0]]["prompts"].tolist() == [5]
    assert sampled(monkeypatch, ["a_0_0"]).keys == ["a_0_0"]


def test_the_row_that_stands_for_none_counts_for_nothing():
    infos = {"reward": [0.0, *map(float, ACC)], "acc": [None, *ACC]}
    assert validated(infos, [NOTHING, *UIDS]) == validated({"reward": list(map(float, ACC)), "acc": list(ACC)})
    trainer = object.__new__(PPOTrainerAllocated)
    expected = {("sums", "p0"): 3, ("sums", "p1"): 3}
    lost = trainer._val_metrics_update([NOTHING], [NOTHING], {"reward": [0.0]}, [0], expected)
    assert lost == {"allocation/val_lost": 6}


def test_rollouts_are_logged_without_padding(monkeypatch):
    logged = []
    monkeypatch.setattr(PPOTrainerSync, "_log_rollout_data", lambda self, batch, *_: logged.append(batch.keys))
    trainer = object.__new__(PPOTrainerAllocated)
    tags = [{"is_padding": True}, {"is_padding": False}, {"is_padding": True}, {}]
    keys = ["p_0_0", "a_0_0", "p_1_0", "a_1_0"]
    trainer._log_rollout_data(KVBatchMeta(partition_id="train", keys=keys, tags=tags), {}, "")
    trainer._log_rollout_data(KVBatchMeta(partition_id="train", keys=["p_0_0"], tags=tags[:1]), {}, "")
    assert logged == [["a_0_0", "a_1_0"]]


def test_what_is_written_holds_answers_alone_and_has_a_json_form(tmp_path):
    trainer = object.__new__(PPOTrainerAllocated)
    trainer.global_steps, trainer._dump_futures, trainer._dump_executor = 1, [], ThreadPoolExecutor(1)
    infos = {"uid": [f"{NOTHING}_0_0", "a_0_0"], "acc": [None, True]}
    trainer._dump_generations(["", "7 + 0"], ["", "7"], [None, b"7"], [0.0, 1.0], infos, str(tmp_path))
    trainer._dump_executor.shutdown()
    for future in trainer._dump_futures:
        future.result()
    (line,) = map(json.loads, (tmp_path / "1.jsonl").read_text().splitlines())
    assert (line["uid"], line["gts"], line["acc"], line["score"]) == ("a_0_0", "b'7'", True, 1.0)
