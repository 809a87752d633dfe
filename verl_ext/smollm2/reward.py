"""Reward of the sums: 1 for the true total alone on its line, and 0 for anything else."""

from __future__ import annotations

from typing import Any

from verl_ext.tiny.reward import compute_score as score_total


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **kwargs: Any
) -> dict[str, float | bool]:
    """Score one answer: `verl_ext.tiny.reward`'s, blanks around the answer taken away.

    Raises:
        TypeError, ValueError: as there; not scored is not the same as wrong.
    """
    answer = solution_str.strip() if isinstance(solution_str, str) else solution_str
    return score_total(data_source, answer, ground_truth, extra_info, **kwargs)
