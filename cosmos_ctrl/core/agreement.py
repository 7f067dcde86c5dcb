"""The gate: no training command before every trainer rank has confirmed what it restored.

* Model, optimizer, counters and sampling boundary come from one checkpoint: the one this controller resumed from. Equal
  counters with another identity disagree; so do a fresh rank and one at step zero.
* One disagreement is fatal, at once and for everyone.
* Ranks declare what they will save; a name has one writer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cosmos_ctrl.core.errors import ConflictingRetryError, MalformedError, ResumeMetadataMismatch
from cosmos_ctrl.core.execution import Place
from cosmos_ctrl.core.lifecycle import Lifecycle
from cosmos_ctrl.core.resume import ControllerResumeMetadata, check_agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What this execution resumed from."""

    metadata: ControllerResumeMetadata
    manifest_digest: str = ""
    repeat_bound_completions: int = 0
    horizon_training_steps: int | None = None
    """Kept with the checkpoint; None: it was not."""
    application_note: str = ""
    resharded_groups: tuple[str, ...] = ()
    """Trainer groups that were of another world size, mesh or sharding when it was saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What one trainer rank says it restored."""

    metadata: ControllerResumeMetadata | None
    """None: fresh."""
    manifest_digest: str
    training_steps: int
    """Found in the rank's own shard."""
    optimizer_updates: int
    """Found in the rank's own shard."""
    artifact_names: tuple[str, ...]

    def values(self) -> dict[str, Any] | None:
        """What the agreement compares; None is fresh."""
        if self.metadata is None:
            # A fresh rank that counts steps of its own is not fresh.
            return {"training_steps": self.training_steps} if self.training_steps or self.optimizer_updates else None
        return self.metadata.values() | {
            "manifest_digest": self.manifest_digest,
            "restored_training_steps": self.training_steps,
            "restored_optimizer_updates": self.optimizer_updates,
        }


#: Raises for a set of artifact names that cannot be published.
CheckNames = Callable[[tuple[str, ...]], object]


class Agreement:
    """Collects the ranks' confirmations."""

    def __init__(
        self,
        ranks: tuple[Place, ...],
        resumed: Resumed | None,
        lifecycle: Lifecycle,
        *,
        legacy: bool,
        saves_artifacts: bool = True,
        check_artifact_names: CheckNames = lambda _names: None,
    ) -> None:
        """A legacy controller resumed from nothing of its own: its ranks must agree with each other only.

        `check_artifact_names` raises for names that could not be published together; with `saves_artifacts` some rank
        must declare one.
        """
        self._saves_artifacts = saves_artifacts and not legacy
        self._check_publishable = check_artifact_names
        self._ranks, self._lifecycle, self._legacy = ranks, lifecycle, legacy
        self._confirmed: dict[Place, Restored] = {}
        self._expected: Mapping[str, Any] | None = None
        if resumed is not None:
            self._expected = Restored(
                metadata=resumed.metadata,
                manifest_digest=resumed.manifest_digest,
                training_steps=resumed.metadata.completed_training_steps,
                optimizer_updates=resumed.metadata.completed_optimizer_updates,
                artifact_names=(),
            ).values()

    @property
    def missing(self) -> tuple[str, ...]:
        """Ranks that have not confirmed."""
        return tuple(str(place) for place in self._ranks if place not in self._confirmed)

    def artifacts_of(self, place: Place) -> frozenset[str]:
        """What a rank declared that it saves."""
        return frozenset(self._confirmed[place].artifact_names)

    def forget(self, place: Place) -> None:
        """The rank was replaced, or fell silent, before the gate opened: its confirmation does not count any more."""
        if self._confirmed.pop(place, None) is not None:
            self._lifecycle.touch()

    def confirm(self, place: Place, restored: Restored) -> None:
        """Note what a rank restored; the last one opens the gate.

        Raises:
            ResumeMetadataMismatch: it is something else than the controller resumed from.
            ConflictingRetryError: the rank said something else before.
            MalformedError: it declares an artifact that another rank writes.
        """
        before = self._confirmed.get(place)
        if before is not None and before != restored:
            raise ConflictingRetryError(what=f"confirmation of {place}", number=1)
        self._check_names(place, restored.artifact_names)
        expected = self._expected
        if self._legacy and self._confirmed:
            expected = next(iter(self._confirmed.values())).values()
        if not self._legacy or self._confirmed:
            try:
                check_agreement(str(place), expected, restored.values())
            except ResumeMetadataMismatch as error:
                self._lifecycle.fail(error)
                raise
        if before is None:
            self._confirmed[place] = restored
            self._lifecycle.touch()
        if not self._lifecycle.gate_open and not self.missing:
            self._lifecycle.gate_open = True
            self._lifecycle.record("gate", ranks=[str(rank) for rank in self._ranks])

    def _check_names(self, place: Place, names: tuple[str, ...]) -> None:
        if len(set(names)) != len(names):
            raise MalformedError(what=f"{place} declares an artifact twice")
        for other, theirs in self._confirmed.items():
            if other != place and (both := set(names) & set(theirs.artifact_names)):
                raise MalformedError(what=f"{place} declares {min(both)}, which {other} writes")
        last = all(rank in self._confirmed or rank == place for rank in self._ranks)
        if self._saves_artifacts and last and not names and not any(r.artifact_names for r in self._confirmed.values()):
            raise MalformedError(what="no trainer rank declares an artifact, so no checkpoint could ever be committed")
        # Together: names of two ranks may collide where each is safe by itself.
        others = (name for other, theirs in self._confirmed.items() if other != place for name in theirs.artifact_names)
        self._check_publishable((*names, *others))
