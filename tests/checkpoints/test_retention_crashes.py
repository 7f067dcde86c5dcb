"""Retention at the system calls: killed before each one, and each one failing. G4."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from checkpoint_helpers import CONTENT, Zygote, commit, manifest_of, write
from test_checkpoint_crashes import MEMORY, READING

from cosmos_ctrl.checkpoints.claims import Pin, claim_execution, pin_resume, read_pin
from cosmos_ctrl.checkpoints.discovery import discover
from cosmos_ctrl.checkpoints.intents import intended
from cosmos_ctrl.checkpoints.manifest import CheckpointManifest, publish_from_receipts
from cosmos_ctrl.checkpoints.names import TEMPORARY_PREFIX
from cosmos_ctrl.checkpoints.retention import RetentionPolicy, Round, retain
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.core.errors import CheckpointConflictError, CheckpointError

OLD, NEW, DEAD = "e0001-s00000001-00000001", "e0001-s00000002-00000002", "e0001-s00000003-00000003"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint that is to go, the newest, and what a dead execution left unfinished."""
    run = tmp_path_factory.mktemp("template") / "run"
    store = LocalStore(run)
    for number in (1, 2):
        claim_execution(store, execution_id=f"id-{number}", note={})
    pin_resume(store, 2, execution_id="id-2", checkpoint=f"checkpoints/{NEW}")
    for step, name in ((1, OLD), (2, NEW)):
        commit(run, name, step=step, number=1, checkpoint_id=name[-8:])
    write(run / "checkpoints" / DEAD)
    return run


def names_in(directory: Path) -> tuple[str, ...]:
    paths = (path for path in directory.rglob("*") if not path.name.startswith(TEMPORARY_PREFIX))
    return tuple(sorted(str(path.relative_to(directory)) for path in paths))


def check(run: Path, *, done: bool) -> None:
    """What a reader finds, and that another round brings everything to its end."""
    store = LocalStore(run)
    chosen = discover(store, compatibility=None, on_corrupt="error").chosen
    assert chosen is not None
    assert chosen.path == f"checkpoints/{NEW}"
    load(run, NEW)
    old, dead = run / "checkpoints" / OLD, run / "checkpoints" / DEAD
    if f"checkpoints/{OLD}" not in intended(store):
        # Nobody says that it is being deleted: it is whole, or gone without a trace.
        assert not old.exists() or load(run, OLD)
    if (dead / "manifest.json").exists():
        with pytest.raises(CheckpointError):
            publish_from_receipts(dead, manifest_of(3, 1, checkpoint_id=DEAD[-8:]))
    again = retain(store, RetentionPolicy(keep_last=1))
    assert not again.failures
    assert not done or again == Round()
    assert not old.exists()
    assert not intended(store)
    assert names_in(dead) == ("manifest.json",)


def check_late(run: Path) -> None:
    """A rank and a publisher of the dead execution come too late."""
    dead = write(run / "checkpoints" / DEAD)
    with pytest.raises(CheckpointConflictError, match="swept"):
        publish_from_receipts(dead, manifest_of(3, 1, checkpoint_id=DEAD[-8:]))
    assert retain(LocalStore(run), RetentionPolicy(keep_last=1)).swept == (f"checkpoints/{DEAD}",)


def load(run: Path, name: str) -> bool:
    manifest = CheckpointManifest.load(
        run / "checkpoints" / name, required_artifacts=CONTENT, compatibility=manifest_of().compatibility
    )
    return manifest.checkpoint_id == name[-8:]


def fresh(template: Path, base: Path, name: str) -> Path:
    return shutil.copytree(template, base / name)


def test_g4_retention_killed_before_any_call_leaves_whole_checkpoints_and_the_next_round_ends_it(
    zygote: Zygote, template: Path, tmp_path: Path
) -> None:
    calls = zygote.calls("retain", fresh(template, tmp_path, "whole"), tmp_path / "log")
    assert calls["link"] == 2  # the intent, the tombstone
    for call, count in calls.items():
        # What only looks is killed here and there: a change lies between two of them at most.
        reads = call in (*READING, "close", "lseek", "fcntl", "lstat", "ioctl")
        for k in range(1, count + 1, 9 if reads else 1) if call not in MEMORY else ():
            run = fresh(template, tmp_path, f"{call}{k}")
            outcome = zygote.run(
                "retain", run, "-o", "/dev/null", "-e", f"inject={call}:signal=SIGKILL:when={k}", "-e", f"trace={call}"
            )
            check(run, done="ok" in outcome)
    check_late(run)


CHANGING = ("unlink", "rmdir", "link", "fsync", "mkdir")


@pytest.mark.parametrize(("error", "tampered"), [("EIO", CHANGING), ("EACCES", CHANGING[:2])])
def test_a_failing_call_is_reported_and_the_next_round_ends_it(
    error: str, tampered: tuple[str, ...], zygote: Zygote, template: Path, tmp_path: Path
) -> None:
    calls = zygote.calls("retain", fresh(template, tmp_path, "whole"), tmp_path / "log")
    seen = set()
    for call in tampered:
        assert calls[call]
        for k in range(1, calls[call] + 1):
            run = fresh(template, tmp_path, f"{call}{k}")
            outcome = zygote.run(
                "retain", run, "-o", "/dev/null", "-e", f"inject={call}:error={error}:when={k}", "-e", f"trace={call}"
            )
            failures = outcome["ok"]["failures"]
            # What the two share and cannot be made durable fails both, the second with the memory of the first.
            assert all(error in failure["why"] or "an earlier fsync failed" in failure["why"] for failure in failures)
            # The other of the two is not held up by it.
            assert len(failures) + len(outcome["ok"]["retired"]) + len(outcome["ok"]["swept"]) == 2
            seen.add((call, bool(failures)))
            check(run, done=not failures)
    # Only removing a temporary name, or making a directory that is there, may fail without a word.
    assert seen - {("mkdir", False)} == {(call, True) for call in tampered} | {("unlink", False)}


def test_a_failing_look_deletes_nothing_that_it_would_not_have(zygote: Zygote, template: Path, tmp_path: Path) -> None:
    calls = zygote.calls("retain", fresh(template, tmp_path, "whole"), tmp_path / "log")
    for call in ("openat", "getdents64", "read"):
        for k in range(1, calls[call] + 1, 9):
            run = fresh(template, tmp_path, f"{call}{k}")
            zygote.run(
                "retain", run, "-o", "/dev/null", "-e", f"inject={call}:error=EIO:when={k}", "-e", f"trace={call}"
            )
            check(run, done=False)


def test_the_manifest_is_gone_durably_before_the_first_artifact_and_the_intent_before_it(
    zygote: Zygote, template: Path, tmp_path: Path
) -> None:
    run, log = fresh(template, tmp_path, "run"), tmp_path / "log"
    outcome = zygote.run("retain", run, "-y", "-o", str(log), "-e", "trace=link,unlink,rmdir,fsync")
    assert "ok" in outcome
    made = []
    for line in log.read_text().splitlines():
        call, _, rest = line.partition("(")
        if call in ("link", "unlink", "rmdir", "fsync") and "cosmos-ctrl-tmp" not in rest.split(",")[-1]:
            target = rest.split("<")[1].split(">")[0] if call == "fsync" else rest.rpartition(")")[0].split('"')[-2]
            made.append((call, os.path.relpath(target, run)))
    old, dead = f"checkpoints/{OLD}", f"checkpoints/{DEAD}"
    after = made[made.index(("link", f"deleting/{OLD}.json")) :]
    assert ("fsync", f"checkpoints/{NEW}") in made[: -len(after)]
    assert after == [
        ("link", f"deleting/{OLD}.json"),
        ("fsync", "deleting"),
        ("unlink", f"{old}/manifest.json"),
        ("fsync", old),
        ("unlink", f"{old}/sub/rank1.pt"),
        ("fsync", f"{old}/sub"),
        ("rmdir", f"{old}/sub"),
        ("fsync", old),
        ("unlink", f"{old}/rank0.pt"),
        ("fsync", old),
        ("rmdir", old),
        ("fsync", "checkpoints"),
        ("unlink", f"deleting/{OLD}.json"),
        ("fsync", "deleting"),
    ]
    sweep = made[made.index(("link", f"{dead}/manifest.json")) :]
    assert sweep[:3] == [
        ("link", f"{dead}/manifest.json"),
        ("fsync", dead),
        ("unlink", f"{dead}/sub/rank1.pt"),
    ]


def test_a_pin_killed_anywhere_is_there_or_not(zygote: Zygote, tmp_path: Path) -> None:
    calls = zygote.calls("pin", tmp_path / "whole", tmp_path / "log")
    for call, count in calls.items():
        for k in range(1, count + 1) if call not in MEMORY else ():
            run = tmp_path / f"{call}{k}"
            outcome = zygote.run(
                "pin", run, "-o", "/dev/null", "-e", f"inject={call}:signal=SIGKILL:when={k}", "-e", f"trace={call}"
            )
            pin = read_pin(LocalStore(run), 1)
            assert pin == Pin("checkpoints/a") or (pin is None and "ok" not in outcome)
