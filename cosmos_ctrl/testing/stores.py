"""The contract of stores, from outside: nothing but what `Store` says. What cannot be provoked so (a lost reply, a full disk, a power
loss) is not checked.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from cosmos_ctrl.checkpoints.names import MAX_PART_BYTES, TEMPORARY_PREFIX
from cosmos_ctrl.checkpoints.stores import Entry, Store
from cosmos_ctrl.checkpoints.stores.opening import probe_conditional_puts
from cosmos_ctrl.core.errors import (
    CheckpointConflictError,
    CheckpointDamagedError,
    StorageUnavailableError,
    UnsafeNameError,
)
from cosmos_ctrl.testing.expectations import Expectations, StoreContractError, short

_UNSAFE = ("..", "../x", "a/../b", "/x", "a//b", "a/", "a\\b", "a\0b", "e\u0301")

#: Each is one name to a store, and comes out of a listing as it went in.
_ODD = ("with space", "100%", "a%20b", "a+b", "a#b", "a?b=c&d", "ü", "日本", "'quote'", "a:b", "~a", ".hidden", "A")


def check_store(open_store: Callable[[], Store], *, writers: int = 6, rounds: int = 20, listed: int = 1100) -> None:
    """Hold a store to the contract of `cosmos_ctrl.checkpoints.stores.Store`.

    Args:
        open_store: makes a store object over one place, which is empty at first; called many times, and from several threads.
        writers: threads that race for a name.
        rounds: races.
        listed: names in one listing; more than a page, where the store has pages.

    Raises:
        StoreContractError: it breaks rules; it names each, with what was expected and what was found.
    """
    broken: list[str] = []
    for check in (
        _absence,
        _one_put,
        _contents,
        _unsafe_names,
        _odd_names,
        _limits,
        _listings,
        _long_listing,
        _temporary_names,
        _deletion,
        _opened_files,
        _inner_stores,
        _races,
    ):
        expect = Expectations(check.__name__.strip("_").replace("_", " "), broken)
        try:
            check(open_store, expect, _Sizes(writers, rounds, listed))
        except Exception as error:
            expect.broke(f"a call failed with {type(error).__name__}: {error}")
    if broken:
        raise StoreContractError(open_store().uri, broken)


@dataclass(frozen=True, slots=True)
class _Sizes:
    writers: int
    rounds: int
    listed: int


def _absence(open_store: Callable[[], Store], expect: Expectations, _sizes: _Sizes) -> None:
    store = open_store()
    expect.equal("list('') of an empty store", store.list(""), ())
    expect.equal("scan('') of an empty store", store.scan(""), ())
    for name in ("absent", "absent/deep"):
        expect.equal(f"read({name!r})", store.read(name, limit=1), None)
        expect.equal(f"head({name!r})", store.head(name), None)
        expect.equal(f"kind({name!r})", store.kind(name), None)
        expect.raises(StorageUnavailableError, f"sync({name!r})", partial(store.sync, name))
        expect.equal(f"open({name!r})", store.open(name), None)
        expect.equal(f"list({name!r})", store.list(name), ())
        expect.equal(f"scan({name!r})", store.scan(name), ())
        expect.equal(f"delete({name!r})", store.delete(name), False)
    expect.equal("list('') after looking at absent names", store.list(""), ())


def _one_put(open_store: Callable[[], Store], expect: Expectations, _sizes: _Sizes) -> None:
    store, other = open_store(), open_store()
    expect.equal("the first put", store.put_if_absent("put/a", b"one"), True)
    expect.equal("another object's read right after it", other.read("put/a", limit=3), b"one")
    for again in (store, other):
        expect.equal("an identical second put", again.put_if_absent("put/a", b"one"), False)
        for data in (b"two", b"", b"one and more"):
            put = partial(again.put_if_absent, "put/a", data)
            expect.raises(CheckpointConflictError, f"a second put of {data!r}", put)
    expect.equal("read after refused puts", store.read("put/a", limit=3), b"one")
    probe_conditional_puts(store)


def _contents(open_store: Callable[[], Store], expect: Expectations, _sizes: _Sizes) -> None:
    store = open_store()
    for name, data in (("empty", b""), ("bytes", bytes(range(256))), ("large", os.urandom(3 << 20))):
        store.put_if_absent(f"content/{name}", data)
        if store.read(f"content/{name}", limit=len(data)) != data:
            expect.broke(f"{len(data)} bytes were read as others than were put")
        expect.equal(f"head of {len(data)} bytes", store.head(f"content/{name}"), len(data))
    expect.equal("head of a directory", store.head("content"), None)


def _unsafe_names(open_store: Callable[[], Store], expect: Expectations, _sizes: _Sizes) -> None:
    store = open_store()
    for name in _UNSAFE:
        expect.raises(UnsafeNameError, f"put_if_absent({name!r})", partial(store.put_if_absent, name, b""))
        expect.raises(UnsafeNameError, f"read({name!r})", partial(store.read, name, limit=1))
        for call in (store.open, store.head, store.delete, store.list, store.scan, store.within):
            expect.raises(UnsafeNameError, f"{call.__name__}({name!r})", partial(call, name))
    expect.raises(UnsafeNameError, "put_if_absent('')", partial(store.put_if_absent, "", b""))
    expect.raises(UnsafeNameError, "delete('')", partial(store.delete, ""))


def _odd_names(open_store: Callable[[], Store], expect: Expectations, _sizes: _Sizes) -> None:
    store = open_store()
    long = "/".join(["n" * MAX_PART_BYTES, "ü" * (MAX_PART_BYTES // 2), "end"])
    for name in (*_ODD, long):
        store.put_if_absent(f"odd/{name}", name.encode())
    for name in (*_ODD, long):
        expect.equal(f"read of {name!r}", store.read(f"odd/{name}", limit=1000), name.encode())
    files = tuple(sorted(entry.name for entry in store.scan("odd") if entry.kind == "file"))
    expect.equal("scan of odd names", files, tuple(sorted((*_ODD, long))))
    expect.equal("list of odd names", store.list("odd"), tuple(sorted((*_ODD, long.partition("/")[0] + "/"))))


def _limits(open_store: Callable[[], Store], expect: Expectations, _sizes: _Sizes) -> None:
    store = open_store()
    store.put_if_absent("limit", b"12345")
    expect.equal("read with the exact limit", store.read("limit", limit=5), b"12345")
    for limit in (4, 0):
        read = partial(store.read, "limit", limit=limit)
        expect.raises(CheckpointDamagedError, f"read beyond the limit {limit}", read)


def _listings(open_store: Callable[[], Store], expect: Expectations, _sizes: _Sizes) -> None:
    store = open_store()
    for name in ("b", "a/x", "a/deep/er/y", "ab/z", "a.b/z"):
        store.put_if_absent(f"listing/{name}", name.encode())
    expect.equal("list", store.list("listing"), ("a.b/", "a/", "ab/", "b"))
    expect.equal(
        "list of a directory beside ones whose names begin as its own", store.list("listing/a"), ("deep/", "x")
    )
    entries = store.scan("listing/a")
    files = tuple(entry for entry in entries if entry.kind != "directory")
    expect.equal("files of a scan", files, (Entry("deep/er/y", "file", 11), Entry("x", "file", 3)))
    directories = {entry.name for entry in entries if entry.kind == "directory"}
    if directories not in (set(), {"deep", "deep/er"}):
        expect.broke(f"a scan shows the directories {short(directories)}, expected all that there are, or none")
    expect.equal("scan in order", entries, tuple(sorted(entries, key=lambda entry: entry.name)))
    for name, kind in (("listing", "directory"), ("listing/a", "directory"), ("listing/b", "file")):
        expect.equal(f"kind({name!r})", store.kind(name), kind)
    store.sync("listing")
    store.sync_names(["listing/b", "listing/a/deep/er/y"])


def _long_listing(open_store: Callable[[], Store], expect: Expectations, sizes: _Sizes) -> None:
    store = open_store()
    names = [f"{number:05d}/x" for number in range(sizes.listed)]
    with ThreadPoolExecutor(sizes.writers) as pool:
        list(pool.map(lambda name: store.put_if_absent(f"long/{name}", b""), names))
    expect.equal("number of names in a long list", len(store.list("long")), sizes.listed)
    found = [entry.name for entry in store.scan("long") if entry.kind == "file"]
    if found != names:
        expect.broke(f"a long scan has {len(found)} files, expected {len(names)}, in order")


def _temporary_names(open_store: Callable[[], Store], expect: Expectations, _sizes: _Sizes) -> None:
    store = open_store()
    hidden = f"{TEMPORARY_PREFIX}left"
    for name in ("seen", hidden, f"deep/{hidden}", "deep/seen"):
        store.put_if_absent(f"temporary/{name}", b"x")
    expect.equal("list beside temporary names", store.list("temporary"), ("deep/", "seen"))
    files = tuple(entry.name for entry in store.scan("temporary") if entry.kind == "file")
    expect.equal("scan beside temporary names", files, ("deep/seen", "seen"))
    expect.equal("read of a temporary name", store.read(f"temporary/{hidden}", limit=1), b"x")


def _deletion(open_store: Callable[[], Store], expect: Expectations, _sizes: _Sizes) -> None:
    store, other = open_store(), open_store()
    store.put_if_absent("deletion/a", b"one")
    store.put_if_absent("deletion/ab", b"other")
    expect.equal("delete", store.delete("deletion/a"), True)
    expect.equal("read of what was deleted", other.read("deletion/a", limit=9), None)
    expect.equal("a second delete", store.delete("deletion/a"), False)
    expect.equal("list after a delete", store.list("deletion"), ("ab",))
    expect.equal("a put of other content after a delete", store.put_if_absent("deletion/a", b"two"), True)


def _opened_files(open_store: Callable[[], Store], expect: Expectations, _sizes: _Sizes) -> None:
    store = open_store()
    data = os.urandom(100_000)
    store.put_if_absent("open/a", data)
    file = store.open("open/a")
    if file is None:
        expect.broke("open of what is there gave None")
        return
    with file:
        expect.equal("seek to the end", file.seek(0, os.SEEK_END), len(data))
        expect.equal("read at the end", file.read(1), b"")
        expect.equal("seek", file.seek(99_990), 99_990)
        expect.equal("read after a seek", file.read(100), data[99_990:])
        file.seek(0)
        if file.read(len(data)) != data:
            expect.broke("an opened file has other bytes than were put")
    file = store.open("open/a")
    store.delete("open/a")
    store.put_if_absent("open/a", b"another")
    with file or open(os.devnull, "rb") as old:  # noqa: PTH123
        try:
            found = old.read(len(data))
        except CheckpointDamagedError:
            return
    if found != data:
        expect.broke(
            "a file whose name was given to another one while it was open reads as neither the old one nor damage"
        )


def _inner_stores(open_store: Callable[[], Store], expect: Expectations, _sizes: _Sizes) -> None:
    store = open_store()
    store.put_if_absent("inner/deep/first", b"1")
    inner = store.within("inner").within("deep")
    expect.equal("a put within", inner.put_if_absent("a/b", b"one"), True)
    expect.equal("read from outside of what was put within", store.read("inner/deep/a/b", limit=3), b"one")
    expect.equal("list within", inner.list(""), ("a/", "first"))
    expect.equal("location within", inner.location("a/b"), store.location("inner/deep/a/b"))
    expect.equal("uri of within('')", store.within("").uri, store.uri)


def _races(open_store: Callable[[], Store], expect: Expectations, sizes: _Sizes) -> None:
    stores = [open_store() for _ in range(sizes.writers)]
    barrier = threading.Barrier(sizes.writers)

    def put(identical: bool, number: int, who: int) -> bool | None:
        data = b"the same" if identical else f"from {who}".encode()
        barrier.wait(60)
        try:
            return stores[who].put_if_absent(f"race/{identical}/{number}", data)
        except CheckpointConflictError:
            return None

    with ThreadPoolExecutor(sizes.writers) as pool:
        for identical in (False, True):
            for number in range(sizes.rounds):
                told = list(pool.map(partial(put, identical, number), range(sizes.writers)))
                kept = stores[0].read(f"race/{identical}/{number}", limit=100)
                if identical:
                    if None in told or told.count(True) > 1:
                        expect.broke(
                            f"of {sizes.writers} puts of the same at once were told {told}, expected one True, else False"
                        )
                elif [who for who, one in enumerate(told) if one is not None] != [
                    who for who in range(sizes.writers) if f"from {who}".encode() == kept
                ]:
                    expect.broke(f"of {sizes.writers} different puts at once were told {told}, and {kept!r} was kept")
