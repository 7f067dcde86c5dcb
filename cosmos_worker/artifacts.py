"""One rank's artifacts of a checkpoint, verified on the very files that are then read.

* A mapping is handed out only when every artifact of the rank is sound; otherwise everything is closed again.
* Damaged and missing are told apart from unreadable: an I/O error says nothing about the content.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import BinaryIO

from cosmos_ctrl.checkpoints.artifacts import open_verified
from cosmos_ctrl.checkpoints.manifest import CheckpointManifest
from cosmos_ctrl.checkpoints.stores import Store
from cosmos_ctrl.core.errors import ArtifactMissingError


class Artifacts(Mapping[str, BinaryIO]):
    """Open files by the names that this rank saved them under; close it, or leave it to the ``with`` statement."""

    def __init__(self, files: Mapping[str, BinaryIO]) -> None:
        self._files = dict(files)

    def __getitem__(self, name: str) -> BinaryIO:
        return self._files[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __enter__(self) -> Artifacts:  # noqa: PYI034  # final in spirit: nobody derives from it
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every file. Idempotent."""
        for file in self._files.values():
            file.close()


def open_artifacts(checkpoint: Store, manifest: CheckpointManifest, prefix: str, *, path: str) -> Artifacts:
    """Open and verify the artifacts whose names begin with `prefix`.

    Args:
        checkpoint: the store within the checkpoint.
        manifest: read from it.
        prefix: this rank's folder, with its slash; it is left off in the mapping's keys.
        path: the checkpoint, for the errors.

    Raises:
        ArtifactMissingError, CheckpointDamagedError: one is not what was committed, or there is none.
        StorageUnavailableError: one could not be read.
    """
    wanted = {name: entry for name, entry in manifest.artifacts.items() if name.startswith(prefix)}
    if not wanted:
        raise ArtifactMissingError(path=path, artifacts=(f"{prefix}*",))
    with ExitStack() as opened:
        files: dict[str, BinaryIO] = {}
        for name, entry in wanted.items():
            files[name.removeprefix(prefix)] = opened.enter_context(open_verified(checkpoint, name, entry, path=path))
        opened.pop_all()
    return Artifacts(files)
