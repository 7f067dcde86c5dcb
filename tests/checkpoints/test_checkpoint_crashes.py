"""G4 and G7 at the system calls: killed before each one, and each one failing.

The tasks run in real processes over real files; strace kills or tampers.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from checkpoint_helpers import COMPATIBILITY, CONTENT, Zygote, commit, load, manifest_of, publish, write

from cosmos_ctrl.checkpoints.claims import claim_execution, newest_claim
from cosmos_ctrl.checkpoints.manifest import CheckpointManifest, publish_from_receipts, read_manifest
from cosmos_ctrl.checkpoints.names import TEMPORARY_PREFIX
from cosmos_ctrl.checkpoints.stores.local import VISIBLE_NOT_DURABLE, LocalStore
from cosmos_ctrl.core.errors import CheckpointUncommittedError

#: Calls that neither read nor change a file: being killed before one is being killed before the next.
MEMORY = {
    "mmap",
    "munmap",
    "brk",
    "mprotect",
    "madvise",
    "futex",
    "rt_sigaction",
    "rt_sigprocmask",
    "exit_group",
    "getrandom",
}
READING = ("openat", "openat2", "read", "lseek", "newfstatat", "fstat", "getdents64")
FAILING = (*READING, "write", "fsync", "close", "link", "mkdir", "unlink")


def fresh(base: Path, index: str) -> Path:
    return write(base / index)


def committed_whole(directory: Path) -> bool:
    """What a reader sees: nothing (False) or a whole checkpoint (True); anything else raises."""
    try:
        manifest, _ = read_manifest(directory)
    except CheckpointUncommittedError:
        return False
    CheckpointManifest.load(directory, required_artifacts=CONTENT, compatibility=manifest.compatibility)
    return True


@pytest.mark.parametrize("task", ["publish", "receipts"])
def test_g4_killed_before_any_call_leaves_a_whole_checkpoint_or_none(task: str, zygote: Zygote, tmp_path: Path) -> None:
    calls = zygote.calls(task, fresh(tmp_path, "whole"), tmp_path / "log")
    assert calls["fsync"] >= 5
    assert calls["link"] == 1
    seen = set()
    for call, count in calls.items():
        for k in range(1, count + 1) if call not in MEMORY else ():
            directory = fresh(tmp_path, f"{call}{k}")
            killed = zygote.run(
                task,
                directory,
                "-o",
                "/dev/null",
                "-e",
                f"inject={call}:signal=SIGKILL:when={k}",
                "-e",
                f"trace={call}",
            )
            whole = committed_whole(directory)
            seen.add(whole)
            # The result is written after the task: a kill there finds it acknowledged-but-for-the-reply.
            assert "ok" not in killed or whole, (call, k)
            leftovers = [path.name for path in directory.rglob("*") if path.name.startswith(TEMPORARY_PREFIX)]
            assert len(leftovers) <= 1
            # What is left does not stand in the way of the same publication.
            if task == "publish":
                publish(directory)
            else:
                publish_from_receipts(directory, manifest_of())
            assert committed_whole(directory)
    assert seen == {True, False}


@pytest.mark.parametrize("task", ["publish", "receipts"])
def test_g4_everything_is_durable_before_the_name_and_the_name_before_the_answer(
    task: str, zygote: Zygote, tmp_path: Path
) -> None:
    directory = fresh(tmp_path, "c")
    log = tmp_path / "log"
    outcome = zygote.run(
        task, directory, "-y", "-o", str(log), "-e", "trace=write,fsync,link,rename,renameat,renameat2"
    )
    assert "ok" in outcome
    pattern = re.compile(r"^([a-z0-9_]+)\((?:\d+<([^>]*)>|\"[^\"]*\", \"([^\"]*)\")", flags=re.MULTILINE)
    found = [(call, held or named) for call, held, named in pattern.findall(log.read_text())]
    # What the test's own directory lies in is fsynced too, as far up as the file system goes.
    outer = {("fsync", str(path)) for path in tmp_path.parents}
    assert ("fsync", str(tmp_path.parent)) in found
    made = [step for step in found if step not in outer]
    temporary = next(path for call, path in made if call == "write")
    shards = [("fsync", str(directory / name)) for name in sorted(CONTENT)] if task == "publish" else []
    assert made[:-1] == [
        *shards,
        ("fsync", str(directory / "sub")),
        ("fsync", str(directory)),
        ("fsync", str(directory.parent)),
        ("write", temporary),
        ("fsync", temporary),
        ("link", str(directory / "manifest.json")),
        ("fsync", str(directory)),
    ]
    assert made[-1][0] == "write"  # the answer
    assert Path(temporary).name.startswith(TEMPORARY_PREFIX)


@pytest.mark.parametrize("error", ["EIO", "ENOSPC", "EACCES"])
@pytest.mark.parametrize("task", ["publish", "receipts"])
def test_g4_a_failing_call_is_a_typed_error_and_acknowledges_nothing(
    task: str, error: str, zygote: Zygote, tmp_path: Path
) -> None:
    calls = zygote.calls(task, fresh(tmp_path, "whole"), tmp_path / "log")
    visible = 0
    harmless = []
    for call in FAILING:
        for k in range(1, calls[call] + 1):
            if (call, k) == ("write", calls["write"]):
                continue  # the harness's own: the task's result
            directory = fresh(tmp_path, f"{call}{k}")
            outcome = zygote.run(
                task, directory, "-o", "/dev/null", "-e", f"inject={call}:error={error}:when={k}", "-e", f"trace={call}"
            )
            whole = committed_whole(directory)
            if "ok" in outcome:
                # Only calls whose failure takes nothing away: removing the temporary name, and the C library's own around a listing.
                assert whole, (call, k)
                harmless.append(call)
                continue
            assert outcome.get("error") == "StorageUnavailableError", (call, k, outcome)
            assert error in outcome["text"], (call, k, outcome)
            if whole:
                visible += 1
                assert outcome["operation"] == VISIBLE_NOT_DURABLE, (call, k, outcome)
    assert visible >= 1
    listings = calls["getdents64"] // 2  # each read to its end
    # A directory that may be neither read nor written ends the way up.
    others = [path for path in directory.parents if not os.access(path, os.W_OK)]
    assert len([call for call in harmless if call == "openat"]) <= (len(others) if error == "EACCES" else 0)
    listed = [call for call in harmless if "stat" not in call and call != "openat"]
    assert sorted(listed) == ["close"] * listings + ["unlink"]
    assert len([call for call in harmless if "stat" in call]) <= listings


def test_g4_a_device_that_takes_fewer_bytes_than_it_says_is_caught(zygote: Zygote, tmp_path: Path) -> None:
    directory = fresh(tmp_path, "a")
    outcome = zygote.run(
        "receipts", directory, "-o", "/dev/null", "-e", "inject=write:retval=100:when=1", "-e", "trace=write"
    )
    assert outcome["error"] == "StorageUnavailableError"
    assert "the file has" in outcome["text"]
    assert not committed_whole(directory)


def test_g4_interrupted_calls_are_taken_up_again(zygote: Zygote, tmp_path: Path) -> None:
    for call in ("fsync", "write", "read"):
        directory = fresh(tmp_path, call)
        outcome = zygote.run(
            "publish", directory, "-o", "/dev/null", "-e", f"inject={call}:error=EINTR:when=1", "-e", f"trace={call}"
        )
        assert "ok" in outcome
        assert committed_whole(directory)


@pytest.mark.parametrize("error", ["EIO", "EACCES"])
@pytest.mark.parametrize("task", ["load", "discover"])
def test_g7_unreadable_is_neither_absent_nor_damaged(task: str, error: str, zygote: Zygote, tmp_path: Path) -> None:
    directory = commit(tmp_path, "a", execution_id="", number=0, artifacts=publish(write(tmp_path / "other")).artifacts)
    assert load(directory, compatibility=COMPATIBILITY).checkpoint_id == "a"
    where = tmp_path if task == "discover" else directory
    calls = zygote.calls(task, where, tmp_path / "log")
    right = zygote.run(task, where, "-o", "/dev/null")
    refused = 0
    for call in READING:
        for k in range(1, calls[call] + 1):
            outcome = zygote.run(
                task, where, "-o", "/dev/null", "-e", f"inject={call}:error={error}:when={k}", "-e", f"trace={call}"
            )
            # The C library does not mind a failing fstat around a listing; the answer is then the right one.
            assert outcome.get("error") == "StorageUnavailableError" or outcome == right, (call, k, outcome)
            refused += "error" in outcome
    assert refused >= 10


def test_a_claim_killed_anywhere_costs_at_most_a_number(zygote: Zygote, tmp_path: Path) -> None:
    calls = zygote.calls("claim", tmp_path / "whole", tmp_path / "log")
    seen = set()
    for call, count in calls.items():
        for k in range(1, count + 1) if call not in MEMORY else ():
            run = tmp_path / f"{call}{k}"
            outcome = zygote.run(
                "claim", run, "-o", "/dev/null", "-e", f"inject={call}:signal=SIGKILL:when={k}", "-e", f"trace={call}"
            )
            before = newest_claim(LocalStore(run))
            seen.add(before)
            assert "ok" not in outcome or before == 1
            assert claim_execution(LocalStore(run), execution_id="next", note={}) == before + 1
    assert seen == {0, 1}
