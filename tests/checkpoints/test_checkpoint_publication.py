"""Publishing and loading on real files: the closed set, republication, damage, moved and copied checkpoints."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO

import pytest
from checkpoint_helpers import CONTENT, load, manifest_of, metadata, publish, receipts, write

from cosmos_ctrl.checkpoints import artifacts, digests, durable
from cosmos_ctrl.checkpoints.manifest import publish_from_receipts, read_manifest
from cosmos_ctrl.checkpoints.names import TEMPORARY_PREFIX
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.core.errors import (
    ArtifactMissingError,
    ArtifactUnexpectedError,
    CheckpointConflictError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointUncommittedError,
    StorageUnavailableError,
    UnsafeNameError,
)


def replace_with(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "rank0.pt"
        path.unlink()
        make(path)

    return change


def bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = Path.cwd()
        os.chdir(path.parent)
        listener.bind(path.name)
        os.chdir(here)


def linked_directory(directory: Path) -> None:
    (directory / "sub").rename(directory.with_name("elsewhere"))
    (directory / "sub").symlink_to(directory.with_name("elsewhere"))


VIOLATIONS = {
    "missing": (lambda d: (d / "rank0.pt").unlink(), ArtifactMissingError, "rank0.pt"),
    "missing directory": (lambda d: shutil.rmtree(d / "sub"), ArtifactMissingError, "sub/rank1.pt"),
    "extra": (lambda d: (d / "more.pt").write_bytes(b"x"), ArtifactUnexpectedError, "more.pt"),
    "extra in a directory": (lambda d: (d / "sub/more.pt").write_bytes(b"x"), ArtifactUnexpectedError, "sub/more.pt"),
    "extra directory": (lambda d: (d / "empty").mkdir(), ArtifactUnexpectedError, "empty"),
    "extra link": (lambda d: (d / "link").symlink_to("rank0.pt"), ArtifactUnexpectedError, "link"),
    "empty": (lambda d: (d / "rank0.pt").write_bytes(b""), CheckpointDamagedError, "rank0.pt"),
    "link": (replace_with(lambda p: p.symlink_to("sub/rank1.pt")), CheckpointDamagedError, "rank0.pt"),
    "dangling link": (replace_with(lambda p: p.symlink_to("nowhere")), CheckpointDamagedError, "rank0.pt"),
    "FIFO": (replace_with(os.mkfifo), CheckpointDamagedError, "rank0.pt"),
    "socket": (replace_with(bind_socket), CheckpointDamagedError, "rank0.pt"),
    "device": (
        replace_with(lambda p: os.mknod(p, stat.S_IFCHR | 0o600, os.makedev(1, 3))),
        CheckpointDamagedError,
        "rank0.pt",
    ),
    "directory": (replace_with(Path.mkdir), CheckpointDamagedError, "rank0.pt"),
    "linked directory": (linked_directory, CheckpointDamagedError, "sub"),
}


def break_it(directory: Path, name: str) -> tuple[type[CheckpointError], str]:
    change, error, artifact = VIOLATIONS[name]
    try:
        change(directory)
    except PermissionError:
        pytest.skip(f"making a {name} is not permitted here")
    return error, artifact


def named(error: CheckpointError) -> str:
    return str(getattr(error, "artifact", "") or ", ".join(getattr(error, "artifacts", ())))


@pytest.mark.parametrize("violation", VIOLATIONS)
def test_g4_publish_refuses_what_is_not_the_closed_set(violation: str, tmp_path: Path) -> None:
    directory = write(tmp_path / "c")
    error, artifact = break_it(directory, violation)
    for attempt in (lambda: publish(directory), lambda: publish_from_receipts(directory, manifest_of())):
        with pytest.raises(error) as caught:
            attempt()
        assert named(caught.value) == artifact
        assert not (directory / "manifest.json").exists()


@pytest.mark.parametrize("violation", VIOLATIONS)
def test_load_refuses_what_is_not_the_closed_set(violation: str, tmp_path: Path) -> None:
    directory = write(tmp_path / "c")
    publish(directory)
    error, artifact = break_it(directory, violation)
    with pytest.raises(error) as caught:
        load(directory)
    assert named(caught.value) == artifact


def test_load_refuses_a_set_that_the_caller_does_not_name(tmp_path: Path) -> None:
    publish(write(tmp_path))
    with pytest.raises(ArtifactMissingError, match=r"rank2\.pt"):
        load(tmp_path, required_artifacts=[*CONTENT, "rank2.pt"])
    with pytest.raises(ArtifactUnexpectedError, match=r"sub/rank1\.pt"):
        load(tmp_path, required_artifacts=["rank0.pt"])
    with pytest.raises(UnsafeNameError):
        load(tmp_path, required_artifacts=[*CONTENT, "../x"])


def test_receipts_of_another_size_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "rank0.pt").write_bytes(b"short")
    with pytest.raises(CheckpointDamagedError) as caught:
        publish_from_receipts(tmp_path, manifest_of())
    assert (caught.value.artifact, caught.value.found) == ("rank0.pt", "5")


def test_publication_from_receipts_reads_no_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    for owner, name in ((artifacts, "open_artifact"), (digests, "hash_file"), (LocalStore, "open")):
        monkeypatch.setattr(owner, name, lambda *_: pytest.fail("a shard was opened or read"))
    digest = publish_from_receipts(tmp_path, manifest_of())
    manifest, found = read_manifest(tmp_path, "checkpoints/c")
    assert digest == found == manifest_of().digest() == digests.digest_bytes((tmp_path / "manifest.json").read_bytes())
    assert manifest.metadata.checkpoint_path == "checkpoints/c"


def test_an_identical_second_publication_succeeds_and_changes_nothing(tmp_path: Path) -> None:
    first = publish(write(tmp_path))
    inode = (tmp_path / "manifest.json").stat().st_ino
    assert publish(tmp_path) == first
    assert publish_from_receipts(tmp_path, first) == first.digest()
    assert (tmp_path / "manifest.json").stat().st_ino == inode


@pytest.mark.parametrize("what", ["metadata", "compatibility", "artifact"])
def test_a_different_second_publication_is_a_conflict_and_changes_nothing(what: str, tmp_path: Path) -> None:
    publish(write(tmp_path))
    before = (tmp_path / "manifest.json").read_bytes()
    if what == "artifact":
        (tmp_path / "rank0.pt").write_bytes(b"second attempt")
    with pytest.raises(CheckpointConflictError):
        publish(
            tmp_path,
            step=4 if what == "metadata" else 3,
            compatibility={}
            if what == "compatibility"
            else {"dataset": {"digest": "sha256:aa", "rows": 10}, "world_size": 2},
        )
    assert (tmp_path / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda p: p.symlink_to("rank0.pt")])
def test_something_else_of_the_manifests_name_is_a_conflict_and_damage_to_a_reader(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(write(tmp_path) / "manifest.json")
    with pytest.raises(CheckpointConflictError):
        publish_from_receipts(tmp_path, manifest_of())
    with pytest.raises(CheckpointDamagedError, match=r"manifest\.json"):
        read_manifest(tmp_path)


def test_absent_and_uncommitted_are_two_things(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError) as caught:
        load(tmp_path / "absent")
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(CheckpointNotFoundError):
        publish(tmp_path / "absent")
    with pytest.raises(CheckpointUncommittedError):
        load(write(tmp_path / "c"))


def test_a_removed_directory_does_not_come_back_with_a_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write(tmp_path / "c")
    before = LocalStore.sync_names

    def sweep(store: LocalStore, names: Iterable[str]) -> None:
        before(store, names)
        shutil.rmtree(store.root)

    monkeypatch.setattr(LocalStore, "sync_names", sweep)
    with pytest.raises(StorageUnavailableError):
        publish_from_receipts(directory, manifest_of())
    assert not directory.exists()


@pytest.mark.parametrize("position", [0, 1, 549, 1098, 1099])
def test_a_flipped_bit_is_found(position: int, tmp_path: Path) -> None:
    publish(write(tmp_path))
    data = bytearray((tmp_path / "rank0.pt").read_bytes())
    data[position] ^= 4
    (tmp_path / "rank0.pt").write_bytes(data)
    with pytest.raises(CheckpointDamagedError) as caught:
        load(tmp_path)
    error = caught.value
    assert (error.artifact, error.what, error.expected) == ("rank0.pt", "digest", receipts()["rank0.pt"].digest)
    assert error.found.startswith("sha256:")


def test_truncated_grown_and_swapped_artifacts_are_found(tmp_path: Path) -> None:
    content = {"a": b"1234", "b": b"5678"}
    publish(write(tmp_path, content), required_artifacts=content)
    for change in ({"a": b"123"}, {"a": b"12345"}, {"a": b"5678", "b": b"1234"}):
        write(tmp_path, content | change)
        with pytest.raises(CheckpointDamagedError) as caught:
            load(tmp_path, required_artifacts=content)
        assert caught.value.artifact in change
    write(tmp_path, content)
    load(tmp_path, required_artifacts=content)


def test_a_copied_or_moved_checkpoint_loads_where_it_is(tmp_path: Path) -> None:
    published = publish(write(tmp_path / "c"))
    shutil.copytree(tmp_path / "c", tmp_path / "copy")
    (tmp_path / "c").rename(tmp_path / "moved")
    for name in ("copy", "moved"):
        loaded = load(tmp_path / name)
        assert loaded.metadata.checkpoint_path == str(tmp_path / name)
        assert loaded.digest() == published.digest()
        assert loaded.metadata.values() == metadata(path=str(tmp_path / name)).values()


def test_a_file_that_is_still_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    real = digests.hash_file

    def hash_and_append(file: BinaryIO, algorithm: str) -> tuple[str, int]:
        with (tmp_path / "rank0.pt").open("ab") as writer:
            writer.write(b"more")
        return real(file, algorithm)

    monkeypatch.setattr(digests, "hash_file", hash_and_append)
    with pytest.raises(CheckpointDamagedError, match="still being written"):
        publish(tmp_path)


def test_the_manifest_has_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    for umask, mode in ((0o022, 0o644), (0o077, 0o600), (0o002, 0o644)):
        before = os.umask(umask)
        try:
            publish(write(tmp_path / oct(umask)))
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / oct(umask) / "manifest.json").stat().st_mode) == mode


def test_a_leftover_of_a_killed_publisher_is_no_artifact(tmp_path: Path) -> None:
    (write(tmp_path) / f"{TEMPORARY_PREFIX}1234").write_bytes(b"half")
    publish(tmp_path)
    load(tmp_path)


@pytest.mark.parametrize(
    "failing", ["rank0.pt", "sub/rank1.pt", "sub", "first .", "..", f"{TEMPORARY_PREFIX}*", "second ."]
)
def test_after_a_failed_fsync_the_same_files_are_never_trusted_again(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    real = os.fsync
    made: list[str] = []

    def fsync(descriptor: int) -> None:
        path = os.path.relpath(Path(f"/proc/self/fd/{descriptor}").readlink(), tmp_path)
        name = {".": f"{'second' if 'first .' in made else 'first'} ."}.get(path, path)
        made.append(name)
        if fnmatch(name, failing):
            raise OSError(5, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(digests, "default_threads", lambda: 1)
    with pytest.raises(StorageUnavailableError) as caught:
        publish(tmp_path)
    assert fnmatch(made[-1], failing)
    monkeypatch.setattr(os, "fsync", real)
    assert ("visible" in caught.value.cause) == (failing == "second .")
    if failing.startswith(TEMPORARY_PREFIX):
        # A new attempt has a new temporary file.
        publish(tmp_path)
        return
    with pytest.raises(StorageUnavailableError, match="an earlier fsync failed"):
        publish(tmp_path)


def test_content_written_anew_may_be_published_after_a_failed_fsync(tmp_path: Path) -> None:
    write(tmp_path)
    status = (tmp_path / "rank0.pt").stat()
    durable._failed.add((status.st_dev, status.st_ino, status.st_mtime_ns))
    with pytest.raises(StorageUnavailableError):
        publish(tmp_path)
    os.utime(tmp_path / "rank0.pt", ns=(status.st_mtime_ns + 1, status.st_mtime_ns + 1))
    publish(tmp_path)
