"""The prompts of a data set by stable key: their order, their epochs, and which of them are out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .metric import Metric
from .state import check_keys, check_same, rng_for


def prompt_key(data_source: Any, prompt: Any, ground_truth: Any) -> str:
    """A prompt's stable key: blake2b (16 bytes, hex) of the canonical JSON of the three.

    Data sets number their rows unreliably (``extra_info.index`` may be absent or anything), so the key is the content.

    Raises:
        TypeError: a value has no JSON form.
    """
    text = json.dumps(
        [data_source, prompt, ground_truth],
        sort_keys=True,
        ensure_ascii=False,
        separators=(",", ":"),
        default=_jsonable,
    )
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _jsonable(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"prompt_key: {type(value).__name__} has no JSON form")


_NEVER = -1


class PromptPool:
    """Prompts in epochs, without loss at an epoch's edge.

    An epoch ends when every prompt that is neither retired nor deferred was offered once; a draw that crosses the
    edge goes on in the next epoch's order. No prompt is offered twice in a step, also across the edge: one that the
    new epoch's order puts first stays first in line for the next step. Where a selector offers some prompts again and
    leaves out others, an epoch ends after as many offers, or deferred prompts would never come back.

    Args:
        keys: one key a row, all different.
        order: ``order(epoch)`` gives that epoch's permutation of the rows, epochs counted from 0; asked lazily and
            only by number. Default: shuffled by ``seed`` and the epoch's number.
        seed: for the default order.

    Raises:
        ValueError: no keys, or a key twice (named).
    """

    def __init__(
        self,
        keys: Sequence[str],
        order: Callable[[int], np.ndarray] | None = None,
        seed: int = 0,
    ) -> None:
        self.keys = list(keys)
        if not self.keys:
            raise ValueError("prompt pool: no prompts")
        seen: dict[str, int] = {}
        for row, key in enumerate(self.keys):
            if seen.setdefault(key, row) != row:
                raise ValueError(
                    f"prompt pool: rows {seen[key]} and {row} have the same key {key!r}; remove duplicate prompts"
                )
        digest = hashlib.blake2b(digest_size=16)
        for key in self.keys:
            digest.update(key.encode() + b"\n")
        self._keys_digest = digest.hexdigest()
        self._make_order = order
        self._seed = int(seed)
        size = len(self.keys)
        self._retired = np.zeros(size, bool)
        self._deferred = np.zeros(size, bool)
        self._offered = np.zeros(size, bool)
        self._in_step = np.zeros(size, bool)
        self._held = np.zeros(size, bool)
        self._looks = 0  # prompts looked at so far
        self._steps = 0
        self._last_look = np.full(size, _NEVER)  # the number of the look that was a prompt's last
        self._last_step = np.zeros(size, np.int32)  # and its step
        self.epoch = 0
        """Number of the current epoch, from 0."""
        self._order: np.ndarray | None = None
        self._cursor = 0  # all rows before it in the order are done with for this epoch
        self._again = 0  # offers of prompts that this epoch had offered already

    def __len__(self) -> int:
        return len(self.keys)

    def begin_step(self) -> None:
        """Forget which prompts the last step was offered."""
        self._in_step[:] = self._held[:] = False
        if self._again >= self._open().sum() and not self.all_retired:
            self._next_epoch()

    def take(self, n: int) -> list[int]:
        """The next ``n`` rows in order; fewer when the pool has no more for this step."""
        taken: list[int] = []
        while len(taken) < n:
            rows = self._scan(n - len(taken))
            taken.extend(rows)
            if len(taken) == n:
                break
            if not rows and ((self._open() & ~self._held).any() or not self._fresh_next_epoch().any()):
                break  # what is left was offered in this step already, or nothing is left at all
            if not rows:
                self._next_epoch()
        return taken

    def mark_offered(self, rows: Iterable[int]) -> None:
        """Rows that a selector chose by itself.

        Raises:
            ValueError: a row is retired, deferred or was offered in this step already (named).
        """
        for row in rows:
            if self._retired[row] or self._deferred[row] or self._in_step[row]:
                why = "retired" if self._retired[row] else "deferred" if self._deferred[row] else "offered in this step"
                raise ValueError(f"prompt pool: row {row} is {why} and cannot be offered")
            self._again += bool(self._offered[row])
            self._offered[row] = self._in_step[row] = True

    def hold(self, row: int) -> None:
        """A prompt whose group waited is in hand: not offered in this step, and no reason to keep an epoch open."""
        self._in_step[row] = self._held[row] = True

    def offered(self, row: int) -> bool:
        """Whether the prompt was offered in the current epoch."""
        return bool(self._offered[row])

    def retire(self, row: int) -> None:
        """Take a prompt out for good."""
        self._retired[row] = True

    def defer(self, row: int) -> None:
        """Not before the next epoch."""
        self._deferred[row] = True

    def readmit(self) -> None:
        """Bring all retired prompts back, as not yet offered in this epoch."""
        self._offered[self._retired] = False
        self._retired[:] = False
        self._cursor = 0

    def eligible(self) -> np.ndarray:
        """Mask of the rows that may be offered now: neither retired, nor deferred, nor offered in this step."""
        return ~(self._retired | self._deferred | self._in_step)

    @property
    def all_retired(self) -> bool:
        """Nothing can ever be offered again."""
        return bool(self._retired.all())

    def look_at(self, rows: Sequence[int]) -> None:
        """A step ends that asked for rollouts of these prompts, in this order."""
        self._steps += 1
        self._last_look[rows] = np.arange(self._looks, self._looks + len(rows))
        self._last_step[rows] = self._steps
        self._looks += len(rows)

    def rested(self) -> np.ndarray:
        """Prompts looked at since each was, as a share of those that are not retired; inf where one never was."""
        live = max(1, int((~self._retired).sum()))
        return np.where(self._last_look == _NEVER, np.inf, (self._looks - 1 - self._last_look) / live)

    def coverage(self) -> dict[str, float]:
        """How evenly the prompts in play are looked at."""
        live = ~self._retired
        window = min(self._looks, int(live.sum()))
        recent = int((self._last_look >= self._looks - window).sum()) if window else 0
        return {
            "distinct_share": recent / window if window else 1.0,
            "longest_unseen": float(self._steps - self._last_step[live].min()) if live.any() else 0.0,
        }

    METRICS = {
        "selector/distinct_share": Metric("different prompts among the latest looks, as many as are in play", "share",
                                          "1: every prompt is seen; low: a few are seen again and again"),
        "selector/longest_unseen": Metric("the longest that a prompt in play was not looked at", "steps"),
        "pool/epoch": Metric("epochs of the pool that are over", "epochs"),
        "pool/epoch_share": Metric("prompts in play that this epoch has offered", "share"),
        "pool/retired": Metric("prompts that left for good", "prompts", "near all: harder data is needed"),
        "pool/deferred": Metric("prompts that wait for the next epoch", "prompts"),
    }  # fmt: skip

    def metrics(self) -> dict[str, float]:
        live = ~self._retired
        return {
            "epoch": float(self.epoch),
            "epoch_share": float(self._offered[live].mean()) if live.any() else 1.0,
            "retired": float(self._retired.sum()),
            "deferred": float(self._deferred.sum()),
        }

    def state_dict(self) -> dict[str, Any]:
        """Epoch, cursor, and 12 bytes and three bits a prompt."""
        return {
            "keys": self._keys_digest,
            "order": self._order_digest(),
            "epoch": self.epoch,
            "cursor": self._cursor,
            "again": self._again,
            "looks": self._looks,
            "steps": self._steps,
            "last_look": self._last_look.copy(),
            "last_step": self._last_step.copy(),
            "retired": np.packbits(self._retired),
            "deferred": np.packbits(self._deferred),
            "offered": np.packbits(self._offered),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state saved between two steps.

        Raises:
            StateError: keys differ, or the prompts or their order are not those the state was saved with.
        """
        masks = {"retired": self._retired, "deferred": self._deferred, "offered": self._offered}
        arrays = {"last_look": self._last_look, "last_step": self._last_step}
        check_keys("pool", state, ("keys", "order", "epoch", "cursor", "again", "looks", "steps", *arrays, *masks))
        check_same("pool", state, keys=self._keys_digest)
        epoch, order = self.epoch, self._order
        self.epoch, self._order = int(state["epoch"]), None
        try:
            check_same("pool", state, order=self._order_digest())
        except Exception:
            self.epoch, self._order = epoch, order
            raise
        self._cursor, self._again = int(state["cursor"]), int(state["again"])
        self._looks, self._steps = int(state["looks"]), int(state["steps"])
        for name, array in arrays.items():
            array[:] = state[name]
        for name, mask in masks.items():
            mask[:] = np.unpackbits(np.asarray(state[name], np.uint8), count=len(self)).astype(bool)
        self._in_step[:] = self._held[:] = False

    def _scan(self, n: int) -> list[int]:
        """Take up to ``n`` rows of the current epoch and move the cursor up to the first row not done with."""
        order, size = self._current_order(), len(self)
        found: list[int] = []
        at, block = self._cursor, max(256, 4 * n)
        while at < size and len(found) < n:
            rows = order[at : at + block]
            free = rows[~(self._retired[rows] | self._deferred[rows] | self._offered[rows] | self._in_step[rows])]
            free = free[: n - len(found)]
            self._offered[free] = self._in_step[free] = True
            found.extend(free.tolist())
            at += block
        while self._cursor < size:
            rows = order[self._cursor : self._cursor + block]
            todo = ~(self._retired[rows] | self._deferred[rows] | self._offered[rows])
            if todo.any():
                self._cursor += int(todo.argmax())
                break
            self._cursor += len(rows)
        return found

    def _open(self) -> np.ndarray:
        return ~(self._retired | self._deferred | self._offered)

    def _fresh_next_epoch(self) -> np.ndarray:
        return ~(self._retired | self._in_step)

    def _next_epoch(self) -> None:
        self.epoch += 1
        self._cursor, self._again, self._order = 0, 0, None
        self._offered[:] = False
        self._deferred[:] = False

    def _current_order(self) -> np.ndarray:
        if self._order is None:
            if self._make_order is None:
                order = rng_for(self._seed, "pool", self.epoch).permutation(len(self))
            else:
                order = np.asarray(self._make_order(self.epoch), dtype=np.int64)
            if not np.array_equal(np.sort(order), np.arange(len(self))):
                raise ValueError(
                    f"prompt pool: the order of epoch {self.epoch} is no permutation of the {len(self)} rows "
                    f"(length {len(order)})"
                )
            self._order = order
        return self._order

    def _order_digest(self) -> str:
        order = np.ascontiguousarray(self._current_order(), dtype="<i8")
        return hashlib.blake2b(order.tobytes(), digest_size=16).hexdigest()
