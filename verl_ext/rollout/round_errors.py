# SPDX-License-Identifier: Apache-2.0
"""What may be wrong with a round, in words."""

from __future__ import annotations


def storage_problem(uid: str, rows: int, error: Exception) -> str:
    """What to say where rows cannot be put into TransferQueue."""
    said = f"{rows} rows of group {uid} could not be put into TransferQueue: {error}"
    if "capacity exceeded" not in str(error):
        return said
    return f"{said}; it is full: raise transfer_queue.backend.SimpleStorage.total_storage_size"
