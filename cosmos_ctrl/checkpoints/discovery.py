"""Which checkpoint a run resumes from, and why not the others.

* Manifests alone decide: no ``latest`` file, directory name or time. Newest by execution number, then by training step.
* Only an empty listing is "nothing there". What cannot be read is ``StorageUnavailableError``, whatever the policy: it might be
  the newest.
* A committed but damaged newest one is an error, unless the operator chose ``on_corrupt="previous"``; so is a manifest that cannot
  be parsed, since its place in the order is unknown. An unknown schema or other settings are no damage: always an error.
* Uncommitted saves are passed over with a reason; a reader deletes nothing.
* What is being deleted is not chosen: intents are read before any manifest, after the caller has claimed its execution. At the newest
  end it counts as damage does, so that nothing older is taken in silence.
* No shard is hashed: of the newest, names, kinds and sizes are looked at; of the others, the manifest.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from cosmos_ctrl.checkpoints.artifacts import check_closed_set
from cosmos_ctrl.checkpoints.compatibility import Topology
from cosmos_ctrl.checkpoints.damage import damage_records
from cosmos_ctrl.checkpoints.digests import digest_bytes
from cosmos_ctrl.checkpoints.document import MAX_MANIFEST_BYTES
from cosmos_ctrl.checkpoints.intents import intended, intent_name
from cosmos_ctrl.checkpoints.manifest import CheckpointManifest, parse_manifest
from cosmos_ctrl.checkpoints.names import CHECKPOINTS, MANIFEST_NAME, check_store_name
from cosmos_ctrl.checkpoints.stores import Store
from cosmos_ctrl.checkpoints.stores.opening import open_store
from cosmos_ctrl.core.errors import (
    ArtifactMissingError,
    ArtifactUnexpectedError,
    CheckpointDamagedError,
    CheckpointDeletingError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointSweptError,
    CheckpointUncommittedError,
    StorageUnavailableError,
    UnsafeNameError,
)

OnCorrupt = Literal["error", "previous"]
Verdict = Literal["chosen", "older", "uncommitted", "damaged", "incompatible", "unreadable", "deleting"]

#: Refusals that are damage.
_DAMAGE = (CheckpointDamagedError, ArtifactMissingError, ArtifactUnexpectedError, UnsafeNameError)

#: Refusals that ``on_corrupt="previous"`` passes over.
_PASSED_OVER = (*_DAMAGE, CheckpointDeletingError)


@dataclass(frozen=True, slots=True)
class Found:
    """A committed checkpoint."""

    path: str
    """Relative to the run."""
    manifest: CheckpointManifest
    manifest_digest: str
    """``sha256:hex`` over the manifest's bytes."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A directory below ``checkpoints/`` and what discovery decided about it."""

    path: str
    """Relative to the run."""
    verdict: Verdict
    explanation: str
    """Why, for a person."""
    manifest: CheckpointManifest | None = None
    """None when it has none that could be read."""
    manifest_digest: str = ""
    """Empty when the manifest could not be read."""


@dataclass(frozen=True, slots=True)
class Discovery:
    """What a run would resume from now."""

    chosen: Found | None
    """None: the run is fresh, or `failure` says why nothing may be chosen."""
    candidates: tuple[Candidate, ...]
    """First those whose place in the order is unknown, then the committed ones, newest first, then the uncommitted, by path."""
    failure: CheckpointError | None = None
    """What `discover` raises."""


def discover(
    store: Store, *, compatibility: Mapping[str, Any] | None, on_corrupt: OnCorrupt, topology: Topology | None = None
) -> Discovery:
    """Choose the checkpoint to resume from; ``chosen`` is None only when none was ever committed.

    Args:
        store: the run's.
        compatibility: what this run has; None: not compared.
        on_corrupt: "previous" passes over damage at the newest end.
        topology: how this run's trainers are laid out; None: compared with the rest.

    Raises:
        CheckpointDamagedError, ArtifactMissingError, ArtifactUnexpectedError, UnsafeNameError: the newest is damaged, or all are.
        CheckpointDeletingError: the newest is being deleted.
        CheckpointIncompatibleError: the newest is of another dataset, topology or setting; it names both values.
        UnknownSchemaError: one was written by a version that this one does not know.
        StorageUnavailableError: something could not be read.
    """
    found = explain(store, compatibility=compatibility, on_corrupt=on_corrupt, topology=topology)
    if found.failure is not None:
        raise found.failure
    return found


def explain(
    store: Store, *, compatibility: Mapping[str, Any] | None, on_corrupt: OnCorrupt, topology: Topology | None = None
) -> Discovery:
    """What `discover` would do, with every candidate's verdict and without raising what it would raise.

    Raises:
        StorageUnavailableError: the candidates, or the records of damage, could not even be listed.
    """
    choice = _Choice(on_corrupt)
    flaws = _Flaws(intended(store), damage_records(store))
    committed: list[Found] = []
    unplaced: list[Candidate] = []
    uncommitted: list[Candidate] = []
    for path in _directories(store):
        try:
            committed.append(read_committed(store, path))
        except CheckpointUncommittedError as error:
            headless = f"{path}: its deletion has begun, and the manifest is gone"
            explanation = headless if path in flaws.intended else str(error)
            uncommitted.append(Candidate(path, "uncommitted", explanation))
        except CheckpointError as error:
            choice.refuse(error)
            explanation = f"its place in the order is unknown, so it may be the newest: {error}"
            unplaced.append(Candidate(path, _verdict_of(error), explanation))
    expected = _Expected(compatibility, topology)
    judged = [_judge(store, found, choice, flaws, expected) for found in newest_first(committed)]
    # With everything damaged and passed over, a fresh start would be a silent one.
    failure = choice.failure or (choice.passed_over if choice.chosen is None else None)
    return Discovery(choice.chosen, (*unplaced, *judged, *uncommitted), failure)


def open_checkpoint(
    store: Store | Path, path: str, *, compatibility: Mapping[str, Any] | None, topology: Topology | None = None
) -> Found:
    """The checkpoint that an operator named, and no other.

    Args:
        store: the run's, or the run's directory.
        path: relative to the run, or absolute inside it.
        compatibility: what this run has; None: not compared.
        topology: how this run's trainers are laid out; None: compared with the rest.

    Raises:
        CheckpointNotFoundError: there is no such directory.
        CheckpointUncommittedError: it has no manifest; CheckpointSweptError, if it was swept.
        CheckpointDeletingError: it is being deleted.
        CheckpointDamagedError, ArtifactMissingError, ArtifactUnexpectedError, UnknownSchemaError: it is not what was committed.
        CheckpointIncompatibleError: it is of another dataset, topology or setting; it names both values.
        UnsafeNameError: the path leads out of the run.
        StorageUnavailableError: something could not be read.
    """
    store = open_store(store) if isinstance(store, Path) else store
    relative = path_in_run(store, path)
    flaws = _Flaws(intended(store), damage_records(store))
    try:
        found = read_committed(store, relative)
    except CheckpointSweptError:
        raise
    except CheckpointUncommittedError:
        parent, _, name = relative.rpartition("/")
        if f"{name}/" not in store.list(parent):
            raise CheckpointNotFoundError(path=path) from None
        raise
    _check(store, found, flaws, _Expected(compatibility, topology), sizes=True)
    return found


def list_checkpoints(store: Store) -> tuple[Found, ...]:
    """Every committed checkpoint whose manifest can be parsed, newest first; ``manifest.parent`` is its lineage.

    Raises:
        StorageUnavailableError: one could not be read, so the list would not be whole.
    """
    committed = []
    for path in _directories(store):
        try:
            committed.append(read_committed(store, path))
        except StorageUnavailableError:
            raise
        except CheckpointError:
            continue
    return newest_first(committed)


def path_in_run(store: Store, path: str) -> str:
    """`path` relative to the run, which may be given as absolute inside it.

    Raises:
        UnsafeNameError: it leads out of the run.
    """
    stripped = path.rstrip("/")
    bases = [(store.uri, stripped)]
    if stripped.startswith("/"):
        # The same place may be spelled through links, on either side.
        bases += [(store.uri, os.path.normpath(stripped)), (os.path.realpath(store.uri), os.path.realpath(stripped))]
    inside = [target[len(base) + 1 :] for base, target in bases if target.startswith(f"{base}/")]
    if not inside and stripped.startswith("/"):
        raise UnsafeNameError(path=store.uri, name=path, why="it lies outside of the run")
    return check_store_name(inside[0] if inside else stripped, path=store.uri)


@dataclass(slots=True)
class _Choice:
    """The choice as it is made, from the newest on."""

    on_corrupt: OnCorrupt
    chosen: Found | None = None
    failure: CheckpointError | None = None
    passed_over: CheckpointError | None = None

    def __post_init__(self) -> None:
        if self.on_corrupt not in get_args(OnCorrupt):
            raise ValueError(f"on_corrupt is {self.on_corrupt!r}, expected one of {get_args(OnCorrupt)}")

    @property
    def is_open(self) -> bool:
        return self.chosen is None and self.failure is None

    def refuse(self, error: CheckpointError) -> None:
        """Something at the newest end cannot be resumed from: the end of the choice, unless damage is passed over."""
        if not self.is_open:
            return
        if self.on_corrupt == "previous" and isinstance(error, _PASSED_OVER):
            # The newest of them is told; but an intent before damage, since an operator can lift it.
            can_be_lifted = isinstance(error, CheckpointDeletingError)
            if self.passed_over is None or can_be_lifted > isinstance(self.passed_over, CheckpointDeletingError):
                self.passed_over = error
        else:
            self.failure = error


@dataclass(frozen=True, slots=True)
class _Flaws:
    """What the run says against some of its checkpoints."""

    intended: frozenset[str]
    damage: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Expected:
    """What this run has; None is not compared."""

    compatibility: Mapping[str, Any] | None
    topology: Topology | None


def _judge(
    store: Store,
    found: Found,
    choice: _Choice,
    flaws: _Flaws,
    expected: _Expected,
) -> Candidate:
    metadata = found.manifest.metadata
    order = f"execution {found.manifest.execution_number}, step {metadata.completed_training_steps}"
    verdict: Verdict
    try:
        _check(store, found, flaws, expected, sizes=choice.is_open)
    except CheckpointError as error:
        choice.refuse(error)
        verdict, explanation = _verdict_of(error), str(error)
    else:
        if choice.is_open:
            choice.chosen = found
            verdict, explanation = "chosen", f"the newest committed checkpoint ({order})"
        elif choice.chosen is not None:
            verdict, explanation = "older", f"{order}: {choice.chosen.path} is newer"
        else:
            verdict, explanation = (
                "older",
                f"{order}: not considered, because of a newer one that cannot be passed over",
            )
    return Candidate(found.path, verdict, explanation, found.manifest, found.manifest_digest)


def _check(store: Store, found: Found, flaws: _Flaws, expected: _Expected, *, sizes: bool) -> None:
    if found.path in flaws.intended:
        raise CheckpointDeletingError(path=found.path, intent=intent_name(found.path))
    if found.path in flaws.damage:
        raise recorded_damage(found.path, flaws.damage[found.path])
    if sizes:
        named = {name: artifact.size_bytes for name, artifact in found.manifest.artifacts.items()}
        check_closed_set(store.scan(found.path), named, path=found.path)
    found.manifest.check_compatibility(expected.compatibility, path=found.path, topology=expected.topology)


def recorded_damage(path: str, explanation: str) -> CheckpointDamagedError:
    """The error for a checkpoint of which a rank or an operator said that it is damaged."""
    return CheckpointDamagedError(
        path=path, artifact="an artifact", what="content", expected="what was committed", found=explanation
    )


def read_committed(store: Store, path: str) -> Found:
    """The checkpoint at `path` by its manifest alone.

    Raises:
        CheckpointUncommittedError: it has no manifest; CheckpointSweptError, if it was swept.
        CheckpointDamagedError, UnknownSchemaError, UnsafeNameError: what has the manifest's name is none that is known.
        StorageUnavailableError: it could not be read.
    """
    data = store.read(f"{path}/{MANIFEST_NAME}", limit=MAX_MANIFEST_BYTES)
    if data is None:
        raise CheckpointUncommittedError(path=path)
    return Found(path, parse_manifest(data, path=path), digest_bytes(data))


def _directories(store: Store) -> list[str]:
    return [f"{CHECKPOINTS}/{name[:-1]}" for name in store.list(CHECKPOINTS) if name.endswith("/")]


def newest_first(committed: Iterable[Found]) -> tuple[Found, ...]:
    """The checkpoints in discovery's order."""

    def key(found: Found) -> tuple[int, int, int, int, str, str]:
        # Of one step, the one whose budget is further used up: a run that ends with discards saves its last step again. What
        # follows only breaks ties, so that two copies of one checkpoint have an order.
        manifest, metadata = found.manifest, found.manifest.metadata
        places = metadata.completed_optimizer_updates, -metadata.remaining_completions
        return *manifest.order, *places, manifest.checkpoint_id, found.path

    return tuple(sorted(committed, key=key, reverse=True))


def _verdict_of(error: CheckpointError) -> Verdict:
    if isinstance(error, StorageUnavailableError):
        return "unreadable"
    if isinstance(error, CheckpointDeletingError):
        return "deleting"
    return "damaged" if isinstance(error, _DAMAGE) else "incompatible"
