"""The store contract on a POSIX file system."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cosmos_ctrl.checkpoints import durable
from cosmos_ctrl.checkpoints.names import TEMPORARY_PREFIX
from cosmos_ctrl.checkpoints.stores import Entry, Store
from cosmos_ctrl.checkpoints.stores.local import VISIBLE_NOT_DURABLE, LocalStore
from cosmos_ctrl.core.errors import (
    CheckpointConflictError,
    CheckpointDamagedError,
    StorageUnavailableError,
    UnsafeNameError,
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return LocalStore(tmp_path / "deep" / "run")


def test_absent_is_a_value(store: Store) -> None:
    assert store.read("a", limit=10) is None
    assert store.head("a/b") is None
    assert store.list("") == ()
    assert store.scan("a") == ()
    assert store.delete("a/b") is False
    assert not Path(store.uri).exists()


def test_put_once(store: Store) -> None:
    assert store.put_if_absent("a/b.json", b"one")
    assert not store.put_if_absent("a/b.json", b"one")
    for other in (b"two", b"", b"one and more"):
        with pytest.raises(CheckpointConflictError):
            store.put_if_absent("a/b.json", other)
    assert store.read("a/b.json", limit=3) == b"one"
    assert store.head("a/b.json") == 3
    assert store.head("a") is None
    with pytest.raises(CheckpointConflictError, match="kind directory"):
        store.put_if_absent("a", b"x")
    assert [path.name for path in Path(store.uri).rglob("*") if path.is_file()] == ["b.json"]


def test_read_is_capped_and_takes_only_files(store: Store, tmp_path: Path) -> None:
    store.put_if_absent("a", b"12345")
    with pytest.raises(CheckpointDamagedError, match="at most 4, found 5"):
        store.read("a", limit=4)
    root = Path(store.uri)
    (root / "link").symlink_to("a")
    os.mkfifo(root / "pipe")
    (root / "directory").mkdir()
    for name, kind in (("link", "symbolic link"), ("pipe", "other"), ("directory", "directory")):
        with pytest.raises(CheckpointDamagedError) as caught:
            store.read(name, limit=100)
        assert caught.value.found == kind


def test_list_is_immediate_and_scan_is_deep(store: Store) -> None:
    for name in ("b", "a/x", "a/deep/y"):
        store.put_if_absent(name, name.encode())
    root = Path(store.uri)
    (root / f"{TEMPORARY_PREFIX}1").write_bytes(b"")
    (root / "a" / "link").symlink_to("x")
    assert store.list("") == ("a/", "b")
    assert store.list("a") == ("deep/", "link", "x")
    assert store.scan("") == (
        Entry("a", "directory", 0),
        Entry("a/deep", "directory", 0),
        Entry("a/deep/y", "file", 8),
        Entry("a/link", "symbolic link", 0),
        Entry("a/x", "file", 3),
        Entry("b", "file", 1),
    )


def test_a_dangling_link_is_not_nothing(store: Store, tmp_path: Path) -> None:
    store.put_if_absent("checkpoints/a/x", b"x")
    (Path(store.uri) / "checkpoints/b").symlink_to(tmp_path / "unmounted")
    with pytest.raises(StorageUnavailableError):
        store.list("checkpoints")


def test_delete(store: Store) -> None:
    store.put_if_absent("checkpoints/c/x", b"x")
    assert store.delete("checkpoints/c/x")
    assert not store.delete("checkpoints/c/x")
    assert store.list("checkpoints") == ("c/",)


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "", "a/../b", "a\0"])
def test_no_name_leads_out(name: str, store: Store) -> None:
    for operation in (
        lambda: store.put_if_absent(name, b""),
        lambda: store.delete(name),
        lambda: store.open(name or ".."),
        lambda: store.read(name or "..", limit=1),
        lambda: store.head(name or ".."),
        lambda: store.list(name or ".."),
        lambda: store.scan(name or ".."),
    ):
        with pytest.raises(UnsafeNameError):
            operation()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_where_link_is_not_supported_the_rename_does_not_replace(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    store = LocalStore(tmp_path)
    assert store.put_if_absent("a", b"one")
    assert not store.put_if_absent("a", b"one")
    with pytest.raises(CheckpointConflictError):
        store.put_if_absent("a", b"two")
    assert (tmp_path / "a").read_bytes() == b"one"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_where_neither_is_supported_publication_is_refused_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bare:
        """A C library without renameat2."""

    def link(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(os, "rename", lambda *_: pytest.fail("a plain rename replaces"))
    monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("a plain rename replaces"))
    monkeypatch.setattr(durable.ctypes, "CDLL", lambda *_, **__: Bare())
    with pytest.raises(StorageUnavailableError, match="put the run on a file system that has one of them"):
        LocalStore(tmp_path).put_if_absent("a", b"one")
    assert not list(tmp_path.iterdir())


def test_a_lost_reply_is_resolved_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def link(source: Path, target: Path) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", link)
    assert not LocalStore(tmp_path).put_if_absent("a", b"one")


def test_a_name_that_may_not_last_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put_if_absent("first", b"")
    real = durable.fsync_directory

    def fsync_directory(directory: Path) -> None:
        monkeypatch.setattr(durable, "fsync_directory", real)
        raise StorageUnavailableError(path=str(directory), operation="fsync of the directory", cause="EIO")

    monkeypatch.setattr(durable, "fsync_directory", fsync_directory)
    with pytest.raises(StorageUnavailableError) as caught:
        store.put_if_absent("a", b"one")
    assert caught.value.operation == VISIBLE_NOT_DURABLE
    assert "visible" in str(caught.value)
    assert store.read("a", limit=9) == b"one"


def test_whoever_finds_the_identical_content_makes_it_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LocalStore(tmp_path).put_if_absent("d/a", b"one")
    synced: list[Path] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert not LocalStore(tmp_path).put_if_absent("d/a", b"one")
    # Also the names of the directories: the process that made them may have died before.
    mine = [path for path in synced if path.is_relative_to(tmp_path.parent) and not path.name.startswith(".")]
    assert mine == [tmp_path.parent, tmp_path, tmp_path / "d"]
    assert tmp_path.parent.parent in synced
