"""A store on a POSIX file system.

* A name appears by ``link`` (or ``renameat2(RENAME_NOREPLACE)``) from a temporary file that is whole and fsynced, never by
  writing to it and never by a plain rename: a reader sees all of it or nothing, and nothing is replaced.
* "Already exists" is ambiguous on network file systems, so the content is read back and compared, not the inode.
* Whoever finds the identical content makes its name durable too: its publisher may have died before doing so.
* Parents are made durable before anything is put into them, once per store object.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from cosmos_ctrl.checkpoints import durable, names
from cosmos_ctrl.checkpoints.digests import digest_bytes
from cosmos_ctrl.checkpoints.durable import storage_errors
from cosmos_ctrl.checkpoints.names import parents_of
from cosmos_ctrl.checkpoints.stores import VISIBLE_NOT_DURABLE, Entry, EntryKind
from cosmos_ctrl.checkpoints.stores.beneath import open_beneath
from cosmos_ctrl.core.errors import CheckpointConflictError, CheckpointDamagedError, StorageUnavailableError

# A FIFO would block an open without O_NONBLOCK; a link could lead anywhere.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LocalStore:
    """The directory `root`. Making one touches nothing; the first put makes the directory if need be. Thread-safe."""

    def __init__(self, root: Path, *, file_mode: int = 0o644, make_root: bool = True) -> None:
        """Store below `root`.

        Args:
            root: made by the first put, unless `make_root` is False.
            file_mode: permissions of files, from which the umask is taken.
            make_root: False where a directory that somebody removed must not come back empty.
        """
        self.root = Path(os.path.abspath(root))  # noqa: PTH100 - no link is to be resolved
        self._file_mode = file_mode
        self._make_root = make_root
        self._durable: set[Path] = set()

    @property
    def uri(self) -> str:
        """The directory's absolute path."""
        return str(self.root)

    def location(self, name: str) -> str:
        """Absolute path of `name`."""
        return str(self.path_of(name))

    def path_of(self, name: str) -> Path:
        """Where `name` lies; "" is the root.

        Raises:
            UnsafeNameError: it is not a safe relative path.
        """
        return self.root / names.check_store_name(name, path=self.uri) if name else self.root

    def within(self, prefix: str) -> LocalStore:
        """See `Store.within`."""
        return LocalStore(self.path_of(prefix), file_mode=self._file_mode, make_root=False)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """See `Store.put_if_absent`.

        A failure after the name became visible has the operation ``VISIBLE_NOT_DURABLE``: a reader may see it, a power loss may
        undo it, and it must be neither acknowledged nor tried again here.
        """
        target = self.path_of(names.check_store_name(name, path=self.uri))
        self._ensure(target.parent)
        temporary = target.parent / f"{names.TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        try:
            durable.write_file(temporary, data, mode=self._file_mode)
            created = durable.name_without_replacing(temporary, target)
            if not created:
                self._compare(name, target, data)
            try:
                durable.fsync_directory(target.parent)
            except StorageUnavailableError as error:
                cause = f"it is visible, whether it is durable is unknown: {error.cause}"
                raise StorageUnavailableError(path=str(target), operation=VISIBLE_NOT_DURABLE, cause=cause) from error
        finally:
            # What cannot be removed now is a leftover that no listing shows.
            with suppress(OSError):
                temporary.unlink()
        return created

    def read(self, name: str, *, limit: int) -> bytes | None:
        """See `Store.read`."""
        path = self.path_of(name)
        with storage_errors(path, "read"):
            try:
                descriptor = os.open(path, _FILE_FLAGS)
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno == errno.ELOOP and path.is_symlink():
                    raise self._damaged(path, "kind", "a regular file", "symbolic link") from error
                raise
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise self._damaged(path, "kind", "a regular file", kind_of(status.st_mode))
                data = _read_up_to(descriptor, limit + 1)
            finally:
                os.close(descriptor)
        if len(data) > limit:
            raise self._damaged(path, "size in bytes", f"at most {limit}", str(status.st_size))
        return data

    def open(self, name: str) -> BinaryIO | None:
        """See `Store.open`. A name cannot lead out of the root, even when a directory is swapped meanwhile."""
        path = self.path_of(names.check_store_name(name, path=self.uri))
        with storage_errors(path, "open"):
            try:
                descriptor = open_beneath(self.root, name)
            except FileNotFoundError:
                return None
            except OSError as error:
                # ELOOP: there is a link. ENOTDIR: a directory is none. ENXIO: a socket.
                if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                    raise self._not_regular(name, self._obstacle(name) or durable.describe(error)) from error
                raise
            kind = kind_of(os.fstat(descriptor).st_mode)
            if kind != "file":
                os.close(descriptor)
                raise self._not_regular(name, kind)
            return os.fdopen(descriptor, "rb", buffering=0)

    def list(self, prefix: str) -> tuple[str, ...]:
        """See `Store.list`. A link to a directory is listed as one; a dangling link is ``StorageUnavailableError``."""
        directory = self.path_of(prefix)
        found = []
        with storage_errors(directory, "list"):
            try:
                entries = os.scandir(directory)
            except FileNotFoundError:
                return ()
            with entries:
                for entry in entries:
                    if entry.name.startswith(names.TEMPORARY_PREFIX):
                        continue
                    if entry.is_symlink():
                        Path(entry.path).stat()  # is_dir takes a dangling link for a file
                    found.append(entry.name + "/" if entry.is_dir() else entry.name)
        return tuple(sorted(found))

    def scan(self, prefix: str) -> tuple[Entry, ...]:
        """See `Store.scan`."""
        top = self.path_of(prefix)
        found: list[Entry] = []
        waiting = [""]
        while waiting:
            below = waiting.pop()
            directory = top / below if below else top
            with storage_errors(directory, "scan"):
                try:
                    entries = os.scandir(directory)
                except FileNotFoundError:
                    continue  # absent, or by now
                with entries:
                    for entry in entries:
                        if entry.name.startswith(names.TEMPORARY_PREFIX):
                            continue
                        name = f"{below}/{entry.name}" if below else entry.name
                        try:
                            status = entry.stat(follow_symlinks=False)
                        except FileNotFoundError:
                            continue
                        kind = kind_of(status.st_mode)
                        found.append(Entry(name, kind, status.st_size if kind == "file" else 0))
                        if kind == "directory":
                            waiting.append(name)
        return tuple(sorted(found, key=lambda entry: entry.name))

    def head(self, name: str) -> int | None:
        """See `Store.head`."""
        path = self.path_of(name)
        with storage_errors(path, "stat"):
            try:
                status = path.lstat()
            except FileNotFoundError:
                return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def kind(self, name: str) -> EntryKind | None:
        """See `Store.kind`."""
        path = self.path_of(name)
        with storage_errors(path, "stat"):
            try:
                return kind_of(path.lstat().st_mode)
            except FileNotFoundError:
                return None

    def delete(self, name: str) -> bool:
        """See `Store.delete`. A directory's temporary files go with it."""
        path = self.path_of(names.check_store_name(name, path=self.uri))
        with storage_errors(path, "unlink"):
            try:
                status = path.lstat()
                if stat.S_ISDIR(status.st_mode):
                    _remove_directory(path)
                else:
                    path.unlink()
            except FileNotFoundError:
                if not path.parent.exists():
                    return False
                removed = False
            else:
                removed = True
        # Also when it was absent: whoever removed it may have died before this.
        try:
            durable.fsync_directory(path.parent)
        except StorageUnavailableError:
            with storage_errors(path, "stat"):
                if path.parent.exists():
                    raise
            # Somebody else removed the directory meanwhile, and answers for that.
        return removed

    def sync(self, prefix: str) -> None:
        """See `Store.sync`."""
        durable.fsync_directory(self.path_of(prefix))

    def sync_names(self, names: Iterable[str]) -> None:
        """See `Store.sync_names`: every directory they lie in, the deepest first, then the root."""
        below = {parent for name in names for parent in parents_of(name)}
        for parent in sorted(below, key=lambda name: (-name.count("/"), name)):
            durable.fsync_directory(self.path_of(parent))
        durable.fsync_directory(self.root)

    def _ensure(self, directory: Path) -> None:
        if directory in self._durable:
            return
        if directory == self.root:
            if self._make_root:
                with storage_errors(directory, "mkdir"):
                    directory.mkdir(parents=True, exist_ok=True)
            durable.fsync_path(directory)
        else:
            self._ensure(directory.parent)
            durable.ensure_directory(directory)
        self._durable.add(directory)

    def _compare(self, name: str, target: Path, data: bytes) -> None:
        try:
            existing = self.read(name, limit=len(data))
        except CheckpointDamagedError as error:
            raise CheckpointConflictError(path=str(target), what=f"{error.what} {error.found}") from error
        if existing is None:
            raise CheckpointConflictError(path=str(target), what="it was there and was removed meanwhile")
        if existing != data:
            what = f"{digest_bytes(existing)} is there, {digest_bytes(data)} was to be published"
            raise CheckpointConflictError(path=str(target), what=what)

    def _obstacle(self, name: str) -> str:
        """The first thing on the way to `name` that is of another kind, for people; empty when there is none by now."""
        for part in (*parents_of(name), name):
            with suppress(OSError):
                kind = kind_of((self.root / part).lstat().st_mode)
                if kind != ("file" if part == name else "directory"):
                    return kind if part == name else f"{kind} {part}"
        return ""

    def _not_regular(self, name: str, found: str) -> CheckpointDamagedError:
        return CheckpointDamagedError(path=self.uri, artifact=name, what="kind", expected="a regular file", found=found)

    @staticmethod
    def _damaged(path: Path, what: str, expected: str, found: str) -> CheckpointDamagedError:
        return CheckpointDamagedError(
            path=str(path.parent), artifact=path.name, what=what, expected=expected, found=found
        )


def _read_up_to(descriptor: int, count: int) -> bytes:
    # Not through a file object: its probes ignore errors.
    blocks = []
    while count and (block := os.read(descriptor, min(count, 1 << 20))):
        blocks.append(block)
        count -= len(block)
    return b"".join(blocks)


def _remove_directory(path: Path) -> None:
    with os.scandir(path) as entries:
        temporary = [Path(entry.path) for entry in entries if entry.name.startswith(names.TEMPORARY_PREFIX)]
    for left in temporary:
        left.unlink(missing_ok=True)
    path.rmdir()


def kind_of(mode: int) -> EntryKind:
    """The kind of thing that has `mode`."""
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "symbolic link" if stat.S_ISLNK(mode) else "other"
