"""The one object: pool, rules and ledger of a run, and the loop that collects a step's batch with them.

It knows no engine: the training, the simulated and the replay backend run through the same code.

    allocation = Allocation.from_settings({"allocator": {"name": "sara"}, "stop": {"groups": 8}}, prompts)
    collected = allocation.collect(step, backend)
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ..typed_settings import build, require
from .compose import AllocationSettings, Async, Stop, check_rounds
from .conclude import Collected, conclude
from .context import StepContext
from .failures import Failures
from .ledger import Ledger
from .prompt_pool import PromptPool
from .rounds import Backend, whole_rounds
from .state import check_keys, rng_for
from .streaming import StreamingBackend, stream
from .waiting import WaitingGroups

PARTS = ("pool", "selector", "allocator", "ledger", "failures", "flight")
"""What has a state."""


class Allocation:
    """Decides where rollouts go, step by step. Its parts are plain attributes, to be read and to be replaced.

    Args:
        pool: the prompts.
        selector, allocator, downsampler: the rules, as the registry makes them.
        stop: when a step is full, and when the run has enough.
        rounds: ``barrier``, or ``streaming``, in which ``max_rounds`` bounds the requests of one group.
        async_: what goes on over the update, streaming; None: nothing.
        give_up_after: times in a row that all of a prompt's rollouts failed after which it leaves the pool.
        seed: of ties and of the down-sampler.

    Raises:
        SettingError: no size of the batch, a budget below one group, or an allocator that cannot go so.
    """

    def __init__(
        self,
        pool: PromptPool,
        selector: Any,
        allocator: Any,
        downsampler: Any,
        stop: Stop,
        *,
        rounds: str = "barrier",
        max_rounds: int = 8,
        async_: Async | None = None,
        give_up_after: int | None = 3,
        seed: int = 0,
    ) -> None:
        self.pool, self.selector, self.allocator, self.downsampler = pool, selector, allocator, downsampler
        self.stop, self.rounds, self.max_rounds, self.seed = stop, rounds, max_rounds, seed
        self.ledger = Ledger()
        self.failures = Failures(pool.keys, give_up_after)
        self.async_ = async_ or Async()
        self.flight = WaitingGroups(self.async_.max_lag)
        """Groups that go on over the update, some of their sessions in flight; within a step, empty."""
        self.generating: int | None = None
        """Version of the weights that generate now, where they may lag behind those of the step; None: they do not."""
        self._idle = False  # the last step asked for nothing and trained on nothing
        require(stop.groups is not None, "allocation.stop.groups", None, "an integer of 1 or more")
        least, budget = allocator.group_size, stop.budget(allocator.group_size)
        require(budget >= least, "allocation.stop.rollouts", budget, f"at least group_size={least}")
        check_rounds(allocator, rounds, max_rounds, self.async_)

    @classmethod
    def from_settings(
        cls,
        settings: AllocationSettings | Mapping[str, Any],
        prompts: PromptPool | Sequence[str],
        seed: int | None = None,
        **more: Any,
    ) -> Allocation:
        """Make an allocation at the beginning of a run.

        Args:
            settings: typed, or as configuration gives them.
            prompts: the pool; or a key of each prompt, all different, offered in an order shuffled anew each epoch.
            seed: instead of that of the settings.
            more: for the constructor of a subclass.

        Raises:
            SettingError: naming every setting that is not accepted.
            ValueError: no prompts, or one twice.
        """
        if not isinstance(settings, AllocationSettings):
            settings = build(AllocationSettings, "allocation", settings)
        seed = settings.seed if seed is None else seed
        pool = prompts if isinstance(prompts, PromptPool) else PromptPool(prompts, seed=seed)
        return cls(
            pool, *settings.rules.fresh(), settings.stop,
            rounds=settings.rounds, max_rounds=settings.max_rounds, async_=settings.async_,
            give_up_after=settings.give_up_after, seed=seed, **more,
        )  # fmt: skip

    def collect(
        self,
        step: int,
        backend: Backend | StreamingBackend,
        *,
        policy_version: int | None = None,
        min_group_rows: int = 2,
    ) -> Collected:
        """Collect one step's batch in at most ``max_rounds`` rounds.

        Each round: ask, issue, generate, record, tell. Then every decided group is shown to the selector, the batch is
        down-sampled, and every rollout gets its fate in the ledger. Ends also on data that is all solved, all hopeless
        or unscorable; a short batch is logged and reported in ``short_by``, not an error. Streaming, there is no round
        to wait for: see :mod:`.streaming`.

        Args:
            step: number of the step; with the order of admission it makes the groups' uids, so it must never repeat.
            backend: a :class:`~.rounds.Backend`; streaming, a :class:`~.streaming.StreamingBackend`.
            policy_version: version of the weights that generate in this step, from which the lag of waiting groups is
                counted; None: ``step - 1``, one update a step.
            min_group_rows: a group of which fewer scored rollouts are kept is not trained on (fate filtered).

        Raises:
            RoundError: a round does not fit together, or prompt after prompt fails that never did before.
            Exception: whatever the backend raises. In every case the ledger adds up: what was in flight is failed,
                what had come back is aborted.
        """
        start = time.perf_counter()
        gaps: list[float] = []
        try:
            ctx = self.begin_step(step, policy_version)
            if ctx.streaming:
                restored, self.flight.restored = self.flight.restored, False
                rounds, generating = stream(ctx, self.allocator, backend, restored)
            else:
                rounds, generating, gaps = whole_rounds(ctx, self.allocator, backend)
            collected = self.end_step(ctx, rounds, min_group_rows)
        except BaseException:
            self.ledger.abort()
            raise
        collected.metrics["generate_s"] = generating
        collected.metrics["driver_s"] = time.perf_counter() - start - generating
        if gaps:
            collected.metrics["round_gap_s"] = median(gaps)
            collected.metrics["round_gap_max_s"] = max(gaps)
        return collected

    def begin_step(self, step: int, policy_version: int | None = None) -> StepContext:
        """What a step's rounds work on, for a loop other than :meth:`collect`'s: groups that waited are taken up, and
        the selector has said what it may issue."""
        groups, size = self.stop.groups, self.allocator.group_size
        version = step - 1 if policy_version is None else policy_version
        ctx = StepContext(
            step, self.selector, self.ledger, groups, self.stop.budget(size), self.max_rounds,
            rng_for(self.seed, "collect", step), self.pool, version, self.rounds == "streaming",
            self.failures,
            math.ceil(self.async_.carry * groups), self.async_.max_lag if self.async_.carry else None,
            lambda: self.generating,
        )  # fmt: skip
        self.pool.begin_step()
        ctx.round = 1
        self.flight.resume(ctx)
        self.allocator.begin_step(ctx)  # first, so that the selector finds the prompts of waiting groups out of reach
        self.selector.begin_step(step, self.pool)
        ctx.budget = min(ctx.budget, max(0, self.selector.step_budget(groups, size, ctx.budget)))
        return ctx

    def end_step(self, ctx: StepContext, rounds: int, min_group_rows: int = 2) -> Collected:
        """Decide the batch after the last round, and what becomes of all other rollouts of the step."""
        collected = conclude(self, ctx, rounds, min_group_rows)
        self._idle = not (collected.rollouts or collected.groups)
        return collected

    @property
    def finished(self) -> str | None:
        """Why no further step can train on anything, so that the run ends; None: one can.

        The run's rollouts are issued, the selector's budget is, or every prompt is retired. Groups that wait can still
        be trained on, unless a step has just made nothing of them."""
        most = self.stop.run_rollouts
        if most is not None and self.ledger.issued >= most:
            return f"{self.ledger.issued} of the {most} rollouts of allocation.stop.run_rollouts are issued"
        if (self.ledger.waiting or self.flight.groups) and not self._idle:
            return None
        return "every prompt is retired and no group waits" if self.pool.all_retired else self.selector.finished

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to decide as this one would have."""
        return {part: getattr(self, part).state_dict() for part in PARTS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state saved between two steps, strictly.

        Raises:
            StateError: saying which part it does not fit, and why.
        """
        check_keys("allocation", state, PARTS)
        for part in PARTS:
            getattr(self, part).load_state_dict(state[part])
