"""The run's folder: config.yaml, run.json (versions and machine), and ledger.jsonl beside verl's metrics.jsonl.

The last two are cut back to the step that a run is resumed from.
"""

from __future__ import annotations

import json
import os
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.report.progress import progress_line
from verl_ext.report.provenance import provenance
from verl_ext.report.records import ABOUT, CONFIG, LEDGER, METRICS


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
        OmegaConf.save(config, os.path.join(self.path, CONFIG), resolve=True)
        # Where verl's file logger writes, unless the user has said so.
        os.environ.setdefault("VERL_FILE_LOGGER_PATH", os.path.join(self.path, METRICS))
        self._about = {**provenance(), "ended_at_step": None}
        self._write_about()
        self._kept_metrics: list[str] = []

    def _write_about(self) -> None:
        path = os.path.join(self.path, ABOUT)
        with open(path + ".tmp", "w", encoding="utf-8") as file:
            json.dump(self._about, file, indent=1)
        os.replace(path + ".tmp", path)

    def keep_until(self, step: int) -> None:
        """Cut both files back to `step` (0: a run from scratch keeps nothing)."""
        ledger = os.path.join(self.path, LEDGER)
        kept = _lines_until(ledger, step) if step > 0 else []
        temporary = ledger + ".tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(kept)
        os.replace(temporary, ledger)
        self._kept_metrics = _lines_until(os.path.join(self.path, METRICS), step) if step > 0 else []

    def restore_metrics(self, tracking: Any) -> None:
        """Give verl's file logger the lines it has just thrown away; once, before it logs anything."""
        file_logger = getattr(tracking, "logger", {}).get("file")
        if file_logger is not None and self._kept_metrics:
            file_logger.fp.write("".join(self._kept_metrics).encode())
        self._kept_metrics = []

    def end(self, step: int) -> None:
        """Note that `step` was the run's last."""
        self._about["ended_at_step"] = step
        self._write_about()

    def end_step(self, ledger_record: dict[str, Any], metrics: dict[str, Any], step: int, total: int) -> None:
        """Append the step's ledger line and print its progress line; note the run's end at step `total`."""
        with open(os.path.join(self.path, LEDGER), "a", encoding="utf-8") as file:
            file.write(json.dumps(ledger_record) + "\n")
        if step >= total:
            self.end(step)
        print(progress_line(step, total, metrics), flush=True)
