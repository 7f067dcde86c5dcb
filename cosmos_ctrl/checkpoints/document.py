"""The manifest as a JSON document, schema version 1: which fields there are, and of which types.

* It ends with the digest of all that stands before it: a flipped bit in a count is *damage*, not another place to resume from.
* Every field is required, none is unknown, none is coerced: ``true`` is not a count, ``1.0`` is not ``1``.
* The version is read before anything else, so a later schema is *unknown*, not *damaged*.
* A *tombstone* holds the manifest's name where a save was swept: it is told apart before anything else, and never is a manifest.
* The sampler state is text where its codec is ``json`` and base64 otherwise, so a person can read what can be read.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cosmos_ctrl.checkpoints import canonical, digests
from cosmos_ctrl.checkpoints.artifacts import Artifact
from cosmos_ctrl.checkpoints.names import MANIFEST_NAME
from cosmos_ctrl.core.errors import CheckpointDamagedError, CheckpointSweptError, UnknownSchemaError
from cosmos_ctrl.core.resume import ControllerResumeMetadata
from cosmos_ctrl.core.state import EncodedState

if TYPE_CHECKING:
    from cosmos_ctrl.checkpoints.manifest import CheckpointManifest

SCHEMA_VERSION: Literal[1] = 1

#: Largest manifest, in bytes. A sampler state of some MiB and 100,000 artifacts fit.
MAX_MANIFEST_BYTES = 64 << 20

#: Largest application note, in bytes of UTF-8.
MAX_NOTE_BYTES = 64 << 10

_TOMBSTONE = re.compile(rb'\{"swept_by_execution":([0-9]{1,20})\}\n')

#: What the wire carries.
Count = Annotated[int, Field(ge=0, lt=1 << 64)]
Positive = Annotated[int, Field(ge=1, lt=1 << 64)]


@dataclass(frozen=True, slots=True)
class Parent:
    """The checkpoint that a checkpoint descends from: the one before in its execution, or what that resumed from."""

    checkpoint_id: str
    manifest_digest: str
    """``sha256:hex`` of its manifest."""

    def __post_init__(self) -> None:
        digests.parse_digest(self.manifest_digest)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class SamplerStateDocument(_Strict):
    """An `EncodedState`."""

    codec: Annotated[str, Field(min_length=1)]
    data: str

    @classmethod
    def of(cls, state: EncodedState) -> SamplerStateDocument:
        """The document of a state.

        Raises:
            ValueError: its codec is json, and its data is not UTF-8.
        """
        data = state.data.decode() if state.codec == "json" else base64.b64encode(state.data).decode()
        return cls(codec=state.codec, data=data)

    def decode(self) -> EncodedState:
        """The state.

        Raises:
            ValueError: the data is neither what the codec says nor base64.
        """
        if self.codec == "json":
            canonical.strict_loads(self.data)
            return EncodedState(self.data.encode(), self.codec)
        try:
            return EncodedState(base64.b64decode(self.data, validate=True), self.codec)
        except binascii.Error as error:
            raise ValueError("metadata.sampler_state.data is not base64") from error


class MetadataDocument(_Strict):
    """Metadata v1 without ``checkpoint_path``: a checkpoint is where it is found, so it can be copied and moved."""

    schema_version: Literal[1]
    checkpoint_id: str
    completed_training_steps: Count
    completed_optimizer_updates: Count
    remaining_completions: Count
    epoch: Positive
    sampling_owner: Literal["sampler", "batch_sampler"]
    sampler_state: SamplerStateDocument

    @classmethod
    def of(cls, metadata: ControllerResumeMetadata) -> MetadataDocument:
        """The document of metadata.

        Raises:
            ValueError: a count does not fit in 64 bits, or the sampler state is not what its codec says.
        """
        state = SamplerStateDocument.of(metadata.encoded_state)
        named = {name: getattr(metadata, name) for name in cls.model_fields if name != "sampler_state"}
        return cls(**named, sampler_state=state)

    def decode(self, path: str) -> ControllerResumeMetadata:
        """The metadata of a checkpoint that was found at `path`.

        Raises:
            ValueError: the sampler state is not what its codec says.
        """
        named = {name: getattr(self, name) for name in type(self).model_fields if name != "sampler_state"}
        return ControllerResumeMetadata(**named, sampler_state=self.sampler_state.decode(), checkpoint_path=path)


class ArtifactDocument(_Strict):
    """One artifact."""

    size_bytes: Positive
    digest: str
    rank: Count | None
    group: str


class ParentDocument(_Strict):
    """A `Parent`."""

    checkpoint_id: str
    manifest_digest: str


class ManifestDocument(_Strict):
    """The whole manifest."""

    schema_version: Literal[1]
    metadata: MetadataDocument
    compatibility: dict[str, Any]
    artifacts: dict[str, ArtifactDocument]
    execution_number: Count
    execution_id: str
    parent: ParentDocument | None
    repeat_bound_completions: Count
    horizon_training_steps: Count | None
    application_note: str

    @classmethod
    def of(cls, manifest: CheckpointManifest) -> ManifestDocument:
        """The document of a manifest.

        Raises:
            ValueError: a count does not fit in 64 bits, or the sampler state is not what its codec says.
        """
        parent = manifest.parent
        return cls(
            schema_version=SCHEMA_VERSION,
            metadata=MetadataDocument.of(manifest.metadata),
            compatibility=dict(manifest.compatibility),
            artifacts={name: ArtifactDocument(**asdict(artifact)) for name, artifact in manifest.artifacts.items()},
            execution_number=manifest.execution_number,
            execution_id=manifest.execution_id,
            parent=ParentDocument(**asdict(parent)) if parent else None,
            repeat_bound_completions=manifest.repeat_bound_completions,
            horizon_training_steps=manifest.horizon_training_steps,
            application_note=manifest.application_note,
        )

    def fields(self, path: str) -> dict[str, Any]:
        """The fields of the `CheckpointManifest` that was found at `path`.

        Raises:
            TypeError, ValueError: a digest or the sampler state is not what it should be.
        """
        named = {name: getattr(self, name) for name in type(self).model_fields if name != "schema_version"}
        return named | {
            "metadata": self.metadata.decode(path),
            "artifacts": {name: Artifact(**document.model_dump()) for name, document in self.artifacts.items()},
            "parent": Parent(**self.parent.model_dump()) if self.parent else None,
        }


def encode_document(document: ManifestDocument) -> bytes:
    """The manifest's bytes: canonical JSON, sealed, and a newline.

    Raises:
        TypeError: a text has a lone surrogate.
    """
    return sealed(canonical.canonical_text(document.model_dump(), "manifest").encode() + b"\n")


def sealed(body: bytes) -> bytes:
    """A JSON object and a newline, with the digest of just that as its last field, ``self_digest``."""
    return body.removesuffix(b"}\n") + _seal(digests.digest_bytes(body))


def _seal(digest: str) -> bytes:
    return b',"self_digest":"%b"}\n' % digest.encode()


def _check_seal(data: bytes, stated: Any, path: str) -> None:
    seal = _seal(str(stated))
    if not data.endswith(seal):
        raise not_a_manifest(path, "no self_digest at its end")
    found = digests.digest_bytes(data.removesuffix(seal) + b"}\n")
    if found != stated:
        raise CheckpointDamagedError(path=path, artifact=MANIFEST_NAME, what="digest", expected=stated, found=found)


def tombstone(execution_number: int) -> bytes:
    """What takes a manifest's name for good when that execution sweeps a save that was never committed."""
    return b'{"swept_by_execution":%d}\n' % execution_number


def decode_document(data: bytes, *, path: str) -> ManifestDocument:
    """Read a manifest's bytes; `path` is its checkpoint, for the errors.

    Raises:
        CheckpointSweptError: it is a tombstone.
        UnknownSchemaError: it is of a schema version that is not known here.
        CheckpointDamagedError: it is no manifest.
    """
    if swept := _TOMBSTONE.fullmatch(data):
        raise CheckpointSweptError(path=path, execution=int(swept[1]))
    if len(data) > MAX_MANIFEST_BYTES:
        raise not_a_manifest(path, f"more than {MAX_MANIFEST_BYTES} bytes")
    try:
        value = canonical.strict_loads(data)
    except ValueError as error:
        raise not_a_manifest(path, str(error)) from error
    version = value.get("schema_version") if isinstance(value, dict) else None
    if type(version) is not int:
        raise not_a_manifest(path, "no schema_version")
    if version != SCHEMA_VERSION:
        raise UnknownSchemaError(path=path, found=str(version))
    _check_seal(data, value.pop("self_digest", None), path)
    try:
        return ManifestDocument.model_validate(value)
    except ValidationError as error:
        # The first flaw, by its place; never the value, which may be large or private.
        flaw = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, flaw["loc"]))
        raise not_a_manifest(path, f"{place}: {flaw['msg']}") from error


def check_note(note: str) -> None:
    """Check an application note: empty, or a JSON object of at most ``MAX_NOTE_BYTES``.

    Raises:
        TypeError: it is not a str.
        ValueError: it is too long, or no JSON object.
    """
    if type(note) is not str:
        raise TypeError(f"application_note must be a str, not {type(note).__name__}")
    if not note:
        return
    size = len(note.encode(errors="surrogatepass"))
    if size > MAX_NOTE_BYTES:
        raise ValueError(f"application_note has {size} bytes, at most {MAX_NOTE_BYTES} are kept")
    try:
        value = canonical.strict_loads(note)
    except ValueError as error:
        raise ValueError(f"application_note is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("application_note must be a JSON object")


def not_a_manifest(path: str, found: str) -> CheckpointDamagedError:
    """The error for a manifest that cannot be one."""
    return CheckpointDamagedError(
        path=path, artifact=MANIFEST_NAME, what="content", expected="a manifest of schema version 1", found=found
    )
