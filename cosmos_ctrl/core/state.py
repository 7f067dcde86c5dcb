"""Opaque sampler state as an immutable value.

* A state is encoded once, when its draw is made; after that only a reference to the bytes is passed on.
* Decoding makes a fresh copy, so nothing that holds a state shares memory with a live sampler.
* Two codecs need nothing: ``bytes`` as they are, and ``json`` for what JSON carries faithfully. Anything else is refused
  by name: a state that comes back changed would move the sampler.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class EncodedState:
    """An encoded sampler state: ``data`` in the named ``codec``."""

    data: bytes
    codec: str

    @classmethod
    def of(cls, value: Any) -> EncodedState:
        """Encode `value`; an `EncodedState` is returned as it is.

        Raises:
            TypeError: `value` holds something that JSON would change (a tuple, a tensor, a key that is not a string,
                NaN); the message names the place.
        """
        if isinstance(value, EncodedState):
            return value
        if isinstance(value, bytes):
            return cls(value, "bytes")
        _require_json(value, "sampler_state")
        try:
            return cls(_encode(value).encode(), "json")
        except UnicodeEncodeError as error:
            raise TypeError(
                f"sampler_state holds half of a surrogate pair, which JSON does not carry faithfully. {_ADVICE}"
            ) from error

    def decode(self) -> Any:
        """A fresh copy of the value.

        Raises:
            ValueError: the codec is unknown here, or the data is not what the codec says.
        """
        if self.codec == "bytes":
            return self.data
        if self.codec == "json":
            return json.loads(self.data)
        raise ValueError(f"sampler state has codec {self.codec!r}, known here: bytes, json")

    def __repr__(self) -> str:
        return f"EncodedState(<{len(self.data)} bytes>, {self.codec!r})"


def same_value(a: Any, b: Any) -> bool:
    """Typed equality of plain values: ``True`` is not ``1``, and ``1`` is not ``1.0``. Dict order does not count."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, EncodedState):
        if a == b:
            return True
        return a.codec == b.codec == "json" and _same_json(a, b)
    return bool(a == b)


def _same_json(a: EncodedState, b: EncodedState) -> bool:
    try:
        return same_value(a.decode(), b.decode())
    except ValueError:  # a worker's bytes are not JSON
        return False


_FAITHFUL = frozenset({type(None), bool, str, int})


def _require_json(value: Any, place: str) -> None:
    kind = type(value)
    if kind in _FAITHFUL or (kind is float and math.isfinite(value)):
        return
    if kind is list:
        for index, item in enumerate(value):
            if type(item) not in _FAITHFUL:  # else a place would be written out for each
                _require_json(item, f"{place}[{index}]")
        return
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(
                    f"{place} has the key {key!r} of type {type(key).__name__}; JSON has only strings. {_ADVICE}"
                )
            if type(item) not in _FAITHFUL:
                _require_json(item, f"{place}[{key!r}]")
        return
    what = "a number that is not finite" if isinstance(value, float) else f"a {kind.__name__}"
    raise TypeError(f"{place} is {what}, which JSON does not carry faithfully. {_ADVICE}")


_ADVICE = "Give bytes, or lists, dicts with string keys, strings, ints, finite floats, bools and None."
