"""verl's policy-gradient update, computed on trees: advantages, clipped loss and its aggregation, AdamW."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from verl_ext.allocation import Collected, GroupStatistics, reward_statistics
from verl_ext.lab.decoder import Decoder, Forest
from verl_ext.lab.engine import Trajectory
from verl_ext.typed_settings import refused


@dataclass(frozen=True)
class UpdateSettings:
    """The update, by verl's names."""

    adv_estimator: Literal["grpo", "rloo"] = "grpo"
    """algorithm.adv_estimator."""
    norm_adv_by_std_in_grpo: bool = True
    """algorithm.norm_adv_by_std_in_grpo; with false and seq-mean-token-sum-norm: Dr.GRPO."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """actor.loss_agg_mode."""
    loss_scale_factor: int | None = None
    """actor.loss_scale_factor of seq-mean-token-sum-norm; null: the longest answer of the task."""
    clip_ratio_low: float = 0.2
    """actor.clip_ratio_low."""
    clip_ratio_high: float = 0.2
    """actor.clip_ratio_high."""
    clip_ratio_c: float = 3.0
    """actor.clip_ratio_c, the lower bound of the loss where the advantage is negative."""
    grad_clip: float = 1.0
    """actor.grad_clip, the norm that gradients are clipped to."""
    mini_batches: int = 2
    """Optimizer steps a training step: data.train_batch_size / actor.ppo_mini_batch_size."""
    ppo_epochs: int = 1
    """actor.ppo_epochs."""
    lr: float = 2e-4
    """actor.optim.lr."""
    lr_warmup_steps: int = 3
    """actor.optim.lr_warmup_steps, in training steps."""
    weight_decay: float = 0.01
    """actor.optim.weight_decay."""

    def __post_init__(self) -> None:
        for name, low in (
            ("clip_ratio_low", 0),
            ("clip_ratio_high", 0),
            ("clip_ratio_c", 1),
            ("grad_clip", 0),
            ("lr", 0),
        ):
            value = getattr(self, name)
            if not value > low:
                raise refused(f"lab.update.{name}", value, f"a number above {low}")
        for name in ("mini_batches", "ppo_epochs"):
            value = getattr(self, name)
            if value < 1:
                raise refused(f"lab.update.{name}", value, "an integer of 1 or more")


@dataclass(slots=True)
class Row:
    """What a rollout brings to the loss."""

    group: str
    """uid of its group."""
    trajectory: Trajectory
    """Prompt, answer, log-probabilities."""
    advantage: float
    """The same for all its tokens."""


def advantages(scores: Sequence[float], over: GroupStatistics, settings: UpdateSettings) -> np.ndarray:
    """Advantages of a group's rollouts: (r - mean) / (std + 1e-6), r - mean, or n / (n - 1) (r - mean) for RLOO.

    Args:
        scores: (n,), rewards of the rollouts that reach the update.
        over: mean and deviation of these, or of the whole group (``normalise_over``).
        settings: which of the three.
    """
    if over.std == 0:  # saturated within the allocator's tolerance
        return np.zeros(len(scores))
    centred = np.asarray(scores, float) - over.mean
    if settings.adv_estimator == "rloo":
        return centred * over.n / (over.n - 1)
    return centred / (over.std + 1e-6) if settings.norm_adv_by_std_in_grpo else centred


def rows_of(
    collected: Collected, trajectories: Mapping[tuple[str, int], Trajectory], over: str, settings: UpdateSettings
) -> list[Row]:
    """The rows of a step's batch, group by group.

    Args:
        over: ``group`` or ``selected``, see `verl_ext.allocation.normalised_over`.
    """
    by_group: dict[str, list] = {}
    for outcome in collected.kept:
        by_group.setdefault(outcome.group, []).append(outcome)
    rows = []
    for uid, kept in by_group.items():
        scores = [outcome.score for outcome in kept]
        statistics = collected.statistics[uid] if over == "group" else reward_statistics(scores)
        for outcome, advantage in zip(kept, advantages(scores, statistics, settings), strict=True):
            rows.append(Row(uid, trajectories[uid, outcome.session], float(advantage)))
    return rows


def loss(
    policy: Decoder, prompts: Sequence[Sequence[int]], rows: Sequence[Row], settings: UpdateSettings, max_tokens: int
) -> torch.Tensor:
    """verl's clipped loss of a mini-batch, as ``compute_policy_loss_vanilla`` and ``agg_loss`` compute it.

    With u = log pi - log pi_old clamped to [-20, 20] and A the advantage, a token costs max(-A e^u, -A clip(e^u)),
    for A < 0 at most -A c. Rollouts of a group that are alike count once, with their number as weight.

    Args:
        prompts: token ids by row of the pool.
        max_tokens: longest answer of the task, the norm of seq-mean-token-sum-norm.
    """
    counted: dict[str, dict[tuple, list]] = {}
    for row in rows:
        alike = counted.setdefault(row.group, {})
        alike.setdefault((row.trajectory.tokens, row.advantage), [row, 0])[1] += 1
    forest = Forest()
    nodes, labels, old, adv, weights = [], [], [], [], []
    n = len(rows)
    tokens = sum(len(row.trajectory.tokens) for row in rows)
    norm = settings.loss_scale_factor or max_tokens
    for alike in counted.values():
        members = list(alike.values())
        last = forest.add_tree(prompts[members[0][0].trajectory.prompt])
        for row, count in members:
            answer = row.trajectory.tokens
            size = len(answer)
            nodes += forest.add_path(last, answer)
            labels += answer
            old.append(row.trajectory.log_probs)
            adv += [row.advantage] * size
            per_token = {
                "token-mean": 1 / tokens,
                "seq-mean-token-sum": 1 / n,
                "seq-mean-token-mean": 1 / (n * size),
                "seq-mean-token-sum-norm": 1 / (n * norm),
            }[settings.loss_agg_mode]
            weights += [count * per_token] * size
    device = next(policy.parameters()).device
    hidden = policy(forest.plant(device))
    used, at = np.unique(nodes, return_inverse=True)
    log_probs = policy.log_probabilities(hidden[torch.from_numpy(used).to(device)])
    now = log_probs[torch.from_numpy(at).to(device), torch.tensor(labels, device=device)]
    then = torch.from_numpy(np.concatenate(old)).to(device)
    a = torch.tensor(adv, dtype=torch.float32, device=device)
    w = torch.tensor(weights, dtype=torch.float32, device=device)
    ratio = (now - then).clamp(-20, 20).exp()
    cost = torch.maximum(-a * ratio, -a * ratio.clamp(1 - settings.clip_ratio_low, 1 + settings.clip_ratio_high))
    cost = torch.where(a < 0, torch.minimum(-a * settings.clip_ratio_c, cost), cost)
    return (cost * w).sum()


class Trainer:
    """The policy's optimizer: AdamW with linear warm-up, then constant, as verl's default."""

    def __init__(
        self, policy: Decoder, settings: UpdateSettings, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> None:
        self.policy, self.settings, self.prompts, self.max_tokens = policy, settings, prompts, max_tokens
        self.parameters = list(policy.parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=settings.lr, betas=(0.9, 0.999), weight_decay=settings.weight_decay, fused=True
        )
        self.step = 0
        self.optimizer_steps = 0

    def update(self, rows: Sequence[Row]) -> float:
        """One training step: mini-batches of equal numbers of rows, in order; returns the mean norm of the gradient."""
        settings = self.settings
        rate = settings.lr * min(1.0, self.step / max(1, settings.lr_warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norms = []
        for _ in range(settings.ppo_epochs):
            for part in np.array_split(np.arange(len(rows)), min(settings.mini_batches, len(rows))):
                chosen = [rows[i] for i in part]
                self.optimizer.zero_grad()
                if any(row.advantage for row in chosen):
                    loss(self.policy, self.prompts, chosen, settings, self.max_tokens).backward()
                else:
                    for p in self.parameters:
                        p.grad = torch.zeros_like(p)
                norms.append(float(torch.nn.utils.clip_grad_norm_(self.parameters, settings.grad_clip)))
                self.optimizer.step()
                self.optimizer_steps += 1
        self.step += 1
        return float(np.mean(norms))
