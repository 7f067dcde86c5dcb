"""From where a run lies to its store.

* A path, or a ``file://`` URI, is a directory; ``s3://bucket/prefix``, ``gs://bucket/prefix`` and ``az://container/prefix`` are object
  stores.
* An object store's region, endpoint and credentials come from its provider's own environment variables, never from the run.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from cosmos_ctrl.checkpoints import names
from cosmos_ctrl.checkpoints.stores import Store
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.core.errors import CheckpointConflictError, StorageUnavailableError, UnsafeNameError

#: Schemes of object stores.
OBJECT_SCHEMES = ("s3", "gs", "az")

#: Longest prefix of a run, in bytes of UTF-8: with it and a checkpoint's path, every name stays below the providers' 1,024.
MAX_PREFIX_BYTES = 160


@dataclass(frozen=True, slots=True)
class ObjectLocation:
    """A prefix in a bucket."""

    scheme: str
    """One of ``OBJECT_SCHEMES``."""
    bucket: str
    """Bucket, or container of an Azure account."""
    prefix: str
    """Without slashes at its ends; empty: the whole bucket."""

    @property
    def uri(self) -> str:
        """As it is written."""
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")


def parse_location(location: str) -> Path | ObjectLocation:
    """What `location` names: a directory, or a prefix in an object store.

    Raises:
        ValueError: it is neither; the message says what is wrong.
    """
    scheme, separator, rest = location.partition("://")
    if not separator:
        return Path(location)
    if scheme == "file":
        parts = urlsplit(location)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise ValueError(f"{location!r} is no directory of this machine; write file:///path, or the path alone")
        return Path(unquote(parts.path))
    if scheme not in OBJECT_SCHEMES:
        known = ", ".join(f"{name}://" for name in ("file", *OBJECT_SCHEMES))
        raise ValueError(f"{location!r} has the unknown scheme {scheme}://, expected a path or one of {known}")
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.rstrip("/")
    if not bucket:
        raise ValueError(f"{location!r} names no bucket, expected {scheme}://bucket/prefix")
    if prefix:
        try:
            names.check_store_name(prefix, path=location)
        except UnsafeNameError as error:
            raise ValueError(f"the prefix of {location!r} cannot be used: {error.why}") from error
        if len(prefix.encode()) > MAX_PREFIX_BYTES:
            raise ValueError(f"the prefix of {location!r} is longer than {MAX_PREFIX_BYTES} bytes")
    return ObjectLocation(scheme, bucket, prefix)


def open_store(location: str | Path) -> Store:
    """The store at a path or URI. Nothing is accessed yet.

    Raises:
        ValueError: it is neither a path nor a URI of a known scheme, or the provider's environment variables cannot be read.
        ModuleNotFoundError: it is an object store, and the extra that speaks to those is not installed.
    """
    found = parse_location(location) if isinstance(location, str) else location
    if isinstance(found, Path):
        return LocalStore(found)
    try:
        from cosmos_ctrl.checkpoints.stores.objects import ObjectStore
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{found.uri} is an object store, which needs the package obstore: pip install 'cosmos-ctrl[objects]'"
        ) from error
    return ObjectStore(found)


def probe_conditional_puts(store: Store) -> None:
    """Check that `store` really refuses to replace: put one temporary name twice, with different content, and remove it.

    Raises:
        StorageUnavailableError: it replaces, so two controllers could both believe that they had published; or it cannot be used at all.
    """
    name = f"{names.TEMPORARY_PREFIX}probe-{secrets.token_hex(8)}"
    store.put_if_absent(name, b"first")
    try:
        store.put_if_absent(name, b"second")
    except CheckpointConflictError:
        pass
    else:
        cause = (
            "it replaced an object that a conditional put should have left alone, so it cannot keep two controllers apart; "
            "put the run on a store that honours If-None-Match, or on a file system"
        )
        raise StorageUnavailableError(path=store.uri, operation="probe of conditional puts", cause=cause)
    finally:
        store.delete(name)
