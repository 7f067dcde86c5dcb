"""Checkpoints that cosmos-rl's own manifest helper committed, read and published anew as this package's.

* Its manifest is also called ``manifest.json`` and also has ``schema_version`` 1, with other fields: metadata with a path and a plain
  sampler state, compatibility, and bare SHA-256 digests of flat files. It is told by those fields.
* The original is only read. Its files are copied into a fresh directory of the run, the copies hashed as they lie on disk and compared
  with the original's digests, and the manifest published last: an import that dies on the way commits nothing.
* What is published is of execution 0: every checkpoint of an execution is newer.
"""

from __future__ import annotations

import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cosmos_ctrl.checkpoints import canonical
from cosmos_ctrl.checkpoints.artifacts import check_closed_set, damaged, measure_durably
from cosmos_ctrl.checkpoints.document import MAX_MANIFEST_BYTES, Count, Positive
from cosmos_ctrl.checkpoints.durable import storage_errors
from cosmos_ctrl.checkpoints.manifest import CheckpointManifest, publish_from_receipts
from cosmos_ctrl.checkpoints.names import CHECKPOINTS, MANIFEST_NAME, check_artifact_names
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.core.errors import (
    ArtifactMissingError,
    CheckpointDamagedError,
    CheckpointNotFoundError,
    CheckpointUncommittedError,
    UnknownSchemaError,
)
from cosmos_ctrl.core.resume import ControllerResumeMetadata

_DIGEST = r"^[0-9a-f]{64}$"
_Text = Annotated[str, Field(min_length=1)]


class _Foreign(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _Metadata(_Foreign):
    schema_version: Literal[1]
    checkpoint_path: _Text
    checkpoint_id: _Text
    completed_training_steps: Count
    completed_optimizer_updates: Count
    remaining_completions: Count
    epoch: Positive
    sampling_owner: Literal["sampler", "batch_sampler"]
    sampler_state: dict[str, Any]


class _Manifest(_Foreign):
    schema_version: Literal[1]
    metadata: _Metadata
    compatibility: dict[str, Any]
    artifacts: Annotated[dict[str, Annotated[str, Field(pattern=_DIGEST)]], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class CosmosManifest:
    """What such a manifest says."""

    metadata: ControllerResumeMetadata
    """Its ``checkpoint_path`` is where the helper wrote it, which may be elsewhere by now."""
    compatibility: dict[str, Any]
    artifacts: dict[str, str]
    """``sha256:hex`` by name."""


def read_cosmos_manifest(directory: Path) -> CosmosManifest:
    """Read the manifest that cosmos-rl's helper wrote in `directory`; its artifacts are not looked at.

    Raises:
        CheckpointNotFoundError, CheckpointUncommittedError: there is nothing to read.
        UnknownSchemaError: it is of another version, or this package's own.
        CheckpointDamagedError: it is no such manifest; the first flaw is named.
        UnsafeNameError: an artifact's name is not safe.
        StorageUnavailableError: it could not be read.
    """
    path = str(directory)
    if not directory.is_dir():
        raise CheckpointNotFoundError(path=path)
    data = LocalStore(directory).read(MANIFEST_NAME, limit=MAX_MANIFEST_BYTES)
    if data is None:
        raise CheckpointUncommittedError(path=path)
    try:
        value = canonical.strict_loads(data)
    except ValueError as error:
        raise _no_manifest(path, str(error)) from error
    version = value.get("schema_version") if isinstance(value, dict) else None
    if type(version) is int and version != 1:
        raise UnknownSchemaError(path=path, found=str(version))
    if isinstance(value, dict) and "execution_number" in value:
        raise UnknownSchemaError(path=path, found="1 of cosmos-ctrl itself (nothing is to be imported)")
    try:
        document = _Manifest.model_validate(value)
    except ValidationError as error:
        flaw = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _no_manifest(path, f"{'.'.join(map(str, flaw['loc']))}: {flaw['msg']}") from error
    check_artifact_names(document.artifacts, path=path)
    metadata = ControllerResumeMetadata(**dict(document.metadata))
    artifacts = {name: f"sha256:{digits}" for name, digits in document.artifacts.items()}
    return CosmosManifest(metadata, document.compatibility, artifacts)


def import_checkpoint(store: LocalStore, source: Path) -> tuple[str, CheckpointManifest]:
    """Copy the checkpoint in `source` into the run and commit it there; `source` is not changed.

    Args:
        store: the run's.
        source: a directory with a manifest of cosmos-rl's helper, wherever it lies now.

    Returns:
        The new checkpoint's path within the run, and its manifest.

    Raises:
        CheckpointError: by case; see `read_cosmos_manifest`. Also ArtifactMissingError and CheckpointDamagedError for an artifact that is not
            what the manifest says, and StorageUnavailableError. Nothing is committed then; a directory may be left.
        TypeError, ValueError: metadata or compatibility is nothing that a manifest can carry.
    """
    original = read_cosmos_manifest(source)
    kinds = {entry.name: entry for entry in LocalStore(source).scan("") if "/" not in entry.name}
    if missing := tuple(sorted(original.artifacts.keys() - kinds.keys())):
        raise ArtifactMissingError(path=str(source), artifacts=missing)
    # Extra files beside the artifacts are the helper's to allow: only what it names is copied.
    named = [kinds[name] for name in original.artifacts]
    check_closed_set(named, dict.fromkeys(original.artifacts), path=str(source))
    label = re.sub(r"[^0-9A-Za-z._-]+", "-", original.metadata.checkpoint_id)[:80].strip(".-") or "checkpoint"
    path = f"{CHECKPOINTS}/imported-{label}-{secrets.token_hex(4)}"
    directory, checkpoint = store.path_of(path), store.within(path)
    with storage_errors(directory, "mkdir"):
        directory.mkdir(parents=True)
    for name in original.artifacts:
        with storage_errors(source / name, "copy"):
            shutil.copyfile(source / name, directory / name, follow_symlinks=False)
    measured = measure_durably(checkpoint, original.artifacts, algorithm="sha256", threads=None)
    for name, digest in original.artifacts.items():
        if measured[name].digest != digest:
            raise damaged(str(source), name, "digest", digest, measured[name].digest)
    metadata = ControllerResumeMetadata(**(original.metadata.values() | {"checkpoint_path": path}))
    manifest = CheckpointManifest(
        metadata=metadata,
        artifacts=measured,
        compatibility=original.compatibility,
        # The original does not say what was issued beyond its boundary.
        repeat_bound_completions=metadata.remaining_completions,
    )
    publish_from_receipts(checkpoint, manifest)
    return path, manifest


def _no_manifest(path: str, found: str) -> CheckpointDamagedError:
    expected = "a manifest of cosmos-rl's helper, schema version 1"
    return damaged(path, MANIFEST_NAME, "content", expected, found)
