"""A Ray cluster over nodes of this machine, started by `ray start` on each, as on machines of one's own."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

from tests.cluster.nodes import Node

PORT, JOBS_PORT = 6379, 8265


class RayCluster:
    """Ray on a head and on any number of other nodes; a context. Ends what it started."""

    def __init__(self, folder: Path, head: Node, others: tuple[Node, ...] = (), slots: int = 1) -> None:
        self.folder, self.head, self.others, self.slots = folder, head, others, slots
        self.address = f"http://{head.address}:{JOBS_PORT}"
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "VERL_", "VLLM_", "SLURM_"))},
            # A token file in the home folder would make the head ask for one that the others do not have.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_raylet_start_wait_time_s": "300",
            "RAY_agent_register_timeout_ms": "300000",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self.started: list[subprocess.Popen] = []

    def __enter__(self) -> RayCluster:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._start(
                self.head, "--head", f"--port={PORT}", "--dashboard-host=0.0.0.0", f"--dashboard-port={JOBS_PORT}"
            )
            for node in self.others:
                self.join(node)
            self.ready(1 + len(self.others))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, node: Node, *arguments: str) -> None:
        log = (self.folder / f"ray-{node.name}.log").open("ab")
        self.started.append(
            node.popen(
                sys.executable,
                "-m",
                "ray.scripts.scripts",
                "start",
                "--block",
                "--disable-usage-stats",
                "--log-color=false",
                f"--node-ip-address={node.address}",
                "--num-cpus=32",
                f"--num-gpus={self.slots}",
                "--object-store-memory=300000000",
                # Ports that are given need not be waited for: Ray gives its agents half a minute.
                "--dashboard-agent-grpc-port=6381",
                "--dashboard-agent-listen-port=6382",
                "--metrics-export-port=6383",
                "--runtime-env-agent-port=6384",
                *arguments,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        )

    def join(self, node: Node) -> None:
        """Start Ray on one more node."""
        done = node.run(
            sys.executable,
            "-m",
            "verl_ext.launch.join",
            f"--head={self.head.address}:{PORT}",
            "--timeout=400",
            timeout=500,
            env=self.environment,
        )
        assert done.stdout.strip() == node.address, f"{done.stdout}{done.stderr}{self.logs()}"
        self._start(node, f"--address={self.head.address}:{PORT}")

    def ready(self, nodes: int) -> None:
        done = self.head.run(
            sys.executable,
            "-m",
            "verl_ext.launch.ready",
            f"--nodes={nodes}",
            f"--slots={self.slots}",
            "--timeout=400",
            f"--address={self.head.address}:{PORT}",
            timeout=500,
            env=self.environment,
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}{self.logs()}"

    def logs(self) -> str:
        return "".join(
            f"\n--- {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in self.folder.glob("ray-*.log")
        )

    def __exit__(self, *error) -> None:
        for process in self.started:
            process.terminate()
        for node in (self.head, *self.others):
            for line in node.processes():
                # Ray's own end takes up to half a minute.
                if "ray" in line or "VLLM" in line:
                    try:
                        os.kill(int(line.split()[0]), 9)
                    except ProcessLookupError:
                        continue
        for process in self.started:
            process.wait(30)

    def ray(self, *command: str, timeout: float = 120, check: bool = True) -> str:
        """`ray ...`, run on this machine as a user would."""
        done = subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", *command],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout + done.stderr

    def submit(self, name: str, *entrypoint: str, runtime_env: dict | None = None) -> str:
        """`ray job submit` without waiting; returns the job's id."""
        job = f"{name}-{secrets.token_hex(3)}"
        self.ray(
            "job",
            "submit",
            "--address",
            self.address,
            "--submission-id",
            job,
            "--no-wait",
            "--runtime-env-json",
            json.dumps(runtime_env or {}),
            "--",
            *entrypoint,
        )
        return job

    def status(self, job: str) -> str:
        """PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED."""
        from ray.job_submission import JobSubmissionClient

        return str(JobSubmissionClient(self.address, headers=self._headers()).get_job_status(job).value)

    def job_logs(self, job: str) -> str:
        from ray.job_submission import JobSubmissionClient

        return JobSubmissionClient(self.address, headers=self._headers()).get_job_logs(job)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}

    def wait_for(self, job: str, what: str, condition, timeout: float) -> None:
        """Wait for something that the job brings about; fails at once if it ends before."""
        end = time.monotonic() + timeout
        while not condition():
            state = self.status(job)
            assert state in ("PENDING", "RUNNING"), f"{what}: the job is {state}\n{self.job_logs(job)[-8000:]}"
            assert time.monotonic() < end, (
                f"{what}: not within {timeout:g} s\n{self.job_logs(job)[-8000:]}{self.logs()}"
            )
            time.sleep(1)

    def end(self, job: str, timeout: float) -> str:
        """The state in which the job ends."""
        end = time.monotonic() + timeout
        while (state := self.status(job)) in ("PENDING", "RUNNING"):
            assert time.monotonic() < end, f"not ended within {timeout:g} s\n{self.job_logs(job)[-8000:]}{self.logs()}"
            time.sleep(1)
        return state
