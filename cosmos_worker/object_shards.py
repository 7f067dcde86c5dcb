"""Files of a checkpoint in an object store: hashed while they are written, uploaded in parts meanwhile.

* Every byte is hashed once, from memory, in the order it is written, as on a file system: the digests are the same.
* What fits into one part is put at the end, if the name is free. More is uploaded in parts, several at once, by a thread of its own; a
  writer that is faster than the network waits, so at most a few parts are in memory.
* A failure poisons the file, and no object of its name comes to be. What a killed process had uploaded is no object either; a bucket's
  rule for incomplete uploads removes it.
* ``close`` returns only when the store has the object, durably, in the size that was written.
"""

from __future__ import annotations

import io
import queue
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cosmos_ctrl.checkpoints.digests import DEFAULT_ALGORITHM, new_hasher, verify_file
from cosmos_ctrl.core.errors import CheckpointError, StorageUnavailableError
from cosmos_worker.errors import UsageError
from cosmos_worker.shards import WrittenFile

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from cosmos_ctrl.checkpoints.stores.objects import ObjectStore

#: Bytes that are handed to the upload at once.
BLOCK_BYTES = 8 << 20

#: Blocks that wait for the upload.
_BLOCKS_WAITING = 4

#: Files of up to so many bytes are put at once.
WHOLE_BYTES = 32 << 20


class UploadingFile(io.BufferedIOBase):
    """A new object, for one writer. `torch.save`, `pickle.dump`, `numpy.save` and `TextIOWrapper` write to it."""

    def __init__(self, store: ObjectStore, name: str, *, algorithm: str = DEFAULT_ALGORITHM) -> None:
        """Write the object `name` of `store`. Nothing is accessed yet."""
        super().__init__()
        self._open = False
        self._store = store
        self._name = name
        self._location = store.location(name)
        self._hasher = new_hasher(algorithm)
        self._pending = bytearray()
        self._upload: _Upload | None = None
        self._failure: BaseException | None = None
        self._result: WrittenFile | None = None
        self._open = True

    def writable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Bytes written."""
        return self._hasher.size_bytes

    def write(self, data: Buffer, /) -> int:
        """Write all of `data`.

        Returns:
            Its length in bytes.

        Raises:
            StorageUnavailableError: an upload failed; the object is lost.
            ValueError: it is closed.
        """
        if not self._open:
            self._raise_failure()
            raise ValueError(f"{self._location} is closed")
        view = memoryview(data).cast("B")
        for start in range(0, len(view), BLOCK_BYTES):
            piece = view[start : start + BLOCK_BYTES]
            self._hasher.update(piece)
            self._pending += piece
            if len(self._pending) >= (BLOCK_BYTES if self._upload else WHOLE_BYTES):
                self._send()
        return len(view)

    def close(self) -> None:
        """Have the object stored. Idempotent; after a failure it raises that again.

        Raises:
            StorageUnavailableError: it is not stored.
            CheckpointConflictError: something else has its name.
        """
        if self._open:
            self._open = False
            try:
                self._finish()
            except BaseException as error:
                self._failure = self._failure or error
        self._raise_failure()
        super().close()

    def abandon(self) -> None:
        """Close without storing anything. Idempotent."""
        if self._open:
            self._open = False
            self._failure = self._failure or UsageError(f"{self._location} was abandoned")
            self._pending.clear()
            if self._upload is not None:
                self._upload.end(cancel=True)

    @property
    def result(self) -> WrittenFile:
        """Size and digest, once closed.

        Raises:
            UsageError: it is not closed.
            StorageUnavailableError: it is lost.
        """
        self._raise_failure()
        if self._result is None:
            raise UsageError(f"{self._location} is still being written")
        return self._result

    def __del__(self) -> None:
        # The base class would close, which means store: a file that nobody closed is abandoned.
        self.abandon()

    def _send(self) -> None:
        if self._upload is None:
            self._upload = _Upload(self._store, self._name)
        block, self._pending = bytes(self._pending), bytearray()
        self._upload.send(block)
        if self._upload.failure is not None:
            self._open = False
            self._failure = self._upload.end(cancel=True)
            self._raise_failure()

    def _finish(self) -> None:
        size = self._hasher.size_bytes
        if self._upload is None:
            self._store.put_if_absent(self._name, bytes(self._pending))
        else:
            self._upload.send(bytes(self._pending))
            failure = self._upload.end(cancel=False)
            # The last request's reply may be lost, and a second one is told that there is no such upload.
            if failure is not None and not self._is_stored():
                raise failure
        self._pending.clear()
        found = self._store.head(self._name)
        if found != size:
            cause = f"wrote {size} bytes, the object has {found}"
            raise StorageUnavailableError(path=self._location, operation="upload", cause=cause)
        self._result = WrittenFile(size, self._hasher.digest())

    def _is_stored(self) -> bool:
        try:
            file = self._store.open(self._name)
            if file is None:
                return False
            with file:
                verify_file(file, self.tell(), self._hasher.digest(), path=self._store.uri, artifact=self._name)
        except CheckpointError:
            return False
        return True

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class _Cancelled(Exception):
    """The writer gave up."""


class _Upload:
    """Hands blocks to an upload that runs on a thread."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._blocks: queue.Queue[bytes | None] = queue.Queue(_BLOCKS_WAITING)
        self._cancelled = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(store, name), name="cosmos-upload", daemon=True)
        self._thread.start()

    def send(self, block: bytes) -> None:
        """Hand over the next block; waits while the upload is behind."""
        if self.failure is None:
            self._blocks.put(block)

    def end(self, *, cancel: bool) -> BaseException | None:
        """Wait for the upload to end; its failure. `cancel`: nothing of it is to remain."""
        self._cancelled = cancel
        self._blocks.put(None)
        self._thread.join()
        return self.failure

    def _run(self, store: ObjectStore, name: str) -> None:
        ended = False

        def blocks() -> Iterator[bytes]:
            nonlocal ended
            while (block := self._blocks.get()) is not None:
                yield block
            ended = True
            if self._cancelled:
                raise _Cancelled

        try:
            store.upload(name, blocks())
        except BaseException as error:
            self.failure = error
        # A writer that waits for room is let go, and hears of the failure next.
        while not ended:
            ended = self._blocks.get() is None
