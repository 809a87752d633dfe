# SPDX-License-Identifier: Apache-2.0
"""The table at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence

from verl_ext.reports.advice import advice, beginning
from verl_ext.runs.ledger_check import ledger_faults, malformed
from verl_ext.runs.records import Run

_WIDTH = 78

PHASES = (
    ("gen", "rollouts: generate and score"),
    ("reward", "reward model"),
    ("old_log_prob", "old log-probs"),
    ("ref", "reference log-probs"),
    ("values", "critic's values"),
    ("adv", "advantages"),
    ("update_critic", "critic update"),
    ("update_actor", "policy update"),
    ("update_weights", "weights to the engine"),
    ("save_checkpoint", "checkpoints"),
)
"""verl's timers that do not overlap and lie inside its timer `step`; `testing` lies outside."""


def table(run: Run) -> str:
    """The run in figures: steps, rollouts, accuracy, time by phase, fates, what to try, whether the ledger adds up."""
    parts = [_summary(run), _times(run), _fates(run), _advice(run), _verdict(run)]
    rule = "-" * _WIDTH
    return f"\n{rule}\n".join(["", *[part for part in parts if part], ""]).strip("\n")


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A text column and right-aligned numbers."""
    return "\n".join(f"{row[0]:<34}" + "".join(f"{cell:>14}" for cell in row[1:]) for row in [head, *rows])


def _summary(run: Run) -> str:
    steps = run.steps
    last = steps[-1].data if steps else {}
    of = f" of {run.total_steps}" if run.total_steps and run.total_steps != len(steps) else ""
    rows = [("run", str(run.folder)), ("training steps", f"{len(steps)}{of}")]
    for name, key in (("rollouts", "allocation/rollouts"), ("generated tokens", "allocation/tokens")):
        if key in last:
            rows.append((name, f"{last[key]:,.0f}  ({last[key] / max(len(steps), 1):,.1f} a step)"))
    if shares := run.series("allocation/effective_share")[1]:
        few = min(5, len(shares))
        first, end = sum(shares[:few]) / few, sum(shares[-few:]) / few
        mean = sum(shares) / len(shares)
        rows.append(("effective share", f"{mean:.3f} on average; first {few} steps {first:.3f}, last {few} {end:.3f}"))
    for source, (estimate, points) in run.accuracy().items():
        (first_step, _, first), (last_step, _, final) = points[0], points[-1]
        change = f" -> {final:.3f} (step {last_step}, {final - first:+.3f})" if len(points) > 1 else ""
        rows.append((f"held-out {estimate}", f"{first:.3f} (step {first_step}){change}, {source}"))
    if skipped := last.get("allocation/skipped_updates"):
        rows.append(("steps without update", f"{skipped:.0f}"))
    return "\n".join(f"{name:<22}{value}" for name, value in rows)


def _times(run: Run) -> str:
    steps, step_times = run.series("timing_s/step")
    if not steps:
        return ""
    total, count = sum(step_times), len(step_times)
    rows = [(label, sum(times)) for timer, label in PHASES if (times := run.series(f"timing_s/{timer}")[1])]
    rows.append(("rest of the step", total - sum(seconds for _, seconds in rows)))
    cells = [(label, f"{t / count:.2f}", f"{t:.1f}", f"{100 * t / total:.1f}" if total else "-") for label, t in rows]
    cells.append(("all steps", f"{total / count:.2f}", f"{total:.1f}", "100.0"))
    testing = sum(run.series("timing_s/testing")[1])
    if testing:
        cells.append(("validation, besides", "", f"{testing:.1f}", ""))
    return _columns(("time", "s a step", "s", "per cent"), cells)


def _fates(run: Run) -> str:
    # What is wrong with the line is in the verdict.
    if not run.ledger or malformed(run.ledger[-1]):
        return ""
    last = run.ledger[-1]
    issued, tokens = last["issued_total"], last["tokens_total"]

    def row(name: str, n: int, t: int) -> tuple[str, ...]:
        return name, f"{n:,}", f"{100 * n / issued:.1f}" if issued else "-", f"{t:,}"

    by_count = sorted(last["fates_total"].items(), key=lambda item: -item[1])
    rows = [row(fate, n, last["fate_tokens_total"].get(fate, 0)) for fate, n in by_count if n]
    for name, key in (("waiting for a later step", "waiting"), ("in flight", "in_flight")):
        if last[key]:
            rows.append(row(name, last[key], last[f"{key}_tokens"]))
    rows.append(row("issued", issued, tokens))
    return _columns(("fate", "rollouts", "per cent", "tokens"), rows)


def _advice(run: Run) -> str:
    seen = beginning(run)
    found = advice(seen) if seen else []
    head = "what the first steps suggest, by docs/evidence.md (on toy tasks)"
    return "\n".join([head, *(f"- {line}" for line in found)]) if found else ""


def _verdict(run: Run) -> str:
    if not run.ledger:
        return f"No ledger in {run.folder}: what became of the rollouts is not known."
    faults = ledger_faults(run.ledger)
    if faults:
        shown = "\n".join(f"  {fault}" for fault in faults[:5])
        more = f"\n  and {len(faults) - 5} more" if len(faults) > 5 else ""
        return f"The ledger does NOT add up:\n{shown}{more}"
    last = run.ledger[-1]
    return (
        f"The ledger adds up: {last['issued_total']:,} rollouts issued = {sum(last['fates_total'].values()):,} with a "
        f"fate + {last['waiting']:,} waiting + {last['in_flight']:,} in flight,\n"
        f"and so do their {last['tokens_total']:,} tokens, at each of {len(run.ledger)} steps."
    )
