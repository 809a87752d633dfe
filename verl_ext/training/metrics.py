# SPDX-License-Identifier: Apache-2.0
"""Descriptions of the numbers that the trainer and the collector log beside those of `verl_ext.allocation`."""

from verl_ext.allocation.metric import Metric

METRICS = {
    "collect_s": Metric("time to collect the batch: generation, reward, decisions", "seconds"),
    "generate_s": Metric("of it, waiting for rollouts and their rewards", "seconds"),
    "driver_s": Metric("of it, deciding", "seconds", "small beside the other"),
    "round_gap_s": Metric("time between two rounds in which no rollout worker works, median", "seconds", "below .1"),
    "round_gap_max_s": Metric("the longest such time", "seconds"),
    "rows": Metric("rollouts that reach the update", "rollouts"),
    "pad_share": Metric("padding among the rows of the update", "share", "near 0; padding costs, and teaches nothing"),
    "optimizer_steps": Metric("optimizer steps made", "steps", "the same at every step"),
    "skipped_updates": Metric("steps so far that made no update", "steps", "0 is best"),
    "groups_without_gradient": Metric("groups of the batch whose scores do not differ", "groups", "0 is best"),
    "unscored/*": Metric("rollouts without a score, by the reward's reason", "rollouts", "not there, or few"),
    "prompts_too_long": Metric("prompts longer than `data.max_prompt_length`", "prompts", "not there"),
    "duplicate_prompts": Metric("rows of the training data that repeat a prompt", "prompts", "0 is best"),
    "val_lost": Metric("rollouts of a validation that did not come back", "rollouts", "0; verl counts them as wrong"),
}
