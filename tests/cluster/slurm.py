"""A Slurm on this machine: slurmctld and munged here, slurmd in each node's namespaces, all files in one folder."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from tests.cluster.nodes import DIES_WITH_US, HOST, Node, Nodes, wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "slurm" / "verl_ext.sbatch"
INSTALL = REPOSITORY / "scripts" / "slurm" / "install_local.sh"
BUSY_S = 420
"""Seconds that a job may take on a machine with much else to do; 15 to 30 where it is idle."""
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"

CONF = """
ClusterName=verlext
SlurmctldHost={host}({address})
SlurmctldPort=17002
SlurmdPort=17003
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until its old credential is out of date: seconds, not two minutes.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
SlurmdTimeout=15
SchedulerParameters=sched_interval=1,batch_sched_delay=0
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """The cluster; a context. Ends its daemons."""

    def __init__(self, nodes: Nodes, folder: Path) -> None:
        self.nodes, self.folder = nodes, folder
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "VERL_EXT_", "RAY_"))},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": PATH,
        }
        self.daemons: list[subprocess.Popen] = []

    def __enter__(self) -> Slurm:
        self.folder.mkdir(parents=True)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        lines = "\n".join(
            f"NodeName={node.name} NodeAddr={node.address} CPUs=32 RealMemory=100000 State=UNKNOWN"
            for node in self.nodes.nodes
        )
        conf = CONF.format(host=os.uname().nodename, address=HOST, folder=self.folder, nodes=lines)
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        try:
            self._daemon(
                "munged",
                "--foreground",
                f"--key-file={key}",
                f"--socket={self.folder}/munge.socket",
                f"--pid-file={self.folder}/munged.pid",
                f"--seed-file={self.folder}/munged.seed",
                f"--log-file={self.folder}/munged.log",
            )
            self._wait("munged", (self.folder / "munge.socket").exists)
            self._daemon("slurmctld", "-D", "-c")
            for node in self.nodes.nodes:
                self.start_node(node)
            self._wait("idle nodes", lambda: self.states().count("idle") == len(self.nodes.nodes))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait(self, what: str, condition) -> None:
        try:
            wait_until(what, condition, 60)
        except TimeoutError as error:
            raise AssertionError(f"{error}{self.logs()}") from error

    def _daemon(self, *command: str) -> None:
        log = (self.folder / f"{command[0]}.out").open("ab")
        program = shutil.which(command[0], path=PATH) or command[0]
        self.daemons.append(
            subprocess.Popen(
                [*DIES_WITH_US, program, *command[1:]],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        )

    def start_node(self, node: Node) -> None:
        log = (self.folder / f"slurmd-{node.name}.out").open("ab")
        program = shutil.which("slurmd", path=PATH)
        self.daemons.append(
            node.popen(
                program, "-D", "-N", node.name, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        )

    def __exit__(self, *error) -> None:
        with suppress(Exception):
            self.command("scancel", "--user=root")
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def command(self, *command: str, **environment: str) -> str:
        """A client command's output."""
        done = subprocess.run(
            command,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        files = sorted(self.folder.glob("*.log")) + sorted(self.folder.glob("*.out"))
        return "".join(f"\n--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in files)

    def states(self) -> list[str]:
        """A word a node: idle, alloc, down, ..."""
        return self.command("sinfo", "-h", "-N", "-o", "%t").split()

    def submit(self, folder: Path, *arguments: str, options: tuple[str, ...] = (), **environment: str) -> Job:
        """Submit scripts/slurm/verl_ext.sbatch as a user would from `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        out = self.command(
            "sbatch",
            "--parsable",
            f"--chdir={folder}",
            f"--nodes={len(self.nodes.nodes)}",
            *options,
            str(SCRIPT),
            *arguments,
            **environment,
        )
        number = out.strip()
        return Job(self, number, folder / f"verl_ext-{number}.log")


class Job:
    """A submitted job."""

    def __init__(self, slurm: Slurm, number: str, log: Path) -> None:
        self.slurm, self.number, self.log = slurm, number, log

    def show(self) -> dict[str, str]:
        line = self.slurm.command("scontrol", "show", "job", "-o", self.number)
        return dict(part.split("=", 1) for part in line.split() if "=" in part)

    @property
    def state(self) -> str:
        return self.show()["JobState"]

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait_for(self, pattern: str, timeout: float = BUSY_S, times: int = 1) -> None:
        """Wait for the job's log to say so; fails at once if the job ends before."""

        def said() -> bool:
            if len(re.findall(pattern, self.text)) >= times:
                return True
            assert self.state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED"), self.failure(pattern)
            return False

        try:
            wait_until(pattern, said, timeout)
        except TimeoutError as error:
            raise AssertionError(self.failure(str(error))) from error

    def end(self, timeout: float = BUSY_S) -> tuple[str, str]:
        """Wait for the job's end.

        Returns:
            State and exit code, e.g. ("FAILED", "7:0").
        """
        deadline = time.monotonic() + timeout
        while (shown := self.show())["JobState"] in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED"):
            if time.monotonic() > deadline:
                raise AssertionError(self.failure(f"not ended within {timeout:g} s"))
            time.sleep(0.3)
        return shown["JobState"], shown["ExitCode"]

    def failure(self, what: str) -> str:
        queue = self.slurm.command("squeue") + self.slurm.command("sinfo", "-R")
        return f"{what}\n{self.show()}\n{queue}\n{self.text[-6000:]}{self.slurm.logs()}"
