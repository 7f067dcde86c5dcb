"""Everything about a run that its owner decides, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPolicy:
    """What the core is told. `config.py` documents and validates each value as its user writes it."""

    trainer_groups: tuple[tuple[str, int], ...]
    """Trainer groups with their ranks; rank 0 of the first is the leader."""
    groups_per_step: int
    """Prompt groups in a whole TRAIN command."""
    max_training_steps: int | None = None
    """Hard limit; counts replayed steps. None: only the budget ends the run."""
    save_every_steps: int = 0
    """A SAVE follows every so many steps; 0: only the last one."""
    tail: Literal["train", "discard", "wait"] = "train"
    """What becomes of groups that are too few for a whole command when the budget is exhausted. They wait unsettled, in the final
    checkpoint, for an execution that takes them."""
    min_completions_per_group: int = 1
    """A group with fewer left after discards is dropped whole."""
    max_staleness: int | None = None
    """Most training steps between the lowest weight version of a group and the step that uses it. None: any."""
    on_stale: Literal["discard", "regenerate"] = "discard"
    """What becomes of a group that is too old."""
    poison_limit: int = 3
    """Explicit failure reports after which a group's unfinished completions are discarded."""
    max_outstanding_groups: int = 64
    """Groups that may be waiting, leased or ready at once: what bounds how far generation runs ahead."""
    max_buffered_bytes: int = 1 << 30
    """Payload bytes the controller holds before it stops leasing."""
    max_window_draws: int = 1 << 20
    """Draws beyond the safe boundary before no more are made."""
    max_window_bytes: int = 1 << 30
    """Sampler-state bytes beyond the safe boundary before no more draws are made."""
    on_full_window: Literal["wait", "discard"] = "wait"
    """Whether a full window waits for its oldest group, or discards it when it is out with a worker."""
    records_window: Literal["nothing", "settled", "keys"] = "nothing"
    """What a checkpoint records of its window: what of it is settled; or that, with the prompt keys."""
    announces_weights: bool = True
    """Whether no group is leased before the restored weights are announced."""
    application_owns_checkpoints: bool = False
    """Whether the application commits checkpoints in its own format."""
    lease_deadline_s: float | None = None
    """Longest time a group may be out with one worker; None: as long as the worker's session lives."""
    session_ttl_s: float = 15.0
    """A session lapses when nothing was heard for so long."""
    gate_timeout_s: float = 600.0
    """Longest wait for all trainer ranks to confirm."""
    step_timeout_s: float = 3600.0
    """Longest time between a TRAIN command and its last rank's report."""
    save_timeout_s: float = 1800.0
    """Longest time a SAVE may take before it is abandoned."""
    stop_grace_s: float = 120.0
    """Time to finish in after a stop was requested."""
    max_workers: int = 100_000
    """Worker processes remembered in one execution."""
    max_message_bytes: int = 64 << 20
    """Largest message in either direction; a reply with prompts keeps to it."""
    max_unacknowledged_batches: int = 64
    """Batches a worker may have unacknowledged."""
    max_batch_completions: int = 1 << 16
    """Completions in one batch."""

    def steps_for(self, groups: int) -> int:
        """Training steps that so many groups make, if none is discarded."""
        whole, tail = divmod(groups, self.groups_per_step)
        return whole + bool(tail and self.tail == "train")

    @property
    def leader(self) -> tuple[str, int]:
        """Group and rank that speaks for all trainers."""
        return self.trainer_groups[0][0], 0
