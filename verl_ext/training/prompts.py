"""The training prompts as the pool sees them: rows of verl's data set under stable keys, in verl's own order."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
from verl.trainer.ppo.utils import create_rl_sampler

from verl_ext.allocation.prompt_pool import prompt_key

logger = logging.getLogger(__name__)


def _shown(prompt: Any) -> str:
    """The beginning of a prompt's last message."""
    last = prompt[-1] if isinstance(prompt, list) and prompt else prompt
    text = last.get("content") if isinstance(last, dict) else last
    return repr(text if len(str(text)) <= 80 else f"{str(text)[:80]}...")


def _columns(dataset: Any, prompt_key: str) -> Iterable[tuple[Any, Any, Any]]:
    """(data_source, prompt, reward_model) of each row: by columns where the data set has a table, as verl's own has;
    else row by row, since verl asks a data set for its length and its rows alone."""
    table = getattr(dataset, "dataframe", None)
    if not hasattr(table, "column_names") or len(table) != len(dataset):
        rows = map(dataset.__getitem__, range(len(dataset)))
        return ((row.get("data_source", ""), row["raw_prompt"], row.get("reward_model")) for row in rows)
    names = table.column_names
    sources = table["data_source"] if "data_source" in names else [""] * len(table)
    rewards = table["reward_model"] if "reward_model" in names else [{}] * len(table)
    return zip(sources, table[prompt_key], rewards, strict=True)


class PromptRows:
    """Maps the rows of the pool to those of the data set; copies of a prompt are dropped, counted, and named once.

    The key of a prompt is a hash of (data_source, prompt, ground truth), since `extra_info.index` is absent in some
    data sets and a UUID in others.
    """

    def __init__(self, dataset: Any, data_config: Any) -> None:
        self.dataset = dataset
        self.data_config = data_config
        self.keys: list[str] = []
        self.dataset_row: list[int] = []
        first: dict[str, int] = {}
        for row, (source, prompt, reward) in enumerate(_columns(dataset, data_config.get("prompt_key", "prompt"))):
            try:
                key = prompt_key(source, prompt, (reward or {}).get("ground_truth"))
            except TypeError as error:
                raise TypeError(
                    f"row {row} of data.train_files: {error}; accepted in prompt and ground_truth: text, numbers, true "
                    f"and false, and lists and structs of them"
                ) from error
            if key in first:
                continue
            first[key] = len(self.keys)
            self.keys.append(key)
            self.dataset_row.append(row)
        self.digest = hashlib.blake2b("\n".join(self.keys).encode(), digest_size=8).hexdigest()
        """Of all keys in their order: two data sets of one size differ in it."""
        self.duplicates = len(dataset) - len(self.keys)
        if self.duplicates:
            logger.warning(
                "%d of %d training rows repeat an earlier prompt with the same answer: each prompt is kept once",
                self.duplicates,
                len(dataset),
            )
        self._pool_row = np.full(len(dataset), -1, dtype=np.int64)
        self._pool_row[self.dataset_row] = np.arange(len(self.keys))
        self._orders: list[np.ndarray] = []
        self._sampler = create_rl_sampler(data_config, dataset)

    def marks(self) -> np.ndarray:
        """Four bytes of each key, by which a saved state tells which of its prompts is another; (prompts,) uint32."""
        return np.array([int(key[:8], 16) for key in self.keys], np.uint32)

    def first_other(self, saved: np.ndarray) -> str:
        """The first prompt that is not the one of these marks, in words."""
        here = self.marks()
        common = min(len(saved), len(here))
        row = int(np.argmax(saved[:common] != here[:common])) if (saved[:common] != here[:common]).any() else common
        if row == len(here):
            return f"the first that differs is row {row} of those saved, which has no counterpart here"
        at = self.dataset_row[row]
        return f"the first that differs is row {at} of the training data: {_shown(self.fetch(row)['raw_prompt'])}"

    def order(self, epoch: int) -> np.ndarray:
        """Rows of the pool in the order verl's own sampler offers them in `epoch` (0-based).

        The sampler draws epoch after epoch from one generator, so earlier epochs are drawn first.
        """
        while len(self._orders) <= epoch:
            rows = self._pool_row[np.fromiter(iter(self._sampler), dtype=np.int64)]
            self._orders.append(rows[rows >= 0])
            for old in range(len(self._orders) - 2):
                self._orders[old] = None
        if self._orders[epoch] is None:
            raise ValueError(f"epoch {epoch} was already passed; an epoch's order can be asked while it is current")
        return self._orders[epoch]

    def fetch(self, row: int) -> dict[str, Any]:
        """The data set's fields of one prompt, as verl's data loader would give them."""
        return dict(self.dataset[self.dataset_row[row]])
