"""A Trainer's place in its data: what it depends on, and what has to be put back beside ``global_step``.

* The Trainer goes to the epoch and the batch that ``global_step`` says and skips what comes before. So the place is restored if the order of
  each epoch depends on nothing but settings and the epoch's number, and the settings are the same.
* A sampler that draws each epoch's order from a generator of its own begins, in a fresh process, with the order of the first epoch. TRL's
  `RepeatSampler` is wound forward; another one is refused.
* A trainer that generates for several batches at once keeps in memory what is not trained yet: there is no place to resume from in between.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.utils.data import IterableDataset, SequentialSampler

from cosmos_worker.errors import UsageError

#: Settings that the place depends on, where a trainer has them. The last three are TRL's.
_SETTINGS = (
    # The batch of a process, for as many devices as it drives by itself.
    *("world_size", "train_batch_size", "gradient_accumulation_steps", "seed", "data_seed"),
    *("dataloader_drop_last", "train_sampling_strategy"),
    *("num_generations", "steps_per_generation", "num_iterations"),
)


#: How accelerate deals batches to processes.
_DEALING = ("split_batches", "dispatch_batches", "even_batches")


def settings(args: Any, train_dataset: Any) -> dict[str, Any]:
    """What the place depends on, by name: settings of `args`, and the dataset's length where it has one."""
    length = len(train_dataset) if hasattr(train_dataset, "__len__") else None
    dealing = {name: getattr(args.accelerator_config, name) for name in _DEALING}
    return (
        {name: getattr(args, name) for name in _SETTINGS if hasattr(args, name)}
        | dealing
        | {"train_dataset_length": length}
    )


def place(steps: int, order: dict[str, Any]) -> dict[str, Any]:
    """The place after `steps`, as a sampler state."""
    return {"global_step": steps} | order


def order_of(dataloader: Any) -> dict[str, Any]:
    """What gives the loader's order: the sampler's kind, and the seed that it holds; plain values."""
    sampler = _sampler_of(dataloader)
    seeds = (getattr(sampler, name, None) for name in ("initial_seed", "seed"))
    return {"sampler": type(sampler).__name__, "seed": next((seed for seed in seeds if type(seed) is int), None)}


def restore_sampler(args: Any, dataloader: Any, steps: int) -> None:
    """Put the sampler where it was after `steps`; the Trainer does the rest. Before anything iterates the loader.

    Raises:
        UsageError: the sampler's order cannot be restored, or what was generated is not trained yet.
    """
    if not at_rest(args, dataloader, steps):
        raise UsageError(
            f"step {steps} was the last of a run that ended in the midst of a generation, the rest of which was not kept: resume from an "
            "earlier checkpoint"
        )
    sampler = _sampler_of(dataloader)
    if sampler is None or hasattr(sampler, "set_epoch") or isinstance(sampler, SequentialSampler):
        return
    repeats = getattr(sys.modules.get("trl.trainer.utils"), "RepeatSampler", None)
    if repeats is None or not isinstance(sampler, repeats):
        raise UsageError(
            f"the order of {type(sampler).__name__} depends on more than seed and epoch, so it could not be resumed without skipping data: "
            "use the Trainer's default sampler, or one with set_epoch(epoch)"
        )
    for _ in range(steps // _steps_per_epoch(args, dataloader)):
        next(iter(sampler), None)  # an epoch's order is drawn when its first index is


def require_length(dataloader: Any) -> None:
    """For a second pass over the data.

    Raises:
        UsageError: they are a stream, whose passes the Trainer does not count: it would take the place for one in the first.
    """
    if _is_stream(dataloader):
        raise UsageError(
            "the stream ended before max_steps, and a checkpoint of a second pass could not be resumed: make it one long pass, with "
            "repeat() of a Hugging Face dataset say, or give a dataset with a length"
        )


def generates_ahead(args: Any) -> bool:
    """Whether a trainer generates for several batches at once, as TRL's GRPO and RLOO may."""
    return hasattr(args, "steps_per_generation")


def at_rest(args: Any, dataloader: Any, steps: int) -> bool:
    """Whether all that was generated is trained after `steps`."""
    if not generates_ahead(args):
        return True
    trained = steps % _steps_per_epoch(args, dataloader) * args.gradient_accumulation_steps
    return bool(trained % (args.steps_per_generation * args.num_iterations) == 0)


def _steps_per_epoch(args: Any, dataloader: Any) -> int:
    return -(-len(dataloader) // int(args.gradient_accumulation_steps))


def _sampler_of(dataloader: Any) -> Any:
    """What gives the loader its indices, below what accelerate put around it; None for a stream."""
    if _is_stream(dataloader):
        return None
    batch_sampler = dataloader.batch_sampler
    while hasattr(batch_sampler, "batch_sampler"):
        batch_sampler = batch_sampler.batch_sampler
    return batch_sampler.sampler


def _is_stream(dataloader: Any) -> bool:
    return isinstance(dataloader.dataset, IterableDataset)
