"""G4 under faults: killed at every call that changes anything, and each one failing, followed by a power loss.

Each run is recorded up to its end, and every state that a crash during or after it may leave is read (see ``crash_states``).
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_helpers import CONTENT
from crash_lab import NO_LINK, Lab, changing_calls
from crash_recording import Recording
from crash_scenarios import SCENARIOS
from crash_tasks import PUT_DATA

from cosmos_ctrl.checkpoints.stores.local import LocalStore

#: Calls that change the disk, or promise something about it.
FAILING = ("openat", "write", "fsync", "close", "link", "renameat2", "mkdir", "unlink", "rmdir")

ERRORS = ("EIO", "ENOSPC", "EACCES", "EINTR")

#: Tasks, whether names are given by link there or by renameat2, and the errors; ``test_checkpoint_crashes`` has more of the long ones.
SWEEPS = [
    *(
        (name, True, error)
        for name in ("worker", "first claim", "put", "uncommit", "tidy", "pin a resume")
        for error in ERRORS
    ),
    *(("put", False, error) for error in ERRORS),
    ("script", True, "EIO"),
    ("script", True, "EINTR"),
    ("controller", True, "EACCES"),
    ("controller", False, "EINTR"),
]


def failures(outcome: dict[str, Any]) -> list[str]:
    """What retention says of what it could not delete; it goes on with the rest."""
    done = outcome.get("ok")
    return [failure["why"] for failure in done["failures"]] if isinstance(done, dict) else []


def is_typed(outcome: dict[str, Any], error: str, name: str) -> bool:
    """Whether the failure came out as what it was: of a store typed, of a worker's or script's own files as the system said it."""
    if outcome.get("error") == "StorageUnavailableError":
        return error in outcome["text"] and bool(outcome["operation"])
    wrote_itself = name in ("worker", "whole save", "script") or (name == "controller" and not outcome["told"])
    return wrote_itself and outcome.get("errno") == getattr(errno, error)


@pytest.mark.parametrize(("name", "link", "error"), SWEEPS)
def test_g4_a_failing_call_acknowledges_nothing_that_a_crash_takes_back(
    name: str, link: bool, error: str, lab: Lab
) -> None:
    how = () if link else NO_LINK
    calls = changing_calls(lab, name, FAILING, *how)
    told = max(k for call, k in calls if call == "write")  # the result itself
    failed = 0
    for call, k in calls:
        if (call, k) == ("write", told) or (call == "link" and not link):
            continue
        if name == "tidy" and call in ("openat", "close") and k % 8:
            continue  # most of them only look
        recording, outcome = lab.record(name, *how, "-e", f"inject={call}:error={error}:when={k}")
        assert lab.violation(name, recording) is None, (call, k, outcome)
        failed += "ok" not in outcome or bool(failures(outcome))
        assert "ok" in outcome or is_typed(outcome, error, name), (call, k, outcome)
        assert all(error in why or "an earlier fsync failed" in why for why in failures(outcome)), (call, k, outcome)
    assert failed >= 1


@pytest.mark.parametrize(
    ("name", "link"), [("worker", True), ("put", False), ("first claim", False), ("controller", False)]
)
def test_g4_killed_at_any_call_that_changes_anything(name: str, link: bool, lab: Lab) -> None:
    how = () if link else NO_LINK
    for call, k in changing_calls(lab, name, ("write", "fsync", "renameat2", "mkdir", "unlink"), *how):
        recording, outcome = lab.record(name, *how, "-e", f"inject={call}:signal=SIGKILL:when={k}")
        # By hand first, as it lies there; then as a crash on top of the kill may leave it.
        told = tuple(outcome["told"]) + (("ok",) if "ok" in outcome else ())
        assert SCENARIOS[name].see(recording.root) in SCENARIOS[name].allowed(told), (call, k)
        assert lab.violation(name, recording) is None, (call, k)


def limits() -> Iterator[int]:
    """Sizes at which the disk is full: around the ends of every file, and all over the small ones."""
    yield from range(0, 60, 7)
    for size in {len(PUT_DATA), *map(len, CONTENT.values())}:
        yield from (1, size // 2, size - 1, size)
    yield from range(700, 1100, 50)  # within the manifests


@pytest.mark.parametrize("name", ["script", "controller", "worker", "first claim", "put"])
def test_g4_no_more_room_at_any_byte(name: str, lab: Lab) -> None:
    """A limit on the file's size: the write that crosses it is short, and the next one fails."""
    outcomes = set()
    for limit in sorted(set(limits())):
        recording, outcome = lab.record(name, file_limit=limit)
        assert lab.violation(name, recording) is None, limit
        outcomes.add("ok" in outcome)
        assert "ok" in outcome or is_typed(outcome, "EFBIG", name), (limit, outcome)
    assert False in outcomes


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of eight pages."""
    disk = tmp_path / "small"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k", "none", str(disk)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount")
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], timeout=20, check=True)


def test_g4_a_disk_that_is_full_says_so_and_nothing_is_committed(small_disk: Path, lab: Lab) -> None:
    outcomes = []
    for pages in range(9):
        for path in small_disk.iterdir():
            subprocess.run(["rm", "-rf", str(path)], timeout=20, check=True)
        disk = small_disk / "disk"
        (disk / "run").mkdir(parents=True)
        (small_disk / "filler").write_bytes(bytes(4096 * pages) or b"")
        for name in ("worker", "controller again"):
            recording = Recording(disk)
            outcome = lab.add(recording, name)
            outcomes.append("ok" in outcome)
            if "ok" not in outcome:
                assert is_typed(outcome, "ENOSPC", name), (pages, name, outcome)
                assert not (disk / "run/checkpoints/new/manifest.json").exists()
                break
    assert outcomes[:2] == [True, True]
    assert outcomes[-1] is False


def test_a_device_that_takes_fewer_bytes_than_it_says_is_caught_by_the_worker(lab: Lab) -> None:
    recording, outcome = lab.record("worker", "-e", "inject=write:retval=100:when=1")
    assert outcome["error"] == "OSError"
    assert "has 1000 bytes after 1100 were written" in outcome["text"]
    assert outcome["told"] == []
    assert lab.violation("worker", recording) is None


def test_the_way_up_ends_at_a_mount_point(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, synced = os.fsync, []

    def fsync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    for run in (small_disk, small_disk / "deep/run"):
        LocalStore(run).put_if_absent("record", b"data")
        assert small_disk in synced
        assert not set(small_disk.parents) & set(synced)
