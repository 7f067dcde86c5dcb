"""The manifest: what a checkpoint is, and the act that commits it.

* A checkpoint exists once its manifest does. The manifest is published last, durably, whole, and is never replaced.
* Equal manifests have equal bytes; the manifest's digest is over those bytes and is the checkpoint's proof of identity.
* Nothing in it is absolute, so a checkpoint may be copied or moved; where it was found is in ``metadata.checkpoint_path`` alone.
* What is published can be loaded: the bytes are read back through the strict reader before they go to the disk.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cosmos_ctrl.checkpoints import artifacts as on_disk
from cosmos_ctrl.checkpoints import digests
from cosmos_ctrl.checkpoints.artifacts import Artifact
from cosmos_ctrl.checkpoints.document import (
    MAX_MANIFEST_BYTES,
    ManifestDocument,
    Parent,
    check_note,
    decode_document,
    encode_document,
    not_a_manifest,
    plain_compatibility,
)
from cosmos_ctrl.checkpoints.durable import storage_errors
from cosmos_ctrl.checkpoints.names import MANIFEST_NAME, check_artifact_names
from cosmos_ctrl.checkpoints.stores.local import LocalStore
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
from cosmos_ctrl.core.state import same_value


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

    def check_compatibility(self, expected: Mapping[str, Any], *, path: str) -> None:
        """Compare with what this run has, by typed value.

        Raises:
            CheckpointIncompatibleError: they differ; it names the keys.
            TypeError: `expected` holds what JSON cannot carry.
        """
        wanted = plain_compatibility(expected)
        keys = tuple(
            sorted(
                key
                for key in wanted.keys() | self.compatibility.keys()
                if key not in wanted
                or key not in self.compatibility
                or not same_value(wanted[key], self.compatibility[key])
            )
        )
        if keys:
            raise CheckpointIncompatibleError(path=path, keys=keys)

    @classmethod
    def publish(
        cls,
        root: Path | str,
        metadata: ControllerResumeMetadata,
        *,
        required_artifacts: Iterable[str],
        compatibility: Mapping[str, Any],
        algorithm: str = digests.DEFAULT_ALGORITHM,
    ) -> CheckpointManifest:
        """Commit the checkpoint in `root`, whose artifacts are written and closed. For scripts: hashes and fsyncs them itself.

        A second publication of the same succeeds; of anything else it is a conflict.

        Args:
            root: the checkpoint's directory, with exactly the required artifacts in it.
            metadata: its ``checkpoint_path`` is not stored.
            required_artifacts: names relative to `root`.
            compatibility: plain JSON values.
            algorithm: of the artifacts' digests.

        Raises:
            CheckpointNotFoundError: there is no such directory.
            UnsafeNameError, ArtifactMissingError, ArtifactUnexpectedError, CheckpointDamagedError: the set is not what was named.
            CheckpointConflictError: another manifest is committed there.
            StorageUnavailableError: something could not be read or made durable. Write a new checkpoint; do not repeat this.
            TypeError, ValueError: metadata or compatibility cannot be published.
        """
        directory = Path(root)
        names = check_artifact_names(required_artifacts, path=str(root))
        wanted = plain_compatibility(compatibility)
        # Before the long part: what cannot be published should not cost hashing first.
        store = _existing(directory)
        on_disk.check_closed_set(store.scan(""), dict.fromkeys(names), path=str(root))
        measured = on_disk.measure_durably(directory, names, algorithm=algorithm, threads=None)
        manifest = cls(metadata=located(metadata, str(root)), artifacts=measured, compatibility=wanted)
        publish_from_receipts(directory, manifest)
        return manifest

    @classmethod
    def load(
        cls, root: Path | str, *, required_artifacts: Iterable[str], compatibility: Mapping[str, Any]
    ) -> CheckpointManifest:
        """Read the manifest in `root` and verify every byte of every artifact, in parallel.

        Args:
            root: the checkpoint's directory.
            required_artifacts: exactly the names that it should have.
            compatibility: exactly the values that it should have.

        Raises:
            CheckpointNotFoundError, CheckpointUncommittedError, UnknownSchemaError: there is nothing (known) to load.
            UnsafeNameError, ArtifactMissingError, ArtifactUnexpectedError, CheckpointDamagedError: it is not what was committed.
            CheckpointIncompatibleError: compatibility differs; it names the keys.
            StorageUnavailableError: it could not be read.
        """
        directory, path = Path(root), str(root)
        names = set(check_artifact_names(required_artifacts, path=path))
        manifest, _ = read_manifest(directory, path)
        manifest.check_compatibility(compatibility, path=path)
        if missing := tuple(sorted(names - manifest.artifacts.keys())):
            raise ArtifactMissingError(path=path, artifacts=missing)
        if unexpected := tuple(sorted(manifest.artifacts.keys() - names)):
            raise ArtifactUnexpectedError(path=path, artifacts=unexpected)
        sizes = {name: artifact.size_bytes for name, artifact in manifest.artifacts.items()}
        on_disk.check_closed_set(LocalStore(directory).scan(""), sizes, path=path)
        on_disk.verify_artifacts(directory, manifest.artifacts, path=path)
        return manifest


def publish_from_receipts(directory: Path, manifest: CheckpointManifest) -> str:
    """Commit a checkpoint whose artifacts are durable already, as their receipts say. Reads no byte of them.

    Looks at names, kinds and sizes, makes the directories durable, and publishes the manifest last. Once this returns, the checkpoint
    survives a power loss; when it raises, nothing may be acknowledged, and only ``VISIBLE_NOT_DURABLE`` may have left a visible manifest.

    Args:
        directory: the checkpoint's.
        manifest: with one artifact per receipt.

    Returns:
        The manifest's digest.

    Raises:
        CheckpointNotFoundError: there is no such directory.
        ArtifactMissingError, ArtifactUnexpectedError, CheckpointDamagedError: what lies there is not what the receipts say.
        CheckpointConflictError: another manifest is committed there.
        StorageUnavailableError: something could not be looked at or made durable. Abandon the save.
        TypeError, ValueError: the manifest cannot be written, or could not be read back.
    """
    path = str(directory)
    data = manifest.to_bytes()
    _require_readable(data, manifest)
    store = _existing(directory)
    sizes = {name: artifact.size_bytes for name, artifact in manifest.artifacts.items()}
    on_disk.check_closed_set(store.scan(""), sizes, path=path)
    on_disk.fsync_directories(directory, manifest.artifacts)
    # The store makes the directory's own name durable, then the manifest, then the manifest's name.
    try:
        store.put_if_absent(MANIFEST_NAME, data)
    except CheckpointConflictError as error:
        raise _conflict(store, path, error) from error
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


def read_manifest(directory: Path, path: str | None = None) -> tuple[CheckpointManifest, str]:
    """Read the manifest in `directory`, without looking at the artifacts.

    Args:
        directory: the checkpoint's.
        path: where it is, for the metadata and the errors; None: `directory`.

    Returns:
        The manifest and the digest of its bytes.

    Raises:
        CheckpointNotFoundError: there is no such directory.
        CheckpointUncommittedError: there is one, without a manifest; CheckpointSweptError, if it was swept.
        UnknownSchemaError, UnsafeNameError, CheckpointDamagedError: there is something else.
        StorageUnavailableError: it could not be read.
    """
    path = str(directory) if path is None else path
    data = LocalStore(directory).read(MANIFEST_NAME, limit=MAX_MANIFEST_BYTES)
    if data is None:
        _existing(directory)
        raise CheckpointUncommittedError(path=path)
    return parse_manifest(data, path=path), digests.digest_bytes(data)


def located(metadata: ControllerResumeMetadata, path: str) -> ControllerResumeMetadata:
    """The same metadata with `path` as its ``checkpoint_path``."""
    return ControllerResumeMetadata(**(metadata.values() | {"checkpoint_path": path}))


def _existing(directory: Path) -> LocalStore:
    with storage_errors(directory, "stat"):
        try:
            mode = directory.stat().st_mode
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(path=str(directory)) from error
    if not stat.S_ISDIR(mode):
        raise CheckpointNotFoundError(path=str(directory))
    return LocalStore(directory, make_root=False)


def _conflict(store: LocalStore, path: str, error: CheckpointConflictError) -> CheckpointConflictError:
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
