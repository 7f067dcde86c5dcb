"""The few operations that make names and bytes survive a power loss.

* An OS error is ``StorageUnavailableError`` with its path and operation.
* A failed fsync is final: the kernel marks the pages clean, so a second fsync of the same content would succeed and lie. What
  failed once is refused for as long as this process lives.
* A directory's own name is durable once its parent is fsynced, and is reached only if so are those of all above it.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cosmos_ctrl.core.errors import CheckpointError, StorageUnavailableError

#: Device, inode and, for files, mtime in ns of what could not be made durable. Content that is written anew has another mtime.
_failed: set[tuple[int, int, int]] = set()

_LINK_UNSUPPORTED = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


@contextmanager
def storage_errors(path: Path | str, operation: str) -> Iterator[None]:
    """Turn an OSError of the body into ``StorageUnavailableError``; domain errors pass as they are."""
    try:
        yield
    except CheckpointError:
        raise  # CheckpointNotFoundError is an OSError too
    except OSError as error:
        raise StorageUnavailableError(path=str(path), operation=operation, cause=describe(error)) from error


def describe(error: OSError) -> str:
    """The error's symbol and text, such as ``EIO (Input/output error)``, without its path."""
    if error.errno is None:
        return str(error)
    return f"{errno.errorcode.get(error.errno, error.errno)} ({error.strerror})"


def fsync_file(descriptor: int, path: Path | str) -> None:
    """fsync an open file.

    Raises:
        StorageUnavailableError: it failed, or it had failed before for the same content.
    """
    with storage_errors(path, "fsync"):
        status = os.fstat(descriptor)
    _fsync(descriptor, path, (status.st_dev, status.st_ino, status.st_mtime_ns))


def fsync_directory(directory: Path) -> None:
    """fsync a directory: the names in it are durable afterwards.

    Raises:
        StorageUnavailableError: it failed, or it had failed before.
    """
    with storage_errors(directory, "fsync of the directory"):
        _fsync_and_close(os.open(directory, _DIRECTORY_FLAGS), directory)


def _fsync_and_close(descriptor: int, directory: Path) -> None:
    try:
        status = os.fstat(descriptor)
        _fsync(descriptor, directory, (status.st_dev, status.st_ino, 0))
    finally:
        os.close(descriptor)


def _fsync(descriptor: int, path: Path | str, key: tuple[int, int, int]) -> None:
    if key in _failed:
        cause = "an earlier fsync failed, so a later one proves nothing; write it again, to a fresh file and directory"
        raise StorageUnavailableError(path=str(path), operation="fsync", cause=cause)
    try:
        os.fsync(descriptor)
    except OSError as error:
        _failed.add(key)
        raise StorageUnavailableError(path=str(path), operation="fsync", cause=describe(error)) from error


def ensure_directory(directory: Path) -> None:
    """Make `directory`, unless it is there; its name is durable afterwards, whoever made it.

    Raises:
        StorageUnavailableError: it could not be made (its parent must exist), or not be made durable.
    """
    with storage_errors(directory, "mkdir"):
        try:
            os.mkdir(directory)  # noqa: PTH102 - one system call, its errors apart
        except FileExistsError:
            if not directory.is_dir():
                raise
    if not _is_mount_point(directory):
        fsync_directory(directory.parent)


def fsync_path(directory: Path) -> None:
    """Make the whole way to an existing directory durable: its name, and the names of all that it lies in.

    Whoever made those may have died before, or never have thought of it. It ends at a mount point, or at the first directory that
    this process may neither read nor write: it has no means there, and made nothing there.

    Raises:
        StorageUnavailableError: it failed.
    """
    with storage_errors(directory, "stat"):
        path = Path(os.path.realpath(directory, strict=True))
    while not _is_mount_point(path):
        above = path.parent
        with storage_errors(above, "fsync of the directory"):
            try:
                descriptor = os.open(above, _DIRECTORY_FLAGS)
            except PermissionError:
                if os.access(above, os.W_OK):
                    raise
                return
            _fsync_and_close(descriptor, above)
        path = above


def _is_mount_point(directory: Path) -> bool:
    # A mount point's name is not the file system's to lose.
    with storage_errors(directory, "stat"):
        here, above = directory.stat(), directory.parent.stat()
    return here.st_dev != above.st_dev or here.st_ino == above.st_ino


def write_file(path: Path, data: bytes, *, mode: int) -> None:
    """Write a new file: all bytes, the size checked, fsynced, closed. It is left for the caller to remove when this fails.

    Args:
        path: must not exist.
        data: its content.
        mode: permissions, from which the umask is taken.

    Raises:
        StorageUnavailableError: any step failed; the file is not to be used.
    """
    with storage_errors(path, "write"):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            # A device may accept bytes and keep none; the file's size is what tells.
            size = os.fstat(descriptor).st_size
            if size != len(data):
                cause = f"wrote {len(data)} bytes, the file has {size}"
                raise StorageUnavailableError(path=str(path), operation="write", cause=cause)
            fsync_file(descriptor, path)
        finally:
            os.close(descriptor)


def name_without_replacing(temporary: Path, target: Path) -> bool:
    """Give the file `temporary` the name `target` too (or instead), unless that is taken.

    Returns:
        False when the name is taken. On a network file system that may be by this very call, its reply lost.

    Raises:
        StorageUnavailableError: it failed, or the file system cannot do it without replacing.
    """
    try:
        os.link(temporary, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _LINK_UNSUPPORTED:
            raise StorageUnavailableError(path=str(target), operation="link", cause=describe(error)) from error
        return _rename_without_replacing(temporary, target, describe(error))
    return True


def _rename_without_replacing(temporary: Path, target: Path, link_cause: str) -> bool:
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    number = errno.ENOSYS
    if rename is not None:
        ctypes.set_errno(0)
        result = rename(_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE)
        number = ctypes.get_errno()
        if result == 0:
            return True
    if number == errno.EEXIST:
        return False
    cause = describe(OSError(number, os.strerror(number)))
    # A plain rename replaces: two publishers would both believe that they had won.
    raise StorageUnavailableError(
        path=str(target),
        operation="publication without replacing",
        cause=f"link gave {link_cause}, renameat2(RENAME_NOREPLACE) gave {cause}; put the run on a file system that has one of them",
    )
