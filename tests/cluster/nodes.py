"""Nodes of a cluster on one machine: each a network, process, host-name and mount namespace of its own.

A node has its own address, ports, process table, host name, /tmp and /dev/shm; all else, the home folder and the
environment included, is shared, as on most clusters. Killing a node kills all in it at once, as a power cut does.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SUBNET = "10.117.83"
BRIDGE = "vxbr0"
HOST = f"{SUBNET}.254"
"""This machine's address on the nodes' network."""


_IDLE = "sleep 86399"
"""What process 1 of a node waits for."""


DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")
"""Before a command: it ends when this process is killed."""


class NoNamespaces(RuntimeError):
    """This machine does not let us make such nodes; says why."""


def _run(*command: str, check: bool = True) -> subprocess.CompletedProcess:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if check and done.returncode:
        raise NoNamespaces(f"{shlex.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done


@dataclass
class Node:
    """One node."""

    name: str
    """Host name."""
    address: str
    """On the nodes' network."""
    holder: subprocess.Popen | None = None
    """The process whose end is the node's end."""
    init: int = 0
    """Process 1 of the node, as this machine numbers it."""

    def command(self, *command: str) -> list[str]:
        """The command that runs `command` inside the node."""
        return ["nsenter", f"--target={self.init}", "--all", "--", *command]

    def popen(self, *command: str, **options) -> subprocess.Popen:
        return subprocess.Popen(self.command(*command), **options)

    def run(self, *command: str, timeout: float = 60, **options) -> subprocess.CompletedProcess:
        return subprocess.run(self.command(*command), capture_output=True, text=True, timeout=timeout, **options)

    def processes(self) -> list[str]:
        """Command lines of what runs inside, without process 1."""
        if not self.alive:
            return []
        inside = os.readlink(f"/proc/{self.init}/ns/pid")
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != self.init:
                with suppress(OSError):
                    if os.readlink(f"/proc/{entry}/ns/pid") == inside:
                        line = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                        line = line.strip() or Path(f"/proc/{entry}/comm").read_text().strip()
                        if line != _IDLE:
                            found.append(f"{entry} {line}")
        return found

    @property
    def alive(self) -> bool:
        return self.holder is not None and self.holder.poll() is None

    def kill(self) -> None:
        """A power cut."""
        if self.holder is not None:
            if self.init > 1:
                with suppress(ProcessLookupError):
                    os.kill(self.init, signal.SIGKILL)
            self.holder.kill()
            self.holder.wait()
            self.init = 0

    def start(self, hosts: Path) -> None:
        """Bring the node up, also again after `kill`."""
        mount = (
            "mount --make-rprivate / && mount -t tmpfs -o size=4g none /dev/shm "
            f"&& {_own_tmp()} && mount --bind {shlex.quote(str(hosts))} /etc/hosts && hostname {self.name} "
            # Process 1 has to take in whatever its node's programs leave behind.
            f"&& echo up && while true; do {_IDLE} & wait $!; done"
        )
        self.holder = subprocess.Popen(
            [
                *DIES_WITH_US,
                "nsenter",
                f"--net=/run/netns/{_netns(self.name)}",
                "unshare",
                "--uts",
                "--mount",
                "--ipc",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "bash",
                "-c",
                mount,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if self.holder.stdout.readline() != "up\n":
            self.holder.kill()
            raise NoNamespaces(f"node {self.name}: {self.holder.stderr.read().strip()}")
        children = Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children").read_text().split()
        # `nsenter` has become `unshare`, whose only child is the node's process 1.
        self.init = int(children[0])


def _own_tmp() -> str:
    """A /tmp of the node's own; a repository or an environment under this machine's stays where it is."""
    commands = "mount -t tmpfs -o size=4g none /tmp && chmod 1777 /tmp"
    for folder in {str(Path(__file__).parents[2].resolve()), str(Path(sys.prefix).resolve())}:
        if Path(folder).is_relative_to("/tmp"):
            place = shlex.quote(folder)
            commands = f"mount --bind {place} /mnt && {commands} && mkdir -p {place} && mount --move /mnt {place}"
    return commands


def _netns(name: str) -> str:
    return f"vx-{name}"


class Nodes:
    """A few nodes and the network between them; a context."""

    def __init__(self, folder: Path, names: tuple[str, ...] = ("n1", "n2")) -> None:
        self.folder = folder
        self.nodes = [Node(name, f"{SUBNET}.{i}") for i, name in enumerate(names, start=1)]

    def __getitem__(self, index: int) -> Node:
        return self.nodes[index]

    def __enter__(self) -> Nodes:
        if os.geteuid() != 0:
            raise NoNamespaces("nodes are network namespaces, which only root can make")
        self.folder.mkdir(parents=True, exist_ok=True)
        # The network has one name on this machine: one such cluster at a time.
        self._lock = open(Path(tempfile.gettempdir()) / "verl_ext-nodes.lock", "w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.hosts = self.folder / "hosts"
        lines = [f"{node.address} {node.name}" for node in self.nodes]
        self.hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, f"{HOST} {os.uname().nodename}"]) + "\n")
        try:
            self._network()
            for node in self.nodes:
                node.start(self.hosts)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _network(self) -> None:
        self._remove_network()
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "addr", "add", f"{HOST}/24", "dev", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")
        for i, node in enumerate(self.nodes, start=1):
            space, outside = _netns(node.name), f"vxeth{i}"
            _run("ip", "netns", "add", space)
            _run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "link", "set", outside, "master", BRIDGE, "up")
            for command in (
                ("addr", "add", f"{node.address}/24", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
                ("link", "set", "lo", "up"),
            ):
                _run("ip", "-n", space, *command)

    def _remove_network(self) -> None:
        for i, node in enumerate(self.nodes, start=1):
            _run("ip", "netns", "del", _netns(node.name), check=False)
            _run("ip", "link", "del", f"vxeth{i}", check=False)
        _run("ip", "link", "del", BRIDGE, check=False)

    def __exit__(self, *error) -> None:
        for node in self.nodes:
            node.kill()
        self._remove_network()
        self._lock.close()


def wait_until(what: str, condition, timeout: float, pause: float = 0.3):
    """The condition's first true value.

    Raises:
        TimeoutError: says what was waited for.
    """
    end = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {timeout:g} s")
        time.sleep(pause)
    return value
