"""A rank's training state as one dict: captured whole, checked whole, and only then restored.

* Parts are what has ``state_dict`` and ``load_state_dict``: model, optimizer, scheduler, grad scaler, and whatever else is stateful. The
  random states of Python, NumPy, torch and the rank's CUDA device are always among them.
* `torch.save` writes it, and ``torch.load(weights_only=True)`` reads it: what that would refuse is refused when it is captured.
* It carries the stamp of its rank, step, execution and checkpoint; with another's it is refused, and so is one with a part too few or too
  many, or of another shape, before anything is changed.
* What is sharded over ranks (FSDP2) goes through `torch.distributed.checkpoint`: `sharded` and `load_sharded`. The rest of the rank's state
  is captured beside it.

Example:
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    ...
    with trainer.artifacts(resume) as files:
        found = state.restore(torch.load(files["state.pt"], weights_only=True), parts, files.stamp)
    ...
    with trainer.save(command) as save:
        save.write_later("state.pt", state.capture(parts, save.stamp))
"""

from __future__ import annotations

import importlib.util
import io
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cosmos_worker.dcp import OpensRanks, PlainLoadPlanner, SaveReader
from cosmos_worker.errors import WorkerError
from cosmos_worker.stamps import Stamp

_log = logging.getLogger(__name__)

#: Of the dict.
FORMAT = 1


class StateError(WorkerError, ValueError):
    """A training state cannot be captured, or cannot be restored here. Unless it says so, nothing was changed."""


class Stateful(Protocol):
    """What torch calls so."""

    def state_dict(self) -> Any:
        """The state: plain values and tensors."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Go on from it."""


def capture(parts: Mapping[str, Stateful], stamp: Stamp) -> dict[str, Any]:
    """The state of `parts` and the process's random states. It refers to live tensors: save it before the next step, or copy it.

    Args:
        parts: by names of your own. A wrapper of DistributedDataParallel counts as what it wraps.
        stamp: `Save.stamp`.

    Raises:
        StateError: a part holds what ``torch.load(weights_only=True)`` refuses, or is sharded over ranks.
    """
    states = {name: _unwrapped(part).state_dict() for name, part in parts.items()}
    for name, state in states.items():
        _require_loadable(name, state)
    return {
        "format": FORMAT,
        "stamp": stamp.values(),
        "random": {name: source.get() for name, source in _random_sources().items()},
        "parts": states,
    }


def check(state: Any, parts: Mapping[str, Stateful], expected: Stamp) -> None:
    """Whether `state` can be restored into `parts`; changes nothing.

    Raises:
        StateError: it cannot; it says all that is known to be in the way.
    """
    if not isinstance(state, dict) or "format" not in state:
        raise StateError("this is no training state that was captured here: it has no format")
    if type(state["format"]) is not int or state["format"] != FORMAT:
        raise StateError(f"the training state has format {state['format']!r}, and this version reads {FORMAT}")
    wrong = [f"lacks {name!r}" for name in ("stamp", "random", "parts") if not isinstance(state.get(name), dict)]
    if wrong:
        raise StateError(f"the training state {', '.join(wrong)}")
    if differences := expected.differences(state["stamp"]):
        raise StateError(f"the training state belongs elsewhere ({'; '.join(differences)}); states do not mix")
    sources = _random_sources()
    wrong = _differing("part", state["parts"].keys(), parts.keys())
    wrong += _differing("random state", state["random"].keys(), sources.keys())
    for name in parts.keys() & state["parts"].keys():
        wrong += [f"part {name!r}: {what}" for what in _misfits(_unwrapped(parts[name]), state["parts"][name])]
    for name in sources.keys() & state["random"].keys():
        try:
            sources[name].attempt(state["random"][name])
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
            wrong.append(f"random state {name!r}: {error}")
    if wrong:
        raise StateError(f"the training state does not fit: {'; '.join(sorted(wrong))}")


def restore(state: Any, parts: Mapping[str, Stateful], expected: Stamp) -> Stamp:
    """`check`, then load `state` into `parts` and set the random states. What the optimizer is given is its own from then on.

    Where another world saved it (`Stamp.resharded`), the random states stay as they are: which ranks of this one must draw alike, and which
    must not, only the application knows. It seeds them.

    Args:
        state: what `torch.load` read.
        parts: the same names as it was captured with.
        expected: `Artifacts.stamp`.

    Returns:
        The stamp found in it, to be confirmed.

    Raises:
        StateError: it cannot be restored.
    """
    check(state, parts, expected)
    loaded: list[str] = []
    for name, part in parts.items():
        try:
            _unwrapped(part).load_state_dict(state["parts"][name])
        except Exception as error:
            raise StateError(
                f"part {name!r} refused its state: {type(error).__name__}: {error}; it, and {loaded or 'nothing'} before it, "
                "may have changed: do not confirm, and start this rank again"
            ) from error
        loaded.append(name)
    if expected.resharded:
        _log.warning("random states are not restored, since another world saved them: seed the generators of this rank")
        return Stamp(**state["stamp"])
    # Last: loading may draw.
    for name, source in _random_sources().items():
        source.set(state["random"][name])
    return Stamp(**state["stamp"])


# -- sharded over ranks


def sharded(model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of a model and its optimizers for `torch.distributed.checkpoint`, by qualified names. All ranks call it."""
    model_state, optimizer_state = get_state_dict(model, optimizers)
    return {"model": model_state, "optimizer": optimizer_state}


def load_sharded(files: OpensRanks, name: str, model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """Load what `sharded` gave and a `dcp.SaveWriter` called `name` wrote. All ranks call it.

    Raises:
        BaseException: torch's CheckpointException, which is no Exception: a tensor is missing, is left over or is of another size, found
            before any is read.
    """
    state = sharded(model, *optimizers)
    load(state, storage_reader=SaveReader(files, name), planner=_WholePlanner())
    set_state_dict(model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class _WholePlanner(PlainLoadPlanner):
    """Refuses to leave anything behind; torch's own only refuses what is missing."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        assert self.metadata is not None, "torch sets the planner up first"
        if left := sorted(self.metadata.state_dict_metadata.keys() - self.state_dict.keys()):
            raise StateError(
                f"the checkpoint has {len(left)} values that the model and its optimizers lack: {left[:5]}"
            )
        return plan


# -- parts


def _unwrapped(part: Stateful) -> Stateful:
    return part.module if isinstance(part, DistributedDataParallel) else part


def _differing(what: str, saved: Any, here: Any) -> list[str]:
    return [f"{what} {name!r} is missing" for name in here - saved] + [
        f"{what} {name!r} is not known here" for name in saved - here
    ]


def _misfits(part: Stateful, saved: Any) -> list[str]:
    """What of `saved` the part would refuse, or worse, would take in silence."""
    if isinstance(part, torch.optim.Optimizer):
        groups = saved.get("param_groups") if isinstance(saved, dict) else None
        if not isinstance(groups, list) or "state" not in saved:
            return ["it is no optimizer's state"]
        sizes = [len(group["params"]) for group in groups]
        wanted = [len(group["params"]) for group in part.param_groups]
        return [] if sizes == wanted else [f"it has groups of {sizes} parameters, and the optimizer of {wanted}"]
    if isinstance(part, torch.optim.lr_scheduler.LRScheduler):
        # Torch takes a state without it, and starts the schedule from where this one happens to stand.
        return (
            [] if isinstance(saved, dict) and "last_epoch" in saved else ["it lacks the schedule's place, 'last_epoch'"]
        )
    here = part.state_dict()
    if not isinstance(part, torch.nn.Module):
        return ["its state is empty"] if here and not saved else []
    if not isinstance(saved, dict):
        return ["it is no module's state"]
    wrong = _differing("tensor", saved.keys(), here.keys())
    for name in here.keys() & saved.keys():
        before, found = here[name], saved[name]
        if isinstance(before, torch.Tensor) and _kind(before) != _kind(found):
            wrong.append(f"tensor {name!r} is {_kind(found)}, and the model's is {_kind(before)}")
    return wrong


def _kind(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _require_loadable(name: str, state: Any) -> None:
    """What a reader would refuse, found out by one, in memory, without the tensors' values."""
    file = io.BytesIO()
    skeleton = _without_values(state, f"part {name!r}")
    try:
        torch.save(skeleton, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        # Torch's message is a page; what it is about stands last.
        why = str(error).rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
        raise StateError(
            f"part {name!r} could not be loaded again with torch.load(weights_only=True): {type(error).__name__}: {why}; give tensors and "
            "plain values"
        ) from error


def _without_values(value: Any, place: str) -> Any:
    kind = type(value)
    if isinstance(value, DTensor):
        raise StateError(
            f"{place} is sharded over ranks: save it with torch.distributed.checkpoint (see sharded()), and capture the rest"
        )
    if kind in (torch.Tensor, torch.nn.Parameter):
        return torch.empty(0, dtype=value.dtype)
    if kind in (dict, OrderedDict):
        return kind((key, _without_values(item, f"{place}[{key!r}]")) for key, item in value.items())
    if kind in (list, tuple):
        return kind(_without_values(item, f"{place}[{index}]") for index, item in enumerate(value))
    return value


# -- random states


@dataclass(frozen=True, slots=True)
class _Source:
    """One generator of the process."""

    get: Callable[[], Any]
    attempt: Callable[[Any], object]
    """Sets a generator that nobody uses."""
    set: Callable[[Any], object]


def _random_sources() -> dict[str, _Source]:
    sources = {
        "python": _Source(random.getstate, lambda state: random.Random().setstate(state), random.setstate),
        "torch": _Source(torch.get_rng_state, lambda state: torch.Generator().set_state(state), torch.set_rng_state),
    }
    if importlib.util.find_spec("numpy") is not None:
        sources["numpy"] = _numpy_source()
    if torch.cuda.is_available():
        sources["cuda"] = _Source(
            torch.cuda.get_rng_state,
            lambda state: torch.Generator("cuda").set_state(state),
            torch.cuda.set_rng_state,
        )
    return sources


def _numpy_source() -> _Source:
    import numpy as np

    def get() -> tuple[Any, ...]:
        name, keys, *rest = np.random.get_state()  # the process's own generator is what is to be restored
        return (name, tuple(map(int, keys)), *rest)

    return _Source(get, lambda state: np.random.RandomState().set_state(state), np.random.set_state)
