"""Damage, each kind with the error of its own class and reason: which artifact, what was expected, what was found.

What is not a regular file, missing or extra is in ``test_checkpoint_publication``; what is no manifest in ``test_checkpoint_manifest``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_helpers import COMPATIBILITY, CONTENT, Zygote, commit, load, manifest_of, publish, receipts, write

from cosmos_ctrl.checkpoints.discovery import discover
from cosmos_ctrl.checkpoints.manifest import parse_manifest, publish_from_receipts, read_manifest
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.core.errors import (
    ArtifactMissingError,
    ArtifactUnexpectedError,
    CheckpointDamagedError,
    CheckpointError,
    UnsafeNameError,
)

#: Whoever owns nothing.
NOBODY = 65534


def found_by_load(directory: Path) -> CheckpointDamagedError:
    with pytest.raises(CheckpointDamagedError) as caught:
        load(directory)
    return caught.value


@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("name", CONTENT)
def test_a_flipped_bit_of_any_artifact_is_found(name: str, place: str, bit: int, tmp_path: Path) -> None:
    publish(write(tmp_path))
    data = bytearray(CONTENT[name])
    data[{"first": 0, "middle": len(data) // 2, "last": -1}[place]] ^= 1 << bit
    (tmp_path / name).write_bytes(data)
    error = found_by_load(tmp_path)
    changed = receipts({name: bytes(data)})[name].digest
    assert (error.artifact, error.what, error.found) == (name, "digest", changed)
    assert error.expected == receipts()[name].digest


def test_any_flipped_bit_of_the_manifest_is_refused(tmp_path: Path) -> None:
    commit(tmp_path, "a")
    path = tmp_path / "checkpoints/a/manifest.json"
    right = path.read_bytes()
    for place in range(len(right)):
        for bit in range(8):
            wrong = right[:place] + bytes([right[place] ^ 1 << bit]) + right[place + 1 :]
            with pytest.raises(CheckpointError):
                parse_manifest(wrong, path="c")
    # As an execution that starts would meet it: a step that is another one is damage, not another step.
    path.write_bytes(right.replace(b'"completed_training_steps":3', b'"completed_training_steps":2'))
    with pytest.raises(CheckpointDamagedError):
        discover(LocalStore(tmp_path), compatibility=None, on_corrupt="error")


def test_a_manifest_that_is_cut_anywhere_is_damaged(tmp_path: Path) -> None:
    commit(tmp_path, "a")
    path = tmp_path / "checkpoints/a/manifest.json"
    right = path.read_bytes()
    for size in range(len(right)):
        path.write_bytes(right[:size])
        with pytest.raises(CheckpointDamagedError) as caught:
            read_manifest(path.parent)
        assert (caught.value.artifact, caught.value.what) == ("manifest.json", "content")
    with pytest.raises(CheckpointDamagedError):
        discover(LocalStore(tmp_path), compatibility=None, on_corrupt="error")


@pytest.mark.parametrize("name", CONTENT)
@pytest.mark.parametrize("size", [0, 1, -1, None])
def test_an_artifact_of_another_size_is_found_before_a_byte_is_read(
    name: str, size: int | None, tmp_path: Path
) -> None:
    right = CONTENT[name]
    data = right + b"x" if size is None else right[:size]
    for directory, attempt in (
        (tmp_path / "load", lambda: load(tmp_path / "load")),
        (tmp_path / "receipts", lambda: publish_from_receipts(tmp_path / "receipts", manifest_of())),
    ):
        write(directory)
        if directory.name == "load":
            publish(directory)
        write(directory, {name: data})
        with pytest.raises(CheckpointDamagedError) as caught:
            attempt()
        error = caught.value
        assert (error.artifact, error.what) == (name, "size in bytes")
        assert (error.expected, error.found) == (str(len(right)), str(len(data)))


@pytest.mark.parametrize("other", [{"step": 4}, {"number": 2}], ids=["another step", "another attempt"])
def test_a_shard_of_another_checkpoint_is_found(other: dict[str, int], tmp_path: Path) -> None:
    """Of the same name and size, so only its bytes tell; discovery, which reads none, takes it, and the ranks refuse it."""
    content = {name: bytes(reversed(data)) for name, data in CONTENT.items()}
    mine = commit(tmp_path, "mine", **other)
    theirs = write(tmp_path / "checkpoints/theirs", content)
    publish_from_receipts(theirs, manifest_of(artifacts=receipts(content), checkpoint_id="theirs"))
    for name in CONTENT:
        write(mine)
        (theirs / name).replace(mine / name)
        error = found_by_load(mine)
        assert (error.artifact, error.what) == (name, "digest")
        assert (error.expected, error.found) == (receipts()[name].digest, receipts(content)[name].digest)


def test_swapped_shards_of_one_size_are_each_found(tmp_path: Path) -> None:
    content = {"a/0.pt": b"12345678", "a/1.pt": b"87654321"}
    publish(write(tmp_path, content), required_artifacts=content)
    write(tmp_path, dict(zip(content, reversed(content.values()), strict=True)))
    with pytest.raises(CheckpointDamagedError) as caught:
        load(tmp_path, required_artifacts=content)
    swapped = receipts(content)
    assert caught.value.artifact in content
    assert {caught.value.expected, caught.value.found} == {artifact.digest for artifact in swapped.values()}


def test_a_copy_whose_manifest_came_first_is_refused_until_it_is_whole(tmp_path: Path) -> None:
    source = commit(tmp_path / "source", "a")
    run = tmp_path / "copy"
    copy = run / "checkpoints/a"
    copy.mkdir(parents=True)
    (copy / "manifest.json").write_bytes((source / "manifest.json").read_bytes())
    store = LocalStore(run)

    def refused(error: type[CheckpointError], *artifacts: str) -> None:
        for look in (
            lambda: discover(store, compatibility=COMPATIBILITY, on_corrupt="error"),
            lambda: discover(store, compatibility=COMPATIBILITY, on_corrupt="previous"),
            lambda: load(copy),
        ):
            with pytest.raises(error) as caught:
                look()
            named = getattr(caught.value, "artifacts", None) or (getattr(caught.value, "artifact", ""),)
            assert named == artifacts

    names = sorted(CONTENT)
    refused(ArtifactMissingError, *names)
    for place, name in enumerate(names):
        (copy / name).parent.mkdir(exist_ok=True)
        for size in (0, 1, len(CONTENT[name]) - 1):
            (copy / name).write_bytes(CONTENT[name][:size])
            if place + 1 < len(names):
                refused(ArtifactMissingError, *names[place + 1 :])
            else:
                refused(CheckpointDamagedError, name)
        (copy / name).write_bytes(CONTENT[name])
    assert load(copy).checkpoint_id == "a"
    assert discover(store, compatibility=COMPATIBILITY, on_corrupt="error").chosen


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["../rank0.pt"], "part '..'"),
        (["sub/../../rank0.pt"], "part '..'"),
        (["/etc/hostname"], "absolute"),
        (["rank\u0065\u0301.pt"], "normal form C"),
        (["rank0.pt", "RANK0.pt"], "only in case"),
        (["sub/rank1.pt", "Sub/rank2.pt"], "only in case"),
        (["sub", "sub/rank1.pt"], "both a file and a directory"),
        (["rank0.pt", "rank0.pt"], "twice"),
    ],
)
def test_unsafe_names_are_refused_before_anything_is_touched(names: list[str], why: str, tmp_path: Path) -> None:
    directory = write(tmp_path / "run/c")
    write(tmp_path / "run", {"rank0.pt": b"outside"})
    publish(write(tmp_path / "committed"))
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    attempts: tuple[Callable[[], object], ...] = (
        lambda: publish(directory, required_artifacts=names),
        lambda: load(tmp_path / "committed", required_artifacts=names),
    )
    for attempt in attempts:
        with pytest.raises(UnsafeNameError) as caught:
            attempt()
        assert why in caught.value.why
        assert caught.value.name in names
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["rank\u0065\u0301.pt", "RANK0.pt", "sub/Rank1.pt", "manifest.json.bak", " rank0.pt"])
def test_a_file_that_a_file_system_could_take_for_another_is_extra(name: str, tmp_path: Path) -> None:
    committed = write(tmp_path / "committed")
    publish(committed)
    fresh = write(tmp_path / "fresh")
    attempts: tuple[tuple[Path, Callable[[Path], object]], ...] = ((committed, load), (fresh, publish))
    for directory, attempt in attempts:
        (directory / name).write_bytes(b"x")
        with pytest.raises(ArtifactUnexpectedError) as caught:
            attempt(directory)
        assert caught.value.artifacts == (name,)
    assert not (fresh / "manifest.json").exists()


# --- permissions, as a user whom they bind ---


@pytest.fixture
def run() -> Iterator[Path]:
    """A run that belongs to a user other than root, in a directory that any user can reach."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        run = Path(place) / "run"
        commit(run, "a", execution_id="", number=0)
        write(run / "checkpoints/b")
        if os.geteuid() == 0:
            for path in (run, *run.rglob("*")):
                os.chown(path, NOBODY, NOBODY)
        yield run
        for path in (run, *run.rglob("*")):
            path.chmod(0o755)


def as_user(untraced: Zygote, task: str, directory: Path, **how: Any) -> dict[str, Any]:
    user = {"user": NOBODY} if os.geteuid() == 0 else {}
    return untraced.run_untraced(task, directory, **user, **how)


@pytest.mark.parametrize(
    ("task", "where", "closed"),
    [
        ("load", "checkpoints/a", "checkpoints/a/rank0.pt"),
        ("load", "checkpoints/a", "checkpoints/a/sub"),
        ("load", "checkpoints/a", "checkpoints/a/manifest.json"),
        ("load", "checkpoints/a", "checkpoints/a"),
        ("load", "checkpoints/a", "checkpoints"),
        ("discover", ".", "checkpoints/a/manifest.json"),
        ("discover", ".", "checkpoints/a/sub"),
        ("discover", ".", "checkpoints/a"),
        ("discover", ".", "checkpoints"),
        ("publish", "checkpoints/b", "checkpoints/b/rank0.pt"),
        ("publish", "checkpoints/b", "checkpoints/b/sub"),
        ("publish", "checkpoints/b", "checkpoints/b"),
    ],
)
def test_g7_what_may_not_be_read_is_neither_absent_nor_damaged(
    task: str, where: str, closed: str, run: Path, untraced: Zygote
) -> None:
    (run / closed).chmod(0o000)
    outcome = as_user(untraced, task, run / where)
    (run / closed).chmod(0o755)
    assert outcome.get("error") == "StorageUnavailableError", outcome
    assert "EACCES" in outcome["text"]
    assert str(run / closed) in outcome["text"]
    assert not (run / "checkpoints/b/manifest.json").exists()


@pytest.mark.parametrize(
    ("task", "where", "closed", "operation"),
    [
        ("publish", "checkpoints/b", "checkpoints/b", "write"),
        ("claim", ".", ".", "mkdir"),
        ("record", ".", ".", "mkdir"),
        ("delete", "checkpoints/a", "checkpoints/a", "unlink"),
    ],
)
def test_where_nothing_may_be_written_the_operation_is_named_and_nothing_changes(
    task: str, where: str, closed: str, operation: str, run: Path, untraced: Zygote
) -> None:
    (run / closed).chmod(0o555)
    before = sorted(str(path) for path in run.rglob("*"))
    outcome = as_user(untraced, task, run / where)
    assert (outcome.get("error"), outcome.get("operation")) == ("StorageUnavailableError", operation), outcome
    assert "EACCES" in outcome["text"]
    assert sorted(str(path) for path in run.rglob("*")) == before


def test_a_checkpoint_that_may_only_be_read_loads(run: Path, untraced: Zygote) -> None:
    for path in (run, *run.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    for task, where in (("discover", run), ("load", run / "checkpoints/a")):
        outcome = as_user(untraced, task, where)
        assert "ok" in outcome, outcome


def test_with_a_umask_of_077_the_owner_loads_and_another_user_is_told_why(run: Path, untraced: Zygote) -> None:
    assert "ok" in as_user(untraced, "publish", run / "checkpoints/b", umask=0o077)
    assert (run / "checkpoints/b/manifest.json").stat().st_mode & 0o777 == 0o600
    assert "ok" in as_user(untraced, "load", run / "checkpoints/b")
    if os.geteuid() == 0:
        outcome = untraced.run_untraced("load", run / "checkpoints/b", user=NOBODY - 1)
        assert outcome.get("error") == "StorageUnavailableError", outcome
        assert "EACCES" in outcome["text"]
        assert "manifest.json" in outcome["text"]


def test_the_way_up_ends_where_another_user_forbids_it_and_not_before(untraced: Zygote) -> None:
    """What the user may have made a name in must be readable; what is above belongs to others, and may be private."""
    if os.geteuid() != 0:
        pytest.skip("takes two users")
    with tempfile.TemporaryDirectory() as place:
        home = Path(place) / "home"
        parent = home / "user" / "project" / "runs"
        parent.mkdir(parents=True)
        Path(place).chmod(0o755)
        for path in (parent, parent.parent, parent.parent.parent):
            os.chown(path, NOBODY, NOBODY)
        home.chmod(0o711)
        assert "ok" in as_user(untraced, "claim", parent / "one")
        assert "ok" in as_user(untraced, "claim", home / "user")
        for closed, owner, mode in (
            (parent, NOBODY, 0o311),
            (parent.parent, NOBODY, 0o311),
            (parent, 0, 0o733),
            (parent.parent, 0, 0o733),  # where the user may have made `parent`
        ):
            os.chown(closed, owner, owner)
            closed.chmod(mode)
            outcome = as_user(untraced, "claim", parent / "two")
            os.chown(closed, NOBODY, NOBODY)
            closed.chmod(0o755)
            assert outcome.get("error") == "StorageUnavailableError", outcome
            assert f"{closed}: " in outcome["text"]
            assert "EACCES" in outcome["text"]
        assert "ok" in as_user(untraced, "claim", parent / "two")
