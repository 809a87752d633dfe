# SPDX-License-Identifier: Apache-2.0
"""The run's folder: config.yaml, run.json (versions and machine), and ledger.jsonl beside verl's metrics.jsonl.

Nothing that was recorded there is lost: what a run does not go on from is moved to a folder `earlier-N` beside it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.files import next_path, restrict_umask, write_whole
from verl_ext.masking import masked
from verl_ext.runs.line_file import LineFile, not_written, read_lines
from verl_ext.runs.provenance import provenance
from verl_ext.runs.records import ABOUT, ANSWERS, CONFIG, LEDGER, METRICS, OUTCOMES
from verl_ext.runs.step_line import progress_line

logger = logging.getLogger(__name__)

_LOGGERS_FILE = "VERL_FILE_LOGGER_PATH"


class RunFolder:
    """Writes ledger.jsonl and keeps verl's metrics across a resume (verl's file logger empties the file it opens)."""

    def __init__(self, path: str, config: DictConfig) -> None:
        self.path = os.path.abspath(path)
        os.makedirs(self.path, exist_ok=True)
        # Readable by others, as the metrics are: without the credentials that a configuration may carry.
        restrict_umask()
        plain = masked(OmegaConf.to_container(config, resolve=True))
        plain.pop("verbose", None)
        self._config = OmegaConf.to_yaml(OmegaConf.create(plain)).encode()
        # Where verl's file logger writes, unless the user has said so.
        os.environ.setdefault(_LOGGERS_FILE, self._in(METRICS))
        loggers = OmegaConf.select(config, "trainer.logger") or []
        self._wandb = bool({"wandb", "tracking"} & ({loggers} if isinstance(loggers, str) else set(loggers)))
        self._about: dict[str, Any] = {**provenance(), "ended_at_step": None}
        self._kept_metrics = b""
        self._ledger: LineFile | None = None
        self._answers: LineFile | None = None

    @property
    def outcomes(self) -> str:
        """The folder of `allocation.record=auto`."""
        return self._in(OUTCOMES)

    def _in(self, name: str) -> str:
        return os.path.join(self.path, name)

    @property
    def _metrics(self) -> str:
        return os.environ[_LOGGERS_FILE]

    def _write(self, name: str, payload: bytes) -> None:
        try:
            write_whole(self._in(name), payload, private=os.path.basename(name).startswith(ANSWERS))
        except OSError as error:
            raise not_written(self._in(name), error) from error

    def _write_about(self) -> None:
        self._write(ABOUT, json.dumps(self._about, indent=1).encode())

    # ------------------------------------------------ the beginning of a run

    def begin(self, step: int) -> None:
        """A run goes on from `step`; 0: from scratch. Its records are the lines up to there.

        Lines of later steps, lines that cannot be read, and another configuration go to `earlier-N`, with a word.

        Raises:
            NotWrittenError: a file cannot be read or written.
        """
        before = self._read_about() if step else {}
        kept = self._put_aside(step)
        self._write(LEDGER, kept[LEDGER])
        if kept[ANSWERS] or os.path.exists(self._in(ANSWERS)):
            self._write(ANSWERS, kept[ANSWERS])
        self._keep_metrics(kept[METRICS])
        self._write(CONFIG, self._config)
        if self._wandb:
            self._name_wandb_run(before.get("wandb_run"))
        self._write_about()
        self._ledger = self._answers = None

    def visit(self) -> None:
        """A run that only validates: the records of a run that is here stay as they are, byte for byte.

        Its own metrics go to validation-N.jsonl then. In a folder without a run it is a run like any other.
        """
        if not os.path.exists(self._in(CONFIG)):
            return self.begin(0)
        if self._metrics == self._in(METRICS):
            os.environ[_LOGGERS_FILE] = str(next_path(self._in("validation-{}.jsonl")))
        records, _ = read_lines(self._metrics)
        self._keep_metrics(b"".join(line for _, line in records))

    def _put_aside(self, step: int) -> dict[str, bytes]:
        """Move what this run does not go on from; returns what it does of ledger, metrics and answers."""
        # A run that was killed before it had given them back left them here; its metrics are empty or cut short.
        kept = self._metrics_kept
        sources = {LEDGER: self._in(LEDGER), METRICS: kept if os.path.exists(kept) else self._metrics,
                   ANSWERS: self._in(ANSWERS)}  # fmt: skip
        keep, aside = {}, {}
        for name, path in sources.items():
            records, unreadable = read_lines(path)
            keep[name] = b"".join(line for at, line in records if at <= step and step > 0)
            aside[name] = b"".join(line for at, line in records if at > step or step <= 0)
            aside[name + ".unreadable"] = b"".join(unreadable)
            if unreadable:
                logger.warning("%s: %d lines that cannot be read are put aside", path, len(unreadable))
        aside = {name: content for name, content in aside.items() if content}
        try:
            other = Path(self._in(CONFIG)).read_bytes() != self._config
        except OSError:
            other = False
        if aside or other:
            folder = next_path(self._in("earlier-{}"))
            folder.mkdir()
            for name, content in aside.items():
                self._write(os.path.join(folder.name, name), content)
            for name in (CONFIG, ABOUT):
                if os.path.isfile(self._in(name)):
                    shutil.copy2(self._in(name), folder / name, follow_symlinks=False)
            logger.warning("%s: what was recorded here before and is not gone on from is in %s", self.path, folder)
        return keep

    def _keep_metrics(self, lines: bytes) -> None:
        self._kept_metrics = lines
        self._write(os.path.relpath(self._metrics_kept, self.path), lines)

    @property
    def _metrics_kept(self) -> str:
        return self._metrics + ".kept"

    def _read_about(self) -> dict[str, Any]:
        try:
            about = json.loads(Path(self._in(ABOUT)).read_bytes())
        except (OSError, ValueError):
            return {}
        return about if isinstance(about, dict) else {}

    def _name_wandb_run(self, before: Any) -> None:
        """A resumed run goes on with the run of W&B that it began; the user's own WANDB_RUN_ID comes first."""
        name = before if isinstance(before, str) and before else os.urandom(4).hex()
        self._about["wandb_run"] = os.environ.setdefault("WANDB_RUN_ID", name)
        os.environ.setdefault("WANDB_RESUME", "allow")

    def restore_metrics(self, tracking: Any) -> None:
        """Give verl's file logger the lines it has just thrown away; once, before it logs anything.

        From here on its file is a `LineFile`.
        """
        file_logger = getattr(tracking, "logger", {}).get("file")
        if file_logger is not None and not isinstance(file_logger.fp, LineFile):
            file_logger.fp.close()
            file_logger.fp = LineFile(self._metrics, self._kept_metrics)
        self._kept_metrics = b""
        if os.path.exists(self._metrics_kept):
            os.unlink(self._metrics_kept)

    # ------------------------------------------------ its steps and its end

    def end(self, step: int) -> None:
        """Note that `step` was the run's last."""
        self._about["ended_at_step"] = step
        self._write_about()

    def add_ledger_line(self, ledger_record: dict[str, Any]) -> None:
        """Append the step's ledger line."""
        if self._ledger is None:
            self._ledger = LineFile(self._in(LEDGER))
        self._ledger.write(json.dumps(ledger_record).encode() + b"\n")

    def add_answers(self, answers: Sequence[dict[str, Any]]) -> None:
        """Append a step's sample answers."""
        if answers and self._answers is None:
            self._answers = LineFile(self._in(ANSWERS), private=True)  # text of the data and of the policy
        for answer in answers:
            self._answers.write(json.dumps(answer).encode() + b"\n")

    def end_step(self, metrics: dict[str, Any], step: int, total: int, stopped: bool = False) -> None:
        """Print the step's progress line; note the run's end at step `total`, unless it was stopped there."""
        if step >= total and not stopped:
            self.end(step)
        print(progress_line(step, total, metrics), flush=True)
