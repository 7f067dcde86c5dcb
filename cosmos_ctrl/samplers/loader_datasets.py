"""Datasets inside a loader, so that the states that the library takes of them can be trusted.

* The library sends only what changed since a worker's last state, and compares with the objects it got then. A dataset that
  hands out the list or tensor it goes on changing would look unchanged, so states are copied when they are taken.
* The library asks for a state right after it loaded one, before the first item. A dataset that loads lazily, as Hugging
  Face's do, would answer with its beginning: until the first item, what was loaded is the state.
* A short last batch asks for more and finds the end before its state is taken, when some datasets have begun anew and others
  not. The state is the one right after the item, so an epoch's end always leads to one empty pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from cosmos_ctrl.samplers.loader_checks import has_state


class WatchedIterable(IterableDataset[Any]):
    """An iterable dataset whose iterators may keep a state."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(self.dataset)
        if has_state(iterator):
            copy_states(iterator)
        return iterator


class FaithfulIterable(WatchedIterable):
    """An iterable dataset that keeps a state."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self._kept: Any = None

    def __iter__(self) -> Iterator[Any]:
        iterator = super().__iter__()
        if has_state(iterator):  # it is asked itself, and answers at once
            self._kept = None
            return iterator
        return self._watched(iterator)

    def state_dict(self) -> Any:
        return deepcopy(self.dataset.state_dict() if self._kept is None else self._kept)

    def load_state_dict(self, state: Any) -> None:
        self._kept = deepcopy(state)
        self.dataset.load_state_dict(state)

    def _watched(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for item in iterator:
            self._kept = deepcopy(self.dataset.state_dict())
            yield item


class WorkerStart:
    """A ``worker_init_fn``: shows the user's code the dataset that the user gave. It travels to spawned workers."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker_id: int) -> None:
        """Prepare this worker."""
        info: Any = get_worker_info()
        if isinstance(info.dataset, WatchedIterable):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
        elif has_state(info.dataset):
            copy_states(info.dataset)
        if self._then is not None:
            self._then(worker_id)


def copy_states(keeper: Any) -> None:
    """Let `keeper` hand out copies of its state."""
    state_dict = keeper.state_dict
    keeper.state_dict = lambda: deepcopy(state_dict())
