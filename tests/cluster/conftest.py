"""Two nodes on this machine, and what is run on them; left out, with the reason, where they cannot be had."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.cluster.nodes import Nodes, NoNamespaces
from tests.cluster.slurm import INSTALL, Slurm


@pytest.fixture(scope="module")
def shared():
    """A folder that all nodes see (/tmp is each node's own), removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="verl_ext-cluster-", dir="/var/tmp"))
    # munged wants its folder open to be read.
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def alone():
    """One run of the whole stack at a time on this machine: it takes 14 GiB."""
    with open(Path(tempfile.gettempdir()) / "realstack.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def nodes(shared):
    """Two running nodes."""
    try:
        cluster = Nodes(shared / "nodes").__enter__()
    except NoNamespaces as error:
        pytest.skip(f"two nodes cannot be made on this machine: {error}")
    yield cluster
    cluster.__exit__()


@pytest.fixture(scope="module")
def slurm(nodes, shared):
    """A Slurm over the two nodes, its packages installed if need be."""
    done = subprocess.run([INSTALL], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600)
    if done.returncode == 2:
        pytest.skip(f"no Slurm: {done.stderr.strip()}")
    assert done.returncode == 0, f"scripts/slurm/install_local.sh failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    with Slurm(nodes, shared / "slurm") as cluster:
        yield cluster
