"""Digests: one text form, the file that is read afterwards, parallel verification."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import io
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_ctrl.checkpoints import digests, direct
from cosmos_ctrl.checkpoints.artifacts import open_artifact
from cosmos_ctrl.checkpoints.digests import (
    Verification,
    digest_bytes,
    hash_file,
    new_hasher,
    parse_digest,
    verify_file,
    verify_many,
)
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.core.errors import ArtifactMissingError, CheckpointDamagedError, StorageUnavailableError


@given(st.lists(st.binary(max_size=100)))
def test_hashing_in_parts_is_hashing_the_whole(parts: list[bytes]) -> None:
    hasher = new_hasher()
    for part in parts:
        hasher.update(memoryview(part))
    whole = b"".join(parts)
    assert hasher.digest() == digest_bytes(whole) == "sha256:" + hashlib.sha256(whole).hexdigest()
    assert hasher.size_bytes == len(whole)
    assert parse_digest(hasher.digest()) == ("sha256", hashlib.sha256(whole).hexdigest())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sha256",
        "sha256:",
        "sha256:" + "g" * 64,
        "sha256:" + "a" * 63,
        "sha256:" + "A" * 64,
        "md5:" + "a" * 32,
        "a" * 64,
        "sha256:" + "a" * 64 + "\n",
    ],
)
def test_what_is_no_digest_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="digest"):
        parse_digest(text)


def test_blake3_is_optional() -> None:
    with pytest.raises(ValueError, match="not known"):
        new_hasher("crc32")
    if importlib.util.find_spec("blake3") is None:
        with pytest.raises(ModuleNotFoundError, match="pip install blake3"):
            new_hasher("blake3")
    else:
        assert digest_bytes(b"", "blake3").startswith("blake3:af1349b9f5f9a1a6")


def test_all_of_a_file_is_hashed_wherever_it_stands_and_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "BLOCK_BYTES", 7)
    data = bytes(range(256))
    (tmp_path / "a").write_bytes(data)
    copy = io.BytesIO()
    with (tmp_path / "a").open("rb", buffering=0) as file:
        file.seek(100)
        verify_file(file, 256, digest_bytes(data), path="c", artifact="a", copy=copy)
        assert hash_file(file) == (digest_bytes(data), 256)
    assert copy.getvalue() == data


class Odd(io.FileIO):
    """Reads a whole block at once or refuses, and what is short at that."""

    def __init__(self, path: Path, *, refuses: bool, at_most: int) -> None:
        super().__init__(path)
        self.refuses, self.at_most = refuses, at_most
        self.direct: list[bool] = []

    def readinto(self, buffer: Any) -> int:
        flag = bool(fcntl.fcntl(self.fileno(), fcntl.F_GETFL) & os.O_DIRECT)
        self.direct.append(flag)
        if flag and self.refuses:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().readinto(memoryview(buffer)[: self.at_most])


BLOCK = 64 << 10


@pytest.mark.parametrize("size", [BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 4096, 3 * BLOCK + 777])
@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("at_most", [BLOCK, 4096, 4099])
def test_past_the_page_cache_the_same_bytes_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, refuses: bool, at_most: int
) -> None:
    monkeypatch.setattr(direct, "BLOCK_BYTES", BLOCK)
    data = os.urandom(size)
    (tmp_path / "a").write_bytes(data)
    with Odd(tmp_path / "a", refuses=refuses, at_most=at_most) as file:
        assert hash_file(cast("BinaryIO", file), cached=False) == (digest_bytes(data), size)
        assert file.read() == b""
        assert not fcntl.fcntl(file.fileno(), fcntl.F_GETFL) & os.O_DIRECT
        file.seek(0)
        assert file.read(10) == data[:10]
    with Odd(tmp_path / "a", refuses=True, at_most=size) as file:
        assert hash_file(cast("BinaryIO", file)) == (digest_bytes(data), size)
        assert not any(file.direct)


def test_a_read_that_fails_is_not_a_file_system_that_will_not_have_it(tmp_path: Path) -> None:
    class Broken(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / "a").write_bytes(bytes(direct.BLOCK_BYTES))
    with Broken(tmp_path / "a") as file, pytest.raises(OSError, match="Input/output"):
        hash_file(cast("BinaryIO", file), cached=False)


def test_what_is_no_file_of_this_machine_is_read_all_the_same() -> None:
    data = os.urandom(direct.BLOCK_BYTES + 5)
    assert hash_file(io.BytesIO(data), cached=False) == (digest_bytes(data), len(data))


def test_kind_size_and_content_are_told_apart_and_unreadable_is_neither(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    with (tmp_path / "a").open("rb", buffering=0) as file:
        for size, digest, what in ((4, digest_bytes(b"abc"), "size in bytes"), (3, digest_bytes(b"abd"), "digest")):
            with pytest.raises(CheckpointDamagedError) as caught:
                verify_file(file, size, digest, path="c", artifact="a")
            assert caught.value.what == what
    with (tmp_path / "a").open("ab", buffering=0) as only_writable, pytest.raises(StorageUnavailableError):
        verify_file(only_writable, 3, digest_bytes(b"abc"), path="c", artifact="a")


def test_many_are_verified_at_once_and_nothing_stays_open(tmp_path: Path) -> None:
    names = [f"d/{number}" for number in range(40)]
    (tmp_path / "d").mkdir()
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    threads = set()

    def opened(name: str) -> BinaryIO:
        threads.add(threading.current_thread().name)
        return open_artifact(LocalStore(tmp_path), name, path="c")

    checks = [Verification(name, len(name), digest_bytes(name.encode()), partial(opened, name)) for name in names]
    before = len(list(Path("/proc/self/fd").iterdir()))
    verify_many(checks, path="c", threads=4)
    assert all(name.startswith("verify") for name in threads)
    (tmp_path / "d/17").write_bytes(b"d/71")
    with pytest.raises(CheckpointDamagedError) as caught:
        verify_many(checks, path="c", threads=4)
    assert caught.value.artifact == "d/17"
    (tmp_path / "d/17").unlink()
    for count in (1, 4):
        with pytest.raises(ArtifactMissingError):
            verify_many(checks, path="c", threads=count)
    verify_many([], path="c")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("kind", ["link", "linked directory", "fifo", "missing"])
def test_an_artifact_is_opened_without_following_links(kind: str, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/x").write_bytes(b"secret")
    directory = tmp_path / "c"
    (directory / "sub").mkdir(parents=True)
    name, error = "sub/x", CheckpointDamagedError
    if kind == "link":
        (directory / name).symlink_to(tmp_path / "outside/x")
    elif kind == "linked directory":
        (directory / "sub").rmdir()
        (directory / "sub").symlink_to(tmp_path / "outside")
    elif kind == "fifo":
        os.mkfifo(directory / name)
    else:
        error = ArtifactMissingError
    with pytest.raises(error):
        open_artifact(LocalStore(directory), name, path="c")
