"""Where one rank's files of a checkpoint go: a folder on a file system, or a prefix in an object store. The same to who writes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from cosmos_ctrl.checkpoints.digests import DEFAULT_ALGORITHM
from cosmos_ctrl.checkpoints.stores import Store
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_worker.object_shards import UploadingFile
from cosmos_worker.shards import HashingFile, SystemCalls, WrittenFile, make_directories, sync_directories

if TYPE_CHECKING:
    from cosmos_ctrl.checkpoints.stores.objects import ObjectStore


class ShardFile(Protocol):
    """What is written to, closed or abandoned, and asked for its digest. See `HashingFile`."""

    def close(self) -> None:
        """Make it durable."""

    def abandon(self) -> None:
        """Close without making anything durable."""

    @property
    def result(self) -> WrittenFile:
        """Size and digest, once closed."""


class ShardPlace(Protocol):
    """One rank's own folder in a checkpoint."""

    def create(self, name: str) -> ShardFile:
        """A new file."""

    def sync_names(self, names: Iterable[str]) -> None:
        """Make the names of closed files durable."""


def shards_in(
    run: Store, prefix: str, *, algorithm: str = DEFAULT_ALGORITHM, calls: SystemCalls | None = None
) -> ShardPlace:
    """The place below `prefix` in the run's store.

    Args:
        run: the run's store.
        prefix: the rank's folder, with its slash.
        algorithm: of the digests.
        calls: the system calls of files on a file system.
    """
    if isinstance(run, LocalStore):
        return _Folder(run.root, run.root / prefix, algorithm, calls or SystemCalls())
    return _ObjectPrefix(cast("ObjectStore", run.within(prefix.rstrip("/"))), algorithm)


class _Folder:
    def __init__(self, top: Path, directory: Path, algorithm: str, calls: SystemCalls) -> None:
        self._top, self._directory, self._algorithm, self._calls = top, directory, algorithm, calls

    def create(self, name: str) -> ShardFile:
        path = self._directory / name
        make_directories(path.parent, top=self._top)
        return HashingFile(path, algorithm=self._algorithm, calls=self._calls)

    def sync_names(self, names: Iterable[str]) -> None:
        parents = {(self._directory / name).parent for name in names}
        sync_directories(parents, top=self._top, fsync=self._calls.fsync)


class _ObjectPrefix:
    def __init__(self, store: ObjectStore, algorithm: str) -> None:
        self._store, self._algorithm = store, algorithm

    def create(self, name: str) -> ShardFile:
        return UploadingFile(self._store, name, algorithm=self._algorithm)

    def sync_names(self, names: Iterable[str]) -> None:
        self._store.sync_names(names)
