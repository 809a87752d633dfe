"""Advantages relative to a group: to the whole group where a rule says so, and 0 where scores do not differ.

With a down-sampler, verl would normalise over the rows that are left. `normalise_over: group` (PODS's alternative, and
Reinforce-Ada's rule) uses the statistics that the outcomes gave before the other rows were freed:

    A_i = (r_i - mean(r_1..r_n)) / (std(r_1..r_n) + 1e-6)        for the kept i, n the scored rollouts of the group

with the sample standard deviation (n - 1) and the epsilon of verl's own GRPO; without the division where
`algorithm.norm_adv_by_std_in_grpo` is False; exactly 0 in a saturated group.

verl computes in float32: of eight scores of .95 the mean is not .95, and the deviation that divides is of the same
residue, so that each gets an advantage of .056. A group whose scores do not differ has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from verl_ext.allocation.group_statistics import GroupStatistics
from verl_ext.allocation.groups import Outcome
from verl_ext.training.training_settings import SettingError

EPSILON = 1e-6

RESOLUTION = 2.0**-20
"""Scores closer than this, relative to the largest of their group, are equal: eight steps of float32."""

RELATIVE_ESTIMATORS = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo")
"""Estimators whose advantage is the difference from others of the group and nothing else: 0 where none differs."""

SESSIONS_ALONE = ("grpo", "gae", "reinforce_plus_plus")
"""Estimators that are right where a session has several rows: verl takes a session's last row for grpo, and the others
compare no rows of a group. All others take every row for a rollout."""


def flat_groups(outcomes: Iterable[Outcome], tolerance: float = 0.0) -> set[str]:
    """Groups whose scores do not differ: highest - lowest <= max(tolerance, RESOLUTION x largest score).

    Args:
        outcomes: scored rollouts that an advantage is relative to.
        tolerance: the largest spread of scores that is none, in a group whose outcomes are of one kind.
    """
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.score is not None:
            groups.setdefault(outcome.group, []).append(outcome)
    flat = set()
    for uid, group in groups.items():
        scores = [outcome.score for outcome in group]
        mixed = len({outcome.correct for outcome in group}) > 1
        resolved = RESOLUTION * max(map(abs, scores))
        if max(scores) - min(scores) <= (resolved if mixed else max(tolerance, resolved)):
            flat.add(uid)
    return flat


def without_advantage(batch: KVBatchMeta, uids: set[str]) -> KVBatchMeta:
    """Write advantages and returns of exactly 0 into the rows of these groups."""
    keys = [key for key in batch.keys if key.split("_")[0] in uids]
    if keys:
        masks = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["response_mask"])
        rows = [torch.zeros(len(mask), dtype=torch.float32) for mask in masks["response_mask"]]
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        fields = TensorDict({"advantages": nested, "returns": nested.clone()}, batch_size=len(rows))
        tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=fields)
    return batch


def check_sessions(batch: KVBatchMeta, estimator: str) -> None:
    """
    Raises:
        SettingError: a session has several rows, which the estimator would take for as many rollouts.
    """
    sessions = {key.rpartition("_")[0] for key in batch.keys}
    if len(sessions) < len(batch.keys) and estimator not in SESSIONS_ALONE:
        raise SettingError(
            f"algorithm.adv_estimator={estimator} with an agent loop that returns several outputs a session "
            f"({len(batch.keys)} rows of {len(sessions)} sessions): it takes each for a rollout of its own; accepted "
            f"are {', '.join(SESSIONS_ALONE)}"
        )


def group_advantages(
    batch: KVBatchMeta, statistics: Mapping[str, GroupStatistics], divide_by_std: bool
) -> KVBatchMeta:
    """Write advantages and returns of all rows into TransferQueue; padding rows get zero.

    Args:
        batch: rows with rm_scores and response_mask (nested, one value a response token).
        statistics: mean and standard deviation by uid.
        divide_by_std: whether the deviation divides.
    """
    fields = ["rm_scores", "response_mask"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    rows = []
    for key, scores, mask in zip(batch.keys, data["rm_scores"], data["response_mask"], strict=True):
        group = statistics.get(key.split("_")[0])
        advantage = 0.0 if group is None else group.advantage(float(scores.sum()), divide_by_std, EPSILON)
        rows.append(mask.to(torch.float32) * advantage)
    nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    fields = TensorDict({"advantages": nested, "returns": nested.clone()}, batch_size=len(rows))
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
