"""GRPO's advantage with the mean and deviation of the whole group, also of rollouts that do not reach the update.

With a down-sampler, verl would normalise over the rows that are left. `normalise_over: group` (PODS's alternative, and
Reinforce-Ada's rule) uses the statistics that the outcomes gave before the other rows were freed:

    A_i = (r_i - mean(r_1..r_n)) / (std(r_1..r_n) + 1e-6)        for the kept i, n the scored rollouts of the group

with the sample standard deviation (n - 1) and the epsilon of verl's own GRPO; without the division where
`algorithm.norm_adv_by_std_in_grpo` is False; exactly 0 in a saturated group.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from verl_ext.allocation.statistics import GroupStatistics

EPSILON = 1e-6


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
