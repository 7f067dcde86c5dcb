"""What a person sees while the run goes on: a live table on a terminal, a line a step elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_worker.transport import name_of

if TYPE_CHECKING:
    from rich.table import Table


class View:
    """Plain lines. Also what the live view falls back to."""

    def __init__(self) -> None:
        self._last_step = -1

    def event(self, text: str) -> None:
        """Something happened that is worth a line."""
        print(text, flush=True)

    def show(self, state: pb.RunState | None, workers: list[pb.Worker], processes: list[tuple[str, int]]) -> None:
        """The run as it is: processes are names with process IDs."""
        if state is not None and state.completed_training_steps != self._last_step:
            self._last_step = state.completed_training_steps
            print(step_line(state, workers), flush=True)

    def close(self) -> None:
        """The run is over."""


class LiveView(View):
    """A table that is drawn anew."""

    def __init__(self) -> None:
        super().__init__()
        from rich.live import Live

        self._live = Live(refresh_per_second=4)
        self._live.start()

    def event(self, text: str) -> None:
        """See `View`."""
        self._live.console.print(text, highlight=False, markup=False)

    def show(self, state: pb.RunState | None, workers: list[pb.Worker], processes: list[tuple[str, int]]) -> None:
        """See `View`."""
        self._live.update(_table(state, workers, processes))

    def close(self) -> None:
        """See `View`."""
        self._live.stop()


def make_view() -> View:
    """A live one when standard output is a terminal and rich is installed."""
    if not sys.stdout.isatty():
        return View()
    try:
        return LiveView()
    except ImportError:
        return View()


def step_line(state: pb.RunState, workers: list[pb.Worker]) -> str:
    """A committed step in one line."""
    reward = f"{state.mean_reward:.3f}" if state.HasField("mean_reward") else "  –  "
    return (
        f"execution {state.execution_number}  step {state.completed_training_steps:3d}  reward {reward}  "
        f"window {state.window_draws:3d} prompts  ready {state.groups_ready:2d}  leased {state.groups_leased:2d}  "
        f"weights {_weights(state)}  rollout lag {_lag(state, workers)}"
    )


def _weights(state: pb.RunState) -> str:
    return f"v{state.weights_version}" if state.HasField("weights_version") else "–"


def _lag(state: pb.RunState, workers: list[pb.Worker]) -> str:
    versions = [m.value for w in workers for m in w.metrics if m.name == "weights_version"]
    if not versions:
        return "–"
    return " ".join(str(max(0, state.completed_training_steps - int(version))) for version in versions)


def _table(state: pb.RunState | None, workers: list[pb.Worker], processes: list[tuple[str, int]]) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    if state is None:
        table.add_row("starting …")
    else:
        phase = name_of(pb.Phase, state.phase).lower().replace("_", " ")
        reward = f"{state.mean_reward:.3f}" if state.HasField("mean_reward") else "–"
        checkpoint = f"step {state.checkpoint.completed_training_steps}" if state.HasField("checkpoint") else "none yet"
        rows = (
            ("execution", f"{state.execution_number}, {phase}"),
            ("step", f"{state.completed_training_steps} ({state.completed_optimizer_updates} optimizer updates)"),
            ("reward", reward),
            (
                "window",
                f"{state.window_draws} prompts, {state.window_completions} completions beyond the safe boundary",
            ),
            (
                "groups",
                f"{state.groups_leased} leased, {state.groups_ready} ready, {state.groups_training} in training",
            ),
            ("weights", f"{_weights(state)}, rollout workers behind by {_lag(state, workers)}"),
            ("checkpoint", checkpoint),
            ("refused", f"{state.stale_refused} requests of dead executions"),
        )
        for name, value in rows:
            table.add_row(name, value)
    table.add_row("processes", "  ".join(f"{name} {pid}" for name, pid in processes))
    return table
