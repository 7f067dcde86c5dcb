"""The sampler: restored in one fixed order, then drawn from.

* Order: the samplers exist → metadata is loaded once, only when resume is on → ``set_epoch`` on both → ``restore_sampler``
  once, on the effective owner → the iterator. Nothing probes or advances a live sampler before that.
* The effective owner is the batch sampler where there is one, else the sampler; its state right after a draw is the
  draw's state, encoded once.
* The state of an epoch's end rolls to the next epoch exactly once: it yields no empty epoch and does not end the run.
* A draw never exceeds the budget: its last groups are cut to what remains.
* Feedback reaches the sampler when a step commits, and at no other time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cosmos_ctrl.core.errors import CheckpointNotFoundError
from cosmos_ctrl.core.ledger import SamplingBoundary
from cosmos_ctrl.core.resume import (
    ControllerResumeAdapter,
    ControllerResumeMetadata,
    ResumeSettings,
    SamplingOwner,
    require_count,
)
from cosmos_ctrl.core.state import EncodedState


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as leased to a worker."""

    key: str
    """Stable identity, equal in every execution."""
    source: str = ""
    """Dataset or task it comes from."""
    payload: bytes | None = None
    """The prompt itself, opaque; None when workers hold the data."""
    codec: str = ""
    """How `payload` is encoded."""

    @property
    def size_bytes(self) -> int:
        """About what it takes in a message."""
        return len(self.payload or b"") + len(self.key) + len(self.source) + 64


@dataclass(frozen=True, slots=True)
class Draw:
    """One step of the sampler."""

    prompts: tuple[Prompt, ...]
    sizes: tuple[int, ...]
    """Completions of each prompt's group."""
    after: SamplingBoundary
    """The boundary right after this draw."""


@dataclass(frozen=True, slots=True)
class PromptFeedback:
    """What became of a prompt's completions in a step that is committed."""

    key: str
    source: str
    rewards: tuple[float, ...]
    """Of the completions in the step, by index; also of those that it discarded."""


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """The training section that `load_resume_metadata` reads."""

    resume: bool | str = True
    """True: discover; a string: that checkpoint and no other; False: the adapter is not asked."""
    output_dir: str = ""
    """Where the run lies."""


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """The least configuration that an adapter can be asked with."""

    train: TrainRequest = TrainRequest()


def load_resume_metadata(
    adapter: ControllerResumeAdapter, config: ResumeSettings, *, owner: SamplingOwner
) -> ControllerResumeMetadata | None:
    """Ask the adapter what to resume from; None means a fresh run.

    Raises:
        FileNotFoundError: an explicit checkpoint was asked for and the adapter found none.
        TypeError: the adapter returned something that is not metadata.
        ValueError: the position was saved by the other kind of sampler.
    """
    resume = config.train.resume
    if resume is False:
        return None
    metadata: Any = adapter.load_metadata(config)
    if metadata is None:
        if isinstance(resume, str):
            raise CheckpointNotFoundError(path=resume)
        return None
    if not isinstance(metadata, ControllerResumeMetadata):
        raise TypeError(
            f"{type(adapter).__name__}.load_metadata returned {type(metadata).__name__}, expected "
            "ControllerResumeMetadata or None"
        )
    if metadata.sampling_owner != owner:
        raise ValueError(
            f"checkpoint {metadata.checkpoint_path} was saved with the {metadata.sampling_owner} as owner of the position, "
            f"this run has a {owner}; use the sampler it was saved with"
        )
    return metadata


def boundary_of(metadata: ControllerResumeMetadata) -> SamplingBoundary:
    """The boundary that a checkpoint was saved with."""
    return SamplingBoundary(
        epoch=metadata.epoch,
        sampler_state=metadata.encoded_state,
        remaining_completions=metadata.remaining_completions,
    )


class Sampling:
    """The effective sampler of a run."""

    def __init__(
        self,
        sampler: Any = None,
        batch_sampler: Any = None,
        *,
        prompt_of: Callable[[Any], Prompt],
        completions_per_prompt: int,
    ) -> None:
        """Take the samplers as they are; nothing is asked of them yet.

        Args:
            sampler: yields an index, or a sample, per draw. None: the batch sampler needs none.
            batch_sampler: yields a list of them per draw, and owns the position if given.
            prompt_of: the prompt of an index or sample.
            completions_per_prompt: size of a group.

        Raises:
            TypeError: there is no sampler, or the one that owns the position has no ``state_dict``.
        """
        if not callable(getattr(sampler if batch_sampler is None else batch_sampler, "state_dict", None)):
            owner = sampler if batch_sampler is None else batch_sampler
            raise TypeError(
                f"{type(owner).__name__} has no state_dict, so its position cannot be restored; use a SeekableSampler, or wrap it "
                "with RestorableSampler or RestorableLoader of cosmos_ctrl.samplers"
            )
        self._sampler, self._batch_sampler = sampler, batch_sampler
        self._prompt_of = prompt_of
        self._completions = require_count("completions_per_prompt", completions_per_prompt, least=1)
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0

    @property
    def deterministic(self) -> bool:
        """Whether the owner declares that what it draws depends on nothing but its state."""
        return getattr(self.owner, "deterministic", False) is True

    def groups_in(self, completions: int) -> int:
        """Groups that so many completions of the budget make; the last one may be cut short."""
        return -(-completions // self._completions)

    @property
    def owner_name(self) -> SamplingOwner:
        """Who owns the position."""
        return "sampler" if self._batch_sampler is None else "batch_sampler"

    @property
    def owner(self) -> Any:
        """The object that owns the position."""
        return self._sampler if self._batch_sampler is None else self._batch_sampler

    def start(self, budget: int) -> SamplingBoundary:
        """Begin a fresh run of `budget` completions in epoch 1; returns its first boundary.

        Raises:
            RuntimeError: it has begun already.
        """
        self._begin(1)
        return SamplingBoundary(epoch=1, sampler_state=self._state(), remaining_completions=budget)

    def restore(self, adapter: ControllerResumeAdapter, metadata: ControllerResumeMetadata) -> SamplingBoundary:
        """Continue at `metadata`'s boundary, which is returned. The adapter's exceptions propagate as they are.

        Raises:
            RuntimeError: it has begun already: a sampler is restored once, before anything is drawn.
        """
        self._begin(metadata.epoch)
        adapter.restore_sampler(self.owner, metadata)
        return boundary_of(metadata)

    def metadata(
        self,
        boundary: SamplingBoundary,
        *,
        completed_training_steps: int,
        completed_optimizer_updates: int,
        checkpoint_path: str,
        checkpoint_id: str = "",
    ) -> ControllerResumeMetadata:
        """What a checkpoint with `boundary` holds, for a driver that publishes it itself."""
        return ControllerResumeMetadata(
            completed_training_steps=completed_training_steps,
            completed_optimizer_updates=completed_optimizer_updates,
            remaining_completions=boundary.remaining_completions,
            epoch=boundary.epoch,
            sampling_owner=self.owner_name,
            sampler_state=boundary.encoded_state,
            checkpoint_path=checkpoint_path,
            checkpoint_id=checkpoint_id,
        )

    def draw(self, remaining_completions: int) -> Draw:
        """Take the next step of the sampler; `remaining_completions`, at least 1, is the budget before it.

        Raises:
            RuntimeError: the sampler was neither started nor restored.
            ValueError: a whole epoch yields nothing.
        """
        if not self._epoch:
            raise RuntimeError("start or restore the sampler before drawing from it")
        item = self._next_item()
        indices = [item] if self._batch_sampler is None else list(item)
        if not indices:
            raise ValueError(f"the batch sampler yielded an empty batch in epoch {self._epoch}")
        prompts, sizes, left = [], [], remaining_completions
        for index in indices:
            size = min(self._completions, left)
            if size == 0:
                break
            prompts.append(self._prompt_of(index))
            sizes.append(size)
            left -= size
        after = SamplingBoundary(epoch=self._epoch, sampler_state=self._state(), remaining_completions=left)
        return Draw(tuple(prompts), tuple(sizes), after)

    @property
    def wants_feedback(self) -> bool:
        """Whether the owner has a method ``feedback``, as a curriculum has."""
        return callable(getattr(self.owner, "feedback", None))

    def feedback(self, results: Sequence[PromptFeedback]) -> None:
        """Tell the owner what became of prompts in a step that is committed."""
        self.owner.feedback(results)

    def _begin(self, epoch: int) -> None:
        if self._epoch:
            raise RuntimeError(
                f"the {self.owner_name} was started or restored already, and would lose its place; make a new one"
            )
        self._set_epoch(epoch)

    def _next_item(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self.owner)
        for item in self._iterator:
            return item
        self._set_epoch(self._epoch + 1)
        self._iterator = iter(self.owner)
        for item in self._iterator:
            return item
        raise ValueError(f"the {self.owner_name} yields nothing in epoch {self._epoch}: the run cannot go on")

    def _set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        for sampler in (self._sampler, self._batch_sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def _state(self) -> EncodedState:
        return EncodedState.of(self.owner.state_dict())
