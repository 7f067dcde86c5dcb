"""JSON that means one thing: written canonically, read strictly.

* One value has one text: keys sorted, no spaces, so equal values have equal digests.
* What JSON would change (a tuple, a set, NaN, a key that is not a string, an IntEnum, a lone surrogate) is refused when it is
  written, by its place, and never rounded into something near.
* What readers may take differently (duplicate keys, NaN, a byte order mark, depth without end) is refused when it is read.
"""

from __future__ import annotations

import json
import math
from typing import Any

#: Deepest nesting of objects and arrays.
MAX_DEPTH = 64


def canonical_text(value: Any, place: str) -> str:
    """The canonical JSON text of `value`; `place` names it in errors.

    Raises:
        TypeError: JSON cannot carry something in it faithfully; the message names where it is.
    """
    _require_faithful(value, place, MAX_DEPTH)
    return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))


def strict_loads(data: bytes | str) -> Any:
    """The value of a JSON text in UTF-8.

    Raises:
        ValueError: it is not one that every reader takes alike; the message says what is wrong, not what the text is.
    """
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
        # Also catches what the grammar lets through: lone surrogates as escapes, 1e999.
        _require_faithful(value, "the document", MAX_DEPTH)
    except RecursionError as error:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 at byte {error.start}") from error
    except TypeError as error:
        raise ValueError(str(error)) from error
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} comes twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _require_faithful(value: Any, place: str, depth: int) -> None:
    if _is_plain(value):
        return
    if type(value) is str:
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise TypeError(f"{place} has a lone surrogate, which UTF-8 cannot carry")
        return
    if type(value) is float and math.isfinite(value):
        return
    if type(value) not in (list, dict):
        what = "a number that is not finite" if isinstance(value, float) else f"a {type(value).__name__}"
        raise TypeError(
            f"{place} is {what}, which JSON cannot carry faithfully; use str, int, finite float, bool, None, list, dict"
        )
    if depth == 0:
        raise TypeError(f"{place} is nested deeper than {MAX_DEPTH}")
    for key, item in enumerate(value) if type(value) is list else value.items():
        if type(value) is dict and type(key) is not str:
            raise TypeError(f"{place} has the key {key!r} of type {type(key).__name__}; JSON has only strings")
        if not _is_plain(key):
            _require_faithful(key, f"a key of {place}", depth)
        if not _is_plain(item):  # else a place would be written out for each
            _require_faithful(item, f"{place}[{key!r}]", depth - 1)


def _is_plain(value: Any) -> bool:
    kind = type(value)
    return kind is int or value is None or kind is bool or (kind is str and value.isascii())
