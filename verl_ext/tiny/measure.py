"""What a policy does on chain sums, measured by plain PyTorch sampling (no verl, no vLLM)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl_ext.tiny.tokenizer import END_ID

MAX_NEW_TOKENS = 3  # two digits and the end token


@dataclass(frozen=True)
class Measured:
    """Success of a policy on a set of prompts."""

    prompts: int
    """Number of prompts."""
    rollouts: int
    """Rollouts a prompt (k)."""
    mean: float
    """mean@k: share of right rollouts."""
    greedy: float
    """Share of prompts answered rightly at temperature 0."""
    none_right: float
    """Share of prompts with 0 of k right."""
    all_right: float
    """Share of prompts with k of k right."""

    @property
    def effective_share(self) -> float:
        """Share of prompts with both outcomes among k rollouts."""
        return 1.0 - self.none_right - self.all_right

    def __str__(self) -> str:
        k = self.rollouts
        return (
            f"{self.prompts} prompts: mean@{k} {self.mean:.3f}, greedy {self.greedy:.3f}, effective share "
            f"{self.effective_share:.3f}, 0 of {k} {self.none_right:.3f}, {k} of {k} {self.all_right:.3f}"
        )


@torch.no_grad()
def sample_answers(model, prompts: list[str], generator: torch.Generator | None) -> list[str | None]:
    """One answer a prompt, at temperature 1, or greedily where `generator` is None.

    Returns:
        The text up to the end token; None where no end token came within three tokens, or where the answer is not ASCII.
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
            if generator is None:
                new = logits.argmax(-1, keepdim=True)
            else:
                new = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            ids = torch.cat([ids, new], dim=1)
        for i, row in zip(members, ids[:, start:].tolist(), strict=True):
            if END_ID in row:
                text = row[: row.index(END_ID)]
                answers[i] = "".join(map(chr, text)) if all(t < 128 for t in text) else None
    return answers


def count_right(model, prompts: list[str], answers: list[str], rollouts: int, seed: int = 0) -> torch.Tensor:
    """Right rollouts of `rollouts` for each prompt, shape (prompts,), int64."""
    generator = torch.Generator().manual_seed(seed)
    repeated = [p for p in prompts for _ in range(rollouts)]
    given = sample_answers(model, repeated, generator)
    wanted = [a for a in answers for _ in range(rollouts)]
    right = torch.tensor([g == w for g, w in zip(given, wanted, strict=True)])
    return right.view(len(prompts), rollouts).sum(1)


def measure(model, prompts: list[str], answers: list[str], rollouts: int = 8, seed: int = 0) -> Measured:
    """Measure a policy on prompts with their right answers."""
    right = count_right(model, prompts, answers, rollouts, seed)
    greedy = sample_answers(model, prompts, None)
    n = len(prompts)
    return Measured(
        prompts=n,
        rollouts=rollouts,
        mean=right.sum().item() / (n * rollouts),
        greedy=sum(g == a for g, a in zip(greedy, answers, strict=True)) / n,
        none_right=(right == 0).sum().item() / n,
        all_right=(right == rollouts).sum().item() / n,
    )
