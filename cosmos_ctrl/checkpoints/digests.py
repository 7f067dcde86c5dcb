"""Digests of artifacts: hash while writing, hash a file, verify many files at once.

* A digest is the text ``algorithm:hex``, lower case, of the algorithm's full length; ``parse_digest`` is the only reader.
* A verification reads the very file that its caller reads from afterwards, or makes the copy that its caller reads.
* Size comes first: a file of another size is refused before a byte of it is read.
* An OS error is never a verdict on the content: it is ``StorageUnavailableError``, not ``CheckpointDamagedError``.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from cosmos_ctrl.checkpoints import direct
from cosmos_ctrl.checkpoints.durable import storage_errors
from cosmos_ctrl.core.errors import CheckpointDamagedError, StorageUnavailableError

if TYPE_CHECKING:
    from io import RawIOBase

DEFAULT_ALGORITHM = "sha256"

#: Algorithms and the length of their digests, in hex digits.
ALGORITHMS = {"sha256": 64, "blake3": 64}

#: Bytes read at once. Large enough that hashing dominates, small enough that 32 threads stay within 32 MiB.
BLOCK_BYTES = 1 << 20

_HEX = re.compile(r"[0-9a-f]+")


class Hasher:
    """An incremental hash, fed as bytes are written. Made by `new_hasher`; not thread-safe."""

    __slots__ = ("_inner", "algorithm", "size_bytes")

    def __init__(self, algorithm: str, inner: Any) -> None:
        self.algorithm = algorithm
        self.size_bytes = 0
        """Bytes hashed so far."""
        self._inner = inner

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Hash `data`, which may be any contiguous buffer."""
        self._inner.update(data)
        self.size_bytes += data.nbytes if isinstance(data, memoryview) else len(data)

    def digest(self) -> str:
        """``algorithm:hex`` of everything so far; more may be hashed afterwards."""
        return f"{self.algorithm}:{self._inner.hexdigest()}"


def new_hasher(algorithm: str = DEFAULT_ALGORITHM) -> Hasher:
    """An empty hash.

    Raises:
        ValueError: the algorithm is unknown.
        ModuleNotFoundError: it is blake3, and the ``blake3`` package is not installed.
    """
    if algorithm == "sha256":
        return Hasher(algorithm, hashlib.sha256())
    if algorithm == "blake3":
        try:
            module: Any = importlib.import_module("blake3")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "digests of kind blake3 need the package of that name: pip install blake3"
            ) from error
        return Hasher(algorithm, module.blake3())
    raise ValueError(f"digest algorithm {algorithm!r} is not known, expected one of {', '.join(ALGORITHMS)}")


def digest_bytes(data: bytes, algorithm: str = DEFAULT_ALGORITHM) -> str:
    """``algorithm:hex`` of `data`."""
    hasher = new_hasher(algorithm)
    hasher.update(data)
    return hasher.digest()


def parse_digest(text: str) -> tuple[str, str]:
    """Split ``algorithm:hex``.

    Raises:
        ValueError: it is not that, or the algorithm is unknown.
    """
    algorithm, _, digits = text.partition(":")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"digest {text[:80]!r} does not begin with one of {', '.join(f'{a}:' for a in ALGORITHMS)}")
    if len(digits) != ALGORITHMS[algorithm] or not _HEX.fullmatch(digits):
        raise ValueError(
            f"digest {text[:80]!r} is not {ALGORITHMS[algorithm]} lower-case hex digits after {algorithm}:"
        )
    return algorithm, digits


def hash_file(
    file: BinaryIO, algorithm: str = DEFAULT_ALGORITHM, *, copy: BinaryIO | None = None, cached: bool = True
) -> tuple[str, int]:
    """Digest and size in bytes of an unbuffered file, from its start; it stands at its end afterwards.

    Args:
        file: seekable.
        algorithm: of the digest.
        copy: gets the same bytes.
        cached: False: past the page cache, for bytes that nobody reads again soon.

    Raises:
        OSError: it cannot be read, or the copy not be written, as the system said it.
    """
    hasher = new_hasher(algorithm)
    raw = cast("RawIOBase", file)
    small = raw.seek(0, os.SEEK_END) < direct.BLOCK_BYTES
    for block in _read_cached(raw) if cached or small else direct.read_blocks(raw):
        hasher.update(block)
        if copy is not None:
            copy.write(block)
    return hasher.digest(), hasher.size_bytes


def _read_cached(file: RawIOBase) -> Iterator[memoryview]:
    file.seek(0)
    # One buffer serves all blocks.
    buffer = memoryview(bytearray(BLOCK_BYTES))
    while count := file.readinto(buffer):
        yield buffer[:count]


def verify_file(
    file: BinaryIO,
    size: int,
    digest: str,
    *,
    path: str,
    artifact: str,
    copy: BinaryIO | None = None,
    cached: bool = True,
) -> None:
    """Check that `file` has exactly `size` bytes with that digest; it stands at its end afterwards.

    Args:
        file: unbuffered and seekable.
        size: expected bytes.
        digest: expected ``algorithm:hex``.
        path: the checkpoint, for the error.
        artifact: the artifact's name, for the error.
        copy: gets the same bytes; they are what was expected only if this returns.
        cached: False: past the page cache, for bytes that nobody reads again soon.

    Raises:
        CheckpointDamagedError: size or digest differs.
        StorageUnavailableError: it could not be read, or the copy not be written.
        ValueError: `digest` is malformed.
    """
    algorithm, _ = parse_digest(digest)

    def damaged(what: str, expected: object, found: object) -> CheckpointDamagedError:
        return CheckpointDamagedError(path=path, artifact=artifact, what=what, expected=str(expected), found=str(found))

    try:
        there = file.seek(0, os.SEEK_END)
        if there != size:
            raise damaged("size in bytes", size, there)
        found, read = hash_file(file, algorithm, copy=copy, cached=cached)
    except OSError as error:
        raise StorageUnavailableError(path=f"{path}/{artifact}", operation="read", cause=str(error)) from error
    if read != size:
        raise damaged("size in bytes", size, read)
    if found != digest:
        raise damaged("digest", digest, found)


@dataclass(frozen=True, slots=True)
class Verification:
    """One artifact to verify."""

    artifact: str
    """Name, for the error."""
    size_bytes: int
    digest: str
    open: Callable[[], BinaryIO]
    """Opens it for reading; the file is closed afterwards."""


def verify_many(checks: Iterable[Verification], *, path: str, threads: int | None = None) -> None:
    """Verify artifacts in parallel, past the page cache; reading and hashing release the interpreter lock. Every check in flight ends before
    this returns.

    Args:
        checks: what to verify.
        path: the checkpoint, for the errors.
        threads: at most so many at once; None: `default_threads`.

    Raises:
        CheckpointDamagedError, StorageUnavailableError, ArtifactMissingError: the first failure, in the order of `checks`
            among those that had ended.
    """
    # The largest first: the last to start should be a short one.
    ordered = sorted(checks, key=lambda check: -check.size_bytes)
    if not ordered:
        return
    workers = min(threads or default_threads(), len(ordered))
    if workers == 1:
        for check in ordered:
            _verify(check, path)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="verify") as pool:
        futures = [pool.submit(_verify, check, path) for check in ordered]
        done, pending = wait(futures, return_when=FIRST_EXCEPTION)
        for future in pending:
            future.cancel()
        for future in futures:
            if future in done:
                future.result()


def default_threads() -> int:
    """Threads that a verification uses when nothing is said: three for each CPU that this process may use, at most 32.

    One hashes while the others wait for the disk.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    return min(32, 3 * (len(affinity(0)) if affinity else os.cpu_count() or 1))


def _verify(check: Verification, path: str) -> None:
    with storage_errors(f"{path}/{check.artifact}", "read"), check.open() as file:
        verify_file(file, check.size_bytes, check.digest, path=path, artifact=check.artifact, cached=False)
