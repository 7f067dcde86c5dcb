"""What a checkpoint and a run that resumes from it must share, and how a difference is told.

* The record is plain JSON and compared by typed value. What differs is named down to the value, with both values, cut where they are long.
* Its key `TOPOLOGY` is the controller's own, in every manifest that a controller publishes. It is compared apart, since it alone may be
  declared to differ (``checkpoints.reshard``). A checkpoint that records none differs in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from cosmos_ctrl.checkpoints import canonical
from cosmos_ctrl.core.state import same_value

#: The key under which a manifest records how the trainers were laid out.
TOPOLOGY = "topology"

#: Characters of a value in a difference.
_LONGEST_VALUE = 80

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Topology:
    """How a run's trainers are laid out, and whether a checkpoint of another layout may be loaded."""

    groups: dict[str, Any]
    """By trainer group: ``world_size``, and ``mesh`` and ``sharding`` where they are declared. Plain JSON values."""
    reshard: bool = False
    """Whether a group of a checkpoint may have another world size, mesh or sharding. The groups are the same all the same."""

    @classmethod
    def of(
        cls,
        trainers: Mapping[str, int],
        mesh: Mapping[str, Mapping[str, int]],
        sharding: Mapping[str, str],
        *,
        reshard: bool,
    ) -> Topology:
        """From what is declared by trainer group: world size, sizes of the mesh's dimensions in order, and a word for the sharding."""
        groups: dict[str, Any] = {group: {"world_size": size} for group, size in trainers.items()}
        for group, sizes in mesh.items():
            # JSON objects have no order, and a mesh has.
            groups[group]["mesh"] = [[name, size] for name, size in sizes.items()]
        for group, word in sharding.items():
            groups[group]["sharding"] = word
        return cls(groups, reshard=reshard)

    def changes(self, compatibility: Mapping[str, Any]) -> dict[str, str]:
        """What is laid out otherwise than where a checkpoint with that record was saved; as `differences`."""
        return differences(compatibility.get(TOPOLOGY, _ABSENT), self.groups, TOPOLOGY)

    def other_groups(self, compatibility: Mapping[str, Any]) -> tuple[str, ...]:
        """Trainer groups that are laid out otherwise than where a checkpoint with that record was saved."""
        recorded = compatibility.get(TOPOLOGY)
        saved = recorded if isinstance(recorded, dict) else {}
        return tuple(group for group, layout in self.groups.items() if not same_value(saved.get(group), layout))

    def refused(self, compatibility: Mapping[str, Any]) -> dict[str, str]:
        """Of the changes those that are not declared."""
        recorded = compatibility.get(TOPOLOGY, _ABSENT)
        if not self.reshard:
            return self.changes(compatibility)
        if not isinstance(recorded, dict):
            return {}  # an imported one, say, which may be of any topology
        return differences(_beyond(recorded, self.groups), _beyond(self.groups, recorded), TOPOLOGY)


def differences(recorded: Any, present: Any, key: str = "") -> dict[str, str]:
    """What differs between a checkpoint's record and a run's, by the path to it, ``a.b.c``; in words.

    Args:
        recorded: plain JSON values.
        present: the same, of the run.
        key: path to both.
    """
    if isinstance(recorded, dict) and isinstance(present, dict):
        found: dict[str, str] = {}
        for name in sorted(recorded.keys() | present.keys()):
            path = f"{key}.{name}" if key else name
            found |= differences(recorded.get(name, _ABSENT), present.get(name, _ABSENT), path)
        return found
    if same_value(recorded, present):
        return {}
    return {key: f"the checkpoint has {_named(recorded)}, this run has {_named(present)}"}


def plain_compatibility(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `values` as JSON carries them.

    Raises:
        TypeError: JSON would change something in them; the message names the key.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"compatibility must be a mapping, not {type(values).__name__}")
    return cast("dict[str, Any]", canonical.strict_loads(canonical.canonical_text(dict(values), "compatibility")))


def _beyond(values: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in others}


def _named(value: Any) -> str:
    if value is _ABSENT:
        return "nothing"
    text = canonical.canonical_text(value, "value")
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
