"""Weights on their way from the leader to the rollout workers: one file a version, whole or absent.

Weight transfer is the application's. This one suits processes that share a file system.
"""

from __future__ import annotations

import os
from pathlib import Path

#: A rollout worker that was stopped for a while may still ask for a version that was the newest then.
_KEPT = 16


class WeightFiles:
    """The files that one execution announces."""

    def __init__(self, run: Path, execution_number: int) -> None:
        self._directory = run / "weights" / f"e{execution_number:04d}"
        self._written: list[Path] = []

    def write(self, version: int, weights: bytes) -> str:
        """Write a version; returns its handle. Older ones than the last few are removed: who wants weights takes the newest."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"v{version:06d}.pt"
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(weights)
        temporary.replace(path)
        self._written.append(path)
        while len(self._written) > _KEPT:
            self._written.pop(0).unlink(missing_ok=True)
        return str(path)
