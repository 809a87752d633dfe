"""The allocation of a training run: a step's rows for verl, and the state of the rules beside the weights."""

from __future__ import annotations

import logging
import os
import statistics
import time
from typing import Any

from transfer_queue import KVBatchMeta

from verl_ext.allocation import (
    Allocation,
    Collected,
    Fate,
    GroupStatistics,
    PromptPool,
    StateError,
    load_state,
    save_state,
)
from verl_ext.allocation.group_statistics import normalised_over
from verl_ext.rollout.worker import AllocatedAgentLoopManager
from verl_ext.runs.outcome_records import OutcomeRecorder
from verl_ext.training.all_zero import AllZeroWatch, NoGradientWatch, Sample
from verl_ext.training.batch import StepBudget
from verl_ext.training.group_advantage import flat_groups
from verl_ext.training.identity import differences, identity, other_run
from verl_ext.training.prompts import PromptRows
from verl_ext.training.rollout_backend import PARTITION, TransferQueueBackend
from verl_ext.training.training_settings import TrainingSettings

logger = logging.getLogger(__name__)


class NoUpdate(Exception):
    """A step whose rounds left too little to train on; carries the step's metrics."""

    def __init__(self, reason: str, metrics: dict[str, Any]) -> None:
        super().__init__(reason)
        self.metrics = metrics


class Collector:
    """Collects once a training step and hands verl the keys of the rows to train on.

    Args:
        outcomes: folder of `allocation.record=auto`; None: it records nothing.
    """

    def __init__(
        self, settings: TrainingSettings, budget: StepBudget, prompts: PromptRows, outcomes: str | None = None
    ) -> None:
        self.settings = settings
        self.budget = budget
        self.prompts = prompts
        pool = PromptPool(prompts.keys, order=prompts.order, seed=settings.seed)
        self.allocation = Allocation.from_settings(settings, pool)
        self.ledger_record: dict[str, Any] = {}
        self.statistics: dict[str, GroupStatistics] = {}
        """By uid of the groups in the batch: mean and standard deviation over all their scored rollouts."""
        self.flat: set[str] = set()
        """Uids of the groups in the batch whose scores do not differ: no gradient comes of them."""
        self.skipped_updates = 0
        self.backend = TransferQueueBackend(prompts, settings.deadline_s)
        self.answers: list[Sample] = []
        """A few of the step's answers, for people to look at."""
        self.all_zero = AllZeroWatch(settings.all_zero_steps)
        self.no_gradient = NoGradientWatch(settings.all_zero_steps)
        record = outcomes if settings.record == "auto" else settings.record
        self.recorder = OutcomeRecorder(record, prompts.keys) if record else None

    def connect(self, manager: Any) -> None:
        """Use `manager`'s workers for the rounds.

        Raises:
            TypeError: the manager cannot run rounds.
        """
        if not isinstance(manager, AllocatedAgentLoopManager):
            raise TypeError(
                f"the agent-loop manager is a {type(manager).__name__}, which cannot run rounds: "
                f"actor_rollout_ref.rollout.agent.agent_loop_manager_class must name a subclass of "
                f"{AllocatedAgentLoopManager.__module__}.{AllocatedAgentLoopManager.__name__}"
            )
        self.backend.manager = manager

    def sample(self, global_steps: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Run the rounds of one step.

        Returns:
            Keys and tags of the rows to train on, all others being freed in TransferQueue, and the step's metrics.

        Raises:
            NoUpdate: fewer rows than mini-batches are left.
        """
        return self._hand_over(global_steps, *self._collect(global_steps))

    def _collect(self, global_steps: int) -> tuple[Collected, float]:
        """The step's batch, and the seconds it took."""
        in_hand = self.allocation.flight.groups
        self.backend.begin_step(global_steps, carried=bool(in_hand))
        backend = self.recorder.around(self.backend, global_steps, in_hand) if self.recorder else self.backend
        started = time.perf_counter()
        collected = self.allocation.collect(
            global_steps,
            backend,
            policy_version=self.version(global_steps - 1),
            min_group_rows=self.budget.min_group_rows,
        )
        return collected, time.perf_counter() - started

    def _hand_over(
        self, global_steps: int, collected: Collected, collect_s: float
    ) -> tuple[KVBatchMeta, dict[str, Any]]:
        if self.recorder:
            self.recorder.end_step()
        self.statistics = collected.statistics
        self._note_flat_groups(collected)
        self._watch_rewards(len(self.flat) == len(collected.groups) and self.budget.min_group_rows > 1)
        self.backend.release(collected.dropped)
        keys, tags = self.backend.rows(collected.kept)
        skipped = len(keys) < self.budget.mini_batches
        if skipped:
            self.skipped_updates += 1
            self.allocation.ledger.reclassify(collected.kept, Fate.TRAINED, Fate.SKIPPED)
            self.backend.release(collected.kept)
        else:
            self.backend.forget(collected.kept)
        self.ledger_record = self.allocation.ledger.step_record(global_steps)
        metrics = {f"allocation/{name}": value for name, value in collected.metrics.items()}
        # Plotted against, the cumulative counts have the plain names.
        for name in ("rollouts", "tokens"):
            metrics[f"allocation/step_{name}"] = metrics[f"allocation/{name}"]
            metrics[f"allocation/{name}"] = metrics.pop(f"allocation/{name}_total")
        if self.backend.round_gaps:
            metrics["allocation/round_gap_s"] = statistics.median(self.backend.round_gaps)
            metrics["allocation/round_gap_max_s"] = max(self.backend.round_gaps)
        metrics["allocation/collect_s"] = collect_s
        metrics |= {f"allocation/{name}": value for name, value in self.backend.tally.metrics().items()}
        metrics["allocation/groups_without_gradient"] = float(len(self.flat))
        metrics["allocation/skipped_updates"] = self.skipped_updates
        metrics["allocation/duplicate_prompts"] = self.prompts.duplicates
        if skipped:
            raise NoUpdate(
                f"{collected.rollouts} rollouts gave {len(keys)} rows to train on, fewer than the "
                f"{self.budget.mini_batches} mini-batches",
                metrics,
            )
        return KVBatchMeta(partition_id=PARTITION, keys=keys, tags=tags), metrics

    def _note_flat_groups(self, collected: Collected) -> None:
        compared = collected.kept
        if normalised_over(self.allocation.allocator, self.allocation.downsampler) == "group":
            compared = [outcome for group in collected.groups for outcome in group.outcomes]
        self.flat = flat_groups(compared, self.allocation.allocator.settings.tolerance)

    def _watch_rewards(self, no_gradient: bool) -> None:
        """Warn of rewards that are all zero or teach nothing, with answers whose rows are freed after this."""
        tally, self.answers = self.backend.tally, []
        if self.no_gradient.is_due(no_gradient and tally.right > 0):
            logger.warning("%s", self.no_gradient.message(tally))
        if not (due := self.all_zero.is_due(tally)) and not self.settings.answers:
            return
        try:
            samples = self.backend.samples()
        except Exception:
            # A run does not end for want of an example.
            logger.exception("no sample answers could be read")
            samples = []
        if due:
            logger.warning("%s", self.all_zero.message(tally, [one for one in samples if one.verdict == "wrong"]))
        if self.settings.answers:
            self.answers = samples

    def version(self, global_steps: int) -> int:
        """Version of the weights after that step: one that made no update left them as they were."""
        return global_steps - self.skipped_updates

    @property
    def finished(self) -> str | None:
        """Why no step after the last one that was sampled can train on anything; None: one can."""
        return self.allocation.finished

    def end(self) -> None:
        """The run ends: nothing of what is in hand is left in an engine or in TransferQueue."""
        left = self.backend.end([group for group in self.allocation.flight.groups if group.pending])
        logger.info("rows left in TransferQueue: %d %s", len(left), left[:8] or "")

    # ------------------------------------------------ state

    def _identity(self) -> dict[str, Any]:
        prompts = f"{len(self.prompts.keys)} of digest {self.prompts.digest}"
        return {"training prompts": prompts, **identity(self.settings, self.budget, self.prompts.data_config)}

    def save(self, folder: str) -> None:
        """Write the state of all rules, whole or not at all."""
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        state = dict(self._state())
        state["waiting_rows"] = self.backend.waiting_state(folder, state["waiting_rows"])
        save_state(folder, state)

    def _state(self) -> dict[str, Any]:
        """What is saved, between two steps."""
        return {
            "identity": self._identity(),
            "prompts": self.prompts.marks(),
            "allocation": self.allocation.state_dict(),
            "skipped_updates": self.skipped_updates,
            "waiting_rows": self.backend.waiting_rows(),
        }

    def load(self, folder: str) -> None:
        """Restore the state saved in `folder`.

        Raises:
            ValueError: the state is of another data set, rule, setting, seed or version; says what differs.
            StateError: it is missing, damaged or does not fit together.
        """
        if self.settings.resume == "fresh":
            logger.warning("allocation.resume=fresh: the rules start anew, the state in %s is not read", folder)
            return
        try:
            state = load_state(folder)
            differing = differences(state["identity"], self._identity())
            if any(what.startswith("training prompts") for what in differing):
                differing.append(self.prompts.first_other(state["prompts"]))
            if differing:
                raise ValueError(other_run(folder, differing))
            self.allocation.load_state_dict(state["allocation"])
            self.skipped_updates = state["skipped_updates"]
            self.backend.load_waiting_state(folder, state["waiting_rows"])
        except StateError as error:
            raise StateError(f"{error} (in {folder}); allocation.resume=fresh starts the rules anew") from error
