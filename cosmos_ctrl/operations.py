"""What an operator asks of a run's checkpoints: what is there, what one is, whether its bytes are what was committed.

Plain values, for the command line and for scripts; ``to_json`` of each has stable keys. Nothing here deletes: that is
`cosmos_ctrl.checkpoints.retention`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from cosmos_ctrl.checkpoints.artifacts import Artifact, verify_artifacts
from cosmos_ctrl.checkpoints.digests import default_threads
from cosmos_ctrl.checkpoints.discovery import (
    Candidate,
    Found,
    OnCorrupt,
    explain,
    list_checkpoints,
    read_committed,
)
from cosmos_ctrl.checkpoints.names import CHECKPOINTS, MANIFEST_NAME, parents_of
from cosmos_ctrl.checkpoints.retention import Decision, RetentionPolicy, plan
from cosmos_ctrl.checkpoints.stores import Store
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.checkpoints.stores.opening import open_store
from cosmos_ctrl.checkpoints.survey import Holding, survey
from cosmos_ctrl.core.errors import (
    ArtifactMissingError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointUncommittedError,
    UnsafeNameError,
)

State = Literal["newest", "kept", "due", "damaged", "deleting", "unfinished", "swept", "foreign"]


def open_run(location: str | Path) -> Store:
    """The store of an existing run, a directory or the URI of an object store.

    Raises:
        CheckpointNotFoundError: there is no such directory, or nothing below the URI.
        ValueError: it is a URI of a scheme that is not known here.
        ModuleNotFoundError: it is one of an object store, and the extra that speaks to those is not installed.
    """
    # Within: what is not there is not made.
    store = open_store(location).within("")
    found = store.root.is_dir() if isinstance(store, LocalStore) else bool(store.list(""))
    if not found:
        raise CheckpointNotFoundError(path=store.uri, what="run")
    return store


def split_checkpoint(location: str | Path) -> tuple[Store, str] | None:
    """The run that a checkpoint lies in, and its path there; None for what is no checkpoint.

    Raises:
        As `open_run`.
    """
    checkpoint = open_run(location)
    above, _, name = checkpoint.uri.rstrip("/").rpartition("/")
    if above.rpartition("/")[2] == CHECKPOINTS:
        return open_run(above.rpartition("/")[0] or "/"), f"{CHECKPOINTS}/{name}"
    if checkpoint.kind(MANIFEST_NAME) is not None:
        return open_run(above or "/"), name
    return None


# -- ls


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of ``cosmos-ctrl ls``."""

    path: str
    state: State
    why: str
    execution: int
    step: int | None
    size_bytes: int
    checkpoint_id: str
    manifest_digest: str
    parent: str
    """Checkpoint ID of what it descends from; empty when it started fresh, or has no manifest."""

    @classmethod
    def of(cls, decision: Decision) -> Listed:
        """What a plan says of a holding."""
        holding, found, state = decision.holding, decision.holding.found, _state(decision)
        return cls(
            path=holding.path,
            state=state,
            why=holding.damage if state == "damaged" else decision.why,
            execution=holding.execution,
            step=holding.steps,
            size_bytes=holding.size_bytes,
            checkpoint_id=found.manifest.checkpoint_id if found else "",
            manifest_digest=found.manifest_digest if found else "",
            parent=found.manifest.parent.checkpoint_id if found and found.manifest.parent else "",
        )


def _state(decision: Decision) -> State:
    holding = decision.holding
    if holding.kind == "foreign":
        return "foreign"
    if holding.intended:
        return "deleting"
    if holding.kind == "swept":
        return "swept"
    if holding.kind == "unfinished":
        return "unfinished"
    if holding.damage:
        return "damaged"
    if decision.action == "keep":
        return "newest" if decision.why == "newest" else "kept"
    return "due"


def list_run(store: Store, policy: RetentionPolicy) -> dict[str, Any]:
    """Everything below a run's ``checkpoints/``, newest first, with what becomes of it under `policy`.

    Raises:
        StorageUnavailableError: the run could not be looked at.
    """
    run = survey(store)
    return {
        "run": store.uri,
        "live_execution": run.live,
        "resumed_from": run.pin.checkpoint if run.pin else None,
        "checkpoints": [asdict(Listed.of(decision)) for decision in plan(run, policy)],
    }


# -- explain


def explain_run(store: Store, on_corrupt: OnCorrupt) -> dict[str, Any]:
    """What an automatic resume would take now, and why nothing else. The run's settings are not compared.

    Raises:
        StorageUnavailableError: the candidates, or the records of damage, could not even be listed.
    """
    found = explain(store, compatibility=None, on_corrupt=on_corrupt)
    return {
        "run": store.uri,
        "chosen": found.chosen.path if found.chosen else None,
        "failure": str(found.failure) if found.failure else None,
        "candidates": [_candidate(candidate) for candidate in found.candidates],
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    manifest = candidate.manifest
    return {
        "path": candidate.path,
        "verdict": candidate.verdict,
        "why": candidate.explanation,
        "execution": manifest.execution_number if manifest else 0,
        "step": manifest.metadata.completed_training_steps if manifest else None,
        "checkpoint_id": manifest.checkpoint_id if manifest else "",
        "manifest_digest": candidate.manifest_digest,
    }


# -- inspect


def inspect(store: Store, path: str) -> dict[str, Any]:
    """All that is known of the checkpoint at `path` without reading an artifact.

    Raises:
        CheckpointUncommittedError, CheckpointDamagedError, UnknownSchemaError: it has no manifest that can be read.
        StorageUnavailableError: it could not be read.
    """
    found = read_committed(store, path)
    manifest, metadata = found.manifest, found.manifest.metadata
    known = next((holding for holding in survey(store).holdings if holding.path == path), Holding(path, "committed"))
    return {
        "path": path,
        "checkpoint_id": manifest.checkpoint_id,
        "manifest_digest": found.manifest_digest,
        "execution": manifest.execution_number,
        "execution_id": manifest.execution_id,
        "completed_training_steps": metadata.completed_training_steps,
        "completed_optimizer_updates": metadata.completed_optimizer_updates,
        "remaining_completions": metadata.remaining_completions,
        "epoch": metadata.epoch,
        "sampling_owner": metadata.sampling_owner,
        "sampler_state": {"codec": metadata.encoded_state.codec, "size_bytes": len(metadata.encoded_state.data)},
        "repeat_bound_completions": manifest.repeat_bound_completions,
        "horizon_training_steps": manifest.horizon_training_steps,
        "size_bytes": manifest.total_bytes,
        "artifacts": [{"name": name, **asdict(artifact)} for name, artifact in manifest.artifacts.items()],
        "compatibility": dict(manifest.compatibility),
        "application_note": json.loads(manifest.application_note) if manifest.application_note else None,
        "damage": known.damage,
        "deleting": known.intended,
        "foreign": known.why if known.kind == "foreign" else "",
        "lineage": _lineage(store, found),
    }


def _lineage(store: Store, found: Found) -> list[dict[str, Any]]:
    """What it descends from, the nearest first; the last one has no path when it is not in the run any more."""
    by_digest = {other.manifest_digest: other for other in list_checkpoints(store)}
    chain: list[dict[str, Any]] = []
    at: Found | None = found
    while at is not None and at.manifest.parent is not None:
        parent = at.manifest.parent
        at = by_digest.pop(parent.manifest_digest, None)
        execution, step = at.manifest.order if at else (None, None)
        chain.append(
            {
                "checkpoint_id": parent.checkpoint_id,
                "path": at.path if at else None,
                "execution": execution,
                "step": step,
            }
        )
    return chain


# -- verify


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not what was committed, or could not be read."""

    artifact: str
    what: str
    expected: str
    found: str
    readable: bool = True
    """False when it could not be read, so that it may be sound."""


def verifiable(store: Store) -> list[str]:
    """Everything below ``checkpoints/`` that has a manifest, newest first, but for what is being deleted.

    Raises:
        StorageUnavailableError: the run could not be looked at.
    """
    return [
        holding.path
        for holding in survey(store).holdings
        if not holding.intended and (holding.kind == "committed" or _has_manifest(store, holding))
    ]


def _has_manifest(store: Store, holding: Holding) -> bool:
    if holding.kind != "foreign" or store.kind(holding.path) != "directory":
        return False
    return store.kind(f"{holding.path}/{MANIFEST_NAME}") == "file"


def verify(
    store: Store, path: str, *, threads: int | None = None, on_bytes: Callable[[int, int], None] = lambda *_: None
) -> tuple[Problem, ...]:
    """Verify every byte of the checkpoint at `path`; every problem of it, by artifact.

    Args:
        store: the run's.
        path: the checkpoint, relative to the run.
        threads: artifacts read at once; None: three per CPU.
        on_bytes: told, after each artifact, the bytes that are through and those of all; in the calling thread.

    Raises:
        CheckpointUncommittedError: it has no manifest.
    """
    try:
        found = read_committed(store, path)
        artifacts = found.manifest.artifacts
        problems = _unexpected(store, path, artifacts)
    except CheckpointUncommittedError:
        raise
    except CheckpointError as error:
        return (_problem(MANIFEST_NAME, error),)
    checkpoint = store.within(path)

    def check(name: str) -> Problem | None:
        try:
            verify_artifacts(checkpoint, {name: artifacts[name]}, path=path, threads=1)
        except CheckpointError as error:
            return _problem(name, error)
        return None

    through = 0
    ordered = sorted(artifacts, key=lambda name: -artifacts[name].size_bytes)
    with ThreadPoolExecutor(threads or default_threads(), thread_name_prefix="verify") as pool:
        for name, problem in zip(ordered, pool.map(check, ordered), strict=True):
            through += artifacts[name].size_bytes
            on_bytes(through, found.manifest.total_bytes)
            if problem is not None:
                problems.append(problem)
    return tuple(sorted(problems, key=lambda problem: problem.artifact))


def _unexpected(store: Store, path: str, artifacts: Mapping[str, Artifact]) -> list[Problem]:
    known = {parent for name in artifacts for parent in parents_of(name)} | artifacts.keys() | {MANIFEST_NAME}
    extra = [entry for entry in store.scan(path) if entry.name not in known]
    return [Problem(entry.name, "presence", "nothing", f"a {entry.kind}") for entry in extra]


def _problem(artifact: str, error: CheckpointError) -> Problem:
    if isinstance(error, CheckpointDamagedError):
        return Problem(artifact, error.what, error.expected, error.found)
    if isinstance(error, ArtifactMissingError):
        return Problem(artifact, "presence", "a file", "nothing")
    if isinstance(error, UnsafeNameError):
        return Problem(artifact, "content", "safe names", str(error))
    return Problem(artifact, "reading", "its content", str(error), readable=False)
