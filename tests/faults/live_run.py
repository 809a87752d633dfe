"""A real run as a child, watched: what it has logged, the processes it started, and what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.bench_engine import allocated_bytes
from tests.integration.real_run import RealRun, json_lines
from verl_ext.launch.cleanup import SHARED_MEMORY, paths_in_use

MARK = "VERL_EXT_FAULT_TEST"
START_S = 1800.0


class LiveRun:
    """`python -m verl_ext.main_ppo ...`; every process it starts carries a mark in its environment."""

    def __init__(
        self, folder: Path, *overrides: str, command: list[str] | None = None, run_folder: Path | None = None
    ) -> None:
        self.folder, self.run_folder = folder, run_folder or folder / "run"
        folder.mkdir(parents=True, exist_ok=True)
        self.mark = uuid.uuid4().hex
        # Sockets of vLLM, Ray and others are made under it; their paths must be short.
        self.scratch = Path("/tmp", f"vf{self.mark[:6]}")
        self.scratch.mkdir()
        self.shm_before = set(os.listdir("/dev/shm"))
        command = command or [
            sys.executable, "-m", "verl_ext.main_ppo", *overrides,
            "verbose=true", f"trainer.default_local_dir={self.run_folder}",
        ]  # fmt: skip
        environment = {
            **os.environ, MARK: self.mark, "SPT_NOENV": "1", "RAY_DEDUP_LOGS": "0", "TMPDIR": str(self.scratch),
            "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        self.log_path = folder / f"{self.mark[:6]}.log"
        self.began_ns = time.time_ns()
        with open(self.log_path, "w") as log:
            self.child = subprocess.Popen(
                command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
                # Tests that run in a shell's background inherit an ignored SIGINT, and Python then does not see Ctrl-C.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )  # fmt: skip

    # ------------------------------------------------ what it does

    @property
    def log(self) -> str:
        """All it printed, without colours."""
        return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", self.log_path.read_text(errors="replace"))

    def steps(self) -> list[int]:
        """Steps whose metrics are logged, as far as this run goes on from them; none before it has touched the file."""
        path = self.run_folder / "metrics.jsonl"
        if not path.exists() or path.stat().st_mtime_ns < self.began_ns:
            return []
        lines = path.read_bytes().split(b"\n")[:-1]
        return [line["step"] for line in map(json.loads, lines) if "training/global_step" in line["data"]]

    def processes(self) -> list[psutil.Process]:
        """All that carry the mark."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def process(self, title: str) -> psutil.Process:
        """The one whose title begins so."""
        found = [p for p in self.processes() if " ".join(p.cmdline()).startswith(title)]
        assert len(found) == 1, f"{title}: {[' '.join(p.cmdline())[:80] for p in self.processes()]}"
        return found[0]

    def wait_for(self, what: Callable[[], bool], seconds: float, doing: str) -> None:
        """Wait until something is so; an early end of the run is an error."""
        deadline = time.monotonic() + seconds
        while not what():
            assert self.child.poll() is None, f"it ended with {self.child.returncode}\n{self.log[-6000:]}"
            assert time.monotonic() < deadline, f"{doing}: not within {seconds:.0f} s\n{self.log[-6000:]}"
            time.sleep(0.2)

    def wait_for_step(self, step: int, seconds: float = START_S) -> None:
        """Wait until the step's metrics are logged."""
        self.wait_for(lambda: step in self.steps(), seconds, f"step {step}")

    def end(self, number: int | None = None, within: float = 300.0) -> tuple[int, float]:
        """Send a signal, if any, and wait for the end; exit status and seconds."""
        began = time.monotonic()
        if number is not None:
            os.kill(self.child.pid, number)
        try:
            status = self.child.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {within:.0f} s\n{self.log[-6000:]}") from None
        return status, time.monotonic() - began

    # ------------------------------------------------ what it leaves

    def nothing_left(self, within: float = 30.0) -> str:
        """No process with the mark, no socket of vLLM or others, no shared memory; says what was looked at."""
        deadline = time.monotonic() + within
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left, f"left running: {[' '.join(p.cmdline())[:100] for p in left]}"
        sockets = [
            str(path) for path in self.scratch.rglob("*")
            # Ray keeps a folder a session, with its logs and the names of its sockets, which nobody listens on.
            if "ray" not in path.relative_to(self.scratch).parts[0] and stat.S_ISSOCK(path.lstat().st_mode)
        ]  # fmt: skip
        assert not sockets, f"sockets left: {sockets}"
        in_use = paths_in_use(filter(str.isdigit, os.listdir("/proc")))
        new = {SHARED_MEMORY + name for name in set(os.listdir(SHARED_MEMORY)) - self.shm_before}
        orphans = new - in_use
        assert not orphans, f"shared memory left: {sorted(orphans)}"
        return "no process, socket or shared memory left"

    def result(self) -> RealRun:
        """What is in its folder."""
        ledger = self.run_folder / "ledger.jsonl"
        return RealRun(
            self.run_folder, self.log, json_lines(self.run_folder / "metrics.jsonl"), json_lines(ledger)
        )  # fmt: skip

    def tidy(self) -> None:
        """End whatever is left, so that the next test has the machine to itself."""
        for process in [*self.processes()]:
            try:
                process.kill()
            except psutil.Error:
                continue
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        subprocess.run(["rm", "-rf", str(self.scratch)], check=False)


def saved_steps(run_folder: Path) -> list[int]:
    """Steps with a checkpoint folder."""
    return sorted(int(path.name.removeprefix("global_step_")) for path in run_folder.glob("global_step_*"))


def tracker(run_folder: Path) -> str:
    """The step that a resume would take."""
    return (run_folder / "latest_checkpointed_iteration.txt").read_text()


def kind_of(command: list[str]) -> str:
    """Ray's and vLLM's own title, the program, or what a Python runs: its module or its script."""
    title = " ".join(command)
    if title.startswith(("ray::", "VLLM::")):
        return title.split(".")[0].split()[0]
    if "verl_ext.main_ppo" in title:
        return "main_ppo"
    program = os.path.basename(command[0])
    if not program.startswith("python"):
        return program
    rest = [word for word in command[1:] if not word.startswith("-")]
    return os.path.basename(rest[0]) if rest else program


def memory_by_name(processes: list[psutil.Process]) -> dict[str, int]:
    """Bytes that processes have allocated, by what they are; none is left out."""
    memory: dict[str, int] = {}
    for process in processes:
        try:
            name = kind_of(process.cmdline() or [process.name()])
            memory[name] = memory.get(name, 0) + allocated_bytes(process)
        except psutil.Error:
            continue
    return memory
