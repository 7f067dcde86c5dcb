"""The configuration that a saved position belongs to, compared before anything is touched.

* A position names items only together with the configuration it was saved under; another one would name other items.
* A refusal names every key that differs, what it was and what it is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cosmos_ctrl.core.resume import require_count
from cosmos_ctrl.core.state import same_value


def require_state(owner: str, state: Any, keys: set[str]) -> dict[str, Any]:
    """`state`, if it is one that an `owner` made.

    Raises:
        ValueError: it is not.
    """
    if type(state) is not dict or state.get("type") != owner or state.keys() != keys | {"type"}:
        found = f"a {state.get('type', 'dict')!r} state" if type(state) is dict else f"a {type(state).__name__}"
        raise ValueError(f"{found} is not a {owner} state: expected the keys {sorted(keys | {'type'})}")
    require_count("epoch", state["epoch"], least=1)
    if "position" in keys:
        require_count("position", state["position"])
    return state


def require_same(owner: str, saved: Any, own: Mapping[str, Any]) -> None:
    """Refuse a position that was saved under another configuration.

    Raises:
        ValueError: they differ; it names each key with both values.
    """
    if type(saved) is not dict:
        raise ValueError(f"the saved position has no configuration, expected one of a {owner}")
    was, here = dict(_flat("", saved)), dict(_flat("", own))
    keys = [*here, *(key for key in was if key not in here)]
    other = [key for key in keys if not (key in was and key in here and same_value(was[key], here[key]))]
    if other:
        differences = "; ".join(f"{key} was {_shown(was, key)}, here {_shown(here, key)}" for key in other)
        raise ValueError(
            f"the saved position belongs to another {owner}: {differences}. Build it as it was, or start a fresh run"
        )


def _shown(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "absent"


def _flat(prefix: str, value: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The leaves of nested dicts by dotted names, so that a message can name them."""
    leaves: list[tuple[str, Any]] = []
    for key, item in value.items():
        leaves += _flat(f"{prefix}{key}.", item) if isinstance(item, dict) else [(f"{prefix}{key}", item)]
    return leaves
