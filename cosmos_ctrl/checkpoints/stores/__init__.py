"""Where a run's files live, behind one contract that a file system and an object store can both keep.

* A name that is put is put whole, durably, once; nothing is ever replaced.
* *Absent* is a value (``None``, an empty listing); whatever else goes wrong is ``StorageUnavailableError``. The two are never
  mixed up: only absence may lead to a fresh start.
* Names are safe relative paths (`cosmos_ctrl.checkpoints.names`); anything else is ``UnsafeNameError`` before any access.
* Names that begin with ``names.TEMPORARY_PREFIX`` are a store's own leftovers; no listing shows them.
* There are no directories to make: a directory is there while something lies in it, whether or not the store has such a thing.

`cosmos_ctrl.testing.check_store` holds a store to this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO, Literal, Protocol

EntryKind = Literal["file", "directory", "symbolic link", "other"]

#: The operation in ``StorageUnavailableError`` when a name is visible, or may be, and it is not known that it lasts.
VISIBLE_NOT_DURABLE = "making the published name durable"


@dataclass(frozen=True, slots=True)
class Entry:
    """Something below a prefix. Object stores have files only."""

    name: str
    """Relative to the prefix that was scanned."""
    kind: EntryKind
    size_bytes: int
    """Zero unless it is a file."""


class Store(Protocol):
    """A run's directory or object-store prefix. Thread-safe."""

    @property
    def uri(self) -> str:
        """Where it is, for people, for errors and for `open_store`."""

    def location(self, name: str) -> str:
        """Where `name` is, for people and for errors."""

    def within(self, prefix: str) -> Store:
        """The store below `prefix`. Where there are directories, it does not make its own again once somebody removed it."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Store `data` under `name` unless the name is taken; durable once this returns. Missing parents are made.

        Returns:
            True when it was created, False when the identical bytes were there already (also by an earlier try of one's own whose
            reply was lost).

        Raises:
            CheckpointConflictError: something else has the name; it is untouched.
            StorageUnavailableError: it was not stored; with the operation ``VISIBLE_NOT_DURABLE``: the name is visible, or may be, and
                must be neither acknowledged nor tried again.
        """

    def read(self, name: str, *, limit: int) -> bytes | None:
        """All bytes of `name`, or None when it is absent.

        Raises:
            CheckpointDamagedError: it is larger than `limit` bytes, or not a regular file.
            StorageUnavailableError: it could not be read.
        """

    def open(self, name: str) -> BinaryIO | None:
        """`name` for reading, unbuffered and seekable, or None when it is absent. No link is followed on the way.

        The file goes on being the one that was opened, whatever becomes of the name. Its errors are ``CheckpointDamagedError`` (it
        changed under the reader) and ``StorageUnavailableError``, or ``OSError``. A file with a ``fileno`` is one of this machine.

        Raises:
            CheckpointDamagedError: it, or a directory on the way, is of another kind.
            StorageUnavailableError: it could not be opened.
        """

    def list(self, prefix: str) -> tuple[str, ...]:
        """Immediate children of `prefix` ("" is the root), sorted; a directory's name ends in "/". Empty when it is absent.

        Raises:
            StorageUnavailableError: it could not be listed.
        """

    def scan(self, prefix: str) -> tuple[Entry, ...]:
        """Everything below `prefix`, however deep, by name; reads no content and follows no link. Empty when it is absent.

        Raises:
            StorageUnavailableError: it could not be listed.
        """

    def head(self, name: str) -> int | None:
        """Size of `name` in bytes, or None when it is absent or not a regular file.

        Raises:
            StorageUnavailableError: it could not be looked at.
        """

    def kind(self, name: str) -> EntryKind | None:
        """What `name` itself is: no link is followed. None when it is absent.

        Raises:
            StorageUnavailableError: it could not be looked at.
        """

    def delete(self, name: str) -> bool:
        """Remove `name`, a file, a link or an empty directory, durably. Object stores have no directories: one is absent.

        Returns:
            False when it was absent. Of two that remove it at once, both may be told True.

        Raises:
            StorageUnavailableError: it could not be removed, or the directory is not empty.
        """

    def sync(self, prefix: str) -> None:
        """Make the names that are visible in `prefix` durable: whoever put one may have died before that.

        Raises:
            StorageUnavailableError: it is absent, or could not be made durable.
        """

    def sync_names(self, names: Iterable[str]) -> None:
        """Make durable that files which somebody else wrote durably have these names.

        Raises:
            StorageUnavailableError: it failed; nothing may be published over them.
        """
