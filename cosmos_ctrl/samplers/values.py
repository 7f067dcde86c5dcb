"""Library state as plain JSON, and back, without an unpickler.

* What JSON carries faithfully stays as it is. The rest is tagged: an object with the single key ``"$tuple"``, ``"$tensor"``
  and so on; a dict that could be mistaken for one is tagged itself.
* A tensor or array is written as its own elements, never as the storage behind it; nothing is shared with the live value.
* What would not come back the same is refused by its place when the state is made, not when it is needed.
"""

from __future__ import annotations

import math
import sys
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

_ADVICE = "Let state_dict() return plain values, tensors or NumPy arrays"


def to_json(value: Any, place: str = "state") -> Any:
    """`value` as lists, dicts with str keys, strings, ints, finite floats, bools and None.

    Raises:
        TypeError: it holds something that would not come back the same; the message names the place.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list:
        return [to_json(item, f"{place}[{index}]") for index, item in enumerate(value)]
    if kind is tuple:
        return {"$tuple": [to_json(item, f"{place}[{index}]") for index, item in enumerate(value)]}
    if kind is dict:
        return _dict_to_json(value, place)
    if kind is bytes:
        return {"$bytes": _text(value)}
    if kind is OrderedDict:
        return {"$ordered": _pairs_to_json(value, place)}
    return _array_to_json(value, place)


def from_json(value: Any) -> Any:
    """A fresh copy of what `to_json` was given.

    Raises:
        ValueError: a tag is unknown here.
    """
    if type(value) is list:
        return [from_json(item) for item in value]
    if type(value) is not dict:
        return value
    tag = next(iter(value), "")
    if len(value) != 1 or not tag.startswith("$"):
        return {key: from_json(item) for key, item in value.items()}
    if tag not in _READERS:
        raise ValueError(f"the saved state has the tag {tag!r}, known here: {', '.join(_READERS)}")
    return _READERS[tag](value[tag])


def tensor_bytes(tensor: Any) -> bytes:
    """The elements of a dense tensor, in order."""
    import torch

    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())


def _dict_to_json(value: dict[Any, Any], place: str) -> dict[str, Any]:
    plain = all(type(key) is str for key in value)
    if plain and not (len(value) == 1 and next(iter(value)).startswith("$")):
        return {key: to_json(item, f"{place}[{key!r}]") for key, item in value.items()}
    return {"$dict": _pairs_to_json(value, place)}


def _pairs_to_json(value: dict[Any, Any], place: str) -> list[Any]:
    return [[to_json(key, f"{place}: a key"), to_json(item, f"{place}[{key!r}]")] for key, item in value.items()]


def _array_to_json(value: Any, place: str) -> dict[str, Any]:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and type(value) is torch.Tensor and _is_plain(value):
        return {"$tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), _text(tensor_bytes(value))]}
    if numpy is not None and type(value) is numpy.ndarray and value.dtype.kind in "biufc":
        return {"$array": [value.dtype.str, list(value.shape), _text(value.tobytes())]}
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biufc":
        return {"$scalar": [value.dtype.str, _text(value.tobytes())]}
    raise TypeError(
        f"{place} is a {type(value).__module__}.{type(value).__qualname__}, which would not come back the same. {_ADVICE}"
    )


def _is_plain(tensor: Any) -> bool:
    """Dense, in main memory and outside of any graph."""
    import torch

    return tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.requires_grad


def _text(data: bytes) -> str:
    return b64encode(data).decode()


def _read_tensor(content: Any) -> Any:
    import torch

    dtype, shape, data = content
    raw = bytearray(b64decode(data))
    if not raw:  # frombuffer refuses an empty buffer
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(raw, dtype=torch.uint8).view(getattr(torch, dtype)).reshape(shape)


def _read_array(content: Any) -> Any:
    import numpy

    dtype, shape, data = content
    return numpy.frombuffer(bytearray(b64decode(data)), dtype=dtype).reshape(shape)


def _read_scalar(content: Any) -> Any:
    dtype, data = content
    return _read_array([dtype, [], data])[()]


def _read_dict(pairs: Any) -> dict[Any, Any]:
    return {from_json(key): from_json(item) for key, item in pairs}


_READERS: dict[str, Callable[[Any], Any]] = {
    "$array": _read_array,
    "$bytes": b64decode,
    "$dict": _read_dict,
    "$float": float,
    "$ordered": lambda pairs: OrderedDict(_read_dict(pairs)),
    "$scalar": _read_scalar,
    "$tensor": _read_tensor,
    "$tuple": lambda items: tuple(map(from_json, items)),
}
