"""The run's folder: config.yaml, run.json (versions and machine), and ledger.jsonl beside verl's metrics.jsonl.

The last two are cut back to the step that a run is resumed from.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.files import append_opener, restrict_umask, write_whole
from verl_ext.masking import masked
from verl_ext.runs.provenance import provenance
from verl_ext.runs.records import ABOUT, CONFIG, LEDGER, METRICS
from verl_ext.runs.step_line import progress_line


def _lines_until(path: str, step: int) -> list[str]:
    """The lines of a JSON-lines file up to `step`; a last line cut off by a kill is left out."""
    kept = []
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            for line in file:
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if record["step"] <= step:
                    kept.append(line if line.endswith("\n") else line + "\n")
    return kept


class RunFolder:
    """Writes ledger.jsonl and keeps verl's metrics across a resume (verl's file logger empties the file it opens)."""

    def __init__(self, path: str, config: DictConfig) -> None:
        self.path = os.path.abspath(path)
        os.makedirs(self.path, exist_ok=True)
        # Readable by others, as the metrics are: without the credentials that a configuration may carry.
        restrict_umask()
        plain = masked(OmegaConf.to_container(config, resolve=True))
        # A run that only validates may look at another's folder.
        guest = OmegaConf.select(config, "trainer.val_only") and os.path.exists(os.path.join(self.path, CONFIG))
        if not guest:
            write_whole(os.path.join(self.path, CONFIG), OmegaConf.to_yaml(OmegaConf.create(plain)).encode())
        # Where verl's file logger writes, unless the user has said so.
        os.environ.setdefault("VERL_FILE_LOGGER_PATH", os.path.join(self.path, METRICS))
        self._about = {**provenance(), "ended_at_step": None}
        if not guest:
            self._write_about()
        self._kept_metrics: list[str] = []

    def _write_about(self) -> None:
        write_whole(os.path.join(self.path, ABOUT), json.dumps(self._about, indent=1).encode())

    def keep_until(self, step: int) -> None:
        """Cut both files back to `step` (0: a run from scratch keeps nothing)."""
        ledger = os.path.join(self.path, LEDGER)
        kept = _lines_until(ledger, step) if step > 0 else []
        write_whole(ledger, "".join(kept).encode())
        self._keep_metrics(step)

    def keep_all(self) -> None:
        """The ledger stays as it is, and what is logged is added to the metrics."""
        self._keep_metrics(sys.maxsize)

    def _keep_metrics(self, step: int) -> None:
        # A run that was killed before it had given them back left them here; its metrics are empty or cut short.
        aside = self._metrics_aside
        before = aside if os.path.exists(aside) else os.path.join(self.path, METRICS)
        self._kept_metrics = _lines_until(before, step) if step > 0 else []
        write_whole(aside, "".join(self._kept_metrics).encode())

    @property
    def _metrics_aside(self) -> str:
        return os.path.join(self.path, METRICS + ".kept")

    def restore_metrics(self, tracking: Any) -> None:
        """Give verl's file logger the lines it has just thrown away; once, before it logs anything."""
        file_logger = getattr(tracking, "logger", {}).get("file")
        if file_logger is not None and self._kept_metrics:
            file_logger.fp.write("".join(self._kept_metrics).encode())
            os.fsync(file_logger.fp.fileno())
        self._kept_metrics = []
        if os.path.exists(self._metrics_aside):
            os.unlink(self._metrics_aside)

    def end(self, step: int) -> None:
        """Note that `step` was the run's last."""
        self._about["ended_at_step"] = step
        self._write_about()

    def add_ledger_line(self, ledger_record: dict[str, Any]) -> None:
        """Append the step's ledger line."""
        with open(os.path.join(self.path, LEDGER), "a", encoding="utf-8", opener=append_opener) as file:
            file.write(json.dumps(ledger_record) + "\n")

    def end_step(self, metrics: dict[str, Any], step: int, total: int, stopped: bool = False) -> None:
        """Print the step's progress line; note the run's end at step `total`, unless it was stopped there."""
        if step >= total and not stopped:
            self.end(step)
        print(progress_line(step, total, metrics), flush=True)
