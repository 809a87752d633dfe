"""CERO: one budget of rollouts over a whole run, spent on the prompts where the next rollout is worth most.

"Cross-Epoch Adaptive Rollout Optimization for RL Post-Training", arXiv 2606.05606, and its successor arXiv 2610.09679.
The mathematics is in :mod:`.fenchel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...typed_settings import require
from ..metric import Metric
from ..posterior import expected_variance
from ..prompt_pool import PromptPool
from ..registry import register_selector
from ..state import StateError, check_keys, rng_for
from . import fenchel
from .selector import Selector, SelectorSettings

# E[p (1 - p)] under the uniform prior: the scale of q.
_Q0 = 1 / 6
# State, each a private attribute. A number a prompt: discounted counts, theta, its rate L = eta q, rollouts issued in
# the open round.
_ARRAYS = {
    "successes": np.float64, "failures": np.float64, "theta": np.float64, "rate": np.float64, "executed": np.int32,
}  # fmt: skip
# Of the run: sizes, B, rollouts issued, rounds closed, those of them without an offer, mu. Of the open round: whether
# there is one, rollouts it may issue and has issued, prompts offered by rank, place in the queue.
_NUMBERS = {
    "prompts": int, "group_size": int, "budget": int, "spent": int, "rounds_done": int, "empty_rounds": int,
    "price": float, "open": bool, "share": int, "round_spent": int, "offered": int, "cursor": int,
}  # fmt: skip


@dataclass(frozen=True)
class CeroSettings(SelectorSettings):
    """Settings of CERO. The papers give none of the constants; the defaults were chosen by simulation.

    With ``price: dual`` the published rule is run. It is unstable under the step sizes used here (``theta_rate``,
    ``price_rate``), which are derived, not published: where ``stop.groups`` does not limit a step, rounds that offer a
    large part of the pool and long rows of empty rounds follow each other.
    """

    rounds: int
    """K, the rounds the budget is for: training steps with ``schedule: batch``, epochs with ``schedule: epoch``."""
    budget: int | None = None
    """B, rollouts of all rounds together, never overspent. null: rounds x stop.groups x group_size, what uniform
    sampling would use; to be given with ``schedule: epoch``."""
    schedule: Literal["batch", "epoch"] = "batch"
    """``batch``: a training step is a round, over the whole pool. ``epoch``: a round is decided at once for the whole
    pool and its prompts, in random order, fill as many steps as they take; the last of them may be short."""
    price: Literal["exact", "dual"] = "exact"
    """``exact``: prompts are offered by falling theta until the round's share of the remaining budget is spent; mu is
    the theta of the last one, the price that clears the round. ``dual``: mu takes gradient steps, all prompts with
    theta above it are offered (and ties while the share lasts), and only the whole remaining budget limits a round."""
    dual: Literal["executed", "virtual"] = "executed"
    """What theta, and mu with ``price: dual``, learn from: the rollouts ``executed`` (the first paper), or those the
    price alone would give, ``virtual`` (its successor)."""
    alpha: float = 1.0
    """Prior pseudo-count of successes. (.5, .5) rates unseen prompts lower, and explores less."""
    beta: float = 1.0
    """Prior pseudo-count of failures."""
    forget: float = 0.5
    """Weight that a prompt's earlier outcomes keep at each visit; 1: all of it. Policies move: .99 is too slow."""
    explore: float = 0.05
    """Share of the prompts that are drawn at random from all others."""
    eta: float | None = None
    """Scale of the utility 1 - exp(-eta q n). null: 6 / (K group_size), at which all that a prompt can get in K rounds
    brings an unseen one to 1 - 1/e."""
    cap: float = 2.0
    """Most a round of ``schedule: batch`` may get, in units of stop.groups x group_size, so that unspent budget is not
    dumped on the last rounds."""
    theta_rate: float = 1.0
    """Factor on the steps of theta; 0 ranks by the expected variance q alone."""
    price_rate: float = 1.0
    """Factor on the steps of mu, with ``price: dual``."""
    seed: int = 0
    """Seed of ties and exploration."""

    def __post_init__(self) -> None:
        whole = "an integer of 1 or more"
        require(self.rounds >= 1, "allocation.selector.rounds", self.rounds, whole)
        require(self.budget is None or self.budget >= 1, "allocation.selector.budget", self.budget, f"null or {whole}")
        require(
            self.budget is not None or self.schedule == "batch",
            "allocation.selector.budget", self.budget, f"{whole} with allocation.selector.schedule=epoch",
        )  # fmt: skip
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            require(0 < value < float("inf"), f"allocation.selector.{name}", value, "a finite number above 0")
        require(0 <= self.forget <= 1, "allocation.selector.forget", self.forget, "a number in [0, 1]")
        require(0 <= self.explore <= 1, "allocation.selector.explore", self.explore, "a number in [0, 1]")
        require(
            self.eta is None or 0 < self.eta < float("inf"), "allocation.selector.eta", self.eta,
                    "null or a number above 0"
        )  # fmt: skip
        require(1 <= self.cap < float("inf"), "allocation.selector.cap", self.cap, "a number of 1 or more")
        for name in ("theta_rate", "price_rate"):
            value = getattr(self, name)
            require(0 <= value < float("inf"), f"allocation.selector.{name}", value, "a number of 0 or more")
        require(self.seed >= 0, "allocation.selector.seed", self.seed, "an integer of 0 or more")


@register_selector("cero")
class Cero(Selector):
    """Ranks the pool by theta, the worth of a prompt's next rollout, and offers down to the price that clears a round.

    The budget is kept through the step's: a step may issue what is left of the round's share, whichever allocator
    spends it and however many rollouts a prompt ends up with. What was issued counts, scored or not. SARA inside
    CERO's choice goes further down the ranking for the same share.

    After the last round, steps go on with what is left of the budget, if anything.
    """

    Settings = CeroSettings

    def __init__(self, settings: CeroSettings) -> None:
        super().__init__(settings)
        for name, kind in _NUMBERS.items():
            setattr(self, f"_{name}", kind())
        for name, kind in _ARRAYS.items():
            setattr(self, f"_{name}", np.zeros(0, kind))
        self._queue = self._virtual = self._unsorted = np.zeros(0, np.int32)
        self._begin()

    @property
    def finished(self) -> str | None:
        if not self._prompts or self._budget - self._spent >= self._group_size:
            return None
        return f"{self._spent} of the {self._budget} rollouts of allocation.selector.budget are issued"

    # ------------------------------------------------ a step

    def begin_step(self, step: int, pool: PromptPool) -> None:
        super().begin_step(step, pool)
        if self._prompts and self._prompts != len(pool):
            raise StateError(f"cero knows {self._prompts} prompts and the pool has {len(pool)}")
        self._rng = rng_for(self.settings.seed, "cero", step)
        self._begin()

    def step_budget(self, groups: int, group_size: int, rollouts: int) -> int:
        """What is left of the round's share; opens a round where none is.

        Raises:
            SettingError: the budget is below one group a round, or ``group_size`` changed within a run.
        """
        if not self._prompts:
            self._start(groups, group_size)
        require(group_size == self._group_size, "allocation.allocator.group_size", group_size,
                f"{self._group_size}, as before")  # fmt: skip
        if self._open and self.settings.schedule == "batch":
            self._open = False  # the last step broke off: its round is decided anew, with what it spent gone
        elif self._open and self._finished():
            self._close()
        if not self._open:
            self._open_round(groups)
        return max(0, min(rollouts, self._round_left()))

    def select(self, n: int) -> list[int]:
        assert self.pool is not None and self._open, "begin_step and step_budget come first"
        if self.settings.schedule == "epoch":
            return self._take(n)
        drawn = int(self._rng.binomial(n, self.settings.explore))
        rows = self._take(n - drawn)
        return rows + self._draw(drawn)

    def issued(self, prompt_row: int, rollouts: int) -> None:
        self._spent += rollouts
        self._round_spent += rollouts
        self._issued.extend((prompt_row, rollouts))

    def observe(self, prompt_row: int, successes: int, trials: int, group_size: int) -> None:
        if trials:
            self._outcomes.extend((prompt_row, successes, trials))

    def end_step(self) -> None:
        rows, rollouts = _columns(self._issued, 2)
        np.add.at(self._executed, rows, rollouts.astype(np.int32))
        self._learn(*_columns(self._outcomes, 3))
        numbers = {
            "budget": float(self._budget),
            "budget_used": float(self._spent),
            "budget_used_share": self._spent / self._budget,
            "round_share": float(self._share),
            "explored": float(self._explored),
            "seen_share": float(np.mean(self._successes + self._failures > 0)),
        }
        if self.settings.schedule == "batch":
            self._close()
        self._numbers |= numbers | {
            "price": self._price,
            "rounds_done": float(self._rounds_done),
            "empty_rounds": float(self._empty_rounds),
        }

    METRICS = {
        "budget": Metric("rollouts of the whole run", "rollouts"),
        "budget_used": Metric("rollouts issued since the run began", "rollouts"),
        "budget_used_share": Metric("`budget_used` / `budget`", "share", "the run ends at 1"),
        "rounds_done": Metric("rounds of the rule that are over", "rounds"),
        "round_share": Metric("this round's part of the budget", "share"),
        "empty_rounds": Metric("rounds so far in which the ranking offered nobody", "rounds", "many: the price is off"),
        "explored": Metric("prompts that were drawn at random", "prompts"),
        "price": Metric("threshold of the ranking: gain that a rollout must promise", "gain a rollout"),
        "seen_share": Metric("prompts of the pool with outcomes", "share"),
        "variance_predicted": Metric("q before the outcomes, mean over prompts with 2 scored rollouts", "variance",
                                     "near `variance_realised`: the rates are calibrated"),
        "variance_realised": Metric("its unbiased estimate from the outcomes", "variance", ".25 at most"),
    }  # fmt: skip

    # ------------------------------------------------ rounds

    def _begin(self) -> None:
        # Flat lists: one call a group has to be cheap, and a list takes up a tuple faster than an array does.
        self._issued: list[int] = []  # row, rollouts
        self._outcomes: list[int] = []  # row, successes, trials
        self._explored = 0
        self._numbers = {}

    def _start(self, groups: int, group_size: int) -> None:
        """The first step: sizes are known now."""
        settings = self.settings
        self._prompts, self._group_size = len(self.pool), group_size
        for name, kind in _ARRAYS.items():
            setattr(self, f"_{name}", np.zeros(self._prompts, kind))
        self._budget = settings.rounds * groups * group_size if settings.budget is None else settings.budget
        if self._budget < settings.rounds * group_size:
            least = settings.rounds * group_size
            self._prompts = 0
            require(False, "allocation.selector.budget", self._budget,
                    f"one group a round: rounds x group_size = {least} or more")  # fmt: skip
        self._rate[:] = self._rates()
        self._theta[:] = self._rate
        self._price = float(self._theta.max())

    def _rates(self) -> np.ndarray:
        """L = eta q of every prompt."""
        settings = self.settings
        eta = 1 / (_Q0 * self._most) if settings.eta is None else settings.eta
        return eta * expected_variance(settings.alpha + self._successes, settings.beta + self._failures)

    @property
    def _most(self) -> int:
        """K N_max, what a prompt can get over all rounds."""
        return self.settings.rounds * self._group_size

    def _open_round(self, groups: int) -> None:
        settings, size = self.settings, self._group_size
        left = self._budget - self._spent
        self._share = left // max(1, settings.rounds - self._rounds_done)
        if settings.schedule == "batch":
            self._share = min(self._share, int(settings.cap * groups * size))
        self._open, self._round_spent, self._offered, self._cursor = True, 0, 0, 0
        count = fill = self._share // size
        free = np.flatnonzero(self.pool.eligible())
        if settings.schedule == "batch" and settings.price == "exact":
            # Allocators that stop early go down the ranking further than the share of whole groups does.
            self._queue, self._unsorted = fenchel.rank_first(self._theta, free, 2 * fill, self._most, self._rng)
            self._virtual = self._queue[:count]
            return
        ranked = fenchel.rank(self._theta, free, self._most, self._rng)
        if settings.price == "dual":
            count = fenchel.admitted(self._theta, ranked, self._price, fill, self._most)
        self._virtual = ranked[:count]
        if settings.schedule == "batch":
            self._queue = self._virtual
            return
        drawn = int(self._rng.binomial(fill, settings.explore))
        named = count - drawn if settings.price == "exact" else count  # exploration is part of the share
        others = self._rng.permutation(ranked[named:])[:drawn]
        self._explored = len(others)
        self._offered = len(ranked[:named])
        if settings.price == "exact" and self._offered:
            self._price = float(self._theta[ranked[self._offered - 1]])
        self._queue = self._rng.permutation(np.concatenate([ranked[:named], others])).astype(np.int32)
        keep = len(self._virtual) if settings.dual == "virtual" else 0  # the queue says the rest
        self._virtual = self._virtual[:keep].astype(np.int32)

    def _round_left(self) -> int:
        """Rollouts that the round may still issue."""
        left = self._budget - self._spent
        return min(left, self._share - self._round_spent) if self.settings.price == "exact" else left

    def _finished(self) -> bool:
        """A round of ``schedule: epoch`` has nothing left to offer, or no budget for another group."""
        rest = self._queue[self._cursor :]
        return self._round_left() < self._group_size or not self.pool.eligible()[rest].any()

    def _take(self, n: int) -> list[int]:
        """The next ``n`` rows of the queue that may still be offered."""
        taken: list[int] = []
        block = max(64, 2 * n)
        free = self.pool.eligible() if n else None
        while len(taken) < n:
            if self._cursor == len(self._queue):
                if not len(self._unsorted):
                    break
                self._queue, self._cursor = fenchel.by_theta(self._theta, self._unsorted, self._most), 0
                self._unsorted = self._unsorted[:0]
            rows = self._queue[self._cursor : self._cursor + block]
            at = np.flatnonzero(free[rows])[: n - len(taken)]
            taken += rows[at].tolist()
            self._cursor += int(at[-1]) + 1 if len(taken) == n else len(rows)
        self.pool.mark_offered(taken)
        if taken and self.settings.schedule == "batch":
            self._offered += len(taken)
            if self.settings.price == "exact":
                self._price = float(self._theta[taken[-1]])
        return taken

    def _draw(self, n: int) -> list[int]:
        """``n`` rows at random from all that may be offered."""
        if not n:
            return []
        free = np.flatnonzero(self.pool.eligible())
        rows = self._rng.choice(free, min(n, len(free)), replace=False).tolist()
        self.pool.mark_offered(rows)
        self._explored += len(rows)
        return rows

    def _close(self) -> None:
        """The round is over: the duals step on the rates it was decided with, then the rates are refreshed."""
        settings, k, size = self.settings, self.settings.rounds, self._group_size
        given = self._executed
        if settings.dual == "virtual":
            given = np.zeros(self._prompts, np.int32)
            given[self._virtual] = size
        if settings.price == "dual":
            self._price = fenchel.step_price(
                self._price, float(given.sum()), self._budget / k, self._prompts, size, k, float(self._rate.max()),
                settings.price_rate,
            )  # fmt: skip
        theta = fenchel.step_theta(self._theta, self._rate, given, k, size, settings.theta_rate)
        rates = self._rates()
        self._theta = fenchel.rescale(theta, self._rate, rates, self._most)
        self._rate = rates
        self._executed[:] = 0
        self._rounds_done += 1
        self._empty_rounds += self._offered == 0
        self._open = False
        self._queue = self._virtual = self._unsorted = np.zeros(0, np.int32)

    def _learn(self, rows: np.ndarray, successes: np.ndarray, trials: np.ndarray) -> None:
        """New outcomes: counts <- forget x counts + outcomes, for the prompts visited."""
        visited = np.zeros(self._prompts, bool)
        visited[rows] = True
        if visited.sum() != len(rows):
            raise ValueError("cero: a prompt was observed twice in a step")
        settings = self.settings
        right, wrong, several = self._successes[rows], self._failures[rows], trials > 1
        if several.any():
            s, n = successes[several], trials[several]
            q = expected_variance(settings.alpha + right[several], settings.beta + wrong[several])
            self._numbers["variance_predicted"] = float(np.mean(q))
            self._numbers["variance_realised"] = float(np.mean(s * (n - s) / (n * (n - 1))))
        self._successes[rows] = settings.forget * right + successes
        self._failures[rows] = settings.forget * wrong + trials - successes

    # ------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """36 bytes a prompt; up to 8 more in the middle of a round of ``schedule: epoch``."""
        state: dict[str, Any] = {name: getattr(self, f"_{name}") for name in _NUMBERS}
        for name in (*_ARRAYS, "queue", "virtual"):
            state[name] = getattr(self, f"_{name}").copy()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys("cero", state, (*_NUMBERS, *_ARRAYS, "queue", "virtual"))
        for name in _ARRAYS:
            if len(state[name]) != state["prompts"]:
                raise StateError(f"state of cero: {name} of {len(state[name])} prompts where it has {state['prompts']}")
        for name, kind in _NUMBERS.items():
            setattr(self, f"_{name}", kind(state[name]))
        for name, kind in (*_ARRAYS.items(), ("queue", np.int32), ("virtual", np.int32)):
            setattr(self, f"_{name}", np.array(state[name], kind))
        self._begin()


def _columns(flat: list[int], width: int) -> np.ndarray:
    """(width, n): the ``width`` numbers that each call appended, each a contiguous row."""
    return np.fromiter(flat, np.int64, len(flat)).reshape(-1, width).T.copy()
