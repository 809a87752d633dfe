"""Whether the mathematics reward can judge the true answers of a data set.

Each is tried against itself, which must be right, and against a changed one, which must be wrong: a truth that no
answer can meet, or that none can miss, teaches nothing.
"""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl_ext.rewards.math_verify import compute_score
from verl_ext.rewards.worker_pool import close_pools

LIMIT_S = 300.0
"""Seconds after which the rest is not tried; 17,000 integers take some seconds."""
LISTED = 100
"""Truths that are named; the count has all."""
_SETTINGS = {"deadline_s": 2.0, "workers": 2}
_THREADS = 4
_BATCH = 256
_LAST_DIGITS = re.compile(r"\d+(?=\D*$)")


def check_truths(truths: Iterable[str], limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Try all truths, each different one once.

    Args:
        truths: the true answers, in the order of the rows.
        limit_s: seconds after which the rest is not tried.

    Returns:
        `tried`, `not_tried` and `not_judged` count different truths; `examples` names the first of those that cannot be
        judged, with the row of its first prompt in the output and the reason. Without math-verify, `skipped` says so.
    """
    if importlib.util.find_spec("math_verify") is None:
        return {"skipped": "math-verify is not installed"}
    rows: dict[str, int] = {}
    for row, truth in enumerate(truths):
        rows.setdefault(truth, row)
    until, tried, bad = time.monotonic() + limit_s, 0, []
    with ThreadPoolExecutor(_THREADS) as threads:
        different = list(rows)
        while tried < len(different) and time.monotonic() < until:
            part = different[tried : tried + _BATCH]
            for truth, reason in zip(part, threads.map(_reason, part), strict=True):
                if reason is not None:
                    bad.append({"row": rows[truth], "truth": truth, "reason": reason})
            tried += len(part)
    close_pools()
    return {"tried": tried, "not_tried": len(rows) - tried, "not_judged": len(bad), "examples": bad[:LISTED]}


def changed(truth: str) -> Iterator[str]:
    """Answers that are not the true one: its last number one larger, and a number that no question has."""
    if match := _LAST_DIGITS.search(truth):
        yield f"{truth[: match.start()]}{int(match.group()) + 1}{truth[match.end() :]}"
    yield "7919.25"


def _reason(truth: str) -> str | None:
    """Why a truth cannot be judged; None where it can."""
    try:
        verdict = _judged(truth, truth)
        if verdict != "right":
            return f"itself is {verdict}"
        for other in changed(truth):
            if (verdict := _judged(other, truth)) != "wrong":
                return f"{other} is {verdict}"
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _judged(answer: str, truth: str) -> str:
    result = compute_score("truth", f"Answer: {answer}\n", truth, **_SETTINGS)
    return f"unscored: {result['unscored']}" if result["acc"] is None else "right" if result["acc"] else "wrong"


def describe(checked: dict[str, Any]) -> str:
    """The result in a line or a few."""
    if "skipped" in checked:
        return f"the true answers were not tried with the reward: {checked['skipped']}"
    tried = checked["tried"]
    lines = [f"the reward can judge {tried - checked['not_judged']:,} of {tried:,} different answers"]
    if checked["not_tried"]:
        lines[0] += f" ({checked['not_tried']:,} were not tried for lack of time)"
    lines += [f"  row {one['row']}, {one['truth']!r:.80}: {one['reason']:.120}" for one in checked["examples"][:5]]
    return "\n".join(lines)
