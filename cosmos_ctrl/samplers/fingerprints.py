"""What a dataset holds, and in which order, as one digest.

* Order-sensitive: a permuted, shorter or longer dataset, or one changed item, has another fingerprint.
* Every value is written with its type and its length, so no two sequences collide by running together.
* Streaming: one item is held at a time.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from typing import Any

from cosmos_ctrl.samplers.values import tensor_bytes

_Write = Callable[[bytes], object]


def dataset_fingerprint(items: Any) -> str:
    """``sha256:hex`` of `items`: a full pass over a list, a map-style dataset (by index), a Hugging Face dataset or an iterable.

    Items may hold strings, bytes, numbers, bools, None, lists, tuples, dicts (their order does not count), tensors and
    NumPy arrays.

    Raises:
        TypeError: an item holds something else; the message names the place. Give a fingerprint of your own then.
    """
    digest = sha256()
    count = 0
    for count, item in enumerate(_each(items), start=1):
        digest.update(value_digest(item, f"item {count - 1}"))
    digest.update(b"items" + count.to_bytes(8, "little"))
    return f"sha256:{digest.hexdigest()}"


def value_digest(value: Any, place: str = "value") -> bytes:
    """32 bytes that say what one value is.

    Raises:
        TypeError: it holds something that has no digest; the message names the place.
    """
    digest = sha256()
    _write(digest.update, value, place)
    return digest.digest()


def _each(items: Any) -> Iterator[Any]:
    if isinstance(items, Iterable):
        return iter(items)
    if hasattr(items, "__getitem__") and hasattr(items, "__len__"):
        return (items[index] for index in range(len(items)))
    raise TypeError(f"a {type(items).__name__} is neither iterable nor a map-style dataset with a length")


def _write(write: _Write, value: Any, place: str) -> None:
    if value is None or isinstance(value, bool):
        _write_leaf(write, b"c", repr(value).encode())
    elif isinstance(value, str):
        _write_leaf(write, b"s", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray | memoryview):
        _write_leaf(write, b"b", bytes(value))
    elif type(value) is int:
        _write_leaf(write, b"i", b"%d" % value)
    elif type(value) is float:
        _write_leaf(write, b"f", struct.pack("<d", value))
    elif isinstance(value, list | tuple):
        _write_leaf(write, b"l" if isinstance(value, list) else b"t", b"%d" % len(value))
        for index, item in enumerate(value):
            _write(write, item, f"{place}[{index}]")
    elif isinstance(value, dict):
        _write_leaf(write, b"d", b"%d" % len(value))
        pairs = [
            (value_digest(key, f"{place}: a key"), value_digest(item, f"{place}[{key!r}]"))
            for key, item in value.items()
        ]
        for key_digest, item_digest in sorted(pairs):
            write(key_digest + item_digest)
    else:
        _write_array(write, value, place)


def _write_array(write: _Write, value: Any, place: str) -> None:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor) and value.layout is torch.strided:
        data, kind, dtype = tensor_bytes(value), b"T", str(value.dtype)
    elif numpy is not None and isinstance(value, numpy.ndarray | numpy.generic) and not value.dtype.hasobject:
        data, kind, dtype = value.tobytes(), b"A", value.dtype.str
    else:
        raise TypeError(
            f"{place} is a {type(value).__module__}.{type(value).__qualname__}, which has no digest: expected plain values, "
            "tensors or arrays. Give a fingerprint of your own"
        )
    _write_leaf(write, kind, f"{dtype}{tuple(value.shape)}".encode())
    _write_leaf(write, b"v", data)


def _write_leaf(write: _Write, kind: bytes, data: bytes) -> None:
    write(kind + len(data).to_bytes(8, "little"))
    write(data)
