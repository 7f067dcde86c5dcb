"""A store in a bucket: S3 and what speaks like it, Google Cloud Storage, Azure Blob Storage; by the package ``obstore``.

* A name appears by one conditional put. Whatever that is answered (taken, conflict, 5xx, nothing at all), what can be read back decides:
  the identical bytes are success, others are a conflict, nothing means that it is tried again.
* Absent is what a listing of the bucket confirms: a bucket that is not there answers 404 as well.
* Throttling, conflicts, 5xx, timeouts and lost connections are tried again, with growing pauses and a limit in all. What will not get
  better (refused, forbidden, no such bucket) is not.
* A conditional put here is only as good as the server's: `probe_conditional_puts` asks before anything relies on it.
"""

from __future__ import annotations

import copy
import io
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, BinaryIO, TypeVar, cast

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from cosmos_ctrl.checkpoints import names
from cosmos_ctrl.checkpoints.digests import digest_bytes
from cosmos_ctrl.checkpoints.names import parents_of
from cosmos_ctrl.checkpoints.stores import VISIBLE_NOT_DURABLE, Entry, EntryKind
from cosmos_ctrl.checkpoints.stores.opening import ObjectLocation
from cosmos_ctrl.core.errors import (
    CheckpointConflictError,
    CheckpointDamagedError,
    CheckpointError,
    StorageUnavailableError,
)

T = TypeVar("T")

#: Bytes that one request fetches of an open object.
FETCH_BYTES = 16 << 20

#: Bytes of one part of an upload. Providers take 10,000 parts: objects of up to 320 GB.
PART_BYTES = 32 << 20

#: Parts of one upload that are on their way at once.
PARTS_AT_ONCE = 4

#: Not the process's own generator, whose state is the application's, and which the ranks of a run may seed alike.
_JITTER = random.SystemRandom()

#: Longest single request; a part, or a manifest, has to get through within it.
_REQUEST_S = 60

_STATUS = re.compile(r"non-2xx status code: (\d{3})")

#: Statuses below 500 that may pass.
_PASSING = {408, 409, 425, 429}

_REDIRECTED = "Received redirect"

#: Of a request that could not be made, and of a connection that could not: nothing was sent.
_IMPOSSIBLE = "builder error"
_NOT_CONNECTED = "kind: Connect"

#: Where the libraries ask for a machine's own credentials when none were given.
_METADATA_SERVICES = ("169.254.169.254", "/latest/api/token", "metadata.google.internal", "/metadata/identity")

_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, and AWS_ENDPOINT_URL where it is not Amazon's",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SERVICE_ACCOUNT_KEY",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}


@dataclass(frozen=True, slots=True)
class Retries:
    """How long and how often a request is tried again. Seconds."""

    total_s: float = 60.0
    """No try begins later than this after the first."""
    first_s: float = 0.1
    """About the first pause; doubles, and is shortened at random, by up to a half, so that many processes do not come back at once."""
    most_s: float = 5.0
    """Longest pause."""

    def tries(self) -> Iterator[None]:
        """One item a try, with the pauses in between."""
        until = time.monotonic() + self.total_s
        pause = self.first_s
        while True:
            yield
            pause_s = _JITTER.uniform(pause / 2, pause)
            if time.monotonic() + pause_s > until:
                return
            time.sleep(pause_s)
            pause = min(2 * pause, self.most_s)


class ObjectStore:
    """A prefix in a bucket. Making one accesses nothing. Thread-safe; not to be used in a process forked after its first use."""

    def __init__(
        self, where: ObjectLocation, *, retries: Retries | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        """Store below a prefix.

        Args:
            where: the bucket and the prefix.
            retries: how long it keeps trying.
            options: arguments of obstore's store for the provider, which win over the provider's environment variables.

        Raises:
            ValueError: an option, or an environment variable, cannot be used.
        """
        self.where = where
        self._retries = retries or Retries()
        # Tries are counted here, where a conflict can be told from a taken name; only an upload's parts are left to obstore.
        self._client = _connect(where, {"max_retries": 0}, options or {})
        bound = timedelta(seconds=self._retries.total_s)
        self._parts = _connect(where, {"max_retries": 10, "retry_timeout": bound}, options or {})

    @property
    def uri(self) -> str:
        """``scheme://bucket/prefix``."""
        return self.where.uri

    def location(self, name: str) -> str:
        """The URI of `name`."""
        return f"{self.uri}/{name}"

    def within(self, prefix: str) -> ObjectStore:
        """See `Store.within`."""
        inner = copy.copy(self)
        inner.where = ObjectLocation(self.where.scheme, self.where.bucket, self._prefix(prefix))
        return inner

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """See `Store.put_if_absent`."""
        key = self._key(name)
        may_be_visible = False
        failure: Exception | None = None
        for _ in self._retries.tries():
            try:
                obstore.put(self._client, key, data, mode="create", use_multipart=False)
            except Exception as error:
                failure = error
            else:
                return True
            absent = False
            try:
                self._compare(name, self._fetch(key, name, limit=len(data)), data)
            except FileNotFoundError:
                absent = True
            except CheckpointDamagedError as error:
                raise CheckpointConflictError(path=self.location(name), what=f"{error.what} {error.found}") from error
            except CheckpointError:
                raise
            except Exception as error:
                # The put's own failure says more, unless it was that the name is taken.
                failure = error if isinstance(failure, exceptions.AlreadyExistsError) else failure
            else:
                return False
            # A request that was never answered may still be carried out after the look.
            may_be_visible |= not (_refused(failure) or (absent and _status_of(failure)))
            if _is_final(failure):
                break
        if may_be_visible:
            raise self._unavailable(name, VISIBLE_NOT_DURABLE, failure, "it may be visible: ") from failure
        raise self._unavailable(name, "put", failure) from failure

    def read(self, name: str, *, limit: int) -> bytes | None:
        """See `Store.read`."""
        key = self._key(name)
        return self._find("read", name, lambda: self._fetch(key, name, limit=limit))

    def open(self, name: str) -> BinaryIO | None:
        """See `Store.open`. The bytes are fetched as they are read, and are always those of the object that was opened."""
        key = self._key(name)
        found = self._find("open", name, lambda: obstore.head(self._client, key))
        if found is None:
            return None
        tag = found["e_tag"]

        def fetch(start: int, end: int) -> bytes:
            options: obstore.GetOptions = {"range": (start, end), "if_match": tag}

            def attempt() -> bytes:
                try:
                    return bytes(obstore.get(self._client, key, options=options).bytes())
                except (FileNotFoundError, exceptions.PreconditionError) as error:
                    raise self._damaged(name, "content", "the one that was opened", "another, or none") from error

            return self._call("read", name, attempt)

        return cast("BinaryIO", _OpenObject(found["size"], fetch))

    def list(self, prefix: str) -> tuple[str, ...]:
        """See `Store.list`."""
        key = self._prefix(prefix)
        found = self._call("list", prefix, lambda: obstore.list_with_delimiter(self._client, key or None))
        directories = [f"{self._relative(path, key)}/" for path in found["common_prefixes"]]
        files = [self._relative(item["path"], key) for item in found["objects"] if item["path"] != key]
        return tuple(sorted(name for name in directories + files if not _is_temporary(name)))

    def scan(self, prefix: str) -> tuple[Entry, ...]:
        """See `Store.scan`. The empty object that some consoles put where a directory would be is no file."""
        key = self._prefix(prefix)
        found = self._call("scan", prefix, lambda: obstore.list(self._client, key or None).collect())
        sizes = {self._relative(item["path"], key): item["size"] for item in found if item["path"] != key}
        markers = {parent for name in sizes for parent in parents_of(name) if sizes.get(parent) == 0}
        return tuple(
            Entry(name, "file", size)
            for name, size in sorted(sizes.items())
            if name not in markers and not _is_temporary(name)
        )

    def head(self, name: str) -> int | None:
        """See `Store.head`."""
        key = self._key(name)
        found = self._find("head", name, lambda: obstore.head(self._client, key))
        return None if found is None else found["size"]

    def kind(self, name: str) -> EntryKind | None:
        """See `Store.kind`. A directory is what has something below it."""
        if self.head(name) is not None:
            return "file"
        return "directory" if self.list(name) else None

    def delete(self, name: str) -> bool:
        """See `Store.delete`."""
        key = self._key(name)
        # Some providers say that they deleted what was not there.
        if self.head(name) is None:
            return False
        self._find("delete", name, lambda: obstore.delete(self._client, key))
        return True

    def sync(self, prefix: str) -> None:
        """See `Store.sync`. What is visible is durable."""
        if prefix and not self.list(prefix):
            raise StorageUnavailableError(path=self.location(prefix), operation="sync", cause="there is nothing")

    def sync_names(self, names: Iterable[str]) -> None:
        """See `Store.sync_names`. An object is durable with its name once its put is answered."""

    def upload(self, name: str, parts: Iterator[bytes]) -> None:
        """Store a large object in parts, several on their way at once, each tried again by itself. Only for names that are nobody
        else's: there is no condition on the last request, so of two uploads at once the later one replaces.

        Args:
            name: within the store.
            parts: blocks of any length. What it raises ends the upload, of which nothing remains, and propagates.

        Raises:
            CheckpointConflictError: something has the name.
            StorageUnavailableError: it failed. Parts of it may remain where the provider could not be told; they are no object.
        """
        key = self._key(name)
        if self.head(name) is not None:
            raise CheckpointConflictError(path=self.location(name), what="an upload in parts would replace it")
        foreign: Exception | None = None

        def watched() -> Iterator[bytes]:
            nonlocal foreign
            try:
                yield from parts
            except Exception as error:
                foreign = error
                raise

        try:
            obstore.put(
                self._parts, key, watched(), use_multipart=True, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE
            )
        except Exception as error:
            if foreign is not None:
                raise foreign from None
            raise self._unavailable(name, "upload", error) from error

    def _call(self, operation: str, name: str, call: Callable[[], T]) -> T:
        failure: Exception | None = None
        for _ in self._retries.tries():
            try:
                return call()
            except CheckpointError:
                raise
            except Exception as error:
                failure = error
            if _is_final(failure):
                break
        raise self._unavailable(name, operation, failure) from failure

    def _find(self, operation: str, name: str, call: Callable[[], T]) -> T | None:
        def attempt() -> tuple[T] | None:
            try:
                return (call(),)
            except FileNotFoundError:
                return None

        found = self._call(operation, name, attempt)
        if found is None:
            # A missing bucket answers 404 too; to a listing it does so as an error.
            self._call(operation, name, lambda: obstore.list_with_delimiter(self._client, self._key(name)))
            return None
        return found[0]

    def _fetch(self, key: str, name: str, *, limit: int) -> bytes:
        result = obstore.get(self._client, key)
        size = result.meta["size"]
        if size > limit:
            raise self._damaged(name, "size in bytes", f"at most {limit}", str(size))
        return bytes(result.bytes())

    def _compare(self, name: str, existing: bytes, data: bytes) -> None:
        if existing != data:
            what = f"{digest_bytes(existing)} is there, {digest_bytes(data)} was to be published"
            raise CheckpointConflictError(path=self.location(name), what=what)

    def _key(self, name: str) -> str:
        return self._prefix(names.check_store_name(name, path=self.uri))

    def _prefix(self, name: str) -> str:
        if name:
            names.check_store_name(name, path=self.uri)
        return "/".join(part for part in (self.where.prefix, name) if part)

    @staticmethod
    def _relative(path: str, key: str) -> str:
        return path[len(key) + 1 :] if key else path

    def _damaged(self, name: str, what: str, expected: str, found: str) -> CheckpointDamagedError:
        directory, _, last = name.rpartition("/")
        path = self.location(directory) if directory else self.uri
        return CheckpointDamagedError(path=path, artifact=last, what=what, expected=expected, found=found)

    def _unavailable(
        self, name: str, operation: str, error: Exception | None, state: str = ""
    ) -> StorageUnavailableError:
        return StorageUnavailableError(
            path=self.location(name) if name else self.uri,
            operation=operation,
            cause=f"{state}{_brief(error)}{_advice(error, self.where)}",
        )


class _OpenObject(io.RawIOBase):
    """An object that is fetched piece by piece as it is read."""

    def __init__(self, size: int, fetch: Callable[[int, int], bytes]) -> None:
        super().__init__()
        self._size = size
        self._fetch = fetch
        self._position = 0
        self._piece = memoryview(b"")
        self._piece_start = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}, before the start")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        if self._position >= self._size or not target:
            return 0
        at = self._position - self._piece_start
        if not 0 <= at < len(self._piece):
            end = min(self._position + FETCH_BYTES, self._size)
            self._piece, self._piece_start, at = memoryview(self._fetch(self._position, end)), self._position, 0
        block = self._piece[at : at + len(target)]
        target[: len(block)] = block
        self._position += len(block)
        return len(block)


def _connect(where: ObjectLocation, retry: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    # Not as client options, which would hide those of the environment. It also bounds a server that accepts and never answers.
    config = {"timeout": f"{_REQUEST_S} seconds", **options.get("config", {})}
    arguments: dict[str, Any] = {**options, "config": config, "retry_config": dict(retry)}
    try:
        if where.scheme == "s3":
            # One name at a time, which every provider of the dialect has.
            arguments["config"] = {"disable_bulk_delete": True, **config}
            return S3Store(where.bucket, **arguments)
        return GCSStore(where.bucket, **arguments) if where.scheme == "gs" else AzureStore(where.bucket, **arguments)
    except Exception as error:
        raise ValueError(
            f"{where.uri} cannot be used as it is configured: {_brief(error)}; it takes {_CREDENTIALS[where.scheme]}"
        ) from error


def _is_temporary(name: str) -> bool:
    return any(part.startswith(names.TEMPORARY_PREFIX) for part in name.split("/"))


def _status_of(error: Exception | None) -> int:
    # obstore has the status in its text alone; one that is not found there makes an error look passing and unresolved, which is safe.
    match = _STATUS.search(str(error))
    return int(match[1]) if match else 301 if _REDIRECTED in str(error) else 0


def _refused(error: Exception | None) -> bool:
    """Whether the server certainly did not carry out a put."""
    if isinstance(error, exceptions.AlreadyExistsError):
        return False
    status = _status_of(error)
    return 300 <= status < 500 if status else any(text in str(error) for text in (_IMPOSSIBLE, _NOT_CONNECTED))


def _is_final(error: Exception | None) -> bool:
    """Whether trying again cannot help."""
    if isinstance(error, exceptions.AlreadyExistsError):
        return False
    status = _status_of(error)
    if status:
        return status == 501 or (status < 500 and status not in _PASSING)
    never = (exceptions.InvalidPathError, exceptions.NotSupportedError, exceptions.UnknownConfigurationKeyError)
    return _IMPOSSIBLE in str(error) or isinstance(
        error, (*never, ValueError, FileNotFoundError, exceptions.PreconditionError)
    )


def _brief(error: Exception | None) -> str:
    # What follows is for obstore's developers. It redacts signatures itself.
    return " ".join(str(error).partition("\n\nDebug source")[0].split())[:600]


def _advice(error: Exception | None, where: ObjectLocation) -> str:
    status, text = _status_of(error), str(error)
    if isinstance(error, FileNotFoundError) or status == 404:
        return f". There is no bucket or container {where.bucket}, or its endpoint is another one"
    if _IMPOSSIBLE in text:
        return ". An endpoint without TLS has to be allowed, by AWS_ALLOW_HTTP=true where it speaks S3"
    if status == 501:
        return (
            ". The store has no conditional puts, which keep two controllers apart; use one that has, or a file system"
        )
    if status in (301, 307) or "AuthorizationHeaderMalformed" in text:
        return f". The bucket {where.bucket} is in another region than AWS_REGION says"
    if status in (401, 403) or any(service in text for service in _METADATA_SERVICES):
        return f". There are no credentials, or they do not allow it; they come from {_CREDENTIALS[where.scheme]}"
    return ""
