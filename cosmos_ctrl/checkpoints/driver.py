"""An execution of a driver that is its own controller: the durable steps of a run, in their order, with no server.

* Beginning claims the next execution number, chooses a checkpoint, verifies every byte of it, and pins it: before anything is loaded.
* What cannot be resumed from is an error, or passed over where the operator chose so; only "there is nothing" is a fresh start.
* Every save has a directory of its own, and is committed by its manifest, last. A superseded execution acknowledges and deletes nothing.
* One process of the application does all this; the others need the number and the ID, from which `place_of` gives all the same places.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cosmos_ctrl.checkpoints import artifacts, digests
from cosmos_ctrl.checkpoints.claims import claim_execution, is_superseded, pin_resume
from cosmos_ctrl.checkpoints.damage import record_damage
from cosmos_ctrl.checkpoints.discovery import Found, OnCorrupt, discover, list_checkpoints, open_checkpoint
from cosmos_ctrl.checkpoints.document import Parent
from cosmos_ctrl.checkpoints.manifest import CheckpointManifest, publish_from_receipts
from cosmos_ctrl.checkpoints.names import SaveName
from cosmos_ctrl.checkpoints.retention import KEEP_ALL, RetentionPolicy, retain
from cosmos_ctrl.checkpoints.stores import Store
from cosmos_ctrl.checkpoints.stores.opening import probe_conditional_puts
from cosmos_ctrl.core.errors import (
    ArtifactForeignError,
    ArtifactMissingError,
    CheckpointDamagedError,
    ControlError,
    SupersededError,
)
from cosmos_ctrl.core.resume import ControllerResumeMetadata

_log = logging.getLogger(__name__)

#: What is found in a checkpoint's bytes, and discovery, which reads none, cannot find by itself.
_DAMAGE = (CheckpointDamagedError, ArtifactMissingError, ArtifactForeignError)


@dataclass(frozen=True, slots=True)
class Place:
    """Where one save goes, and under which identity."""

    path: str
    """Directory, relative to the run; fresh."""
    checkpoint_id: str


@dataclass(slots=True)
class DriverExecution:
    """One start of a driver over a run. `begin` makes it."""

    store: Store
    """The run's."""
    number: int
    """Execution number."""
    execution_id: str
    resumed: Found | None
    """What it starts from, every byte verified; None: it is fresh."""
    compatibility: Mapping[str, Any] = field(default_factory=dict)
    retention: RetentionPolicy = KEEP_ALL
    _parent: Parent | None = None
    _all_swept: bool = False
    """With everything kept, what dead executions left is looked for once."""

    def __post_init__(self) -> None:
        if self.resumed is not None:
            self._parent = Parent(self.resumed.manifest.checkpoint_id, self.resumed.manifest_digest)

    def commit(self, place: Place, metadata: ControllerResumeMetadata) -> Found:
        """Make all files in the directory of a save durable, hash them, and publish the manifest; then retention has its turn.

        Args:
            place: of `place_of`, with files that are written and closed, and no longer change.
            metadata: with the ID of `place`.

        Raises:
            SupersededError: a newer execution has claimed the run; end this process.
            CheckpointDamagedError: something in it is empty, no regular file, or still changes.
            StorageUnavailableError: something could not be made durable; nothing was acknowledged.
            TypeError, ValueError: the metadata or the compatibility cannot be published.
        """
        self._require_live()
        checkpoint = self.store.within(place.path)
        names = [entry.name for entry in checkpoint.scan("") if entry.kind != "directory"]
        measured = artifacts.measure_durably(checkpoint, names, algorithm=digests.DEFAULT_ALGORITHM, threads=None)
        manifest = CheckpointManifest(
            metadata=metadata,
            artifacts=measured,
            compatibility=self.compatibility,
            execution_number=self.number,
            execution_id=self.execution_id,
            parent=self._parent,
        )
        digest = publish_from_receipts(checkpoint, manifest)
        self._require_live()
        self._parent = Parent(manifest.checkpoint_id, digest)
        self._retain()
        return Found(place.path, manifest, digest)

    def _require_live(self) -> None:
        if is_superseded(self.store, self.number):
            raise SupersededError(place=f"execution {self.number} of {self.store.uri}", incarnation=self.execution_id)

    def _retain(self) -> None:
        if self._all_swept:
            return
        try:
            done = retain(self.store, self.retention, number=self.number)
        except ControlError as error:
            _log.warning("retention could not look at the run: %s", error)
            return
        for failure in done.failures:
            _log.warning("%s is not deleted, and tried again after the next save: %s", failure.path, failure.why)
        self._all_swept = self.retention == KEEP_ALL and not done.failures


def place_of(number: int, execution_id: str, *, steps: int, save: int) -> Place:
    """Where an execution's `save`-th save goes: the same in every process that asks, and another for each save.

    Args:
        number: the execution's.
        execution_id: the execution's.
        steps: completed training steps.
        save: counts the saves of this execution, so that a step which is saved twice gets two directories.
    """
    checkpoint_id = hashlib.sha256(f"{execution_id}/{steps}/{save}".encode()).hexdigest()[:32]
    return Place(SaveName(number, steps, checkpoint_id[:8]).path, checkpoint_id)


def begin(
    store: Store,
    *,
    resume: bool | str = True,
    compatibility: Mapping[str, Any],
    on_corrupt: OnCorrupt = "error",
    retention: RetentionPolicy = KEEP_ALL,
    check: Callable[[Found], None] = lambda _: None,
) -> DriverExecution:
    """Claim the run, choose what to resume from, verify it, pin it.

    Args:
        store: the run's.
        resume: True: the newest committed checkpoint; a path, relative to the run or absolute inside it: that one and no other; False:
            start fresh, whatever is there.
        compatibility: what this run has; plain JSON values.
        on_corrupt: "previous" passes over damage at the newest end, also such as is found now.
        retention: which checkpoints are kept.
        check: looks into what was chosen, after its bytes were verified; raises ArtifactForeignError for content that is another's.

    Raises:
        CheckpointError: by case; see `discover` and `open_checkpoint`. Damage is recorded in the run, for the next execution.
        StorageUnavailableError: something could not be read or made durable, or the store replaces what it should not.
        TypeError: `resume` is neither a bool nor a str.
        ValueError: `resume` is empty.
    """
    if not isinstance(resume, bool | str):
        raise TypeError(f"resume is {resume!r}, expected True, False or a checkpoint's path as a str")
    if not resume and resume is not False:
        raise ValueError("resume is empty, expected True, False or a checkpoint's path")
    probe_conditional_puts(store)
    execution_id = secrets.token_hex(16)
    note = {"host": socket.gethostname(), "pid": os.getpid(), "started_at": round(time.time(), 3)}
    number = claim_execution(store, execution_id=execution_id, note=note)
    found = _choose(store, resume, compatibility, on_corrupt, check)
    pin_resume(store, number, execution_id=execution_id, checkpoint=found.path if found else None)
    _say_what_is_resumed(store, number, resume, found)
    return DriverExecution(store, number, execution_id, found, compatibility, retention)


def _choose(
    store: Store,
    resume: bool | str,
    compatibility: Mapping[str, Any],
    on_corrupt: OnCorrupt,
    check: Callable[[Found], None],
) -> Found | None:
    while resume is not False:
        if isinstance(resume, str):
            found = open_checkpoint(store, resume, compatibility=compatibility)
        elif (chosen := discover(store, compatibility=compatibility, on_corrupt=on_corrupt).chosen) is not None:
            found = chosen
        else:
            return None
        try:
            artifacts.verify_artifacts(store.within(found.path), found.manifest.artifacts, path=found.path)
            check(found)
        except _DAMAGE as error:
            record_damage(store, found.path, _artifact_of(error), str(error))
            if isinstance(resume, str) or on_corrupt == "error":
                raise
            _log.warning("%s is passed over: %s", found.path, error)
        else:
            return found
    return None


def _artifact_of(error: CheckpointDamagedError | ArtifactMissingError | ArtifactForeignError) -> str:
    return ", ".join(error.artifacts) if isinstance(error, ArtifactMissingError) else error.artifact


def _say_what_is_resumed(store: Store, number: int, resume: bool | str, found: Found | None) -> None:
    if found is not None:
        steps = found.manifest.metadata.completed_training_steps
        _log.info("execution %d resumes from %s, step %d", number, found.path, steps)
    elif resume is False and (left := list_checkpoints(store)):
        _log.warning(
            "execution %d starts fresh because resume is off; the run holds %d checkpoints, the newest %s. Nothing of them is overwritten",
            *(number, len(left), left[0].path),
        )
    else:
        _log.info("execution %d starts fresh: the run holds no checkpoint", number)
