"""Validation's answers as verl's own code can take them: a batch without any, and values that are no numbers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_ext.rollout.outcomes import as_number

logger = logging.getLogger(__name__)

NOTHING = "nothing"
"""The group of a row that stands for no answer."""


def or_nothing(batch: KVBatchMeta, token: int) -> KVBatchMeta:
    """The batch; where no answer of it has a score, a row of one token that stands for none: verl cannot do without."""
    if batch.keys:
        return batch
    one = torch.full((1,), token, dtype=torch.int64)
    row = {
        "uid": NOTHING, "prompts": one, "responses": one, "rm_scores": torch.zeros(1), "num_turns": 0,
        "reward_model": {}, "data_source": NOTHING, "extra_fields": {"reward_extra_info": {}},
    }  # fmt: skip
    keys, tags = [f"{NOTHING}_0_0"], [{"status": "success"}]
    fields = list_of_dict_to_tensordict([row])
    tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=fields, tags=tags)
    return KVBatchMeta(partition_id=batch.partition_id, keys=keys, tags=tags)


def is_nothing(key: str) -> bool:
    """Whether a key of a row, or a uid, is that of no answer."""
    return key.split("_")[0] == NOTHING


def without(rows: Sequence[int], infos: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """These rows of every variable."""
    return {name: [values[i] for i in rows] for name, values in infos.items()}


def numbers_alone(infos: Mapping[str, Sequence[Any]], warned: set[str]) -> dict[str, list[Any]]:
    """A reward's variables with None for what is no number: verl takes means of them, and leaves None out.

    `pred`, by which verl votes, is text throughout. A variable that is text throughout is left to verl, which passes
    over it.

    Args:
        infos: by variable, a value an answer.
        warned: variables that were warned of before; added to.
    """
    found: dict[str, list[Any]] = {}
    for name, values in infos.items():
        if name == "pred":
            found[name] = [None if value is None else str(value) for value in values]
        elif all(value is None or isinstance(value, str) for value in values):
            found[name] = list(values)
        else:
            found[name] = [value if isinstance(value, bool) else as_number(value) for value in values]
            odd = [value for value, kept in zip(values, found[name], strict=True) if kept is None and value is not None]
            if odd and name not in warned:
                warned.add(name)
                logger.warning(
                    "validation: %d of %d values of the reward's %r are no numbers (%.80r, for one): left out of its "
                    "metrics; said once", len(odd), len(values), name, odd[0],
                )  # fmt: skip
    return found
