"""The record of a checkpoint's window as an artifact: compressed JSON that the controller writes beside the ranks' shards.

* It is part of the closed set and has its digest in the manifest, like every artifact; no rank loads it.
* Reading it never fails a resume: what is damaged, unknown or too large is a doubt, and the resume repeats more.
* Both sizes are limited, the compressed one and the one it grows to.
"""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cosmos_ctrl.checkpoints import canonical
from cosmos_ctrl.checkpoints.artifacts import Artifact
from cosmos_ctrl.checkpoints.digests import digest_bytes, parse_digest
from cosmos_ctrl.checkpoints.discovery import Found
from cosmos_ctrl.checkpoints.document import Count, Positive, SamplerStateDocument
from cosmos_ctrl.checkpoints.stores import Store
from cosmos_ctrl.core.errors import CheckpointError
from cosmos_ctrl.core.ledger import LedgerWindow, SamplingBoundary
from cosmos_ctrl.core.replay import Doubt, RecordedDraw, ReplayRecord, record_of

#: Its name in every checkpoint that has one; no rank may write an artifact of that name.
RECORD_NAME = "window.json.z"

_GROWTH = 64
"""Most times that a record may grow by being read; draws of equal size shrink the most, to a seventh."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _CursorDocument(_Strict):
    epoch: Positive
    remaining_completions: Count
    sampler_state: SamplerStateDocument

    @classmethod
    def of(cls, cursor: SamplingBoundary) -> _CursorDocument:
        return cls(
            epoch=cursor.epoch,
            remaining_completions=cursor.remaining_completions,
            sampler_state=SamplerStateDocument.of(cursor.encoded_state),
        )

    def decode(self) -> SamplingBoundary:
        return SamplingBoundary(
            epoch=self.epoch,
            sampler_state=self.sampler_state.decode(),
            remaining_completions=self.remaining_completions,
        )


class _RecordDocument(_Strict):
    """Draws in order; groups in the order of their draws; bits in the order of the groups' completions, low first."""

    schema_version: Annotated[int, Field(ge=1, le=1)]
    base: str
    identities: str
    """Base64 of 8 bytes a draw, big-endian."""
    sizes: list[list[Annotated[int, Field(ge=1, lt=1 << 32)]]]
    """Completions of each draw's groups."""
    settled: str
    """Base64 of a bitmap over all completions."""
    keys: list[list[str]] | None
    epochs: list[list[Positive]] | None
    """Epoch that each group was first drawn in, where there are keys."""
    cursor: _CursorDocument | None


def write_record(checkpoint: Store, window: LedgerWindow, *, most_bytes: int) -> dict[str, Artifact] | Doubt:
    """Write the record of a window durably into a checkpoint that is not committed yet.

    Args:
        checkpoint: the store within it.
        window: as it was when the checkpoint was cut.
        most_bytes: largest record.

    Returns:
        The artifact by its name; nothing when there is nothing to record; a doubt when the record would be too large.

    Raises:
        CheckpointConflictError: something else has its name. Abandon the save.
        StorageUnavailableError: it could not be written or made durable. Abandon the save.
    """
    record = record_of(window)
    if record is None:
        return {}
    text = _text_of(record)
    data = zlib.compress(text)
    if len(data) > most_bytes or len(text) > most_bytes * _GROWTH:  # the same limits as when it is read
        sizes = f"{len(data)} bytes, at most {most_bytes} are kept; {len(text)} as text, at most {most_bytes * _GROWTH}"
        return Doubt(f"the record of {len(record.draws)} draws takes {sizes}")
    checkpoint.put_if_absent(RECORD_NAME, data)
    return {RECORD_NAME: Artifact(len(data), digest_bytes(data))}


def read_record(store: Store, found: Found, *, most_bytes: int) -> ReplayRecord | Doubt | None:
    """The record of a committed checkpoint; None when it has none.

    Args:
        store: the run's.
        found: the checkpoint.
        most_bytes: largest record that is read.
    """
    artifact = found.manifest.artifacts.get(RECORD_NAME)
    if artifact is None:
        return None
    if artifact.size_bytes > most_bytes:
        return Doubt(f"{RECORD_NAME} has {artifact.size_bytes} bytes, at most {most_bytes} are read")
    try:
        data = store.read(f"{found.path}/{RECORD_NAME}", limit=artifact.size_bytes)
        if data is None:
            return Doubt(f"{RECORD_NAME} is gone")
        if len(data) != artifact.size_bytes or digest_bytes(data, parse_digest(artifact.digest)[0]) != artifact.digest:
            return Doubt(f"{RECORD_NAME} is damaged: its digest is not the manifest's")
        return decode_record(data, most_bytes=most_bytes * _GROWTH)
    except (CheckpointError, ValueError, ModuleNotFoundError) as error:  # the last: a digest that needs a package
        return Doubt(f"{RECORD_NAME} cannot be used: {error}")


def encode_record(record: ReplayRecord) -> bytes:
    """The artifact's bytes. Deterministic."""
    return zlib.compress(_text_of(record))


def _text_of(record: ReplayRecord) -> bytes:
    rows = [row for draw in record.draws for row in zip(draw.sizes, draw.settled, strict=True)]
    bitmap = "".join(f"{mask:0{size}b}"[::-1] for size, mask in rows)
    document = _RecordDocument(
        schema_version=1,
        base=record.base,
        identities=_text(struct.pack(f">{len(record.draws)}Q", *(draw.identity for draw in record.draws))),
        sizes=[list(draw.sizes) for draw in record.draws],
        settled=_text(int(bitmap[::-1] or "0", 2).to_bytes((len(bitmap) + 7) // 8, "little")),
        keys=[list(draw.keys) for draw in record.draws] if record.cursor else None,
        epochs=[list(draw.epochs) for draw in record.draws] if record.cursor else None,
        cursor=_CursorDocument.of(record.cursor) if record.cursor else None,
    )
    return canonical.canonical_text(document.model_dump(), "record").encode()


def decode_record(data: bytes, *, most_bytes: int) -> ReplayRecord:
    """The record that `data` is.

    Raises:
        ValueError: it is none, or it grows to more than `most_bytes`.
    """
    try:
        inflater = zlib.decompressobj()
        text = inflater.decompress(data, most_bytes)
        if not inflater.eof or inflater.unused_data:
            raise ValueError(f"it is cut off, or grows to more than {most_bytes} bytes")
        document = _RecordDocument.model_validate(canonical.strict_loads(text))
        identities = base64.b64decode(document.identities, validate=True)
        bitmap = base64.b64decode(document.settled, validate=True)
        cursor = document.cursor.decode() if document.cursor else None
    except zlib.error as error:
        raise ValueError(f"it is not compressed as it should be: {error}") from error
    except ValidationError as error:
        raise ValueError(f"it is not a record: {error.error_count()} fields are wrong") from error
    draws, completions = document.sizes, sum(map(sum, document.sizes))
    keys = document.keys if document.keys is not None else [[] for _ in draws]
    epochs = document.epochs if document.epochs is not None else [[] for _ in draws]
    columns = 8 * len(draws), (completions + 7) // 8, len(draws), len(draws)
    if (len(identities), len(bitmap), len(keys), len(epochs)) != columns:
        raise ValueError("its columns are not equally long")
    # As text, since slicing a number of a million bits copies it each time.
    bits = f"{int.from_bytes(bitmap, 'little'):0{completions}b}"[::-1]
    at, found = 0, []
    rows = zip(struct.iter_unpack(">Q", identities), draws, keys, epochs, strict=True)
    for (identity,), sizes, named, when in rows:
        masks = []
        for size in sizes:
            masks.append(int(bits[at : at + size][::-1], 2))
            at += size
        found.append(RecordedDraw(identity, tuple(sizes), tuple(masks), tuple(named), tuple(when)))
    if at != len(bits):
        raise ValueError("its bitmap has bits beyond its completions")
    return ReplayRecord(document.base, tuple(found), cursor)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
