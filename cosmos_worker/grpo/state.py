"""A rank's training state: captured whole, restored whole or not at all.

- Covered: model, optimizer, learning-rate schedule, Python's and torch's random states, both counters, the rank.
- Restoring builds everything anew beside what is there and only then hands it over, so a state with a part that
  is missing, unknown, of another shape or of another rank changes nothing.
- Training goes on from a restored state with the same bits as without the interruption.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cosmos_worker.grpo.model import GrpoModel

_FORMAT = 1
_PARTS = frozenset({"format", "rank", "world_size", "steps", "updates", "model", "optimizer", "scheduler", "random"})


class StateError(ValueError):
    """A saved state cannot be restored here; nothing was changed."""


@dataclass(slots=True)
class TrainingParts:
    """What training changes."""

    model: GrpoModel
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    steps: int
    """Completed training steps."""
    updates: int
    """Completed optimizer updates."""


def capture_state(parts: TrainingParts, *, rank: int, world_size: int) -> dict[str, Any]:
    """A dict that `torch.save` writes and `torch.load(weights_only=True)` reads; it shares nothing with `parts`."""
    state = {
        "format": _FORMAT,
        "rank": rank,
        "world_size": world_size,
        "steps": parts.steps,
        "updates": parts.updates,
        "model": parts.model.state_dict(),
        "optimizer": parts.optimizer.state_dict(),
        "scheduler": parts.scheduler.state_dict(),
        "random": {"python": random.getstate(), "torch": torch.get_rng_state()},
    }
    return copy.deepcopy(state)


def restore_state(
    state: dict[str, Any], new_parts: Callable[[], TrainingParts], *, rank: int, world_size: int
) -> TrainingParts:
    """Parts as they were captured; sets the process's random states last, once all else has been accepted."""
    _check_stamps(state, rank=rank, world_size=world_size)
    before = torch.get_rng_state()
    try:
        parts = new_parts()
        parts.model.load_state_dict(state["model"], strict=True)
        # torch would train on in the given tensors.
        parts.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        parts.scheduler.load_state_dict(state["scheduler"])
        _check_optimizer(parts, state["updates"])
        _check_schedule(parts, state)
        python_random, torch_random = state["random"]["python"], state["random"]["torch"]
        random.Random().setstate(python_random)
        torch.Generator().set_state(torch_random)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise StateError(f"the saved training state does not fit: {error}") from error
    finally:
        # Making parts draws initial weights.
        torch.set_rng_state(before)
    parts.steps, parts.updates = state["steps"], state["updates"]
    random.setstate(python_random)
    torch.set_rng_state(torch_random)
    return parts


def _check_stamps(state: dict[str, Any], *, rank: int, world_size: int) -> None:
    if not isinstance(state, dict):
        raise StateError(f"the saved training state is a {type(state).__name__}, not a dict")
    missing, unknown = sorted(_PARTS - state.keys()), sorted(state.keys() - _PARTS)
    if missing or unknown:
        raise StateError(f"the saved training state lacks {missing} and has unknown {unknown}")
    if state["format"] != _FORMAT:
        raise StateError(f"the saved training state has format {state['format']!r}, not {_FORMAT}")
    if (state["rank"], state["world_size"]) != (rank, world_size):
        raise StateError(
            f"the saved training state is of rank {state['rank']} of {state['world_size']}, "
            f"and this is rank {rank} of {world_size}"
        )
    for counter in ("steps", "updates"):
        if type(state[counter]) is not int or state[counter] < 0:
            raise StateError(f"{counter} is {state[counter]!r}, not a count")


def _check_optimizer(parts: TrainingParts, updates: int) -> None:
    """torch accepts moments that are absent or of another shape, and fails, or starts from zero, later."""
    for group in parts.optimizer.param_groups:
        for parameter in group["params"]:
            moments = parts.optimizer.state.get(parameter, {})
            if updates and set(moments) != {"step", "exp_avg", "exp_avg_sq"}:
                raise ValueError("the optimizer's moments are not whole")
            for name in set(moments) - {"step"}:
                if moments[name].shape != parameter.shape:
                    raise ValueError(f"the optimizer's {name} is of another shape than its parameter")


def _check_schedule(parts: TrainingParts, state: dict[str, Any]) -> None:
    """The schedule advances once a step; torch accepts a state that lacks its place."""
    if state["scheduler"]["last_epoch"] != state["steps"]:
        raise ValueError(
            f"the learning-rate schedule stands at {state['scheduler']['last_epoch']}, not at step {state['steps']}"
        )
    if set(state["scheduler"]) != set(parts.scheduler.state_dict()):
        raise ValueError("the learning-rate schedule is not whole")
