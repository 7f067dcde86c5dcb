"""Loaders that cannot be restored are refused when they are wrapped, and batches that are no lists of samples when they come."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

from cosmos_ctrl.samplers.huggingface import is_streaming


def has_state(value: Any) -> bool:
    """Whether `value` says that it can be saved and restored."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def require_restorable(loader: Any) -> None:
    """Refuse a loader that could not be restored.

    Raises:
        TypeError: it is of another kind.
        ValueError: it was used already, or is set up in a way that loses the position.
    """
    if not isinstance(loader, StatefulDataLoader):
        raise TypeError(
            f"a {type(loader).__module__}.{type(loader).__qualname__} keeps no position: use "
            "torchdata.stateful_dataloader.StatefulDataLoader, which takes the same arguments as torch's DataLoader"
        )
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        raise TypeError("a DataPipe draws seeds of its own and cannot be restored: use a Dataset or an IterableDataset")
    if loader._iterator is not None or loader.next_iter_state is not None:
        raise ValueError(
            "the loader was iterated, or asked for or given a state already, and its later states would not move: "
            "wrap it right after it is made"
        )
    if loader.num_workers:
        _require_restorable_workers(loader)
    elif loader.timeout:
        raise ValueError(f"timeout={loader.timeout} needs workers, and there are none: leave it out")


def _require_restorable_workers(loader: StatefulDataLoader[Any]) -> None:
    if not loader.in_order:
        raise ValueError(
            "in_order=False gives batches in another order each time, so no position can be kept: use in_order=True"
        )
    if not loader.persistent_workers or is_streaming(loader.dataset):  # those hold the epoch in shared memory
        return
    if hasattr(loader.dataset, "set_epoch"):
        raise ValueError(
            "persistent_workers=True keeps copies of the dataset that set_epoch does not reach, so every epoch would be the "
            "first: use persistent_workers=False"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            "persistent_workers=True carries copies of the dataset from epoch to epoch, and what one says of itself between two "
            "epochs may be the end of one or the start of the other: use persistent_workers=False"
        )


def samples_of(batch: Any, collate_fn: Any) -> list[Any]:
    """`batch` as the list of its samples.

    Raises:
        TypeError: it was collated into something else.
    """
    if isinstance(batch, torch.Tensor) and batch.dim() == 1:
        return list(batch.tolist())
    # The default collation turns samples that are sequences into one sequence per field: a list, but not of samples.
    if type(batch) in (list, tuple) and (
        collate_fn is not default_collate or all(isinstance(sample, str | bytes) for sample in batch)
    ):
        return list(batch)
    raise TypeError(
        f"the loader's batch is a {type(batch).__module__}.{type(batch).__qualname__} that its collate_fn made of the samples, "
        "expected a list of them: give the StatefulDataLoader collate_fn=list"
    )
