# SPDX-License-Identifier: Apache-2.0
"""Does a run's ledger add up? Checked from its lines alone, not by the code that wrote them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

_NEEDED = (
    *("issued", "tokens", "fates", "fate_tokens", "in_flight", "waiting", "in_flight_tokens", "waiting_tokens"),
    *("issued_total", "tokens_total", "fates_total", "fate_tokens_total"),
)


def malformed(line: dict[str, Any], names: Sequence[str] = _NEEDED) -> list[str]:
    """What of these a line of the ledger lacks, or has in another form than a count, or counts by fate."""
    missing = [name for name in names if name not in line]
    found = [f"no {', '.join(missing)} in its line"] if missing else []
    for name in names:
        if name in line and not _in_form(name, line[name]):
            kind = "counts by fate" if name.startswith("fate") else "a count"
            found.append(f"{name} is {line[name]!r:.40}, not {kind}")
    return found


def _in_form(name: str, value: Any) -> bool:
    if name.startswith("fate"):
        return isinstance(value, dict) and all(_in_form("", count) for count in value.values())
    return isinstance(value, int | float) and not isinstance(value, bool)


def ledger_faults(lines: Sequence[dict[str, Any]]) -> list[str]:
    """What does not add up, in rollouts and in tokens; nothing where all does.

    At every step, issued so far = sum over fates + in flight + waiting; the steps' own counts sum to the totals; and no
    total is negative.

    Args:
        lines: lines of ledger.jsonl in rising order of steps, from the first.
    """
    faults: list[str] = []
    sums: dict[str, Counter[str] | int] = {"issued": 0, "tokens": 0, "fates": Counter(), "fate_tokens": Counter()}
    for line in lines:
        step = line.get("step")
        if wrong := malformed(line):
            faults += [f"step {step}: {what}" for what in wrong]
            continue
        for what, total, by_fate, in_flight, waiting in (
            ("rollouts", "issued_total", "fates_total", "in_flight", "waiting"),
            ("tokens", "tokens_total", "fate_tokens_total", "in_flight_tokens", "waiting_tokens"),
        ):
            parts = sum(line[by_fate].values()), line[in_flight], line[waiting]
            if line[total] != sum(parts):
                faults.append(
                    f"step {step}: {line[total]} {what} issued, but {parts[0]} with a fate + {parts[1]} in flight + "
                    f"{parts[2]} waiting = {sum(parts)}"
                )
            if min([line[total], *parts[1:], *line[by_fate].values()], default=0) < 0:
                faults.append(f"step {step}: a negative count of {what}")
        for name in ("issued", "tokens"):
            sums[name] += line[name]
            if sums[name] != line[f"{name}_total"]:
                total = line[f"{name}_total"]
                faults.append(f"step {step}: {name} of the steps so far sum to {sums[name]}, not {total}")
        for name in ("fates", "fate_tokens"):
            for fate, count in line[name].items():
                sums[name][fate] += count
            total = line[f"{name}_total"]
            if wrong := sorted(f for f in {*sums[name], *total} if sums[name][f] != total.get(f, 0)):
                faults.append(f"step {step}: {name} so far do not sum to the totals for {', '.join(wrong)}")
    return faults
