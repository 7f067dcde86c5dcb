"""Files of a checkpoint: hashed while they are written, durable once they are closed.

* What is written is copied into blocks, each of which is hashed on one thread while another writes it; nothing is read back. A caller
  that is faster than the disk waits for a free block, so memory stays bounded.
* Whole blocks go past the page cache where the file system can do that: they are on their way to the disk at once, for a tenth of the
  CPU time, and what the trainer has in the cache stays there. Elsewhere write-back starts early, so that the final fsync is short.
* The first failure is final, and is what every later call raises, as the system said it. The file is never fsynced again: the kernel
  has forgotten the pages, and a second fsync would succeed over bytes that are not there.
* ``close`` returns only if size and content are durable: fsync of the file, then every directory up to the checkpoint's
  parent (`sync_directories`).
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from cosmos_ctrl.checkpoints import direct
from cosmos_ctrl.checkpoints.digests import DEFAULT_ALGORITHM, new_hasher
from cosmos_worker.errors import UsageError
from cosmos_worker.settings import RUN_DIRECTORY

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: Filled, hashed and written at the same time: 12 MiB that an open file holds.
_BLOCKS = 6

#: Bytes between two write-backs of the page cache.
WRITE_BACK_BYTES = 32 << 20

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


# Not on every system; the stronger call does the same.
_fdatasync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)


@dataclass(frozen=True, slots=True)
class SystemCalls:
    """The calls that a file makes, replaceable where a test needs them to fail."""

    open: Callable[[Path, int, int], int] = os.open
    set_direct: Callable[[int, bool], None] = direct.set_direct
    """Whether writes go past the page cache from now on; an OSError where they cannot."""
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
        self._output: _Output | None = None
        self._hasher = new_hasher(algorithm)
        self._taken = 0
        self._blocks: list[_Block] = []
        """Filled in turn, made when they are first needed."""
        self._threads: tuple[_Hand, _Hand] | None = None
        """One hashes and one writes, once there is a whole block."""
        self._failure: OSError | None = None
        self._result: WrittenFile | None = None
        self.path = path
        calls = calls or SystemCalls()
        self._output = _Output(calls.open(path, _CREATE, 0o644), calls)

    def writable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Bytes taken."""
        return self._taken

    def write(self, data: Buffer, /) -> int:
        """Take all of `data`; it is its owner's again afterwards.

        Returns:
            Its length in bytes.

        Raises:
            OSError: writing failed, of this or of something before, as the system said it; the file is lost.
            ValueError: it is closed.
        """
        output = self._output
        if output is None:
            self._raise_failure()
            raise ValueError(f"{self.path} is closed")
        view = memoryview(data).cast("B")
        taken = 0
        with self._lost_if_it_fails():
            while taken < len(view):
                index, start = divmod(self._taken, direct.BLOCK_BYTES)
                block = self._block(index)
                count = min(len(view) - taken, direct.BLOCK_BYTES - start)
                block.memory[start : start + count] = view[taken : taken + count]
                taken += count
                self._taken += count
                if start + count == direct.BLOCK_BYTES:
                    self._send(block, output)
        return taken

    def close(self) -> None:
        """Make the file durable. Idempotent; after a failure it raises that again.

        Raises:
            OSError: as the system said it; the file is lost.
        """
        if self._output is not None:
            with self._lost_if_it_fails():
                self._result = self._seal(self._output)
            self._release()
        self._raise_failure()
        super().close()

    def abandon(self) -> None:
        """Close without making anything durable. Idempotent."""
        if self._output is not None:
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
        # The base class would close, which means fsync: a file that nobody closed is abandoned. Not when the interpreter ends: its threads
        # stand still then, and are not to be waited for.
        if not sys.is_finalizing():
            self.abandon()

    def _block(self, index: int) -> _Block:
        """The block for the next bytes, free to be filled."""
        if index < _BLOCKS and index == len(self._blocks):
            self._blocks.append(_Block())
        block = self._blocks[index % _BLOCKS]
        block.wait()
        return block

    def _send(self, block: _Block, output: _Output) -> None:
        if self._threads is None:
            self._threads = _Hand("cosmos-hash"), _Hand("cosmos-write")
        hashing, writing = self._threads
        block.work = hashing.submit(self._hasher.update, block.memory), writing.submit(output.write, block.memory)

    def _seal(self, output: _Output) -> WrittenFile:
        for block in self._blocks:
            block.wait()
        index, count = divmod(self._taken, direct.BLOCK_BYTES)
        if count:
            rest = self._block(index).memory[:count]
            self._hasher.update(rest)
            output.write(rest)
        size = output.sync()
        # A device that took fewer bytes than it said is caught here, before anyone is told.
        if size != self._taken:
            raise OSError(f"{self.path} has {size} bytes after {self._taken} were written")
        return WrittenFile(size, self._hasher.digest())

    @contextmanager
    def _lost_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # Also an interrupt: what is on the disk may be more than what was hashed.
            lost = error if isinstance(error, OSError) else OSError(f"{self.path} is lost: {error!r}")
            self._failure = self._failure or lost
            self._release()
            raise

    def _release(self) -> None:
        output, self._output = self._output, None
        if output is None:
            return
        for thread in self._threads or ():
            thread.end()
        self._threads, self._blocks = None, []
        try:
            output.close()
        except OSError as error:
            # NFS and quotas speak up here.
            self._failure = self._failure or error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class _Block:
    """Memory for a part of the file."""

    def __init__(self) -> None:
        self.memory = direct.new_block()
        self.work: tuple[Future[None], ...] = ()
        """What is still being done with it."""

    def wait(self) -> None:
        """Until nothing is done with it any more; raises what went wrong."""
        for each in self.work:
            each.result()
        self.work = ()


class _Hand:
    """Does what it is given, one after another, on a thread of its own. That keeps no process alive, as an executor's would: a write may hang."""

    def __init__(self, name: str) -> None:
        self._given: SimpleQueue[tuple[Future[None], Callable[[memoryview], None], memoryview] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[memoryview], None], data: memoryview) -> Future[None]:
        """Have `work` done with `data`."""
        future: Future[None] = Future()
        self._given.put((future, work, data))
        return future

    def end(self) -> None:
        """Wait until all of it is done."""
        self._given.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            future, work, data = given
            try:
                work(data)
            except BaseException as error:  # whatever it is, it is the writer's
                future.set_exception(error)
            else:
                future.set_result(None)


class _Output:
    """The file as the system has it. Not thread-safe."""

    def __init__(self, fd: int, calls: SystemCalls) -> None:
        self._fd, self._calls = fd, calls
        self._direct, self._may_be_direct = False, True
        self._cached = 0
        """Bytes in the page cache since the last write-back."""
        self._failure: Exception | None = None

    def write(self, data: memoryview) -> None:
        """Write all of `data`, a whole block past the page cache if that can be; raises OSError, and from then on only that."""
        if self._failure is not None:
            raise self._failure
        try:
            self._set_direct(len(data) == direct.BLOCK_BYTES and self._may_be_direct)
            while data:
                data = data[self._write_some(data) :]
            if self._cached >= WRITE_BACK_BYTES:
                self._calls.fdatasync(self._fd)
                self._cached = 0
        except Exception as error:
            self._failure = error
            raise

    def sync(self) -> int:
        """Make it durable; returns its size in bytes."""
        self._calls.fsync(self._fd)
        return self._calls.size(self._fd)

    def close(self) -> None:
        """Give up the descriptor."""
        self._calls.close(self._fd)

    def _write_some(self, data: memoryview) -> int:
        try:
            count = self._calls.write(self._fd, data)
        except OSError as error:
            if not self._direct or error.errno != errno.EINVAL:
                raise
            # The file system is of another mind than when it was asked, or a short write has left what is not whole sectors.
            self._may_be_direct = False
            self._set_direct(False)
            return 0
        if count <= 0:
            raise OSError("the system wrote nothing and gave no reason")
        self._cached += 0 if self._direct else count
        return count

    def _set_direct(self, wanted: bool) -> None:
        if wanted == self._direct:
            return
        try:
            self._calls.set_direct(self._fd, wanted)
        except OSError:
            if not wanted:
                raise
            self._may_be_direct = False
        else:
            self._direct = wanted


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
