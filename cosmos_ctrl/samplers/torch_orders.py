"""PyTorch's own samplers as orders that depend on seed and epoch alone.

* The sampler that the user holds is never changed: an order works on a shallow copy with a generator of its own, which it
  seeds anew at the beginning of every epoch.
* Only samplers whose code is known here are replayed; one that keeps its own state is restored through that.
* A sampler is asked for the length of its dataset, never for an item.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, Protocol

import torch
import torchdata.stateful_dataloader.sampler as torchdata_samplers
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from cosmos_ctrl.samplers.fingerprints import dataset_fingerprint
from cosmos_ctrl.samplers.seeds import epoch_seed
from cosmos_ctrl.samplers.values import from_json, to_json

_GENERATED = (RandomSampler, torchdata_samplers.RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_DISTRIBUTED = (DistributedSampler, torchdata_samplers.StatefulDistributedSampler)
_BATCHED = (BatchSampler, torchdata_samplers.BatchSampler)
_SHAPE = ("replacement", "num_samples", "num_replicas", "rank", "shuffle", "drop_last")


class Order(Protocol):
    """What a `RestorableSampler` iterates."""

    @property
    def own_seed(self) -> int | None:
        """The seed that the user gave to the sampler itself, if it has one."""

    @property
    def leaf(self) -> Leaf | None:
        """The sampler that keeps its own state, or None when seed, epoch and position say everything."""

    def configuration(self) -> dict[str, Any]:
        """What names the order, besides seed and epoch."""

    def begin(self, seed: int, epoch: int) -> Iterator[Any]:
        """The items of `epoch` from its start, or from where the leaf stands."""


def order_of(sampler: Any) -> Order:
    """The order of `sampler`.

    Raises:
        TypeError: it cannot be restored; the message says what can.
    """
    if isinstance(sampler, DataLoader):
        raise TypeError(f"a {type(sampler).__name__} is not a sampler: use RestorableLoader with a StatefulDataLoader")
    if isinstance(sampler, IterableDataset):
        raise TypeError(
            f"a {type(sampler).__name__} is a dataset, not a sampler: use StatefulSampler or RestorableLoader"
        )
    # Exactly these types: a subclass may draw in any way.
    kind = type(sampler)
    if kind in _BATCHED:
        return _Batches(sampler)
    if kind is SequentialSampler or kind in _GENERATED or kind in _DISTRIBUTED:
        return _Indices(sampler)
    if kind in (list, tuple, range):
        return _Listed(sampler)
    if callable(getattr(sampler, "state_dict", None)) and callable(getattr(sampler, "load_state_dict", None)):
        return Leaf(sampler)
    raise TypeError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be restored: it is none of PyTorch's own samplers and keeps no state. "
        "Give it state_dict() and load_state_dict(), or use cosmos_ctrl.samplers.SeekableSampler, or wrap it in "
        "ReplayedIterable if it gives the same items in every process"
    )


class _Indices:
    """A sampler of indices that draws from a generator or from its own epoch."""

    leaf = None

    def __init__(self, sampler: Any) -> None:
        self._sampler = copy(sampler)
        self.own_seed: int | None = None
        if type(sampler) in _GENERATED:
            generator = sampler.generator
            self.own_seed = None if generator is None else generator.initial_seed()
        if type(sampler) in _DISTRIBUTED:
            self.own_seed = sampler.seed
        if type(sampler) is torchdata_samplers.StatefulDistributedSampler:
            self._sampler.next_yielded = None  # a position of its own would be skipped once more

    def configuration(self) -> dict[str, Any]:
        sampler = self._sampler
        found: dict[str, Any] = {"sampler": _name(sampler)}
        if isinstance(sampler, SubsetRandomSampler):
            found |= {
                "length": len(sampler.indices),
                "indices": dataset_fingerprint(list(map(operator.index, sampler.indices))),
            }
        elif isinstance(sampler, WeightedRandomSampler):
            found |= {"length": len(sampler.weights), "weights": dataset_fingerprint([sampler.weights])}
        else:
            source: Any = sampler.dataset if isinstance(sampler, DistributedSampler) else sampler.data_source
            found["length"] = len(source)
        return found | {name: getattr(sampler, name) for name in _SHAPE if hasattr(sampler, name)}

    def begin(self, seed: int, epoch: int) -> Iterator[Any]:
        sampler = copy(self._sampler)  # so that no two passes share a generator
        if isinstance(sampler, DistributedSampler):
            sampler.seed = seed
            sampler.set_epoch(epoch)
        elif not isinstance(sampler, SequentialSampler):
            sampler.generator = torch.Generator()
            sampler.generator.manual_seed(epoch_seed(seed, epoch, "order"))
        return map(operator.index, sampler)


class _Listed:
    """Indices, or batches of them, that are written down."""

    own_seed = None
    leaf = None

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def configuration(self) -> dict[str, Any]:
        return {"sampler": "list", "length": len(self._items), "items": dataset_fingerprint(list(self._items))}

    def begin(self, seed: int, epoch: int) -> Iterator[Any]:
        return iter(self._items)


class Leaf:
    """A sampler that keeps its own state."""

    own_seed = None

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._kept: Any = None

    @property
    def leaf(self) -> Leaf:
        return self

    @property
    def deterministic(self) -> bool:
        """Whether it says so."""
        return bool(getattr(self._sampler, "deterministic", False))

    def configuration(self) -> dict[str, Any]:
        return {"sampler": _name(self._sampler), "compatibility": dict(getattr(self._sampler, "compatibility", {}))}

    def begin(self, seed: int, epoch: int) -> Iterator[Any]:
        for item in self._sampler:
            # Now, as a short last batch finds the sampler's end before its state is asked for.
            self._kept = to_json(self._sampler.state_dict())
            yield item

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler, if it wants to know."""
        self._kept = None
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)

    def state(self) -> Any:
        """The sampler's state right after its newest item, or the one that was loaded, as plain JSON."""
        return to_json(self._sampler.state_dict()) if self._kept is None else self._kept

    def load(self, state: Any) -> None:
        """Continue where `state` says."""
        self._kept = state
        self._sampler.load_state_dict(from_json(state))


class _Batches:
    """Batches of another order. A whole batch takes exactly its own indices, so the leaf's state is right after each."""

    def __init__(self, sampler: Any) -> None:
        self._batched = sampler
        self._inner = order_of(sampler.sampler)
        self.own_seed, self.leaf = self._inner.own_seed, self._inner.leaf

    def configuration(self) -> dict[str, Any]:
        batched = self._batched
        shape = {"batch_size": batched.batch_size, "drop_last": batched.drop_last}
        return {"sampler": "BatchSampler", **shape, "of": self._inner.configuration()}

    def begin(self, seed: int, epoch: int) -> Iterator[Any]:
        items = self._inner.begin(seed, epoch)
        return iter(BatchSampler(items, self._batched.batch_size, self._batched.drop_last))


def _name(sampler: Any) -> str:
    """The class, with its library: torch and torchdata draw differently under one name."""
    kind = type(sampler)
    return f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"
