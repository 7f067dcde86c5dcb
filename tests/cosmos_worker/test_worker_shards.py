"""Checkpoint files against devices that write little, fail early, fail late, or lie."""

# what is raised comes out of the worker's with statement, body and all
from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cosmos_ctrl.checkpoints import direct
from cosmos_worker import shards
from cosmos_worker.errors import UsageError
from cosmos_worker.shards import HashingFile, SystemCalls, make_directories, sync_directories


class Device:
    """System calls of the real kernel, some of which fail. Counts every one."""

    def __init__(self, **faults):
        self.faults = faults
        self.counts: dict[str, int] = {}

    def calls(self) -> SystemCalls:
        return SystemCalls(
            write=self._write,
            fdatasync=lambda fd: self._do("fdatasync", os.fdatasync, fd),
            fsync=lambda fd: self._do("fsync", os.fsync, fd),
            close=lambda fd: self._do("close", os.close, fd),
        )

    def _do(self, name, real, *arguments):
        self.counts[name] = self.counts.get(name, 0) + 1
        fault = self.faults.get(name)
        result = real(*arguments)
        if isinstance(fault, tuple) and fault[0] == self.counts[name]:
            raise OSError(fault[1], os.strerror(fault[1]))
        return result

    def _write(self, fd, data):
        short = self.faults.get("short")
        data = memoryview(data)[:short] if short else data
        lie = self.faults.get("lie")
        if lie:
            self._do("write", lambda fd, data: os.write(fd, data[:-1]), fd, data)
            return len(data)
        return self._do("write", os.write, fd, data)


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def test_the_digest_is_of_what_is_on_the_disk(tmp_path):
    file = HashingFile(tmp_path / "a")
    parts = [b"one", bytearray(b"two"), memoryview(b"three")]
    assert [file.write(part) for part in parts] == [3, 3, 5]
    assert file.tell() == 11
    file.close()
    file.close()
    assert (tmp_path / "a").read_bytes() == b"onetwothree"
    assert (file.result.size_bytes, file.result.digest) == (11, digest(b"onetwothree"))
    with pytest.raises(ValueError, match="closed"):
        file.write(b"x")


BLOCK = 64 << 10


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(direct, "BLOCK_BYTES", BLOCK)


def threads_named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def refused(fd: int, direct: bool) -> None:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def pretended(fd: int, direct: bool) -> None:
    """A file system that says it writes past the page cache."""


class Unwilling(Device):
    """Takes no whole block past the page cache, though it said that it would."""

    def __init__(self):
        super().__init__()
        self.direct = False

    def set_direct(self, fd, direct):
        self.direct = direct

    def _write(self, fd, data):
        if self.direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super()._write(fd, data)

    def calls(self) -> SystemCalls:
        return dataclasses.replace(super().calls(), set_direct=self.set_direct)


FILE_SYSTEMS = {
    "this one": SystemCalls,
    "with no way past the cache": lambda: SystemCalls(set_direct=refused),
    "that says it has one": lambda: Unwilling().calls(),
    "of short writes": lambda: Device(short=3 * 4096 + 5).calls(),
}


@pytest.mark.parametrize("calls", FILE_SYSTEMS.values(), ids=FILE_SYSTEMS)
@pytest.mark.parametrize(
    "sizes", [[BLOCK], [BLOCK - 1, BLOCK, 1, 3 * BLOCK + 7], [BLOCK + 1, 0, 5, 9 * BLOCK], [7] * 20, [4 * BLOCK]]
)
def test_blocks_are_written_and_hashed_in_their_order(tmp_path, sizes, calls, small_blocks):
    parts = [os.urandom(size) for size in sizes]
    file = HashingFile(tmp_path / "a", calls=calls())
    for part in parts:
        assert file.write(part) == len(part)
    assert file.tell() == sum(sizes)
    assert bool(threads_named("cosmos-")) == (sum(sizes) >= BLOCK)
    file.close()
    assert not threads_named("cosmos-")
    assert file.result.digest == digest(b"".join(parts))
    assert (tmp_path / "a").read_bytes() == b"".join(parts)


def test_whole_blocks_go_past_the_page_cache_and_the_rest_through_it(tmp_path, small_blocks):
    probe = os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT)
    try:
        direct.set_direct(probe, True)
    except OSError:
        pytest.skip("this file system has no way past the page cache")
    finally:
        os.close(probe)
    seen = []

    def write(fd, data):
        seen.append((len(data), bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)))
        return os.write(fd, data)

    with HashingFile(tmp_path / "a", calls=SystemCalls(write=write)) as file:
        file.write(bytes(2 * BLOCK + 9))
    assert seen == [(BLOCK, True), (BLOCK, True), (9, False)]


def test_what_was_written_is_its_owners_again(tmp_path, small_blocks):
    buffer = bytearray(os.urandom(4 * BLOCK))
    content = b""
    file = HashingFile(tmp_path / "a")
    for _ in range(5):
        content += buffer
        file.write(buffer)
        buffer[:] = bytes(len(buffer))  # raises BufferError, or spoils the digest, if anybody still looks
        buffer += b"more"
    file.close()
    assert file.result.digest == digest(content)


def test_a_writer_waits_for_a_slow_disk_and_memory_stays_bounded(tmp_path, small_blocks):
    go, written = threading.Semaphore(0), []

    def write(fd, data):
        assert go.acquire(timeout=30)
        written.append(len(data))
        return os.write(fd, data)

    file = HashingFile(tmp_path / "a", calls=SystemCalls(set_direct=refused, write=write))
    file.write(bytes(shards._BLOCKS * BLOCK))  # as much as there is memory for
    writer = threading.Thread(target=file.write, args=(bytes(BLOCK),))
    writer.start()
    assert writer.is_alive()
    assert len(file._blocks) == shards._BLOCKS
    assert not written
    go.release(1)
    writer.join(30)
    assert not writer.is_alive()
    go.release(shards._BLOCKS)
    file.close()
    assert written == [BLOCK] * (shards._BLOCKS + 1)


HANGS = """
import sys, threading
from pathlib import Path
from cosmos_ctrl.checkpoints import direct
from cosmos_worker.shards import HashingFile, SystemCalls

hanging = threading.Event()

def write(fd, data):
    hanging.set()
    threading.Event().wait()

file = HashingFile(Path(sys.argv[1]), calls=SystemCalls(write=write))
if sys.argv[2] == "waits":
    threading.Thread(target=file.write, args=(bytes(9 * direct.BLOCK_BYTES),), daemon=True).start()
else:
    file.write(bytes(direct.BLOCK_BYTES))
assert hanging.wait(30)
print("left", flush=True)
"""


@pytest.mark.parametrize("writer", ["waits", "is gone"])
def test_g9_a_write_that_hangs_keeps_no_process(tmp_path, writer):
    done = subprocess.run(
        [sys.executable, "-c", HANGS, tmp_path / "a", writer], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "left\n"), done.stderr


def test_a_block_that_cannot_be_written_ends_the_file_and_its_threads(tmp_path, small_blocks):
    device = Device(write=(2, errno.ENOSPC))
    file = HashingFile(tmp_path / "a", calls=device.calls())
    with pytest.raises(OSError, match="No space left"):  # noqa: PT012  # it comes with one of the next blocks
        for _ in range(shards._BLOCKS + 3):
            file.write(bytes(BLOCK))
    assert not threads_named("cosmos-")
    for later in (lambda: file.write(b"x"), file.close, lambda: file.result):
        with pytest.raises(OSError, match="No space left"):
            later()
    assert device.counts["write"] == 2
    assert "fsync" not in device.counts
    assert device.counts["close"] == 1


def test_what_fails_last_is_told_when_the_file_is_closed(tmp_path, small_blocks):
    device = Device(write=(3, errno.EIO))
    file = HashingFile(tmp_path / "a", calls=device.calls())
    file.write(bytes(3 * BLOCK))
    with pytest.raises(OSError, match="Input/output"):
        file.close()
    assert "fsync" not in device.counts
    with pytest.raises(OSError, match="Input/output"):
        _ = file.result


@pytest.mark.parametrize("size", [5, BLOCK])
def test_a_file_that_could_not_be_hashed_is_lost(tmp_path, monkeypatch, size, small_blocks):
    file = HashingFile(tmp_path / "a")

    def fails(_: object) -> None:
        raise MemoryError("no room to hash")

    monkeypatch.setattr(type(file._hasher), "update", lambda _, data: fails(data))
    file.write(bytes(size))
    with pytest.raises(MemoryError):
        file.close()
    monkeypatch.undo()
    for later in (lambda: file.write(b"more"), file.close, lambda: file.result):
        with pytest.raises(OSError, match="is lost: MemoryError"):
            later()


def test_short_writes_are_completed(tmp_path):
    device = Device(short=7)
    data = os.urandom(1000)
    with HashingFile(tmp_path / "a", calls=device.calls()) as file:
        file.write(data)
    assert (tmp_path / "a").read_bytes() == data
    assert file.result.digest == digest(data)
    assert device.counts["write"] == 143


def test_a_device_that_lies_about_writes_is_caught_before_anyone_is_told(tmp_path):
    file = HashingFile(tmp_path / "a", calls=Device(lie=True).calls())
    file.write(b"x" * 100)
    with pytest.raises(OSError, match="99 bytes after 100"):
        file.close()
    with pytest.raises(OSError, match="99 bytes"):
        _ = file.result


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_surfaces_as_itself_and_is_not_synced(tmp_path, code):
    device = Device(write=(2, code), short=1)
    file = HashingFile(tmp_path / "a", calls=device.calls())
    file.write(b"xy")
    with pytest.raises(OSError) as caught:  # noqa: PT011  # the number is what counts
        file.close()
    assert caught.value.errno == code
    for again in (lambda: file.write(b"z"), file.close, lambda: file.result):
        with pytest.raises(OSError) as later:  # noqa: PT011
            again()
        assert later.value is caught.value
    assert "fsync" not in device.counts
    assert device.counts["close"] == 1


@pytest.mark.parametrize("call", ["fsync", "close"])
def test_a_failed_sync_or_close_is_final(tmp_path, call):
    device = Device(**{call: (1, errno.EIO)})
    file = HashingFile(tmp_path / "a", calls=device.calls())
    file.write(b"x")
    for _ in range(3):
        with pytest.raises(OSError, match="Input/output"):
            file.close()
    assert device.counts["fsync"] == 1
    with pytest.raises(OSError, match="Input/output"):
        _ = file.result


def test_a_failed_write_back_poisons_the_file(tmp_path, monkeypatch, small_blocks):
    monkeypatch.setattr(shards, "WRITE_BACK_BYTES", 2 * BLOCK)
    device = Device(fdatasync=(1, errno.EIO))
    file = HashingFile(tmp_path / "a", calls=dataclasses.replace(device.calls(), set_direct=refused))
    file.write(bytes(3 * BLOCK))
    with pytest.raises(OSError, match="Input/output"):
        file.close()
    assert "fsync" not in device.counts
    assert device.counts["fdatasync"] == 1
    assert device.counts["write"] == 2


def test_write_back_of_the_page_cache_starts_early(tmp_path, monkeypatch, small_blocks):
    monkeypatch.setattr(shards, "WRITE_BACK_BYTES", 2 * BLOCK)
    started = threading.Event()
    device = Device()

    def fdatasync(fd):
        started.set()
        os.fdatasync(fd)

    calls = dataclasses.replace(device.calls(), set_direct=refused, fdatasync=fdatasync)
    with HashingFile(tmp_path / "a", calls=calls) as file:
        file.write(bytes(2 * BLOCK))
        # Before the file is closed, and without being asked.
        assert started.wait(10)
    started.clear()
    with HashingFile(tmp_path / "b", calls=dataclasses.replace(calls, set_direct=pretended)) as file:
        file.write(bytes(9 * BLOCK))
    assert not started.is_set()


def test_an_unclosed_file_is_not_made_durable(tmp_path):
    device = Device()
    file = HashingFile(tmp_path / "a", calls=device.calls())
    file.write(b"x")
    with pytest.raises(UsageError):
        _ = file.result
    del file
    assert "fsync" not in device.counts
    assert device.counts["close"] == 1


def test_nothing_is_overwritten_and_no_link_is_followed(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        HashingFile(tmp_path / "a")
    (tmp_path / "b").symlink_to(tmp_path / "c")
    with pytest.raises(OSError):  # noqa: PT011  # EEXIST or ELOOP, by system
        HashingFile(tmp_path / "b")
    assert not (tmp_path / "c").exists()


def test_text_and_pickles_fit(tmp_path):
    file = HashingFile(tmp_path / "a")
    text = io.TextIOWrapper(file, encoding="utf-8")
    text.write("grüße")
    text.close()
    assert (tmp_path / "a").read_text() == "grüße"


def test_directories_are_synced_from_the_deepest_up(tmp_path):
    top = tmp_path / "run"
    top.mkdir()
    deep = top / "checkpoints" / "x" / "policy-0"
    make_directories(deep, top=top)
    synced = []

    def fsync(fd):
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        os.fsync(fd)

    sync_directories({deep, deep / ".." / "policy-0"} & {deep}, top=top, fsync=fsync)
    assert synced == [str(path) for path in (deep, deep.parent, deep.parent.parent, top)]


def test_a_run_that_is_mounted_elsewhere_is_not_made_up(tmp_path):
    with pytest.raises(FileNotFoundError, match="COSMOS_CTRL_RUN_DIR"):
        make_directories(tmp_path / "run" / "a", top=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_torch_saves_into_it(tmp_path):
    torch = pytest.importorskip("torch")
    state = {"w": torch.arange(100_000), "step": 3}
    with HashingFile(tmp_path / "a", calls=Device(short=4096).calls()) as file:
        torch.save(state, file)
    assert file.result.digest == digest((tmp_path / "a").read_bytes())
    loaded = torch.load(tmp_path / "a", weights_only=True)
    assert torch.equal(loaded["w"], state["w"])
