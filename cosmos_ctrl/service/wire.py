"""Encoded messages put together from parts, so that a payload is copied once on its way out.

The library would copy it into a message, once more into whatever that is encoded in, and leave the memory to be faulted in anew each
time: that was most of what a worker with large payloads did. Protobuf's encoding lets a message be the concatenation of its fields'
encodings (https://protobuf.dev/programming-guides/encoding/), so the small fields are encoded by the library and the large ones are
put beside them.
"""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import Message

_LENGTH_DELIMITED = 2


def field(message: type[Message], name: str, parts: Sequence[bytes]) -> list[bytes]:
    """The parts of field `name` of `message`, a message or bytes, whose own encoding is `parts`."""
    number = message.DESCRIPTOR.fields_by_name[name].number
    return [_varint(number << 3 | _LENGTH_DELIMITED) + _varint(sum(map(len, parts))), *parts]


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
