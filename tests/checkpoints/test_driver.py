"""A driver's execution without a server: claimed, chosen, verified, pinned; committed or superseded."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from checkpoint_helpers import COMPATIBILITY, CONTENT, metadata, write

from cosmos_ctrl.checkpoints import driver
from cosmos_ctrl.checkpoints.claims import Pin, claim_execution, read_pin
from cosmos_ctrl.checkpoints.damage import damage_records
from cosmos_ctrl.checkpoints.discovery import Found, list_checkpoints
from cosmos_ctrl.checkpoints.driver import DriverExecution, Place, begin, place_of
from cosmos_ctrl.checkpoints.names import MANIFEST_NAME
from cosmos_ctrl.checkpoints.retention import RetentionPolicy
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.checkpoints.survey import survey
from cosmos_ctrl.core.errors import (
    ArtifactForeignError,
    CheckpointDamagedError,
    CheckpointNotFoundError,
    ControlError,
    StorageUnavailableError,
    SupersededError,
)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run")


def start(store: LocalStore, **options: Any) -> DriverExecution:
    return begin(store, compatibility=COMPATIBILITY, **options)


def written(execution: DriverExecution, steps: int, save: int = 0) -> Place:
    place = place_of(execution.number, execution.execution_id, steps=steps, save=save)
    write(execution.store.path_of(place.path))  # type: ignore[attr-defined]  # these tests are on a file system
    return place


def saved(execution: DriverExecution, steps: int) -> Found:
    place = written(execution, steps)
    return execution.commit(place, metadata(steps, place.checkpoint_id, place.path))


def flip(store: LocalStore, found: Found) -> str:
    """Damages one artifact of a checkpoint; its name."""
    name = "sub/rank1.pt"
    path = store.path_of(f"{found.path}/{name}")
    content = bytearray(path.read_bytes())
    content[7] ^= 4
    path.write_bytes(content)
    return name


def test_executions_go_on_from_each_other_and_what_they_resumed_from_is_pinned(store: LocalStore) -> None:
    first = start(store)
    assert (first.number, first.resumed, read_pin(store, 1)) == (1, None, Pin(None))
    earlier, later = saved(first, 2), saved(first, 4)
    assert earlier.manifest.parent is None
    assert later.manifest.parent is not None
    assert later.manifest.parent.checkpoint_id == earlier.manifest.checkpoint_id
    assert later.manifest.artifacts.keys() == CONTENT.keys()
    second = start(store)
    assert (second.number, second.resumed) == (2, later)
    assert read_pin(store, 2) == Pin(later.path)
    third = saved(second, 6)
    assert third.manifest.parent is not None
    assert third.manifest.parent.manifest_digest == later.manifest_digest
    assert third.manifest.order == (2, 6)
    assert {holding.kind for holding in survey(store).holdings} == {"committed"}, "the names are a controller's"


def test_places_are_equal_wherever_they_are_asked_for_and_no_two_saves_share_one() -> None:
    asked = [
        (number, execution_id, steps, save)
        for number, execution_id in ((1, "aa"), (2, "bb"))
        for steps in (0, 3)
        for save in (0, 1)
    ]
    places = [place_of(number, execution_id, steps=steps, save=save) for number, execution_id, steps, save in asked]
    again = [place_of(number, execution_id, steps=steps, save=save) for number, execution_id, steps, save in asked]
    assert places == again
    assert len({place.path for place in places}) == len({place.checkpoint_id for place in places}) == len(asked)


def test_a_superseded_execution_publishes_nothing(store: LocalStore) -> None:
    first = start(store)
    saved(first, 2)
    claim_execution(store, execution_id="newer", note={})
    place = written(first, 4)
    with pytest.raises(SupersededError, match=r"execution 1 of .* was taken over"):
        first.commit(place, metadata(4, place.checkpoint_id, place.path))
    assert store.head(f"{place.path}/{MANIFEST_NAME}") is None


def test_superseded_in_the_moment_of_publication_it_acknowledges_and_deletes_nothing(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(store, retention=RetentionPolicy(keep_last=1))
    saved(first, 2)
    publish = driver.publish_from_receipts

    def overtaken(*arguments: Any) -> str:
        digest = publish(*arguments)
        claim_execution(store, execution_id="newer", note={})
        return digest

    monkeypatch.setattr(driver, "publish_from_receipts", overtaken)
    with pytest.raises(SupersededError):
        saved(first, 4)
    assert [found.manifest.order for found in list_checkpoints(store)] == [(1, 4), (1, 2)]


def test_damage_found_in_the_bytes_is_recorded_and_passed_over_only_where_chosen(store: LocalStore) -> None:
    first = start(store)
    sound, damaged, also = saved(first, 2), saved(first, 4), saved(first, 6)
    name = flip(store, also)
    flip(store, damaged)
    with pytest.raises(CheckpointDamagedError) as caught:
        start(store)
    assert (caught.value.path, caught.value.artifact) == (also.path, name)
    assert damage_records(store).keys() == {also.path}
    with pytest.raises(CheckpointDamagedError):
        start(store, resume=damaged.path, on_corrupt="previous")  # a named one is that one
    assert start(store, on_corrupt="previous").resumed == sound
    flip(store, sound)
    with pytest.raises(CheckpointDamagedError):
        start(store, on_corrupt="previous")  # with nothing left a fresh start would be a silent one


def test_content_of_another_checkpoint_counts_as_damage(store: LocalStore) -> None:
    first = start(store)
    before, newest = saved(first, 2), saved(first, 4)

    def refuse(found: Found) -> None:
        if found == newest:
            raise ArtifactForeignError(path=found.path, artifact="rank0.pt", what="step", expected="4", found="2")

    with pytest.raises(ArtifactForeignError):
        start(store, check=refuse)
    assert start(store, on_corrupt="previous").resumed == before


def test_what_is_missing_unreadable_or_switched_off_is_told_apart(
    store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match="resume is empty"):
        start(store, resume="")
    for other in (None, 1, store.root / "checkpoints"):
        with pytest.raises(TypeError, match="expected True, False or a checkpoint's path"):
            start(store, resume=other)
    assert not store.list("executions"), "refused before anything is claimed"
    with pytest.raises(CheckpointNotFoundError):
        start(store, resume="checkpoints/e0001-s00000002-0a0a0a0a")
    with caplog.at_level(logging.INFO):
        assert start(store, resume=False).resumed is None
    assert "starts fresh: the run holds no checkpoint" in caplog.text
    newest = saved(start(store), 2)
    caplog.clear()
    fresh = start(store, resume=False)
    assert "resume is off; the run holds 1 checkpoints" in caplog.text
    assert fresh.resumed is None
    assert saved(fresh, 2).manifest.parent is None
    assert newest in list_checkpoints(store)
    (store.root / "checkpoints" / "dangling").symlink_to("nowhere")
    with pytest.raises(StorageUnavailableError):
        start(store)
    assert not damage_records(store)


def test_retention_keeps_what_it_should_and_never_stops_a_run(
    store: LocalStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = start(store)
    leftover = written(dead, 3)
    first = start(store, retention=RetentionPolicy(keep_last=2))
    for steps in (2, 4, 6):
        saved(first, steps)
    assert [found.manifest.order for found in list_checkpoints(store)] == [(2, 6), (2, 4)]
    assert [entry.name for entry in store.scan(leftover.path)] == [MANIFEST_NAME], "swept, behind a tombstone"

    def unavailable(*_: Any, **__: Any) -> None:
        raise StorageUnavailableError(path="run", operation="list", cause="EIO")

    monkeypatch.setattr(driver, "retain", unavailable)
    assert saved(first, 8).manifest.order == (2, 8)
    assert "retention could not look at the run" in caplog.text


def test_an_empty_file_or_one_of_another_kind_is_not_committed(store: LocalStore) -> None:
    execution = start(store)
    for number, spoil in enumerate((lambda path: path.write_bytes(b""), lambda path: path.symlink_to("rank0.pt"))):
        place = written(execution, 2, save=number)
        spoil(store.path_of(f"{place.path}/more"))
        with pytest.raises(ControlError, match="more"):
            execution.commit(place, metadata(2, place.checkpoint_id, place.path))
    assert not list_checkpoints(store)
