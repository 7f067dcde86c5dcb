"""A checkpoint's artifacts in its store: the closed set, opening, hashing, durability.

* The set is closed: what is missing, what nobody named, and what is not a regular file with bytes in it is refused by name.
* The bytes that are hashed are the bytes that are fsynced: one descriptor, and a file that changes meanwhile is refused.
* What is handed out to be read is verified first, and is the very file that was: of an object store a copy on this machine, made while
  the bytes were hashed.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, cast

from cosmos_ctrl.checkpoints import digests, durable
from cosmos_ctrl.checkpoints.names import MANIFEST_NAME, parents_of
from cosmos_ctrl.checkpoints.stores import Entry, Store
from cosmos_ctrl.core.errors import ArtifactMissingError, ArtifactUnexpectedError, CheckpointDamagedError
from cosmos_ctrl.core.resume import require_count


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


def open_artifact(checkpoint: Store, name: str, *, path: str) -> BinaryIO:
    """Open an artifact for reading; see `Store.open`.

    Args:
        checkpoint: the store within the checkpoint.
        name: a safe artifact name.
        path: the checkpoint, for the errors.

    Raises:
        ArtifactMissingError: it is not there.
        CheckpointDamagedError: it, or a directory on the way, is a link or of another kind.
        StorageUnavailableError: it could not be opened.
    """
    file = checkpoint.open(name)
    if file is None:
        raise ArtifactMissingError(path=path, artifacts=(name,))
    return file


def open_verified(checkpoint: Store, name: str, artifact: Artifact, *, path: str) -> BinaryIO:
    """Open an artifact at its start, every byte of it verified. What is not on this machine is copied to an unnamed temporary file.

    Args:
        checkpoint: the store within the checkpoint.
        name: the artifact's.
        artifact: what the manifest says of it.
        path: the checkpoint, for the errors.

    Raises:
        ArtifactMissingError, CheckpointDamagedError: it is not what was committed.
        StorageUnavailableError: it could not be read, or not be copied.
    """
    with durable.storage_errors(checkpoint.location(name), "read"), ExitStack() as opened:
        file = opened.enter_context(open_artifact(checkpoint, name, path=path))
        verify = partial(digests.verify_file, file, artifact.size_bytes, artifact.digest, path=path, artifact=name)
        if descriptor_of(file) is None:
            with durable.storage_errors(tempfile.gettempdir(), "making a temporary file for it"):
                copy = opened.enter_context(cast("BinaryIO", tempfile.TemporaryFile(buffering=0)))  # noqa: SIM115
            verify(copy=copy)
            file.close()
            file = copy
        else:
            verify()
        file.seek(0)
        opened.pop_all()
    return cast("BinaryIO", io.BufferedReader(cast("io.RawIOBase", file)))


def descriptor_of(file: BinaryIO) -> int | None:
    """The descriptor of a file on this machine; None of any other."""
    try:
        return file.fileno()
    except io.UnsupportedOperation:
        return None


def verify_artifacts(
    checkpoint: Store, artifacts: Mapping[str, Artifact], *, path: str, threads: int | None = None
) -> None:
    """Verify every byte of the given artifacts, in parallel.

    Args:
        checkpoint: the store within the checkpoint.
        artifacts: what its manifest says of those that are to be verified.
        path: the checkpoint, for the errors.
        threads: at most so many at once; None: three per CPU.

    Raises:
        ArtifactMissingError, CheckpointDamagedError: one is not what was committed.
        StorageUnavailableError: one could not be read.
    """
    checks = [
        digests.Verification(
            name, artifact.size_bytes, artifact.digest, partial(open_artifact, checkpoint, name, path=path)
        )
        for name, artifact in artifacts.items()
    ]
    digests.verify_many(checks, path=path, threads=threads)


def measure_durably(
    checkpoint: Store, names: Iterable[str], *, algorithm: str, threads: int | None
) -> dict[str, Artifact]:
    """Hash, and where there is such a thing fsync, artifacts that somebody else wrote, in parallel.

    Args:
        checkpoint: the store within the checkpoint.
        names: safe artifact names.
        algorithm: of the digests.
        threads: at most so many at once; None: three per CPU.

    Raises:
        ArtifactMissingError, CheckpointDamagedError: one is not there, is of another kind, empty, or changed while it was read.
        StorageUnavailableError: one could not be read or made durable.
    """
    ordered = list(names)
    workers = min(threads or digests.default_threads(), len(ordered))
    if workers <= 1:
        return {name: _measure(checkpoint, name, algorithm) for name in ordered}
    with ThreadPoolExecutor(workers, thread_name_prefix="measure") as pool:
        measured = pool.map(lambda name: _measure(checkpoint, name, algorithm), ordered)
        return dict(zip(ordered, measured, strict=True))


def _measure(checkpoint: Store, name: str, algorithm: str) -> Artifact:
    path = checkpoint.location(name)
    with durable.storage_errors(path, "read"), open_artifact(checkpoint, name, path=checkpoint.uri) as file:
        descriptor = descriptor_of(file)
        before = os.fstat(descriptor) if descriptor is not None else None
        expected = file.seek(0, os.SEEK_END)
        if expected == 0:
            raise damaged(checkpoint.uri, name, "size in bytes", "at least 1", "0")
        if descriptor is not None:
            durable.fsync_file(descriptor, path)
        digest, size = digests.hash_file(file, algorithm)
        after = os.fstat(descriptor) if descriptor is not None else None
    changed = before and after and (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns)
    if changed or size != expected:
        raise damaged(
            checkpoint.uri, name, "content", "one that no longer changes", "a file that is still being written"
        )
    return Artifact(size_bytes=size, digest=digest)


def damaged(path: str, artifact: str, what: str, expected: str, found: str) -> CheckpointDamagedError:
    """The error for an artifact that is not what it was."""
    return CheckpointDamagedError(path=path, artifact=artifact, what=what, expected=expected, found=found)
