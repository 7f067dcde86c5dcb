"""One rank's artifacts of a checkpoint, verified on the very descriptors that are then read.

* Nothing below the checkpoint's directory is a link, so a name cannot lead out of it, even when a directory is swapped.
* A mapping is handed out only when every artifact of the rank is sound; otherwise everything is closed again.
* Damaged and missing are told apart from unreadable: an I/O error says nothing about the content.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from cosmos_ctrl.checkpoints.digests import verify_descriptor
from cosmos_ctrl.checkpoints.manifest import CheckpointManifest
from cosmos_ctrl.core.errors import ArtifactMissingError, CheckpointDamagedError, StorageUnavailableError

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


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


def open_artifacts(directory: Path, manifest: CheckpointManifest, prefix: str, *, path: str) -> Artifacts:
    """Open and verify the artifacts whose names begin with `prefix`.

    Args:
        directory: the checkpoint's.
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
            file = os.fdopen(_open(directory, name, path), "rb")
            opened.callback(file.close)
            verify_descriptor(file.fileno(), entry.size_bytes, entry.digest, path=path, artifact=name)
            files[name.removeprefix(prefix)] = file
        opened.pop_all()
    return Artifacts(files)


def _open(directory: Path, name: str, path: str) -> int:
    *parents, last = name.split("/")
    try:
        with ExitStack() as stack:
            # The checkpoint itself may be reached through a link; nothing below it may.
            at = os.open(directory, _DIRECTORY)
            stack.callback(os.close, at)
            for parent in parents:
                at = os.open(parent, _DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
                stack.callback(os.close, at)
            return os.open(last, _FILE, dir_fd=at)
    except FileNotFoundError as error:
        raise ArtifactMissingError(path=path, artifacts=(name,)) from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise CheckpointDamagedError(
                path=path, artifact=name, what="kind", expected="a regular file", found=str(error)
            ) from error
        raise StorageUnavailableError(path=f"{path}/{name}", operation="open", cause=str(error)) from error
