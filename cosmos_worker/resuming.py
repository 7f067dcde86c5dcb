"""What a trainer resumes from, as values; and the metadata as it travels."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cosmos_ctrl.checkpoints.stores import Store
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.checkpoints.stores.opening import open_store
from cosmos_ctrl.core.errors import MalformedError
from cosmos_ctrl.core.resume import ControllerResumeMetadata
from cosmos_ctrl.service.metadata import metadata_from_message
from cosmos_ctrl.v1 import checkpoint_pb2
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_worker.errors import ProtocolError
from cosmos_worker.settings import RUN_DIRECTORY


@dataclass(frozen=True, slots=True)
class ResumedCheckpoint:
    """The checkpoint that this execution resumes from."""

    path: Path | None
    """Its directory, on this machine; None in an object store."""
    metadata: ControllerResumeMetadata
    manifest_digest: str
    """``algorithm:hex``; empty when the application owns its checkpoints."""
    application_note: Any
    """The application's own JSON, decoded, as saved with the checkpoint; None if none."""
    resharded: bool = False
    """Whether this rank's group was of another world size, mesh or sharding when it was saved; then its random states are none of this
    rank's."""


@dataclass(frozen=True, slots=True)
class Resume:
    """What this execution starts from. The same on every rank of a trainer group."""

    checkpoint: ResumedCheckpoint | None
    """None: the run is fresh."""
    run: str
    """Name of the run."""
    store: Store = field(compare=False, repr=False)
    """Where the run lies."""
    run_directory: Path | None
    """The run's directory, on this machine; None in an object store."""
    execution_number: int
    """From 1; 0 with a legacy controller."""
    execution_id: str
    """Empty with a legacy controller."""
    max_training_steps: int | None
    """Hard limit, replayed steps included; None: no limit."""
    repeat_bound_completions: int
    """At most so many completions are trained that the restored model has been trained on before."""
    horizon_training_steps: int
    """Training steps that the run was planned to take when it began: what a schedule is made for. The same after every restart, though
    repeats may take a few steps more, and discards fewer."""


def resume_from(response: pb.GetResumeStateResponse, run_directory: str, group: str) -> Resume:
    """The controller's answer as a value.

    Args:
        response: from GetResumeState.
        run_directory: where this machine has the run, a path or URI; empty: where the controller has it.
        group: the rank's trainer group.

    Raises:
        ProtocolError: the answer cannot mean anything, or the run cannot be opened here.
        ModuleNotFoundError: the run is in an object store, and the extra that speaks to those is not installed.
    """
    store = _store_at(run_directory or response.run_uri)
    directory = store.root if isinstance(store, LocalStore) else None
    checkpoint = None
    if response.HasField("metadata"):
        metadata = metadata_of(response.metadata)
        checkpoint = ResumedCheckpoint(
            path=directory / metadata.checkpoint_path if directory else None,
            metadata=metadata,
            manifest_digest=response.manifest_digest,
            application_note=json.loads(response.application_note) if response.application_note else None,
            resharded=group in response.resharded_groups,
        )
    limits = response.limits
    return Resume(
        checkpoint=checkpoint,
        run=response.run,
        store=store,
        run_directory=directory,
        execution_number=response.execution_number,
        execution_id=response.header.execution_id,
        max_training_steps=limits.max_training_steps if limits.HasField("max_training_steps") else None,
        repeat_bound_completions=response.repeat_bound_completions,
        horizon_training_steps=response.horizon_training_steps,
    )


def _store_at(location: str) -> Store:
    try:
        return open_store(location)
    except ValueError as error:
        raise ProtocolError(f"the run cannot be opened here: {error}; {RUN_DIRECTORY} says where it is") from error


def metadata_of(message: checkpoint_pb2.ResumeMetadata) -> ControllerResumeMetadata:
    """The message as a checked value.

    Raises:
        ProtocolError: a field cannot be.
    """
    try:
        return metadata_from_message(message)
    except MalformedError as error:
        raise ProtocolError(f"the controller's resume metadata is not valid: {error.what}") from error
