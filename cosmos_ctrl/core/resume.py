"""What a run resumes from: metadata, the adapter that supplies it, and the agreement on it.

* Metadata v1 is frozen and strict: counters are ints (never bool, str or float), the epoch counts from 1, and an unknown
  version or field is refused.
* Step zero is a checkpoint; *fresh* is the absence of metadata, and equal to no metadata at all.
* A disagreement names keys, never values: they may be private, and they may be large.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, get_args

from cosmos_ctrl.core.errors import ResumeMetadataMismatch
from cosmos_ctrl.core.state import EncodedState, same_value

SamplingOwner = Literal["sampler", "batch_sampler"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, init=False)
class ControllerResumeMetadata:
    """Controller metadata, schema version 1. Immutable; the sampler state is encoded when the object is made."""

    schema_version: int
    """Always 1."""
    checkpoint_path: str
    """Where the checkpoint lies; relative to the run when the manifest is ours."""
    checkpoint_id: str
    """Identity of the checkpoint; empty only for an application's own format that has none."""
    completed_training_steps: int
    """Training commands completed by the saved model."""
    completed_optimizer_updates: int
    """Optimizer updates completed by the saved model."""
    remaining_completions: int
    """Completions that the budget still holds at the sampling boundary."""
    epoch: int
    """Sampling epoch, from 1."""
    sampling_owner: SamplingOwner
    """Who owns the state: the sampler, or the batch sampler with everything nested in it."""
    encoded_state: EncodedState
    """The owner's position right after the boundary's draw, as bytes."""

    def __init__(
        self,
        *,
        completed_training_steps: int,
        completed_optimizer_updates: int,
        remaining_completions: int,
        epoch: int,
        sampling_owner: SamplingOwner,
        sampler_state: Any,
        checkpoint_path: str,
        checkpoint_id: str = "",
        schema_version: int = SCHEMA_VERSION,
    ) -> None:
        """Check every field; `sampler_state` is a plain value, bytes, or an `EncodedState`.

        Raises:
            TypeError: a field has another type (a bool or a float is not a count).
            ValueError: a count is negative, the epoch is not positive, or the version or the owner is unknown.
        """
        require_count("schema_version", schema_version)
        if schema_version != SCHEMA_VERSION:
            raise ValueError(f"schema_version is {schema_version}, this version knows {SCHEMA_VERSION}")
        for name, text in (("checkpoint_path", checkpoint_path), ("checkpoint_id", checkpoint_id)):
            if type(text) is not str:
                raise TypeError(f"{name} must be a str, not {type(text).__name__}: {text!r}")
        if sampling_owner not in get_args(SamplingOwner):
            raise ValueError(f"sampling_owner is {sampling_owner!r}, expected one of {get_args(SamplingOwner)}")
        set_field = object.__setattr__
        set_field(self, "schema_version", schema_version)
        set_field(self, "checkpoint_path", checkpoint_path)
        set_field(self, "checkpoint_id", checkpoint_id)
        set_field(self, "completed_training_steps", require_count("completed_training_steps", completed_training_steps))
        set_field(
            self,
            "completed_optimizer_updates",
            require_count("completed_optimizer_updates", completed_optimizer_updates),
        )
        set_field(self, "remaining_completions", require_count("remaining_completions", remaining_completions))
        set_field(self, "epoch", require_count("epoch", epoch, least=1))
        set_field(self, "sampling_owner", sampling_owner)
        set_field(self, "encoded_state", EncodedState.of(sampler_state))

    @property
    def sampler_state(self) -> Any:
        """The owner's position, as a fresh copy at every access."""
        return self.encoded_state.decode()

    def values(self) -> dict[str, Any]:
        """The nine fields by their names, the state encoded: what the agreement compares."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        named["sampler_state"] = named.pop("encoded_state")
        return named

    def to_checkpoint_extra_info(self) -> dict[str, Any]:
        """The six keys that cosmos-rl trainers store and report with a checkpoint."""
        return {
            "step": self.completed_training_steps,
            "optimizer_updates": self.completed_optimizer_updates,
            "remain_samples_num": self.remaining_completions,
            "checkpoint_path": self.checkpoint_path,
            "checkpoint_id": self.checkpoint_id,
            "controller_resume_schema_version": self.schema_version,
        }


class TrainSettings(Protocol):
    """The part of the configuration that an adapter reads."""

    @property
    def resume(self) -> bool | str:
        """True: discover; a string: that checkpoint and no other; False: the adapter is not asked."""

    @property
    def output_dir(self) -> str:
        """Where the run lies."""


class ResumeSettings(Protocol):
    """What `ControllerResumeAdapter.load_metadata` is given."""

    @property
    def train(self) -> TrainSettings:
        """The training section."""


class ControllerResumeAdapter(Protocol):
    """How an application's checkpoints and sampler plug in: an instance, passed to the controller.

    One whose application commits checkpoints in its own format may also have ``repeat_bound_completions`` and
    ``horizon_training_steps``, ints, after ``load_metadata``: what the SAVE command said, as it was kept with the checkpoint. Without the
    first, everything that remains may be a repeat; without the second, the horizon is planned anew.
    """

    def load_metadata(self, config: ResumeSettings) -> ControllerResumeMetadata | None:
        """Find and validate the checkpoint to resume from, without touching a live sampler. Called once, only when resume is on.

        Returns:
            The metadata, or None when automatic discovery found nothing. None for an explicit path is an error.
        """

    def restore_sampler(self, sampler: Any, metadata: ControllerResumeMetadata) -> None:
        """Put `sampler`, the effective owner, where `metadata` says. Called once, after ``set_epoch``, before the iterator."""


def require_count(name: str, value: Any, *, least: int = 0) -> int:
    """`value`, if it is an int (not a bool) of at least `least`.

    Raises:
        TypeError: it is of another type.
        ValueError: it is too small.
    """
    if type(value) is not int:
        raise TypeError(f"{name} must be an int, not {type(value).__name__}: {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    return value


def check_agreement(place: str, expected: Mapping[str, Any] | None, found: Mapping[str, Any] | None) -> None:
    """Compare what a part of the run restored with what it should have; None is *fresh*, a value of its own.

    Values are compared with their types: ``True`` is not ``1``.

    Raises:
        ResumeMetadataMismatch: they differ; it names the keys.
    """
    if expected is None and found is None:
        return
    if expected is None or found is None:
        # A fresh part and a resumed one differ in being resumed, whatever the counters say.
        keys = ("checkpoint",)
        raise ResumeMetadataMismatch(
            place=place, missing=keys if found is None else (), unexpected=keys if expected is None else ()
        )
    missing = tuple(sorted(expected.keys() - found.keys()))
    unexpected = tuple(sorted(found.keys() - expected.keys()))
    changed = tuple(sorted(key for key in expected.keys() & found.keys() if not same_value(expected[key], found[key])))
    if missing or unexpected or changed:
        raise ResumeMetadataMismatch(place=place, missing=missing, unexpected=unexpected, changed=changed)
