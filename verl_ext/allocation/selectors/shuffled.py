"""Prompts in the pool's own order: what every trainer does."""

from __future__ import annotations

from ..registry import register_selector
from .selector import Selector


@register_selector("shuffled")
class Shuffled(Selector):
    """The pool's order, epoch after epoch (see :class:`~verl_ext.allocation.prompt_pool.PromptPool`)."""

    def select(self, n: int) -> list[int]:
        assert self.pool is not None, "begin_step comes first"
        return self.pool.take(n)
