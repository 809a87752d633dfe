"""Reward of the tiny task: 1 for the true total, written as it is, and 0 for anything else."""

from __future__ import annotations

import re
from typing import Any

_TOTAL = re.compile(r"0|[1-9][0-9]*")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **kwargs: Any
) -> dict[str, float | bool]:
    """Score one answer to a chain sum.

    The answer must be the total in ASCII digits and nothing else: no leading zero, sign, space or further text. The
    policy's pre-training corpus is written so, hence nothing right is lost, and there is nothing to exploit.

    Args:
        data_source: ignored; verl passes it.
        solution_str: the decoded response without special tokens.
        ground_truth: the total in decimal.
        extra_info: ignored; verl passes it.
        **kwargs: ignored; verl may pass more.

    Returns:
        {"score": 1.0 or 0.0, "acc": whether the answer is right}.

    Raises:
        TypeError: the answer or the ground truth is not text. Not scored is not the same as wrong.
        ValueError: the ground truth is not a total in decimal.
    """
    if not isinstance(solution_str, str):
        raise TypeError(f"chain_sums: solution_str must be a str, got {type(solution_str).__name__}: {solution_str!r}")
    if not isinstance(ground_truth, str):
        raise TypeError(f"chain_sums: ground_truth must be a str, got {type(ground_truth).__name__}: {ground_truth!r}")
    if not _TOTAL.fullmatch(ground_truth):
        raise ValueError(f"chain_sums: ground_truth must be a total such as '30', got {ground_truth!r}")
    right = solution_str == ground_truth
    return {"score": 1.0 if right else 0.0, "acc": right}
