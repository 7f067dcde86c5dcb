"""Retention, controllers, publishers and operators at once: every interleaving, with a failing call at every place."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from checkpoint_helpers import manifest_of
from retention_model import Actor, Content, Exploration, Memory, Notes, State

from cosmos_ctrl.checkpoints import discovery
from cosmos_ctrl.checkpoints.artifacts import Artifact, check_closed_set
from cosmos_ctrl.checkpoints.claims import claim_execution, is_superseded, newest_claim, pin_resume
from cosmos_ctrl.checkpoints.damage import record_damage
from cosmos_ctrl.checkpoints.digests import digest_bytes
from cosmos_ctrl.checkpoints.discovery import discover, open_checkpoint
from cosmos_ctrl.checkpoints.document import tombstone
from cosmos_ctrl.checkpoints.intents import intended
from cosmos_ctrl.checkpoints.manifest import CheckpointManifest, parse_manifest
from cosmos_ctrl.checkpoints.retention import RetentionPolicy, Round, retain
from cosmos_ctrl.core.errors import ControlError

SHARD = b"s"
ONE = RetentionPolicy(keep_last=1)


def path_of(number: int, step: int) -> str:
    return f"checkpoints/e{number:04d}-s{step:08d}-{step:08x}"


@cache
def manifest(number: int, step: int) -> CheckpointManifest:
    artifacts = {"a": Artifact(len(SHARD), digest_bytes(SHARD))}
    return manifest_of(step, number, checkpoint_id=f"{step:08x}", artifacts=artifacts, compatibility={})


def run(
    *committed: tuple[int, int], unfinished: tuple[tuple[int, int], ...] = (), claims: int = 1, fresh: int = 0
) -> Content:
    """A run; the first `fresh` executions have pinned that they started fresh."""
    store = Memory(frozenset())
    for number in range(1, claims + 1):
        assert claim_execution(store, execution_id=f"id-{number}", note={}) == number
        if number <= fresh:
            pin_resume(store, number, execution_id=f"id-{number}", checkpoint=None)
    for number, step in (*committed, *unfinished):
        store.put_if_absent(f"{path_of(number, step)}/a", SHARD)
    for number, step in committed:
        store.put_if_absent(f"{path_of(number, step)}/manifest.json", manifest(number, step).to_bytes())
    return store.content()


# -- actors


def controller(
    *, identity: str = "new", named: str | None = None, previous: bool = False, publishes: int | None = None
) -> Actor:
    """Claims, discovers, pins; may then publish a step and retain."""

    def act(store: Any, notes: Notes) -> None:
        try:
            number = claim_execution(store, execution_id=identity, note={})
            notes["number"] = number
            if named is not None:
                chosen = open_checkpoint(store, named, compatibility=None).path
            else:
                found = discover(store, compatibility=None, on_corrupt="previous" if previous else "error")
                chosen = found.chosen.path if found.chosen else ""
            notes["chosen"] = chosen
            pin_resume(store, number, execution_id=identity, checkpoint=chosen or None)
            if publishes is not None:
                store.put_if_absent(f"{path_of(number, publishes)}/a", SHARD)
                publish(store, notes, number, publishes)
                notes["round"] = retain(store, ONE, number=number)
        except ControlError as error:
            notes["error"] = error

    return act


def publish(store: Any, notes: Notes, number: int, step: int) -> None:
    """As a controller publishes, over any store, from when it has found that it may: nobody knows how long ago."""
    path = path_of(number, step)
    check_closed_set(store.scan(path), {"a": len(SHARD)}, path=path)
    store.put_if_absent(f"{path}/manifest.json", manifest(number, step).to_bytes())
    if not is_superseded(store, number):
        notes["acknowledged"] = (number, step)


def publisher(number: int, step: int) -> Actor:
    def act(store: Any, notes: Notes) -> None:
        try:
            publish(store, notes, number, step)
        except ControlError as error:
            notes["error"] = error

    return act


def deleter(number: int | None, policy: RetentionPolicy = ONE) -> Actor:
    """A controller's retention, or an operator's."""

    def act(store: Any, notes: Notes) -> None:
        try:
            notes["round"] = retain(store, policy, number=number)
        except ControlError as error:
            notes["error"] = error

    return act


def damage(number: int, step: int) -> Actor:
    def act(store: Any, notes: Notes) -> None:
        try:
            record_damage(store, path_of(number, step), "a", "a bit is flipped")
        except ControlError as error:
            notes["error"] = error

    return act


# -- what must hold in every state


def is_whole(store: Memory, path: str) -> bool:
    data = store.names.get(f"{path}/manifest.json")
    return data is not None and data != tombstone_of(data) and store.names.get(f"{path}/a") == SHARD


def tombstone_of(data: bytes) -> bytes | None:
    return next((tombstone(number) for number in range(9) if tombstone(number) == data), None)


def check(state: State, acknowledged: tuple[int, int], *, damaged: bool = False) -> None:
    store = Memory(state.content)
    live = newest_claim(store)
    for notes in (node.notes for node in state.nodes):
        # What the newest claim's execution resumes from is there, from its choice on.
        if notes.get("number") == live and notes.get("chosen"):
            assert is_whole(store, notes["chosen"]), "what the live execution resumes from is deleted under it"
        acknowledged = max(acknowledged, notes.get("acknowledged", (0, 0)))
    for name, data in store.names.items():
        path, _, last = name.rpartition("/")
        if last != "manifest.json" or tombstone_of(data) is not None or path in intended(store):
            continue
        # A publication that lands when all is over makes a manifest without artifacts: never the newest, gone with the next round.
        assert is_whole(store, path) or state.late, (
            "a committed checkpoint is not whole, and nobody says that it is being deleted"
        )
    if not damaged:
        resumable(state.content, acknowledged)


@cache
def resumable(content: Content, acknowledged: tuple[int, int]) -> None:
    """Whoever would start now finds a whole checkpoint, no older than the newest that was acknowledged; and one more round, after
    whatever crash, leaves nothing half deleted."""
    store = Memory(content)
    chosen = discover(store, compatibility=None, on_corrupt="error").chosen
    assert chosen is not None
    assert is_whole(store, chosen.path)
    assert chosen.manifest.order >= acknowledged
    number = claim_execution(store, execution_id="later", note={})
    pin_resume(store, number, execution_id="later", checkpoint=chosen.path)
    done = retain(store, ONE)
    assert not done.failures
    assert not done.superseded
    assert not intended(store)
    again = retain(store, ONE)
    assert (again.retired, again.swept, again.failures) == ((), (), ())
    for name in store.names:
        path = name.rpartition("/")[0]
        if path.startswith("checkpoints/") and name.endswith("/a"):
            unfinished = f"{path}/manifest.json" not in store.names
            assert unfinished or is_whole(store, path)


@pytest.fixture(autouse=True)
def parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "parse_manifest", cache(parse_manifest))
    resumable.cache_clear()


SETTLED = ("damaged", "checkpoints/e0001-s00000002", "executions/00000001")


def explored(
    content: Content,
    actors: list[Actor],
    acknowledged: tuple[int, int],
    *,
    faults: int = 0,
    settled: tuple[str, ...] = (),
    damaged: bool = False,
) -> list[State]:
    """The states in which all actors are through; every state on the way is checked."""
    ends, count = [], 0
    for state in Exploration(content, actors, faults=faults, settled=settled):
        check(state, acknowledged, damaged=damaged)
        count += 1
        if state.over:
            ends.append(state)
    assert count > 100, "hardly anything was explored"
    return ends


OLD, NEW = path_of(1, 1), path_of(1, 2)
TWO = run((1, 1), (1, 2), fresh=1)


def outcomes(states: list[State], actor: int) -> set[tuple[str | None, str]]:
    """What a controller chose, and the error that it met."""
    notes = (state.notes(actor) for state in states)
    return {(found.get("chosen"), type(found["error"]).__name__ if "error" in found else "") for found in notes}


def rounds(states: list[State], actor: int) -> list[Round]:
    return [state.notes(actor)["round"] for state in states if "round" in state.notes(actor)]


def test_the_retention_of_a_controller_and_the_start_of_the_next() -> None:
    states = explored(TWO, [deleter(1), controller()], (1, 2), faults=1, settled=SETTLED)
    assert outcomes(states, 1) == {(NEW, ""), (NEW, "StorageUnavailableError"), (None, "StorageUnavailableError")}
    assert {done.superseded for done in rounds(states, 0)} == {True, False}
    assert {done.retired for done in rounds(states, 0)} == {(), (OLD,)}


@pytest.mark.parametrize("number", [1, None], ids=["controller", "operator"])
def test_a_start_from_a_named_old_checkpoint_has_it_or_is_refused(number: int | None) -> None:
    states = explored(TWO, [controller(named=OLD), deleter(number)], (1, 2), faults=1, settled=SETTLED)
    assert outcomes(states, 0) == {
        (OLD, ""),
        (OLD, "StorageUnavailableError"),
        (None, "CheckpointDeletingError"),
        (None, "CheckpointUncommittedError"),
        (None, "CheckpointNotFoundError"),
        (None, "StorageUnavailableError"),
    }


def test_a_controller_and_an_operator_delete_the_same_while_another_starts_from_it() -> None:
    states = explored(TWO, [controller(named=OLD), deleter(1), deleter(None)], (1, 2), settled=SETTLED)
    assert {chosen for chosen, _ in outcomes(states, 0)} == {OLD, None}
    assert not any(done.failures for actor in (1, 2) for done in rounds(states, actor))


def test_two_controllers_start_while_the_retention_of_the_one_before_goes_on() -> None:
    actors = [deleter(1), controller(named=OLD), controller(identity="other")]
    states = explored(TWO, actors, (1, 2), faults=1, settled=SETTLED)
    assert {state.notes(1).get("number") for state in states} >= {2, 3}
    assert {chosen for chosen, _ in outcomes(states, 1)} == {OLD, None}
    assert {chosen for chosen, _ in outcomes(states, 2)} == {NEW, None}


def test_a_controller_publishes_and_retains_while_another_starts_from_what_it_deletes() -> None:
    actors = [controller(identity="other", publishes=9), controller(named=OLD)]
    states = explored(TWO, actors, (1, 2), settled=SETTLED)
    assert any(state.notes(0).get("acknowledged") for state in states)
    assert any(done.superseded for done in rounds(states, 0))
    assert any(OLD in done.retired for done in rounds(states, 0))


def test_an_operator_deletes_nothing_that_a_starting_controller_may_have_chosen() -> None:
    """Between its claim and its pin nobody knows what it chose."""
    content = run((1, 1), (1, 2), claims=2, fresh=1)
    states = explored(content, [deleter(None), deleter(2)], (1, 2), settled=SETTLED)
    assert {done.retired for done in rounds(states, 0)} == {()}


def test_damage_is_recorded_while_retention_goes_on() -> None:
    """Who passes over damage has what it chose, or is refused: never half of it."""
    actors = [deleter(1), damage(1, 2), controller(previous=True)]
    states = explored(TWO, actors, (1, 2), faults=1, settled=SETTLED[1:], damaged=True)
    assert {(OLD, ""), (NEW, ""), (None, "CheckpointDeletingError")} <= outcomes(states, 2)


def test_a_sweep_and_a_late_publisher() -> None:
    """One of the two has the manifest's name: a whole checkpoint, or nothing."""
    content = run((1, 1), unfinished=((1, 2),), claims=2, fresh=2)
    for third in (deleter(None), controller()):
        states = explored(content, [deleter(2), publisher(1, 2), third], (1, 1))
        assert not any(state.notes(1).get("acknowledged") for state in states)
        assert {done.swept for done in rounds(states, 0)} == {(), (NEW,)}
        errors = {type(state.notes(1).get("error")).__name__ for state in states}
        assert errors == {"NoneType", "CheckpointConflictError", "ArtifactMissingError"}
        assert {is_whole(Memory(state.content), NEW) for state in states} == {True, False}


def test_a_publication_lands_late_or_twice_while_retention_goes_on() -> None:
    content = run((2, 3), unfinished=((1, 1),), claims=2, fresh=2)
    states = explored(content, [publisher(1, 1), deleter(2)], (2, 3), faults=1)
    assert any(OLD in done.retired for done in rounds(states, 1))
    assert any(OLD in done.swept for done in rounds(states, 1))
