"""The run as it is: what watchers, the command line and people see."""

from __future__ import annotations

from dataclasses import dataclass

from cosmos_ctrl.core.commands import Save
from cosmos_ctrl.core.lifecycle import EndReason, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatistics:
    """A frozen snapshot of the run."""

    phase: Phase
    completed_training_steps: int
    completed_optimizer_updates: int
    remaining_completions: int
    safe_remaining_completions: int
    epoch: int
    window_draws: int
    window_completions: int
    gap_age_s: float | None
    blocking_group: int
    """0 when the window is empty."""
    blocking_worker: str
    """Who has that group; empty when nobody has."""
    groups_pending: int
    groups_leased: int
    groups_ready: int
    groups_training: int
    trained_completions: int
    discarded_completions: int
    spared_completions: int
    """Settled in the restored model, as the checkpoint's record proved, and not generated again."""
    replay_doubts: int
    """Records of a window that were not made, or not believed."""
    stale_refused: int
    lease_lost: int
    weights_version: int | None
    mean_reward: float | None
    saves_pending: int
    last_save: Save | None
    """Newest committed save of this execution."""
    end: tuple[EndReason, str] | None
