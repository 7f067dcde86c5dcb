"""Retention: what is kept, against a dumb model; what goes, and how, on a real file system. G3, G4, G7."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_helpers import CONTENT, commit, manifest_of, write
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_ctrl.checkpoints import durable
from cosmos_ctrl.checkpoints.claims import Pin, claim_execution, newest_claim, pin_name, pin_resume, read_pin
from cosmos_ctrl.checkpoints.damage import record_damage
from cosmos_ctrl.checkpoints.discovery import Found, discover, explain, open_checkpoint
from cosmos_ctrl.checkpoints.document import tombstone
from cosmos_ctrl.checkpoints.intents import intended, put_intent
from cosmos_ctrl.checkpoints.manifest import publish_from_receipts, read_manifest
from cosmos_ctrl.checkpoints.names import TEMPORARY_PREFIX, parse_save_name
from cosmos_ctrl.checkpoints.retention import KEEP_ALL, RetentionPolicy, Round, plan, retain
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.checkpoints.survey import Holding, Survey, survey
from cosmos_ctrl.core.errors import (
    CheckpointConflictError,
    CheckpointDamagedError,
    CheckpointDeletingError,
    CheckpointSweptError,
    CheckpointUncommittedError,
    StorageUnavailableError,
)

LAST = RetentionPolicy(keep_last=1)


# -- the plan, against a dumb model

FOUND = Found("p", manifest_of(), "sha256:00")


@st.composite
def surveys(draw: Any) -> Survey:
    live = draw(st.integers(1, 4))
    committed = draw(st.lists(st.tuples(st.integers(1, live), st.integers(0, 12)), max_size=8, unique=True))
    holdings = []
    for number, step in sorted(committed, reverse=True):
        flaws = draw(st.sampled_from([{}, {}, {}, {"damage": "flipped"}, {"intended": True}]))
        holdings.append(Holding(f"c{number}-{step}", "committed", number, step, FOUND, **flaws))
    for index in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["unfinished", "swept", "foreign", "gone"]))
        number = draw(st.integers(1, live))
        left = draw(st.sampled_from([(), ("a",)]))
        intended = kind == "gone" or draw(st.booleans())
        holdings.append(Holding(f"o{index}", kind, number, 1, intended=intended, left=left))
    paths = [None, *(holding.path for holding in holdings)]
    pin = draw(st.one_of(st.none(), st.builds(Pin, st.sampled_from(paths))))
    return Survey(live, pin, "" if pin else "unknown", tuple(holdings))


policies = st.builds(RetentionPolicy, keep_last=st.integers(1, 4), keep_every=st.integers(0, 5)) | st.just(KEEP_ALL)


@settings(max_examples=600, deadline=None)
@given(surveys(), policies)
def test_the_plan_is_what_a_dumb_model_says(run: Survey, policy: RetentionPolicy) -> None:
    decided = {decision.holding.path: decision.action for decision in plan(run, policy)}
    sound = [h for h in run.holdings if h.kind == "committed" and not h.damage and not h.intended]
    for holding in run.holdings:
        wanted = "keep"
        newer = [h for h in sound if (h.execution, h.steps) > (holding.execution, holding.steps)]
        if holding.kind == "committed":
            must_stay = (
                not any(
                    h.kind == "committed" and (h.execution, h.steps) > (holding.execution, holding.steps)
                    for h in run.holdings
                )
                or run.pin is None
                or run.pin.checkpoint == holding.path
                or not newer
            )
            chosen_to_stay = (
                policy.keep_last == 0
                or len(newer) < policy.keep_last
                or (policy.keep_every and holding.steps in range(0, 100, policy.keep_every))
            )
            if not must_stay and (holding.intended or not chosen_to_stay):
                wanted = "retire"
        elif holding.kind == "foreign":
            pass
        elif holding.intended:
            wanted = "retire"
        elif (holding.kind == "unfinished" and holding.execution < run.live) or (
            holding.kind == "swept" and holding.left
        ):
            wanted = "sweep"
        assert decided[holding.path] == wanted, holding
    # Whatever the policy: a sound one stays if there was one, and it is the newest of them.
    if sound:
        assert decided[sound[0].path] == "keep"


@pytest.mark.parametrize(("last", "every"), [(-1, 0), (0, -1), (0, 5)])
def test_a_policy_that_means_nothing_is_refused(last: int, every: int) -> None:
    with pytest.raises(ValueError, match="keep_"):
        RetentionPolicy(keep_last=last, keep_every=every)


@pytest.mark.parametrize("wrong", [True, 1.0, "1", None])
def test_a_number_of_checkpoints_is_an_int(wrong: Any) -> None:
    with pytest.raises(TypeError, match="keep_last"):
        RetentionPolicy(keep_last=wrong)
    with pytest.raises(TypeError, match="keep_every"):
        RetentionPolicy(keep_last=1, keep_every=wrong)


# -- a run on disk


def save_name(number: int, step: int) -> str:
    return f"e{number:04d}-s{step:08d}-{number:04x}{step:04x}"


def committed(run: Path, number: int, step: int) -> Path:
    name = save_name(number, step)
    return commit(run, name, step=step, number=number, checkpoint_id=name[-8:])


def unfinished(run: Path, number: int, step: int) -> Path:
    return write(run / "checkpoints" / save_name(number, step))


def claimed(run: Path, count: int, *, resumed_from: str | None = None) -> LocalStore:
    """The run, claimed so often; the last execution has pinned."""
    store = LocalStore(run)
    for number in range(1, count + 1):
        assert claim_execution(store, execution_id=f"id-{number}", note={}) == number
    pin_resume(store, count, execution_id=f"id-{count}", checkpoint=resumed_from)
    return store


def there(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()}


def test_the_newest_stay_and_the_others_go_without_a_trace(tmp_path: Path) -> None:
    store = claimed(tmp_path, 2)
    for number, step in ((1, 1), (1, 2), (1, 3), (2, 3), (2, 4)):
        committed(tmp_path, number, step)
    done = retain(store, RetentionPolicy(keep_last=2, keep_every=2))
    assert there(tmp_path) == {save_name(1, 2), save_name(2, 3), save_name(2, 4)}
    assert done == Round(retired=(f"checkpoints/{save_name(1, 1)}", f"checkpoints/{save_name(1, 3)}"))
    assert not list((tmp_path / "deleting").iterdir())
    assert retain(store, RetentionPolicy(keep_last=2, keep_every=2)) == Round()


def test_without_a_policy_only_what_dead_executions_left_goes(tmp_path: Path) -> None:
    store = claimed(tmp_path, 2)
    committed(tmp_path, 1, 1)
    committed(tmp_path, 1, 2)
    dead, live = unfinished(tmp_path, 1, 3), unfinished(tmp_path, 2, 3)
    (dead / "empty").mkdir()
    done = retain(store, KEEP_ALL)
    assert done == Round(swept=(f"checkpoints/{dead.name}",))
    assert [path.name for path in dead.iterdir()] == ["manifest.json"]
    assert (dead / "manifest.json").read_bytes() == tombstone(2)
    assert sorted(CONTENT) == sorted(str(p.relative_to(live)) for p in live.rglob("*") if p.is_file())
    assert retain(store, KEEP_ALL) == Round()


def test_what_the_newest_execution_resumed_from_stays_and_is_free_when_another_has_claimed(tmp_path: Path) -> None:
    old = f"checkpoints/{save_name(1, 1)}"
    store = claimed(tmp_path, 2, resumed_from=old)
    committed(tmp_path, 1, 1)
    committed(tmp_path, 1, 2)
    assert retain(store, LAST) == Round()
    number = claim_execution(store, execution_id="id-3", note={})
    # Claimed, and nobody knows what it chose: everything committed stays.
    assert retain(store, LAST) == Round()
    pin_resume(store, number, execution_id="id-3", checkpoint=f"checkpoints/{save_name(1, 2)}")
    assert retain(store, LAST).retired == (old,)


def test_a_pin_is_put_once_and_read_strictly(tmp_path: Path) -> None:
    store = claimed(tmp_path, 1, resumed_from="checkpoints/a")
    assert read_pin(store, 1) == Pin("checkpoints/a")
    assert read_pin(store, 2) is None
    pin_resume(store, 1, execution_id="id-1", checkpoint="checkpoints/a")
    with pytest.raises(CheckpointConflictError):
        pin_resume(store, 1, execution_id="id-1", checkpoint=None)
    assert newest_claim(store) == 1
    for junk in (b"", b"{}", b"[]", b'{"resumed_from": 1}', b"nonsense"):
        (tmp_path / pin_name(1)).write_bytes(junk)
        with pytest.raises(CheckpointDamagedError):
            read_pin(store, 1)
        committed(tmp_path, 1, 1)
        committed(tmp_path, 1, 2)
        assert retain(store, LAST) == Round()
        assert "cannot be told" in survey(store).why_unpinned


def test_a_superseded_controller_deletes_nothing(tmp_path: Path) -> None:
    store = claimed(tmp_path, 2)
    committed(tmp_path, 1, 1)
    committed(tmp_path, 1, 2)
    dead = unfinished(tmp_path, 1, 3)
    before = sorted(tmp_path.rglob("*"))
    assert retain(store, LAST, number=1) == Round(superseded=True)
    assert sorted(tmp_path.rglob("*")) == before
    assert retain(store, LAST, number=2).swept == (f"checkpoints/{dead.name}",)


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    store = claimed(tmp_path, 1)
    for step in (1, 2, 3, 4):
        committed(tmp_path, 1, step)
    record_damage(store, f"checkpoints/{save_name(1, 4)}", "rank0.pt", "flipped")
    (tmp_path / "checkpoints" / save_name(1, 3) / "rank0.pt").unlink()
    assert retain(store, LAST).retired == (f"checkpoints/{save_name(1, 1)}",)
    assert there(tmp_path) == {save_name(1, step) for step in (2, 3, 4)}
    committed(tmp_path, 1, 5)
    assert len(retain(store, LAST).retired) == 3


def test_only_unsound_ones_are_all_kept(tmp_path: Path) -> None:
    store = claimed(tmp_path, 1)
    for step in (1, 2):
        (committed(tmp_path, 1, step) / "rank0.pt").unlink()
    assert retain(store, LAST) == Round()


# -- foreign


def test_what_is_not_ours_is_never_touched_and_shown_with_the_reason(tmp_path: Path) -> None:
    run = tmp_path / "run"
    store = claimed(run, 2)
    committed(run, 2, 9)
    base = run / "checkpoints"
    (base / "latest").write_text("x")
    (base / "link").symlink_to(base / save_name(2, 9))
    (base / save_name(1, 50)).symlink_to(write(tmp_path / "elsewhere"))
    (base / save_name(1, 51)).write_text("a file")
    os.mkfifo(base / "pipe")
    write(base / "mine")
    commit(run, "script", step=1, number=0, execution_id="")
    committed(run, 1, 2).rename(base / save_name(1, 3))
    (committed(run, 1, 4) / "notes.txt").write_text("read me")
    ((committed(run, 1, 5)) / "way-out").symlink_to(tmp_path)
    (unfinished(run, 1, 6) / "link").symlink_to(tmp_path / "elsewhere")
    (committed(run, 1, 7) / "manifest.json").write_bytes(b"{")
    newer = committed(run, 1, 8) / "manifest.json"
    newer.write_bytes(newer.read_bytes().replace(b'"schema_version":1,"self', b'"schema_version":2,"self'))
    unfinished(run, 3, 10)
    os.mkfifo(unfinished(run, 1, 11) / "pipe")
    before = untouched(tmp_path)
    decisions = {decision.holding.path.partition("/")[2]: decision for decision in plan(survey(store), LAST)}
    reasons = {name: decision.why for name, decision in decisions.items() if decision.holding.kind == "foreign"}
    for name, reason in {
        "latest": "a file",
        "link": "a symbolic link",
        save_name(1, 50): "a symbolic link",
        save_name(1, 51): "a file",
        "pipe": "a special file",
        "mine": "name is not one",
        "script": "name is not one",
        save_name(1, 3): "copied or renamed",
        save_name(1, 4): "notes.txt in it is not one of its artifacts",
        save_name(1, 5): "way-out in it is a symbolic link",
        save_name(1, 6): "link in it is a symbolic link",
        save_name(1, 7): "is damaged",
        save_name(1, 8): "schema version 2",
        save_name(3, 10): "execution 3 has not claimed",
        save_name(1, 11): "special file",
    }.items():
        assert reason in reasons.pop(name)
    assert not reasons
    assert retain(store, LAST) == Round()
    assert untouched(tmp_path) == before


def untouched(directory: Path) -> dict[Path, tuple[int, ...]]:
    """Everything there, with what a change of it would change; being read is none."""
    found = {path: path.lstat() for path in directory.rglob("*")}
    return {path: (stat.st_ino, stat.st_mode, stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}


@pytest.mark.parametrize(
    "name",
    ["e0001-s00000001-0000000", "e1-s1-00000000", "e0001-s00000001-ABCDEF01", "e0001-s00000001-00000001.old", ""],
)
def test_a_name_that_no_controller_gives_says_nothing(name: str) -> None:
    assert parse_save_name(name) is None


def test_a_save_that_is_committed_while_it_is_looked_at_is_not_taken_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = claimed(tmp_path, 1)
    name = save_name(1, 1)
    write(tmp_path / "checkpoints" / name, {"rank0.pt": CONTENT["rank0.pt"]})
    scan = store.scan

    def then_it_is_committed(prefix: str) -> Any:
        entries = scan(prefix)
        commit(tmp_path, name, step=1, number=1, checkpoint_id=name[-8:])
        return entries

    monkeypatch.setattr(store, "scan", then_it_is_committed)
    assert [(holding.kind, holding.damage) for holding in survey(store).holdings] == [("unfinished", "")]
    assert retain(store, LAST) == Round()


# -- tombstones


def test_a_late_publisher_meets_the_tombstone_and_a_reader_is_told(tmp_path: Path) -> None:
    store = claimed(tmp_path, 2)
    dead = unfinished(tmp_path, 1, 3)
    (dead / "manifest.json").write_bytes(tombstone(2))  # swept, up to the artifacts
    with pytest.raises(CheckpointConflictError, match="swept by execution 2"):
        publish_from_receipts(dead, manifest_of(3, 1))
    with pytest.raises(CheckpointSweptError, match="swept by execution 2"):
        read_manifest(dead)
    with pytest.raises(CheckpointSweptError):
        open_checkpoint(store, f"checkpoints/{dead.name}", compatibility=None)
    found = explain(store, compatibility=None, on_corrupt="error")
    assert [(candidate.verdict, found.chosen) for candidate in found.candidates] == [("uncommitted", None)]
    assert "swept by execution 2" in found.candidates[0].explanation
    # A later execution goes on with what an earlier one began.
    claim_execution(store, execution_id="id-3", note={})
    assert retain(store, KEEP_ALL).swept == (f"checkpoints/{dead.name}",)
    assert [path.name for path in dead.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("data", [b"", b"{}", tombstone(1)[:-1], tombstone(1) + b" ", b'{"swept_by_execution":"1"}\n'])
def test_what_is_nearly_a_tombstone_is_damage(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(data)
    with pytest.raises(CheckpointDamagedError):
        read_manifest(tmp_path)


def test_a_late_publisher_that_was_first_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = claimed(tmp_path, 2)
    dead = unfinished(tmp_path, 1, 3)
    put = store.put_if_absent

    def publish_first(name: str, data: bytes) -> bool:
        publish_from_receipts(dead, manifest_of(3, 1, checkpoint_id=dead.name[-8:]))
        return put(name, data)

    monkeypatch.setattr(store, "put_if_absent", publish_first)
    assert retain(store, KEEP_ALL) == Round()
    assert discover(store, compatibility=None, on_corrupt="error").chosen


# -- what is being deleted


def test_g7_what_is_being_deleted_is_not_resumed_from_and_nothing_older_is_taken_in_silence(tmp_path: Path) -> None:
    store = claimed(tmp_path, 1)
    committed(tmp_path, 1, 1)
    new = f"checkpoints/{committed(tmp_path, 1, 2).name}"
    put_intent(store, new)
    put_intent(store, new)
    with pytest.raises(CheckpointDeletingError, match=f"remove deleting/{save_name(1, 2)}.json"):
        discover(store, compatibility=None, on_corrupt="error")
    with pytest.raises(CheckpointDeletingError):
        open_checkpoint(store, new, compatibility=None)
    found = explain(store, compatibility=None, on_corrupt="previous")
    assert [candidate.verdict for candidate in found.candidates] == ["deleting", "chosen"]
    # It is the newest, so its deletion does not go on either; an operator who lifts the intent has it back.
    assert retain(store, LAST) == Round()
    (tmp_path / f"deleting/{save_name(1, 2)}.json").unlink()
    assert discover(store, compatibility=None, on_corrupt="error").chosen


def test_g7_when_only_what_is_being_deleted_is_left_the_error_says_what_can_be_lifted(tmp_path: Path) -> None:
    store = claimed(tmp_path, 1)
    put_intent(store, f"checkpoints/{committed(tmp_path, 1, 1).name}")
    (committed(tmp_path, 1, 2) / "rank0.pt").unlink()
    with pytest.raises(CheckpointDeletingError):
        discover(store, compatibility=None, on_corrupt="previous")


def test_what_was_begun_is_finished_whatever_the_policy(tmp_path: Path) -> None:
    store = claimed(tmp_path, 2)
    for step in (1, 2, 3, 4):
        committed(tmp_path, 1, step)
    whole, headless, empty, gone = (f"checkpoints/{save_name(1, step)}" for step in (1, 2, 3, 9))
    for path in (whole, headless, empty, gone):
        put_intent(store, path)
    (tmp_path / headless / "manifest.json").unlink()
    for path in sorted((tmp_path / empty).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / headless / f"{TEMPORARY_PREFIX}left").write_text("of a publisher that was killed")
    explained = {
        candidate.path: candidate for candidate in explain(store, compatibility=None, on_corrupt="error").candidates
    }
    assert explained[whole].verdict == "deleting"
    assert "the manifest is gone" in explained[headless].explanation
    assert set(retain(store, KEEP_ALL).retired) == {whole, headless, empty, gone}
    assert there(tmp_path) == {save_name(1, 4)}
    assert not intended(store)


# -- failures


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_what_cannot_be_deleted_is_reported_stops_nothing_and_is_tried_again(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = claimed(tmp_path, 2)
    for step in (1, 2, 3):
        committed(tmp_path, 1, step)
    dead = unfinished(tmp_path, 1, 4)
    stubborn = {tmp_path / "checkpoints" / save_name(1, 1) / "rank0.pt", dead / "sub" / "rank1.pt"}
    unlink = Path.unlink

    def refuse(path: Path, *arguments: Any, **keywords: Any) -> None:
        if path in stubborn:
            raise OSError(number, os.strerror(number))
        unlink(path, *arguments, **keywords)

    monkeypatch.setattr(Path, "unlink", refuse)
    done = retain(store, LAST)
    assert done.retired == (f"checkpoints/{save_name(1, 2)}",)
    assert done.swept == ()
    assert [failure.path for failure in done.failures] == [f"checkpoints/{dead.name}", f"checkpoints/{save_name(1, 1)}"]
    assert all(errno.errorcode[number] in failure.why for failure in done.failures)
    assert {path for path in (tmp_path / "checkpoints").rglob("*.pt") if save_name(1, 3) not in str(path)} == stubborn
    # Neither can be mistaken for a checkpoint, and the run goes on from the one that is left.
    found = explain(store, compatibility=None, on_corrupt="error")
    assert found.chosen
    assert found.chosen.path == f"checkpoints/{save_name(1, 3)}"
    monkeypatch.setattr(Path, "unlink", unlink)
    assert retain(store, LAST) == Round(
        retired=(f"checkpoints/{save_name(1, 1)}",), swept=(f"checkpoints/{dead.name}",)
    )


def test_nothing_goes_while_the_newest_cannot_be_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = claimed(tmp_path, 1)
    committed(tmp_path, 1, 1)
    newest = committed(tmp_path, 1, 2)
    fsync = durable.fsync_directory

    def refuse(directory: Path) -> None:
        if directory == newest:
            raise StorageUnavailableError(path=str(directory), operation="fsync", cause="EIO")
        fsync(directory)

    monkeypatch.setattr(durable, "fsync_directory", refuse)
    assert [failure.path for failure in retain(store, LAST).failures] == [f"checkpoints/{save_name(1, 1)}"]
    assert there(tmp_path) == {save_name(1, 1), save_name(1, 2)}
    assert not intended(store)


def test_a_run_that_cannot_be_looked_at_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = claimed(tmp_path, 1)
    committed(tmp_path, 1, 1)
    committed(tmp_path, 1, 2)
    real = os.scandir
    for refused in ("executions", "deleting", "damaged", "checkpoints"):
        (tmp_path / refused).mkdir(exist_ok=True)

        def refuse(path: Any, refused: str = refused) -> Any:
            if os.fspath(path) == str(tmp_path / refused):
                raise PermissionError(13, "Permission denied")
            return real(path)

        monkeypatch.setattr(os, "scandir", refuse)
        with pytest.raises(StorageUnavailableError):
            retain(store, LAST)
    monkeypatch.setattr(os, "scandir", real)
    assert there(tmp_path) == {save_name(1, 1), save_name(1, 2)}


def test_one_unreadable_checkpoint_is_foreign_and_the_others_have_their_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = claimed(tmp_path, 1)
    for step in (1, 2, 3):
        committed(tmp_path, 1, step)
    real = os.scandir
    hidden = tmp_path / "checkpoints" / save_name(1, 2)

    def refuse(path: Any) -> Any:
        if os.fspath(path) == str(hidden):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert retain(store, LAST).retired == (f"checkpoints/{save_name(1, 1)}",)
    assert hidden.is_dir()
    assert "EACCES" in next(h.why for h in survey(store).holdings if h.kind == "foreign")


def test_a_round_ends_between_two_steps_and_the_next_one_goes_on(tmp_path: Path) -> None:
    for stop_at in range(1, 40):
        run = tmp_path / str(stop_at)
        store = claimed(run, 2)
        for step in (1, 2):
            committed(run, 1, step)
        unfinished(run, 1, 3)
        asked = 0

        def may_go_on(stop_at: int = stop_at) -> bool:
            nonlocal asked
            asked += 1
            return asked < stop_at

        first = retain(store, LAST, may_go_on=may_go_on)
        second = retain(store, LAST)
        assert not first.failures
        assert not second.failures
        assert there(run) == {save_name(1, 2), save_name(1, 3)}
        assert not list(run.glob("deleting/*"))
        if first.retired and first.swept:
            return
    pytest.fail("a round asks for ever")


def test_deleters_that_run_at_once_do_not_hold_each_other_up(tmp_path: Path) -> None:
    claimed(tmp_path, 2)
    for step in range(1, 13):
        committed(tmp_path, 1, step)
        unfinished(tmp_path, 1, 20 + step)
    barrier = threading.Barrier(4)

    def delete(_: int) -> Round:
        barrier.wait(20)
        return retain(LocalStore(tmp_path), LAST)

    with ThreadPoolExecutor(4) as pool:
        rounds = list(pool.map(delete, range(4)))
    assert {path for done in rounds for path in done.retired} == {
        f"checkpoints/{save_name(1, s)}" for s in range(1, 12)
    }
    assert [f for done in rounds for f in done.failures] == []
    assert retain(LocalStore(tmp_path), LAST) == Round()
    assert there(tmp_path) == {save_name(1, 12), *(save_name(1, 20 + step) for step in range(1, 13))}
    assert all(names == ["manifest.json"] for names in left_in(tmp_path, range(21, 33)))
    assert not intended(LocalStore(tmp_path))


def left_in(run: Path, steps: range) -> list[list[str]]:
    return [[path.name for path in (run / "checkpoints" / save_name(1, step)).iterdir()] for step in steps]


# -- the store's part


def test_a_directory_is_deleted_only_when_it_is_empty(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put_if_absent("d/e/file", b"x")
    (tmp_path / "d/link").symlink_to(tmp_path / "d/e")
    assert [store.kind(name) for name in ("d", "d/e/file", "d/link", "d/absent", "no/where")] == [
        "directory",
        "file",
        "symbolic link",
        None,
        None,
    ]
    with pytest.raises(StorageUnavailableError, match="ENOTEMPTY"):
        store.delete("d/e")
    assert store.delete("d/link")
    assert (tmp_path / "d/e/file").exists()
    assert store.delete("d/e/file")
    (tmp_path / "d/e" / f"{TEMPORARY_PREFIX}1").write_text("")
    assert store.delete("d/e")
    assert not store.delete("d/e")
    with pytest.raises(StorageUnavailableError):
        store.sync("absent")


def test_what_goes_while_it_is_looked_at_or_deleted_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    for name in ("d/e/file", "d/other"):
        store.put_if_absent(name, b"x")
    scandir, fsync = os.scandir, durable.fsync_directory

    def gone(path: Any) -> Any:
        if os.fspath(path) == str(tmp_path / "d/e"):
            raise FileNotFoundError(2, "No such file or directory")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", gone)
    assert [entry.name for entry in store.scan("d")] == ["e", "other"]
    monkeypatch.setattr(os, "scandir", scandir)

    def parent_gone(directory: Path) -> None:
        if directory == tmp_path / "d/e":
            directory.rmdir()
        fsync(directory)

    monkeypatch.setattr(durable, "fsync_directory", parent_gone)
    assert store.delete("d/e/file")
    assert not (tmp_path / "d/e").exists()


def test_an_uncommitted_one_is_told_from_a_swept_one(tmp_path: Path) -> None:
    store = claimed(tmp_path, 1)
    dead = unfinished(tmp_path, 1, 1)
    with pytest.raises(CheckpointUncommittedError) as caught:
        open_checkpoint(store, f"checkpoints/{dead.name}", compatibility=None)
    assert type(caught.value) is CheckpointUncommittedError


def test_a_holding_is_sound_only_when_it_can_be_counted_on() -> None:
    holding = Holding("p", "committed", 1, 1, FOUND)
    assert holding.sound
    assert not replace(holding, damage="flipped").sound
    assert not replace(holding, intended=True).sound
    assert not replace(holding, kind="foreign").sound


def test_an_intent_that_another_deleter_removes_while_it_is_put_is_put_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    put_intent(store, "checkpoints/a")
    read = store.read

    def removed(name: str, *, limit: int) -> bytes | None:
        (tmp_path / name).unlink()
        monkeypatch.setattr(store, "read", read)
        return read(name, limit=limit)

    monkeypatch.setattr(store, "read", removed)
    put_intent(store, "checkpoints/a")
    assert intended(store) == {"checkpoints/a"}
    (tmp_path / "deleting/a.json").write_text("somebody else's")
    with pytest.raises(CheckpointConflictError):
        put_intent(store, "checkpoints/a")
