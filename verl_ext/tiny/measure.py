"""What a policy does on chain sums, in plain PyTorch (no verl, no vLLM).

A right answer is one exact sequence of tokens, so its probability p needs no sampling: it is the product of the token
probabilities along it. Over k independent rollouts at temperature 1 the mean reward is p on average, and the prompt
has both outcomes with probability 1 - (1-p)^k - p^k.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM

from verl_ext.tiny.policy import encode_pairs
from verl_ext.tiny.tokenizer import END_ID

MAX_NEW_TOKENS = 3  # two digits and the end token


@dataclass(frozen=True)
class Measured:
    """Success of a policy on a set of prompts, in expectation over rollouts."""

    prompts: int
    """Number of prompts."""
    rollouts: int
    """Rollouts a prompt (k)."""
    mean: float
    """Expected mean@k: mean of p."""
    greedy: float
    """Share of prompts answered rightly at temperature 0."""
    none_right: float
    """Expected share of prompts with 0 of k right: mean of (1-p)^k."""
    all_right: float
    """Expected share of prompts with k of k right: mean of p^k."""

    @property
    def effective_share(self) -> float:
        """Expected share of prompts with both outcomes among k rollouts."""
        return 1.0 - self.none_right - self.all_right

    def __str__(self) -> str:
        k = self.rollouts
        return (
            f"{self.prompts} prompts: mean@{k} {self.mean:.3f}, greedy {self.greedy:.3f}, effective share "
            f"{self.effective_share:.3f}, 0 of {k} {self.none_right:.3f}, {k} of {k} {self.all_right:.3f}"
        )


@torch.no_grad()
def success_probabilities(
    model, prompts: list[str], answers: list[str], batch_size: int = 256
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probability of the right answer to each prompt at temperature 1, and whether greedy decoding gives it.

    Args:
        model: causal language model over the tiny tokenizer's ids, on the CPU.
        prompts: prompt texts.
        answers: the right answers, without the end token.
        batch_size: prompts in a forward pass.

    Returns:
        (p, greedy), each of shape (prompts,): float64 in [0, 1], and bool.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # similar lengths: little padding
    p = torch.empty(len(prompts), dtype=torch.float64)
    greedy = torch.empty(len(prompts), dtype=torch.bool)
    for start in range(0, len(order), batch_size):
        members = order[start : start + batch_size]
        ids, labels = encode_pairs([(prompts[i], answers[i]) for i in members])
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits.double()
        targets = labels[:, 1:]
        on_answer = targets >= 0
        token_log_p = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        p[members] = (token_log_p * on_answer).sum(1).exp()
        greedy[members] = ((logits.argmax(-1) == targets) | ~on_answer).all(1)
    return p, greedy


def measure(model, prompts: list[str], answers: list[str], rollouts: int = 8) -> Measured:
    """Measure a policy on prompts with their right answers."""
    p, greedy = success_probabilities(model, prompts, answers)
    return Measured(
        prompts=len(prompts),
        rollouts=rollouts,
        mean=p.mean().item(),
        greedy=greedy.double().mean().item(),
        none_right=((1 - p) ** rollouts).mean().item(),
        all_right=(p**rollouts).mean().item(),
    )


def measure_saved(folder: str | os.PathLike, prompts_file: str | os.PathLike, rollouts: int = 8) -> Measured:
    """Measure a policy in a Hugging Face folder on all prompts of a parquet file of the tiny task."""
    rows = pq.read_table(prompts_file).to_pylist()
    prompts = [row["prompt"][0]["content"] for row in rows]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return measure(model, prompts, [row["reward_model"]["ground_truth"] for row in rows], rollouts)


@torch.no_grad()
def sample_answers(model, prompts: list[str], generator: torch.Generator) -> list[str | None]:
    """One sampled answer a prompt, at temperature 1.

    Returns:
        The text up to the end token; None where no end token came within three tokens, or where it is not ASCII.
    """
    answers: list[str | None] = [None] * len(prompts)
    by_length: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(i)
    for members in by_length.values():  # prompts of one length need no padding
        ids = torch.tensor([list(prompts[i].encode()) for i in members])
        start = ids.shape[1]
        for _ in range(MAX_NEW_TOKENS):
            logits = model(input_ids=ids, use_cache=False).logits[:, -1].float()
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1)
        for i, row in zip(members, ids[:, start:].tolist(), strict=True):
            if END_ID in row:
                text = row[: row.index(END_ID)]
                answers[i] = "".join(map(chr, text)) if all(t < 128 for t in text) else None
    return answers
