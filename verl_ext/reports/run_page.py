# SPDX-License-Identifier: Apache-2.0
"""`report.html`: the page of one run. Its figures, its charts, its prompts, and a few of its answers."""

from __future__ import annotations

import html
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verl_ext.files import write_whole
from verl_ext.reports.page import cards, document, made_with, sentences, table, text
from verl_ext.reports.prompts_seen import difficulty_table, prompt_charts, prompts_seen
from verl_ext.reports.run_plot import plot_line, run_charts
from verl_ext.reports.run_table import table as figures
from verl_ext.runs.ledger_check import ledger_faults
from verl_ext.runs.records import ANSWERS, Run, json_lines

FILE = "report.html"
_VERDICTS = ("right", "wrong", "unscored")
_SHOWN = 6


def run_page(run: Run) -> str:
    """The whole document.

    Raises:
        OSError: the drawing library is not installed.
    """
    charts = run_charts(run)
    seen, missing = prompts_seen(run)
    of_prompts = prompt_charts(seen) if seen else []
    faults = ledger_faults(run.ledger)
    prompts = (cards(of_prompts) + difficulty_table(seen) if seen else "") + "".join(
        f'<p class="note">{html.escape(said)}</p>' for said in missing
    )
    where = run.folder.resolve()
    body = f"""<p class="note">Versions: {html.escape(made_with(run.about, "versions"))}.
Machine: {html.escape(made_with(run.about, "machine"))}.</p>
{sentences(["The ledger does NOT add up.", *faults[:5]]) if faults else ""}
<div class="scroll"><pre>{html.escape(figures(run))}</pre></div>
<h2>Charts</h2>{cards(charts)}
<h2>Prompts</h2>{prompts}
<h2>Answers</h2>{_answers(run)}
"""
    return document(f"{where.parent.name} / {where.name}", body, [*charts, *of_prompts])


def _answers(run: Run) -> str:
    """The latest answers of each verdict, of different prompts."""
    path = run.folder / ANSWERS
    if not path.is_file():
        return f'<p class="note">No {ANSWERS} in the run\'s folder; allocation.answers=true keeps some.</p>'
    kept = latest(json_lines(path))
    head = ["verdict", "step", "prompt", "answer", "expected", "the reward said"]
    fields = ("prompt", "answer", "truth", "reward")
    rows = [[text(one["verdict"]), (str(one["step"]), float(one["step"])), *(text(one.get(f, "")) for f in fields)]
            for one in kept]  # fmt: skip
    counts = {verdict: sum(one["verdict"] == verdict for one in kept) for verdict in _VERDICTS}
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    note = f'<p class="note">{said}: the latest that were kept, each of another prompt.</p>'
    return note + table(head, rows, "answers")


def latest(answers: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last few of each verdict, each of another prompt, newest first."""
    found: dict[str, dict[Any, dict[str, Any]]] = {verdict: {} for verdict in _VERDICTS}
    for one in answers:
        if (of := found.get(one.get("verdict", ""))) is not None:
            of.pop(one.get("prompt"), None)
            of[one.get("prompt")] = one
            if len(of) > _SHOWN:
                of.pop(next(iter(of)))
    return [one for of in found.values() for one in reversed(of.values())]


def drawn_lines(run: Run) -> str:
    """Draw the plot of a run and write its page; a line on each."""
    return f"{plot_line(run)}\n{page_line(run)}"


def page_line(run: Run) -> str:
    """Write the page and return the line that names its file; a failure is named instead of raised."""
    path = Path(run.folder) / FILE
    try:
        write_whole(path, run_page(run).encode("utf-8", "replace"), private=True)
    except (OSError, ValueError) as error:
        return f"No page: {error}"
    return f"Page: {path}"
