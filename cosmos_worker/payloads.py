"""Payloads: what travels with a prompt or a completion, opaque to the controller.

* Bytes go as they are, under ``bytes`` or a codec name of the application's own; any other value goes as JSON. As always
  with JSON, tuples come back as lists and keys as strings.
* A `Handle` stays where the producer keeps it; only its text travels.
* What has a codec that is not known here comes back as bytes, never as a guess.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from cosmos_worker.report_items import PayloadKind

BYTES = "bytes"
JSON = "json"


@dataclass(frozen=True, slots=True)
class Handle:
    """Where a payload lies, instead of the payload."""

    text: str


@dataclass(frozen=True, slots=True)
class Encoded:
    """A payload as it travels."""

    kind: PayloadKind
    data: bytes | str
    codec: str


def encode_payload(value: Any, codec: str | None = None) -> Encoded:
    """`value` as it travels; None is no payload.

    Args:
        value: bytes, a `Handle`, None, or what JSON carries.
        codec: name for bytes (or a handle's content); not for values.

    Raises:
        TypeError: JSON does not carry it, or a codec is named for a value that is not bytes.
        ValueError: it holds NaN or an infinity.
    """
    if value is None:
        return Encoded("none", b"", "")
    if isinstance(value, Handle):
        return Encoded("handle", value.text, codec or BYTES)
    if isinstance(value, bytes | bytearray | memoryview):
        return Encoded("inline", bytes(value), codec or BYTES)
    if codec not in (None, JSON):
        raise TypeError(f"codec {codec!r} needs bytes, not a {type(value).__name__}: encode the payload first")
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Encoded("inline", text.encode(), JSON)


def decode_payload(data: bytes, codec: str) -> Any:
    """The value: parsed for ``json``, the bytes themselves for any other codec.

    Raises:
        ValueError: it says JSON and is not.
    """
    return json.loads(data) if codec == JSON else data
