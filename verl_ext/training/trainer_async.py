"""Trainer modes in which groups go on over the update: `allocated_colocate_async` and `allocated_separate_async`.

Where the batch comes from, how its rows are laid out and how it is saved is that of `allocated`; when requests stop,
weights travel and requests go on is that of verl's asynchronous modes. Their replay buffer and the batches that they
send ahead are not used. What it means is in docs/asynchronous.md.
"""

from __future__ import annotations

from omegaconf import DictConfig
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

from verl_ext.training.ahead import AheadCollector
from verl_ext.training.collector import Collector
from verl_ext.training.trainer import PPOTrainerAllocated
from verl_ext.training.training_settings import COLOCATE_ASYNC, SEPARATE_ASYNC


@register_trainer(COLOCATE_ASYNC)
class PPOTrainerAllocatedColocateAsync(PPOTrainerAllocated, PPOTrainerColocateAsync):
    """Engines on the trainer's devices: requests in flight stop with their tokens when the batch is full, and go on
    with the new weights."""

    # PPOTrainerAllocated has those of verl's synchronous mode.
    get_llm_client = PPOTrainerColocateAsync.get_llm_client
    on_init_end = PPOTrainerColocateAsync.on_init_end
    on_sample_end = PPOTrainerColocateAsync.on_sample_end
    on_step_end = PPOTrainerColocateAsync.on_step_end

    def _add_async_warmup_batches(self, num_warmup_batches: float) -> None:
        """Nothing is sent ahead: the rules ask for what is to be in hand."""


@register_trainer(SEPARATE_ASYNC)
class PPOTrainerAllocatedSeparateAsync(PPOTrainerAllocated, PPOTrainerSeparateAsync):
    """Engines of their own: they go on, and prompts are admitted, during the update, since the next step's batch is
    collected meanwhile. A step is one sync of weights, its mini-batches share the log-probs that it begins with."""

    collector_class: type[Collector] = AheadCollector
    collector: AheadCollector

    get_llm_client = PPOTrainerSeparateAsync.get_llm_client
    on_init_end = PPOTrainerSeparateAsync.on_init_end
    on_sample_end = PPOTrainerSeparateAsync.on_sample_end
    # verl keeps a copy of the weights for the later of several samples a step; here there is one.
    _compute_old_log_prob = PPOTrainer._compute_old_log_prob

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.parameter_sync_step = 1

    def _add_async_warmup_batches(self, num_warmup_batches: float) -> None:
        """Nothing is sent ahead: the rules ask for what is to be in hand."""

    def on_train_begin(self) -> None:
        """Nothing is collected beyond the run's last step."""
        super().on_train_begin()
        self.collector.last_step = self.total_training_steps

    def on_step_end(self) -> None:
        """The weights travel; what is offered from here on is of their version."""
        PPOTrainerSeparateAsync.on_step_end(self)
        self.collector.weights_are_out(self.global_steps)


