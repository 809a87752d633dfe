"""Prompts that are longer than they may be, and responses that ended by themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class PromptTooLong(ValueError):
    """A prompt has more tokens than data.max_prompt_length."""


def refuse_long_prompts(agent_loop: Any) -> None:
    """Have an agent loop refuse a prompt that is too long, which verl cuts to its last tokens, with a line in the log.

    What is left of such a prompt is another one, to which the true answer does not belong; custom data sets, and those
    that are read by verl alone, are not looked at before the run.

    Replaces: verl.experimental.agent_loop.agent_loop.AgentLoopBase._cap_text_prompt_length (verl 0.9.1)
    """

    def refuse(prompt_ids: list[int]) -> list[int]:
        longest = agent_loop.rollout_config.prompt_length
        if len(prompt_ids) > longest:
            raise PromptTooLong(
                f"its prompt has {len(prompt_ids)} tokens, data.max_prompt_length={longest}; accepted: a larger one, "
                f"data.filter_overlong_prompts=True, or data.truncation=left, which cuts off its beginning"
            )
        return prompt_ids

    agent_loop._cap_text_prompt_length = refuse


def end_tokens(tokenizer: Any, model_config: Any) -> frozenset[int]:
    """The tokens that end a response: the tokenizer's, and those of the model's generation configuration, which the
    engines heed too."""
    found: set[int] = set()
    for source in (tokenizer, getattr(model_config, "generation_config", None)):
        token = getattr(source, "eos_token_id", None)
        found.update(token if isinstance(token, Iterable) else () if token is None else (token,))
    return frozenset(found)
