# SPDX-License-Identifier: Apache-2.0
"""`python -m verl_ext.report RUN_FOLDER`: print a run's table, draw its plot and write its page, also while it runs."""

from __future__ import annotations

import argparse
import sys

from verl_ext.files import restrict_umask
from verl_ext.reports.run_page import drawn_lines
from verl_ext.reports.run_table import table
from verl_ext.runs.ledger_check import ledger_faults
from verl_ext.runs.records import RunError, read_run


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns the exit status: 1 if the ledger does not add up, 2 if the folder cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m verl_ext.report", description="Table, plot and page of a run.")
    parser.add_argument("folder", help="the run's folder: outputs/<trainer.project_name>/<trainer.experiment_name>")
    parser.add_argument("--no-plot", action="store_true", help="print the table only")
    args = parser.parse_args(argv)
    restrict_umask()
    try:
        run = read_run(args.folder)
    except (RunError, OSError) as error:
        print(f"verl_ext.report: {error}", file=sys.stderr)
        return 2
    print(table(run))
    if not args.no_plot:
        print(f"\n{drawn_lines(run)}")
    return 1 if ledger_faults(run.ledger) else 0


if __name__ == "__main__":
    sys.exit(main())
