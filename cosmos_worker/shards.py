"""Files of a checkpoint: hashed while they are written, durable once they are closed.

* Every byte is hashed once, from memory, in the order it is written; a short write is completed; nothing is read back. What comes in
  large pieces is hashed while it is written, on a thread of its own.
* Write-back starts early, on a thread of its own, so that the final fsync is short. What that thread meets poisons the file.
* After any failure the file is never fsynced again: the kernel has forgotten the pages, and a second fsync would succeed
  over bytes that are not there. The first OSError is what every later call raises, as the system said it.
* ``close`` returns only if size and content are durable: fsync of the file, then every directory up to the checkpoint's
  parent (`sync_directories`).
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from cosmos_ctrl.checkpoints.digests import DEFAULT_ALGORITHM, Hasher, new_hasher
from cosmos_worker.errors import UsageError
from cosmos_worker.settings import RUN_DIRECTORY

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: Bytes between two write-backs.
WRITE_BACK_BYTES = 32 << 20

#: Linux writes at most 2 GiB less a page at once; smaller pieces also let writing overlap with write-back.
_PIECE_BYTES = 64 << 20

#: From so many bytes on, handing a piece to another thread costs little beside hashing it.
_LARGE_BYTES = 1 << 20

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


# Not on every system; the stronger call does the same.
_fdatasync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)


@dataclass(frozen=True, slots=True)
class SystemCalls:
    """The calls that a file makes, replaceable where a test needs them to fail."""

    open: Callable[[Path, int, int], int] = os.open
    write: Callable[[int, Buffer], int] = os.write
    fdatasync: Callable[[int], None] = _fdatasync
    fsync: Callable[[int], None] = os.fsync
    size: Callable[[int], int] = lambda fd: os.fstat(fd).st_size
    close: Callable[[int], None] = os.close


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A durable file."""

    size_bytes: int
    digest: str
    """``algorithm:hex``."""


class HashingFile(io.BufferedIOBase):
    """A new file, for one writer. `torch.save`, `pickle.dump`, `numpy.save` and `TextIOWrapper` write to it."""

    def __init__(self, path: Path, *, algorithm: str = DEFAULT_ALGORITHM, calls: SystemCalls | None = None) -> None:
        """Create `path`, whose directory exists.

        Raises:
            FileExistsError: it is there already.
            OSError: it cannot be created.
        """
        super().__init__()
        self._fd = -1
        self._calls = calls or SystemCalls()
        self._hashing = _Hashing(new_hasher(algorithm))
        self._written = 0
        self._failure: OSError | None = None
        self._result: WrittenFile | None = None
        self.path = path
        self._fd = self._calls.open(path, _CREATE, 0o644)
        self._write_back = _WriteBack(self._fd, self._calls.fdatasync)

    def writable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Bytes written."""
        return self._written

    def write(self, data: Buffer, /) -> int:
        """Write all of `data`.

        Returns:
            Its length in bytes.

        Raises:
            OSError: as the system said it; the file is lost.
            ValueError: it is closed.
        """
        if self._fd < 0:
            self._raise_failure()
            raise ValueError(f"{self.path} is closed")
        view = memoryview(data).cast("B")
        try:
            with self._hashing.of(view):
                for start in range(0, len(view), _PIECE_BYTES):
                    self._write_all(view[start : start + _PIECE_BYTES])
        except BaseException as error:
            # Also an interrupt: what is on the disk may be more than what was hashed.
            self._failure = self._failure or OSError(f"{self.path} is lost: {error!r}")
            self._release()
            raise
        return len(view)

    def close(self) -> None:
        """Make the file durable. Idempotent; after a failure it raises that again.

        Raises:
            OSError: as the system said it; the file is lost.
        """
        if self._fd >= 0:
            try:
                self._write_back.stop()
                self._check_write_back()
                self._guard(self._seal)
            finally:
                self._release()
        self._raise_failure()
        super().close()

    def abandon(self) -> None:
        """Close without making anything durable. Idempotent."""
        if self._fd >= 0:
            self._failure = self._failure or OSError(f"{self.path} was abandoned")
            self._release()

    @property
    def result(self) -> WrittenFile:
        """Size and digest, once closed.

        Raises:
            UsageError: it is not closed.
            OSError: it is lost.
        """
        self._raise_failure()
        if self._result is None:
            raise UsageError(f"{self.path} is still being written")
        return self._result

    def __del__(self) -> None:
        # The base class would close, which means fsync: a file that nobody closed is abandoned.
        self.abandon()

    def _write_all(self, piece: memoryview) -> None:
        while piece:
            self._check_write_back()
            count = self._guard(partial(self._calls.write, self._fd, piece))
            if count <= 0:
                self._guard(_no_progress)
            piece = piece[count:]
            self._written += count
            self._write_back.wrote(self._written)

    def _seal(self) -> None:
        self._calls.fsync(self._fd)
        # A device that took fewer bytes than it said is caught here, before anyone is told.
        size = self._calls.size(self._fd)
        if size != self._written:
            raise OSError(f"{self.path} has {size} bytes after {self._written} were written")
        self._result = WrittenFile(size, self._hashing.digest())

    def _check_write_back(self) -> None:
        if self._write_back.failure is not None:
            self._failure = self._failure or self._write_back.failure
            self._release()
            raise self._failure

    def _guard(self, call: Callable[[], int | None]) -> int:
        try:
            return call() or 0
        except OSError as error:
            self._failure = self._failure or error
            self._release()
            raise

    def _release(self) -> None:
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        self._hashing.stop()
        self._write_back.stop()
        if self._write_back.failure is not None:
            self._result = None
            self._failure = self._failure or self._write_back.failure
        try:
            self._calls.close(fd)
        except OSError as error:
            # NFS and quotas speak up here.
            self._result = None
            self._failure = self._failure or error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class _Hashing:
    """Hashes what is written; what is large on a thread that is made when it is first needed."""

    def __init__(self, hasher: Hasher) -> None:
        self._hasher = hasher
        self._pieces: SimpleQueue[memoryview | None] = SimpleQueue()
        self._hashed: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @contextmanager
    def of(self, view: memoryview) -> Iterator[None]:
        """Hash `view` while the body writes it; both are done with it afterwards, for its owner may change it."""
        if len(view) < _LARGE_BYTES:
            yield
            self._hasher.update(view)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="cosmos-hash", daemon=True)
            self._thread.start()
        self._pieces.put(view[:])  # a view of its own, to be released
        try:
            yield
        finally:
            failure = self._hashed.get()
        if failure is not None:
            raise failure

    def digest(self) -> str:
        """``algorithm:hex`` of everything so far."""
        return self._hasher.digest()

    def stop(self) -> None:
        """End the thread."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._pieces.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (view := self._pieces.get()) is not None:
            failure = None
            try:
                self._hasher.update(view)
            except BaseException as error:  # whatever it is, it is the writer's
                failure = error
            # Before the writer goes on: its buffer may be resized or freed then.
            view.release()
            self._hashed.put(failure)


class _WriteBack:
    """Starts write-back every so many bytes, on a thread that is made when it is first needed."""

    def __init__(self, fd: int, fdatasync: Callable[[int], None]) -> None:
        self._fd = fd
        self._fdatasync = fdatasync
        self._next = WRITE_BACK_BYTES
        self._due = threading.Semaphore(0)
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.failure: OSError | None = None

    def wrote(self, total: int) -> None:
        """So many bytes are written by now."""
        if total < self._next:
            return
        self._next = total + WRITE_BACK_BYTES
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="cosmos-write-back", daemon=True)
            self._thread.start()
        self._due.release()

    def stop(self) -> None:
        """Wait for the thread; its failure is final then."""
        self._stopping = True
        if self._thread is not None:
            self._due.release()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while True:
            self._due.acquire()
            # One write-back serves all that fell due meanwhile.
            while self._due.acquire(blocking=False):
                pass
            if self._stopping or self.failure is not None:
                return
            try:
                self._fdatasync(self._fd)
            except OSError as error:
                self.failure = error


def _no_progress() -> int:
    raise OSError("the system wrote nothing and gave no reason")


def make_directories(directory: Path, *, top: Path) -> None:
    """Make `directory`, and what is missing between it and `top`, which exists; another rank may do the same.

    Raises:
        FileNotFoundError: `top` is not there: the run is mounted elsewhere.
        OSError: as the system said it.
    """
    if not top.is_dir():
        raise FileNotFoundError(
            f"the run's directory {top} is not on this machine; set {RUN_DIRECTORY} to where it is mounted"
        )
    directory.mkdir(parents=True, exist_ok=True)


def sync_directories(directories: set[Path], *, top: Path, fsync: Callable[[int], None] = os.fsync) -> None:
    """Make the names in `directories`, and in everything above them up to and including `top`, durable, deepest first.

    Raises:
        OSError: as the system said it.
    """
    wanted = {top}
    for directory in directories:
        while directory != top:
            wanted.add(directory)
            directory = directory.parent
    for directory in sorted(wanted, key=lambda path: -len(path.parts)):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fsync(fd)
        finally:
            os.close(fd)
