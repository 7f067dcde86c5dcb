"""Discovery: which checkpoint, why not the others, and what is an error. G3, G7."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from checkpoint_helpers import COMPATIBILITY, commit, manifest_of, publish, resealed, write

from cosmos_ctrl.checkpoints import digests
from cosmos_ctrl.checkpoints.adapter import ManifestAdapter
from cosmos_ctrl.checkpoints.damage import record_damage
from cosmos_ctrl.checkpoints.discovery import Discovery, discover, explain, list_checkpoints, open_checkpoint
from cosmos_ctrl.checkpoints.manifest import Parent
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.core.errors import (
    ArtifactMissingError,
    ArtifactUnexpectedError,
    CheckpointDamagedError,
    CheckpointIncompatibleError,
    CheckpointNotFoundError,
    CheckpointUncommittedError,
    StorageUnavailableError,
    UnknownSchemaError,
    UnsafeNameError,
)


def verdicts(found: Discovery) -> dict[str, str]:
    return {candidate.path.removeprefix("checkpoints/"): candidate.verdict for candidate in found.candidates}


def look(run: Path, on_corrupt: Any = "error", compatibility: Any = COMPATIBILITY) -> Discovery:
    found = explain(LocalStore(run), compatibility=compatibility, on_corrupt=on_corrupt)
    if found.failure:
        with pytest.raises(type(found.failure)):
            discover(LocalStore(run), compatibility=compatibility, on_corrupt=on_corrupt)
    return found


def test_g7_nothing_there_is_a_fresh_run(tmp_path: Path) -> None:
    assert look(tmp_path / "absent") == Discovery(None, (), None)
    (tmp_path / "checkpoints").mkdir()
    assert look(tmp_path) == Discovery(None, (), None)


def test_g3_the_newest_is_by_execution_then_step_and_nothing_else(tmp_path: Path) -> None:
    commit(tmp_path, "z", step=99, number=1)
    commit(tmp_path, "b", step=10, number=2)
    commit(tmp_path, "c", step=9, number=2)
    publish(write(tmp_path / "checkpoints/script"), step=500)
    (tmp_path / "checkpoints/latest").write_text("z")
    os.utime(tmp_path / "checkpoints/z", (2e9, 2e9))
    found = look(tmp_path)
    assert found.chosen
    assert found.chosen.path == "checkpoints/b"
    assert [candidate.path for candidate in found.candidates] == [
        f"checkpoints/{name}" for name in ("b", "c", "z", "script")
    ]
    assert verdicts(found) == {"b": "chosen", "c": "older", "z": "older", "script": "older"}
    assert found.chosen.manifest_digest == digests.digest_bytes((tmp_path / "checkpoints/b/manifest.json").read_bytes())
    assert found.chosen.manifest.metadata.checkpoint_path == "checkpoints/b"
    assert found.candidates[1].explanation == "execution 2, step 9: checkpoints/b is newer"


def test_an_uncommitted_save_is_passed_over_with_a_reason_and_left_alone(tmp_path: Path) -> None:
    commit(tmp_path, "a")
    write(tmp_path / "checkpoints/b")
    (tmp_path / "checkpoints/c").mkdir()
    found = look(tmp_path)
    assert verdicts(found) == {"a": "chosen", "b": "uncommitted", "c": "uncommitted"}
    assert "never committed" in found.candidates[1].explanation
    assert (tmp_path / "checkpoints/b/rank0.pt").exists()


def test_g7_only_uncommitted_saves_are_a_fresh_run(tmp_path: Path) -> None:
    write(tmp_path / "checkpoints/b")
    found = look(tmp_path)
    assert found.chosen is None
    assert found.failure is None


DAMAGE = {
    "missing": (lambda d: (d / "rank0.pt").unlink(), ArtifactMissingError),
    "shorter": (lambda d: (d / "rank0.pt").write_bytes(b"x"), CheckpointDamagedError),
    "a link": (
        lambda d: ((d / "rank0.pt").unlink(), (d / "rank0.pt").symlink_to("sub/rank1.pt")),
        CheckpointDamagedError,
    ),
    "extra": (lambda d: (d / "more").write_bytes(b"x"), ArtifactUnexpectedError),
    "torn manifest": (lambda d: (d / "manifest.json").write_bytes(b'{"schema_version":1,'), CheckpointDamagedError),
    "empty manifest": (lambda d: (d / "manifest.json").write_bytes(b""), CheckpointDamagedError),
    "unsafe name": (
        lambda d: resealed(d / "manifest.json", b'"rank0.pt"', b'"../x.pt"'),
        UnsafeNameError,
    ),
    "recorded": (
        lambda d: record_damage(LocalStore(d.parents[1]), "checkpoints/new", "rank0.pt", "flipped"),
        CheckpointDamagedError,
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_g7_a_damaged_newest_is_an_error_unless_passed_over(damage: str, tmp_path: Path) -> None:
    commit(tmp_path, "old", step=1)
    change, error = DAMAGE[damage]
    change(commit(tmp_path, "new", step=2))
    found = look(tmp_path)
    assert type(found.failure) is error
    assert found.chosen is None
    assert verdicts(found) == {"new": "damaged", "old": "older"}

    passed = look(tmp_path, "previous")
    assert passed.chosen
    assert passed.chosen.path == "checkpoints/old"
    assert verdicts(passed) == {"new": "damaged", "old": "chosen"}

    with pytest.raises(error):
        open_checkpoint(LocalStore(tmp_path), "checkpoints/new", compatibility=None)


@pytest.mark.parametrize("damage", DAMAGE)
def test_g7_when_everything_is_damaged_nothing_starts_afresh(damage: str, tmp_path: Path) -> None:
    change, error = DAMAGE[damage]
    change(commit(tmp_path, "new"))
    for on_corrupt in ("error", "previous"):
        found = look(tmp_path, on_corrupt)
        assert type(found.failure) is error
        assert found.chosen is None


def test_damage_further_back_does_not_matter_but_is_shown_when_recorded(tmp_path: Path) -> None:
    commit(tmp_path, "old", step=1)
    commit(tmp_path, "new", step=2)
    record_damage(LocalStore(tmp_path), "checkpoints/old", "rank0.pt", "flipped")
    found = look(tmp_path)
    assert verdicts(found) == {"new": "chosen", "old": "damaged"}
    assert found.failure is None


def test_a_record_of_damage_is_idempotent_and_explains_itself(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    commit(tmp_path, "e1", step=1)
    commit(tmp_path, "e1-x", step=2)
    names = {record_damage(store, "checkpoints/e1-x", "rank0.pt", "sha256 expected a\ud800, found b") for _ in range(2)}
    assert len(names) == 1
    record_damage(store, "checkpoints/e1-x", "sub/rank1.pt", "x" * 10_000)
    (tmp_path / "damaged/by-hand").mkdir()
    found = look(tmp_path, "previous")
    assert verdicts(found) == {"e1-x": "damaged", "e1": "chosen"}
    assert names.pop() in found.candidates[0].explanation or "rank1.pt" in found.candidates[0].explanation
    for record in (tmp_path / "damaged").glob("*.json"):
        assert json.loads(record.read_text())["path"] == "checkpoints/e1-x"
        record.unlink()
    (tmp_path / "damaged/e1-x-mine.json").write_text("looks bad")
    assert verdicts(look(tmp_path, "previous")) == {"e1-x": "damaged", "e1": "chosen"}


@pytest.mark.parametrize("on_corrupt", ["error", "previous"])
def test_g7_other_settings_are_an_error_whatever_the_policy(on_corrupt: str, tmp_path: Path) -> None:
    commit(tmp_path, "old", step=1)
    commit(tmp_path, "new", step=2, compatibility={**COMPATIBILITY, "world_size": 4})
    found = look(tmp_path, on_corrupt)
    assert isinstance(found.failure, CheckpointIncompatibleError)
    assert found.failure.keys == ("world_size",)
    assert verdicts(found) == {"new": "incompatible", "old": "older"}
    assert look(tmp_path, on_corrupt, compatibility=None).chosen


@pytest.mark.parametrize("on_corrupt", ["error", "previous"])
def test_g7_an_unknown_schema_is_an_error_whatever_the_policy(on_corrupt: str, tmp_path: Path) -> None:
    commit(tmp_path, "new", step=2)
    path = commit(tmp_path, "old", step=1) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 2}))
    found = look(tmp_path, on_corrupt)
    assert isinstance(found.failure, UnknownSchemaError)
    assert verdicts(found)["old"] == "incompatible"


@pytest.mark.parametrize("on_corrupt", ["error", "previous"])
@pytest.mark.parametrize("where", ["manifest.json", "rank0.pt", "checkpoints", "damaged"])
def test_g7_unreadable_is_an_error_whatever_the_policy(
    where: str, on_corrupt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path, "old", step=1)
    directory = commit(tmp_path, "new", step=2)
    record_damage(LocalStore(tmp_path), "checkpoints/other", "x", "y")
    broken = {
        "manifest.json": directory / where,
        "rank0.pt": directory,
        "checkpoints": directory.parent,
        "damaged": tmp_path / where,
    }[where]
    for name in ("open", "scandir"):
        real = getattr(os, name)

        def refuse(path: Any, *arguments: Any, real: Any = real, **keywords: Any) -> Any:
            if os.fspath(path) == str(broken):
                raise PermissionError(13, "Permission denied")
            return real(path, *arguments, **keywords)

        monkeypatch.setattr(os, name, refuse)
    with pytest.raises(StorageUnavailableError) as caught:
        discover(LocalStore(tmp_path), compatibility=COMPATIBILITY, on_corrupt=on_corrupt)
    assert "EACCES" in caught.value.cause
    if where in ("manifest.json", "rank0.pt"):
        assert verdicts(look(tmp_path, on_corrupt)) == {"new": "unreadable", "old": "older"}


def test_no_shard_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(tmp_path, "a")
    monkeypatch.setattr(os, "preadv", lambda *_: pytest.fail("a shard was read"))
    assert look(tmp_path).chosen


def test_an_explicit_path_is_that_checkpoint_or_an_error(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    directory = commit(tmp_path / "run", "old", step=1)
    commit(tmp_path / "run", "new", step=2)
    write(tmp_path / "run/checkpoints/unfinished")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for path in ("checkpoints/old", "checkpoints/old/", str(directory), str(tmp_path / "link/checkpoints/old")):
        found = open_checkpoint(store, path, compatibility=COMPATIBILITY)
        assert found.path == found.manifest.metadata.checkpoint_path == "checkpoints/old"
    assert open_checkpoint(tmp_path / "run", "checkpoints/old", compatibility=None).manifest == manifest_of(
        1, checkpoint_id="old", metadata=found.manifest.metadata
    )
    for path, error in (
        ("checkpoints/absent", CheckpointNotFoundError),
        ("absent", CheckpointNotFoundError),
        ("checkpoints/unfinished", CheckpointUncommittedError),
        ("../run/checkpoints/old", UnsafeNameError),
        (str(tmp_path / "elsewhere/checkpoints/old"), UnsafeNameError),
        (str(tmp_path / "run/../elsewhere"), UnsafeNameError),
    ):
        with pytest.raises(error):
            open_checkpoint(store, path, compatibility=None)
    with pytest.raises(CheckpointIncompatibleError):
        open_checkpoint(store, "checkpoints/old", compatibility={})


def test_the_list_is_newest_first_and_has_the_lineage(tmp_path: Path) -> None:
    first = commit(tmp_path, "a", step=1, parent=None)
    digest = digests.digest_bytes((first / "manifest.json").read_bytes())
    commit(tmp_path, "b", step=1, number=2, parent=Parent("a", digest))
    write(tmp_path / "checkpoints/unfinished")
    (commit(tmp_path, "torn") / "manifest.json").write_bytes(b"{")
    listed = list_checkpoints(LocalStore(tmp_path))
    assert [found.path for found in listed] == ["checkpoints/b", "checkpoints/a"]
    assert listed[0].manifest.parent == Parent(listed[1].manifest.checkpoint_id, listed[1].manifest_digest)
    assert listed[1].manifest.parent is None


def test_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on_corrupt"):
        look(tmp_path, "ignore")


# --- the adapter ---


@dataclass
class Train:
    resume: bool | str
    output_dir: str = ""


@dataclass
class Config:
    train: Train


class Sampler:
    def __init__(self) -> None:
        self.loaded: list[Any] = []

    def load_state_dict(self, state: Any) -> None:
        self.loaded.append(state)


def test_the_adapter_discovers_and_restores_a_fresh_copy(tmp_path: Path) -> None:
    adapter = ManifestAdapter(LocalStore(tmp_path), compatibility=COMPATIBILITY)
    assert adapter.load_metadata(Config(Train(True))) is None
    assert adapter.found is None
    commit(tmp_path, "a", step=4)
    metadata = adapter.load_metadata(Config(Train(True)))
    assert metadata
    assert adapter.found
    assert (metadata.checkpoint_path, metadata.completed_training_steps) == ("checkpoints/a", 4)
    assert adapter.found.manifest_digest == adapter.found.manifest.digest()
    sampler = Sampler()
    for _ in range(2):
        adapter.restore_sampler(sampler, metadata)
        sampler.loaded[-1]["seed"] += 1
    assert sampler.loaded == [{"seed": 8, "position": 4}] * 2


def test_the_adapter_opens_what_is_named(tmp_path: Path) -> None:
    directory = commit(tmp_path, "a", step=4)
    commit(tmp_path, "b", step=5)
    adapter = ManifestAdapter(LocalStore(tmp_path))
    for path in ("checkpoints/a", str(directory)):
        metadata = adapter.load_metadata(Config(Train(path)))
        assert metadata
        assert metadata.completed_training_steps == 4
    with pytest.raises(FileNotFoundError):
        adapter.load_metadata(Config(Train("checkpoints/c")))
    assert adapter.found is None
    for resume in (False, ""):
        with pytest.raises(ValueError, match="resume"):
            adapter.load_metadata(Config(Train(resume)))


def test_the_adapter_passes_over_damage_only_when_told(tmp_path: Path) -> None:
    commit(tmp_path, "a", step=4)
    (commit(tmp_path, "b", step=5) / "rank0.pt").unlink()
    with pytest.raises(ArtifactMissingError):
        ManifestAdapter(LocalStore(tmp_path)).load_metadata(Config(Train(True)))
    metadata = ManifestAdapter(LocalStore(tmp_path), on_corrupt="previous").load_metadata(Config(Train(True)))
    assert metadata
    assert metadata.checkpoint_id == "a"
