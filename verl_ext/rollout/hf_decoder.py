"""Decodes a batch of requests with a Hugging Face model: sampling, log-probs, and requests that end at any token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache
from transformers.generation import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; requests that agree in it share a batch."""

    temperature: float = 1.0
    """0 takes the most probable token."""

    top_p: float = 1.0
    """Only the most probable tokens that together reach this probability."""

    top_k: int = -1
    """Only so many of the most probable tokens; -1 or 0: all."""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Sampling:
        """Of verl's sampling parameters.

        Raises:
            ValueError: a parameter that this server does not know, with a value that would change the answers.
        """
        own = {name: given[name] for name in cls.__dataclass_fields__ if name in given}
        neutral = {"repetition_penalty": 1.0, "ignore_eos": False}
        counted = {"logprobs", "max_tokens", "max_new_tokens"}
        for name in given.keys() - own.keys() - counted:
            if name not in neutral or given[name] != neutral[name]:
                known = ", ".join([*cls.__dataclass_fields__, *sorted(counted)])
                raise ValueError(f"sampling parameter {name}={given[name]}: actor_rollout_ref.rollout.name=hf "
                                 f"accepts {known}")  # fmt: skip
        return cls(**own)

    def log_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-probs of what is drawn, (rows, vocabulary), in fp32: after temperature, top_k and top_p."""
        warpers = LogitsProcessorList()
        if self.temperature > 0 and self.temperature != 1.0:
            warpers.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k > 0:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            warpers.append(TopPLogitsWarper(self.top_p))
        return warpers(None, logits.float()).log_softmax(-1)

    def draw(self, log_probs: torch.Tensor) -> torch.Tensor:
        """Token of each row, (rows, 1)."""
        if self.temperature == 0:
            return log_probs.argmax(-1, keepdim=True)
        return torch.multinomial(log_probs.exp(), 1)


@dataclass(eq=False)
class Request:
    """A prompt and what was generated for it so far."""

    prompt: list[int]
    sampling: Sampling
    most: int
    """Tokens after which it ends."""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    aborted: bool = False
    """Set from outside: it ends at the next token."""

    def take(self, token: int, log_prob: float, ends: frozenset[int]) -> bool:
        """Add a token; whether the request has ended."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        return self.aborted or token in ends or len(self.tokens) >= self.most


@torch.inference_mode()
def decode(
    model: torch.nn.Module, requests: Sequence[Request], ends: frozenset[int], ended: Callable[[Request], None]
) -> None:
    """Generate for all requests, which agree in their sampling, until each has ended.

    Prompts are padded on the left. Rows that have ended leave the batch.

    Args:
        model: a causal language model of transformers.
        ends: tokens that end an answer; they belong to it.
        ended: told of each request as it ends.
    """
    rows, device, sampling = list(requests), next(model.parameters()).device, requests[0].sampling
    width = max(len(row.prompt) for row in rows)
    padded = [[0] * (width - len(row.prompt)) + row.prompt for row in rows]
    ids = torch.tensor(padded, device=device)
    mask = torch.tensor([[0] * (width - len(row.prompt)) + [1] * len(row.prompt) for row in rows], device=device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    while rows:
        logits = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]  # fmt: skip
        log_probs = sampling.log_probs(logits)
        ids = sampling.draw(log_probs)
        drawn = zip(rows, ids[:, 0].tolist(), log_probs.gather(1, ids)[:, 0].tolist(), strict=True)
        over = [row.take(token, log_prob, ends) for row, token, log_prob in drawn]
        positions = positions[:, -1:] + 1
        if any(over):
            for row, is_over in zip(rows, over, strict=True):
                if is_over:
                    ended(row)
            rows = [row for row, is_over in zip(rows, over, strict=True) if not is_over]
            keep = ~torch.tensor(over, device=device)
            ids, mask, positions = ids[keep], mask[keep], positions[keep]
            cache.batch_select_indices(keep)
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=-1)
