"""Whose training state something is: of which rank, at which step, for which checkpoint of which execution.

A digest proves that a file is the one that was saved under its name. It cannot prove that the application saved the right thing there: a
rank that writes its sibling's random state under its own name is committed as it is. A stamp in the content can.

* A rank that saves puts the stamp into its own file (`Save.stamp`); a rank that loads compares it with the manifest's (`Artifacts.stamp`).
* Values are compared with their types: ``True`` is not 1.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cosmos_ctrl.core.errors import ArtifactForeignError
from cosmos_ctrl.core.resume import require_count
from cosmos_ctrl.core.state import same_value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """See the module."""

    rank: int
    """Within the trainer group."""
    steps: int
    """Completed training steps."""
    updates: int
    """Completed optimizer updates."""
    execution_id: str
    """Of the execution that saved; empty for a checkpoint that a script published."""
    checkpoint_id: str
    resharded: bool = dataclasses.field(default=False, compare=False)
    """No part of the stamp: whether who reads is one of another world size, mesh or sharding, so that the rank is not its own."""

    def __post_init__(self) -> None:
        for name in ("rank", "steps", "updates"):
            require_count(name, getattr(self, name))

    def values(self) -> dict[str, Any]:
        """Plain values by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.compare}

    def check(self, found: object, *, path: str, artifact: str) -> None:
        """Compare `found`, from an artifact's content, with what it should be.

        Raises:
            ArtifactForeignError: it is another rank's, step's or execution's, or no stamp; it names the first field that differs.
        """
        wanted = self.values()
        if not isinstance(found, dict) or found.keys() != wanted.keys():
            what = sorted(map(str, found)) if isinstance(found, dict) else type(found).__name__
            raise ArtifactForeignError(
                path=path, artifact=artifact, what="stamp", expected=str(sorted(wanted)), found=str(what)
            )
        for name, value in wanted.items():
            if not same_value(value, found[name]):
                raise ArtifactForeignError(
                    path=path, artifact=artifact, what=name, expected=repr(value), found=repr(found[name])
                )

    def differences(self, found: Any) -> list[str]:
        """What of `found`, the values of another stamp, is not this one's; in words, empty if nothing."""
        if not isinstance(found, dict):
            return [f"it is a {type(found).__name__}, not a dict"]
        wanted = self.values()
        return [
            f"{name}: expected {wanted.get(name, 'nothing')!r}, found {found.get(name, 'nothing')!r}"
            for name in (*wanted, *sorted(map(str, found.keys() - wanted.keys())))
            if name not in wanted or name not in found or not same_value(wanted[name], found[name])
        ]
