"""A checkpoint's artifacts on disk: the closed set, opening without following links, hashing, durability.

* The set is closed: what is missing, what nobody named, and what is not a regular file with bytes in it is refused by name.
* An artifact is opened part by part from its checkpoint's directory, no part a link, so a name cannot lead out of it even
  when somebody swaps a directory meanwhile.
* The bytes that are hashed are the bytes that are fsynced: one descriptor, and a file that changes meanwhile is refused.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cosmos_ctrl.checkpoints import digests, durable
from cosmos_ctrl.checkpoints.names import MANIFEST_NAME, parents_of
from cosmos_ctrl.checkpoints.stores import Entry
from cosmos_ctrl.core.errors import ArtifactMissingError, ArtifactUnexpectedError, CheckpointDamagedError
from cosmos_ctrl.core.resume import require_count

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Artifact:
    """What the manifest says of one artifact."""

    size_bytes: int
    """At least 1."""
    digest: str
    """``algorithm:hex``."""
    rank: int | None = None
    """Rank that wrote it, within its trainer group; None when a script published it."""
    group: str = ""
    """Trainer group of that rank; empty when a script published it."""

    def __post_init__(self) -> None:
        require_count("size_bytes", self.size_bytes, least=1)
        digests.parse_digest(self.digest)
        if self.rank is not None:
            require_count("rank", self.rank)


def check_closed_set(entries: Iterable[Entry], sizes: Mapping[str, int | None], *, path: str) -> None:
    """Check what lies in a checkpoint's directory against the artifacts that should; the manifest is not among them.

    Args:
        entries: what a store's `scan` of the directory gave.
        sizes: expected bytes by artifact name; None: any but zero.
        path: the checkpoint, for the errors.

    Raises:
        CheckpointDamagedError: one is not a regular file, is empty, or has another size.
        ArtifactMissingError: some are not there; it names all of them.
        ArtifactUnexpectedError: there are others; it names all of them.
    """
    found = {entry.name: entry for entry in entries if entry.name != MANIFEST_NAME}
    parents = {parent for name in sizes for parent in parents_of(name)}
    for name in sorted(parents & found.keys()):
        if found[name].kind != "directory":
            raise damaged(path, name, "kind", "a directory", found[name].kind)
    for name in sorted(sizes.keys() & found.keys()):
        if found[name].kind != "file":
            raise damaged(path, name, "kind", "a regular file", found[name].kind)
    missing = tuple(sorted(sizes.keys() - found.keys()))
    if missing:
        raise ArtifactMissingError(path=path, artifacts=missing)
    unexpected = tuple(sorted(found.keys() - sizes.keys() - parents))
    if unexpected:
        raise ArtifactUnexpectedError(path=path, artifacts=unexpected)
    for name, size in sorted(sizes.items()):
        actual = found[name].size_bytes
        if actual == 0:
            raise damaged(path, name, "size in bytes", str(size or "at least 1"), "0")
        if size is not None and actual != size:
            raise damaged(path, name, "size in bytes", str(size), str(actual))


def open_artifact(directory: Path, name: str) -> int:
    """Open an artifact for reading and return its descriptor, which the caller closes.

    Args:
        directory: the checkpoint's.
        name: a safe artifact name.

    Raises:
        ArtifactMissingError: it is not there.
        CheckpointDamagedError: it, or a directory on the way, is a link or of another kind.
        StorageUnavailableError: it could not be opened.
    """
    *parents, last = name.split("/")
    with durable.storage_errors(directory / name, "open"), ExitStack() as stack:
        try:
            # The directory itself may be reached through a link; nothing below it may.
            at = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, at)
            for parent in parents:
                at = os.open(parent, _DIRECTORY_FLAGS, dir_fd=at)
                stack.callback(os.close, at)
            return os.open(last, _FILE_FLAGS, dir_fd=at)
        except FileNotFoundError as error:
            raise ArtifactMissingError(path=str(directory), artifacts=(name,)) from error
        except OSError as error:
            # ELOOP: the file is a link. ENOTDIR: a directory is one, or is none. ENXIO: a socket.
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                raise damaged(str(directory), name, "kind", "a regular file", durable.describe(error)) from error
            raise


def verify_artifacts(
    directory: Path, artifacts: Mapping[str, Artifact], *, path: str, threads: int | None = None
) -> None:
    """Verify every byte of the given artifacts, in parallel.

    Args:
        directory: the checkpoint's.
        artifacts: what its manifest says of those that are to be verified.
        path: the checkpoint, for the errors.
        threads: at most so many at once; None: one per CPU.

    Raises:
        ArtifactMissingError, CheckpointDamagedError: one is not what was committed.
        StorageUnavailableError: one could not be read.
    """
    checks = [
        digests.Verification(name, artifact.size_bytes, artifact.digest, partial(open_artifact, directory, name))
        for name, artifact in artifacts.items()
    ]
    digests.verify_many(checks, path=path, threads=threads)


def measure_durably(
    directory: Path, names: Iterable[str], *, algorithm: str, threads: int | None
) -> dict[str, Artifact]:
    """Hash and fsync artifacts that somebody else wrote, in parallel.

    Args:
        directory: the checkpoint's.
        names: safe artifact names.
        algorithm: of the digests.
        threads: at most so many at once; None: one per CPU.

    Raises:
        ArtifactMissingError, CheckpointDamagedError: one is not there, is of another kind, empty, or changed while it was read.
        StorageUnavailableError: one could not be read or made durable.
    """
    ordered = list(names)
    workers = min(threads or digests.default_threads(), len(ordered))
    if workers <= 1:
        return {name: _measure(directory, name, algorithm) for name in ordered}
    with ThreadPoolExecutor(workers, thread_name_prefix="measure") as pool:
        measured = pool.map(lambda name: _measure(directory, name, algorithm), ordered)
        return dict(zip(ordered, measured, strict=True))


def _measure(directory: Path, name: str, algorithm: str) -> Artifact:
    descriptor = open_artifact(directory, name)
    path = directory / name
    with durable.storage_errors(path, "read"):
        try:
            before = os.fstat(descriptor)
            if before.st_size == 0:
                raise damaged(str(directory), name, "size in bytes", "at least 1", "0")
            durable.fsync_file(descriptor, path)
            digest, size = digests.hash_file(descriptor, algorithm)
            after = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or size != before.st_size:
        raise damaged(
            str(directory), name, "content", "one that no longer changes", "a file that is still being written"
        )
    return Artifact(size_bytes=size, digest=digest)


def fsync_directories(directory: Path, names: Iterable[str]) -> None:
    """Make the names of artifacts durable: every directory they lie in, the deepest first, then `directory`.

    Raises:
        StorageUnavailableError: one fsync failed; the checkpoint is not to be published.
    """
    below = {parent for name in names for parent in parents_of(name)}
    for parent in sorted(below, key=lambda name: (-name.count("/"), name)):
        durable.fsync_directory(directory / parent)
    durable.fsync_directory(directory)


def damaged(path: str, artifact: str, what: str, expected: str, found: str) -> CheckpointDamagedError:
    """The error for an artifact that is not what it was."""
    return CheckpointDamagedError(path=path, artifact=artifact, what=what, expected=expected, found=found)
