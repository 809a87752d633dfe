# SPDX-License-Identifier: Apache-2.0
"""What a person sees of a run: a progress line a step, and at the end a table and a plot.

    python -m verl_ext.report outputs/<project>/<experiment>

Reads only the run's folder; imports no verl, Ray or torch, and matplotlib only where a plot is drawn.
"""

from .progress import progress_line
from .records import Run, RunError, StepRecord, read_run

__all__ = ["Run", "RunError", "StepRecord", "progress_line", "read_run"]
