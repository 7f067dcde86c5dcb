"""The manifest: what a checkpoint is, and the act that commits it.

* A checkpoint exists once its manifest does. The manifest is published last, durably, whole, and is never replaced.
* Equal manifests have equal bytes; the manifest's digest is over those bytes and is the checkpoint's proof of identity.
* Nothing in it is absolute, so a checkpoint may be copied or moved; where it was found is in ``metadata.checkpoint_path`` alone.
* What is published can be loaded: the bytes are read back through the strict reader before they go to the store.
* Which kind of store it is makes no difference here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cosmos_ctrl.checkpoints import artifacts as stored
from cosmos_ctrl.checkpoints import digests
from cosmos_ctrl.checkpoints.artifacts import Artifact
from cosmos_ctrl.checkpoints.compatibility import TOPOLOGY, Topology, differences, plain_compatibility
from cosmos_ctrl.checkpoints.document import (
    MAX_MANIFEST_BYTES,
    ManifestDocument,
    Parent,
    check_note,
    decode_document,
    encode_document,
    not_a_manifest,
)
from cosmos_ctrl.checkpoints.names import MANIFEST_NAME, check_artifact_names
from cosmos_ctrl.checkpoints.stores import Entry, Store
from cosmos_ctrl.checkpoints.stores.opening import open_store
from cosmos_ctrl.core.errors import (
    ArtifactMissingError,
    ArtifactUnexpectedError,
    CheckpointConflictError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointIncompatibleError,
    CheckpointNotFoundError,
    CheckpointSweptError,
    CheckpointUncommittedError,
)
from cosmos_ctrl.core.resume import ControllerResumeMetadata, require_count


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """A checkpoint's manifest, schema version 1. Checked when it is made; equal if all but the path is equal in its bytes."""

    metadata: ControllerResumeMetadata
    """The resume metadata. Its ``checkpoint_path`` is where the checkpoint was found, and is not part of the manifest."""
    artifacts: Mapping[str, Artifact]
    """Every artifact by its name. Not empty."""
    compatibility: Mapping[str, Any] = field(default_factory=dict)
    """What must be the same to resume from it: plain JSON values."""
    execution_number: int = 0
    """Execution that published it; 0 for a script."""
    execution_id: str = ""
    """ID of that execution; empty for a script."""
    parent: Parent | None = None
    """What it descends from; None when its execution started fresh."""
    repeat_bound_completions: int = 0
    """W: completions issued beyond the safe boundary when the checkpoint was cut."""
    horizon_training_steps: int | None = None
    """Steps that the lineage was planned to take when it began; None: nobody said."""
    application_note: str = ""
    """A JSON object of the application's own, at most 64 KiB; empty if none."""

    def __post_init__(self) -> None:
        """Check and take copies.

        Raises:
            TypeError: a field has another type, or `compatibility` holds what JSON cannot carry; it names the key.
            ValueError: a count, digest, note or ID is out of its range.
            UnsafeNameError: an artifact's name is not safe.
        """
        if not self.artifacts:
            raise ValueError("a checkpoint has at least one artifact")
        names = check_artifact_names(self.artifacts, path=self.metadata.checkpoint_path)
        object.__setattr__(self, "artifacts", {name: self.artifacts[name] for name in names})
        object.__setattr__(self, "compatibility", plain_compatibility(self.compatibility))
        require_count("execution_number", self.execution_number)
        require_count("repeat_bound_completions", self.repeat_bound_completions)
        if self.horizon_training_steps is not None:
            require_count("horizon_training_steps", self.horizon_training_steps)
        if (self.execution_number == 0) != (self.execution_id == ""):
            raise ValueError("execution_number and execution_id are both given, or neither (0 and empty)")
        check_note(self.application_note)

    @property
    def checkpoint_id(self) -> str:
        """The metadata's checkpoint ID."""
        return self.metadata.checkpoint_id

    @property
    def order(self) -> tuple[int, int]:
        """What discovery ranks by: execution number, then completed training steps."""
        return self.execution_number, self.metadata.completed_training_steps

    @property
    def total_bytes(self) -> int:
        """Sum of the artifacts' sizes."""
        return sum(artifact.size_bytes for artifact in self.artifacts.values())

    def to_bytes(self) -> bytes:
        """The manifest's bytes: canonical JSON and a newline. Deterministic.

        Raises:
            TypeError, ValueError: a field cannot be written: a count beyond 64 bits, a lone surrogate, a state that is not its codec's.
        """
        return encode_document(ManifestDocument.of(self))

    def digest(self) -> str:
        """``sha256:hex`` over `to_bytes`."""
        return digests.digest_bytes(self.to_bytes())

    def check_compatibility(
        self, expected: Mapping[str, Any] | None, *, path: str, topology: Topology | None = None
    ) -> None:
        """Compare with what this run has, by typed value.

        Args:
            expected: plain JSON values; None: not compared.
            path: the checkpoint, for the error.
            topology: compared with the record's own part; None: that part is compared as the rest is.

        Raises:
            CheckpointIncompatibleError: they differ; it names the keys and both values.
            TypeError: `expected` holds what JSON cannot carry.
        """
        recorded, found = dict(self.compatibility), {}
        if topology is not None:
            found = topology.refused(recorded)
            recorded.pop(TOPOLOGY, None)
        if expected is not None:
            found |= differences(recorded, plain_compatibility(expected))
        if found:
            told = tuple(f"{key}: {what}" for key, what in sorted(found.items()))
            raise CheckpointIncompatibleError(path=path, keys=tuple(sorted(found)), differences=told)

    @classmethod
    def publish(
        cls,
        root: Store | Path | str,
        metadata: ControllerResumeMetadata,
        *,
        required_artifacts: Iterable[str],
        compatibility: Mapping[str, Any],
        algorithm: str = digests.DEFAULT_ALGORITHM,
    ) -> CheckpointManifest:
        """Commit the checkpoint in `root`, whose artifacts are written and closed. For scripts: hashes and fsyncs them itself.

        What was issued beyond the boundary a script does not say, so W is all that remains.
        A second publication of the same succeeds; of anything else it is a conflict.

        Args:
            root: the checkpoint's directory, URI or store, with exactly the required artifacts in it.
            metadata: its ``checkpoint_path`` is not stored.
            required_artifacts: names relative to `root`.
            compatibility: plain JSON values.
            algorithm: of the artifacts' digests.

        Raises:
            CheckpointNotFoundError: there is nothing.
            UnsafeNameError, ArtifactMissingError, ArtifactUnexpectedError, CheckpointDamagedError: the set is not what was named.
            CheckpointConflictError: another manifest is committed there.
            StorageUnavailableError: something could not be read or made durable. Write a new checkpoint; do not repeat this.
            TypeError, ValueError: metadata or compatibility cannot be published.
        """
        checkpoint, path = _checkpoint_at(root)
        names = check_artifact_names(required_artifacts, path=path)
        wanted = plain_compatibility(compatibility)
        # Before the long part: what cannot be published should not cost hashing first.
        stored.check_closed_set(_entries(checkpoint, path), dict.fromkeys(names), path=path)
        measured = stored.measure_durably(checkpoint, names, algorithm=algorithm, threads=None)
        manifest = cls(
            metadata=located(metadata, path),
            artifacts=measured,
            compatibility=wanted,
            repeat_bound_completions=metadata.remaining_completions,
        )
        publish_from_receipts(checkpoint, manifest)
        return manifest

    @classmethod
    def load(
        cls, root: Store | Path | str, *, required_artifacts: Iterable[str], compatibility: Mapping[str, Any]
    ) -> CheckpointManifest:
        """Read the manifest in `root` and verify every byte of every artifact, in parallel.

        Args:
            root: the checkpoint's directory, URI or store.
            required_artifacts: exactly the names that it should have.
            compatibility: exactly the values that it should have.

        Raises:
            CheckpointNotFoundError, CheckpointUncommittedError, UnknownSchemaError: there is nothing (known) to load.
            UnsafeNameError, ArtifactMissingError, ArtifactUnexpectedError, CheckpointDamagedError: it is not what was committed.
            CheckpointIncompatibleError: compatibility differs; it names the keys and both values.
            StorageUnavailableError: it could not be read.
        """
        checkpoint, path = _checkpoint_at(root)
        names = set(check_artifact_names(required_artifacts, path=path))
        manifest, _ = read_manifest(checkpoint, path)
        manifest.check_compatibility(compatibility, path=path)
        if missing := tuple(sorted(names - manifest.artifacts.keys())):
            raise ArtifactMissingError(path=path, artifacts=missing)
        if unexpected := tuple(sorted(manifest.artifacts.keys() - names)):
            raise ArtifactUnexpectedError(path=path, artifacts=unexpected)
        sizes = {name: artifact.size_bytes for name, artifact in manifest.artifacts.items()}
        stored.check_closed_set(checkpoint.scan(""), sizes, path=path)
        stored.verify_artifacts(checkpoint, manifest.artifacts, path=path)
        return manifest


def publish_from_receipts(checkpoint: Store | Path, manifest: CheckpointManifest) -> str:
    """Commit a checkpoint whose artifacts are durable already, as their receipts say. Reads no byte of them.

    Looks at names, kinds and sizes, makes the names durable, and publishes the manifest last. Once this returns, the checkpoint
    survives a power loss; when it raises, nothing may be acknowledged, and only ``VISIBLE_NOT_DURABLE`` may have left a visible manifest.

    Args:
        checkpoint: its directory, or the store within it.
        manifest: with one artifact per receipt.

    Returns:
        The manifest's digest.

    Raises:
        CheckpointNotFoundError: there is nothing.
        ArtifactMissingError, ArtifactUnexpectedError, CheckpointDamagedError: what lies there is not what the receipts say.
        CheckpointConflictError: another manifest is committed there.
        StorageUnavailableError: something could not be looked at or made durable. Abandon the save.
        TypeError, ValueError: the manifest cannot be written, or could not be read back.
    """
    data = manifest.to_bytes()
    _require_readable(data, manifest)
    checkpoint, path = _checkpoint_at(checkpoint)
    sizes = {name: artifact.size_bytes for name, artifact in manifest.artifacts.items()}
    stored.check_closed_set(_entries(checkpoint, path), sizes, path=path)
    checkpoint.sync_names(manifest.artifacts)
    # The store makes the checkpoint's own name durable, then the manifest, then the manifest's name.
    try:
        checkpoint.put_if_absent(MANIFEST_NAME, data)
    except CheckpointConflictError as error:
        raise _conflict(checkpoint, path, error) from error
    return digests.digest_bytes(data)


def parse_manifest(data: bytes, *, path: str) -> CheckpointManifest:
    """The manifest that `data` is, of the checkpoint found at `path`.

    Raises:
        CheckpointSweptError: it is a tombstone.
        UnknownSchemaError: it is of a schema version that is not known here.
        UnsafeNameError: it names an artifact that is no safe name.
        CheckpointDamagedError: it is no manifest.
    """
    document = decode_document(data, path=path)
    try:
        return CheckpointManifest(**document.fields(path))
    except (TypeError, ValueError) as error:
        raise not_a_manifest(path, str(error)) from error


def read_manifest(checkpoint: Store | Path, path: str | None = None) -> tuple[CheckpointManifest, str]:
    """Read a checkpoint's manifest, without looking at the artifacts.

    Args:
        checkpoint: its directory, or the store within it.
        path: where it is, for the metadata and the errors; None: as `checkpoint` says.

    Returns:
        The manifest and the digest of its bytes.

    Raises:
        CheckpointNotFoundError: there is nothing.
        CheckpointUncommittedError: there is something, without a manifest; CheckpointSweptError, if it was swept.
        UnknownSchemaError, UnsafeNameError, CheckpointDamagedError: there is something else.
        StorageUnavailableError: it could not be read.
    """
    checkpoint, where = _checkpoint_at(checkpoint)
    path = where if path is None else path
    data = checkpoint.read(MANIFEST_NAME, limit=MAX_MANIFEST_BYTES)
    if data is None:
        _entries(checkpoint, path)
        raise CheckpointUncommittedError(path=path)
    return parse_manifest(data, path=path), digests.digest_bytes(data)


def located(metadata: ControllerResumeMetadata, path: str) -> ControllerResumeMetadata:
    """The same metadata with `path` as its ``checkpoint_path``."""
    return ControllerResumeMetadata(**(metadata.values() | {"checkpoint_path": path}))


def _checkpoint_at(root: Store | Path | str) -> tuple[Store, str]:
    # Within: what somebody removed must not come back with nothing but a manifest in it.
    return (open_store(root).within(""), str(root)) if isinstance(root, (str, Path)) else (root, root.uri)


def _entries(checkpoint: Store, path: str) -> tuple[Entry, ...]:
    if not (entries := checkpoint.scan("")):
        raise CheckpointNotFoundError(path=path)
    return entries


def _conflict(store: Store, path: str, error: CheckpointConflictError) -> CheckpointConflictError:
    """The conflict, said in words where what has the name is a tombstone."""
    try:
        parse_manifest(store.read(MANIFEST_NAME, limit=MAX_MANIFEST_BYTES) or b"", path=path)
    except CheckpointSweptError as swept:
        return CheckpointConflictError(path=error.path, what=str(swept))
    except CheckpointError:
        pass
    return error


def _require_readable(data: bytes, manifest: CheckpointManifest) -> None:
    try:
        again = parse_manifest(data, path=manifest.metadata.checkpoint_path)
    except CheckpointDamagedError as error:
        raise ValueError(f"the manifest could not be read back: {error.found}") from error
    if again != manifest:
        raise ValueError("the manifest would be read back as another one")
