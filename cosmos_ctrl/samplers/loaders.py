"""torchdata's StatefulDataLoader as an owner of the sampling position.

* The loader that the user holds is not changed: the wrapper works on a shallow copy, with a sampler and a generator that are
  seeded from (seed, epoch) at the beginning of every epoch.
* The library's state is taken right after each item, from its snapshot for that item: prefetching never runs ahead of it.
* A position is refused under another configuration before the library sees it: the library itself would accept most.
* What keeps no state is replayed and checked (`replays`); what could not be restored is refused when it is wrapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.incremental_state import _DATASET_ITER_STATE, _FETCHER_ENDED, _FETCHER_STATE
from torchdata.stateful_dataloader.stateful_dataloader import _INDEX_SAMPLER_STATE

from cosmos_ctrl.core.resume import require_count
from cosmos_ctrl.samplers.configurations import require_same, require_state
from cosmos_ctrl.samplers.fingerprints import dataset_fingerprint
from cosmos_ctrl.samplers.huggingface import state_is_exact
from cosmos_ctrl.samplers.loader_checks import has_state, require_restorable, samples_of
from cosmos_ctrl.samplers.loader_datasets import FaithfulIterable, WatchedIterable, WorkerStart
from cosmos_ctrl.samplers.replays import Replay
from cosmos_ctrl.samplers.seeds import epoch_seed, require_given_seed
from cosmos_ctrl.samplers.torch_samplers import RestorableSampler
from cosmos_ctrl.samplers.values import from_json, to_json

_NAME = "RestorableLoader"
_KEYS = {"configuration", "seed", "epoch", "position", "digest", "order", "library"}


class RestorableLoader:
    """An owner of the position around a `StatefulDataLoader`: items with ``batch_size=None``, else lists of samples."""

    def __init__(
        self, loader: StatefulDataLoader[Any], *, fingerprint: str | None = None, seed: int | None = None
    ) -> None:
        """Wrap `loader`, which must be fresh.

        Args:
            loader: over a map-style or an iterable dataset, with any number of workers.
            fingerprint: what the dataset holds. By default a map-style dataset is read once for it (`dataset_fingerprint`),
                and an iterable one has none.
            seed: what its orders are derived from; otherwise its generator's seed, otherwise torch's. One that is given must
                be the state's, one that is not gives way to it.

        Raises:
            TypeError: it is not a StatefulDataLoader, or its sampler cannot be restored.
            ValueError: it was iterated already, or is set up in a way that cannot be restored.
        """
        require_restorable(loader)
        self._dataset = loader.dataset
        self._loader = copy(loader)
        own = vars(self._loader)  # past DataLoader.__setattr__, which guards the user's object and not this copy
        own["generator"] = torch.Generator()
        if loader.num_workers:
            own["worker_init_fn"] = WorkerStart(loader.worker_init_fn)
        self._given_seed = None if seed is None else require_count("seed", seed)
        self._index: RestorableSampler | None = None
        if isinstance(loader.dataset, IterableDataset):
            drawn = torch.initial_seed() if loader.generator is None else loader.generator.initial_seed()
            self._seed = drawn if seed is None else seed
            self._seeks = has_state(loader.dataset) and state_is_exact(loader.dataset)
            own["dataset"] = (FaithfulIterable if self._seeks else WatchedIterable)(loader.dataset)
        else:
            name = "sampler" if loader.batch_sampler is None else "batch_sampler"
            self._index = own[name] = RestorableSampler(getattr(loader, name), seed=seed)
            self._seed = self._index.seed
            self._seeks = True
        self._configuration = _configuration(loader, self._index, fingerprint)
        self._epoch, self._used = 1, False
        self._stage: Literal["ready", "begun", "over"] = "ready"
        self._position, self._digest = 0, ""
        self._state: dict[str, Any] | None = None
        self._replay = Replay()

    @property
    def deterministic(self) -> bool:
        """Whether what follows depends only on the state and the epoch: an iterable dataset has to say so itself."""
        if self._index is not None:
            return self._index.deterministic
        return bool(getattr(self._dataset, "deterministic", False))

    @property
    def compatibility(self) -> dict[str, Any]:
        """What a resumed run must share."""
        return dict(self._configuration)

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`, from 1, at its first item; the samplers and the dataset are told where they want to know."""
        self._epoch = require_count("epoch", epoch, least=1)
        self._stage, self._position, self._digest = "ready", 0, ""
        self._state, self._replay = None, Replay()
        if self._index is not None:
            self._index.set_epoch(epoch)
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        if self._stage == "over":
            return
        if self._stage == "begun":
            raise RuntimeError(
                f"epoch {self._epoch} is under way, and what was loaded ahead in it would be skipped: go on with its iterator, "
                "or begin an epoch with set_epoch"
            )
        self._state = self.state_dict()  # while nothing is loaded ahead
        self._stage, self._used = "begun", True
        self._loader.generator.manual_seed(epoch_seed(self._seed, self._epoch, "workers"))
        items = map(self._given, iter(self._loader))
        if self._digest:
            self._replay.repeat(items, self._position, self._digest)
        for item in items:
            self._position += 1
            self._state = self._made(item)
            yield item
        self._stage = "over"

    def state_dict(self) -> dict[str, Any]:
        """The position as plain JSON: the state right after the newest item, or the one that was loaded."""
        if self._state is None:
            order = None if self._index is None else self._index.state_dict()
            self._state = self._stated(order=order)
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` says.

        Raises:
            RuntimeError: this loader has given items already.
            ValueError: the state is of another configuration or seed, or the order has changed; the library was not touched.
        """
        if self._used:
            raise RuntimeError(f"this {_NAME} has been iterated: load the state into a fresh one, before iter()")
        state = require_state(_NAME, state, _KEYS)
        require_same(_NAME, state["configuration"], self._configuration)
        seed = require_given_seed(_NAME, state["seed"], self._given_seed)
        library = from_json(state["library"])
        order = state["order"] or _found(library, _INDEX_SAMPLER_STATE)
        if self._index is not None and self._index.replayed:
            self._index.load_state_dict(order)  # to refuse it now: the library loads it only at the first item
        self._seed = seed
        self.set_epoch(state["epoch"])
        if self._index is not None and not library:
            self._index.load_state_dict(order)
        if library:
            self._loader.load_state_dict(_asked_once_more(library))
        self._position, self._digest, self._state = state["position"], state["digest"], state

    def _given(self, item: Any) -> Any:
        return item if self._loader.batch_sampler is None else samples_of(item, self._loader.collate_fn)

    def _made(self, item: Any) -> dict[str, Any]:
        library = self._loader.state_dict()
        # An iterator may keep the state where the dataset has none; that is seen only once there is one.
        if self._seeks or _iterator_keeps_state(library):
            return self._stated(library=to_json(library, "the loader's state"))
        self._replay.note(item)
        return self._stated(digest=self._replay.digest)

    def _stated(self, *, order: Any = None, library: Any = None, digest: str = "") -> dict[str, Any]:
        where = {"epoch": self._epoch, "position": self._position, "digest": digest, "order": order, "library": library}
        return {"type": _NAME, "configuration": self._configuration, "seed": self._seed, **where}


def _configuration(
    loader: StatefulDataLoader[Any], index: RestorableSampler | None, fingerprint: str | None
) -> dict[str, Any]:
    dataset = loader.dataset
    if fingerprint is None:
        fingerprint = "" if index is None else dataset_fingerprint(dataset)
    return {
        "dataset": "iterable" if index is None else "map-style",
        "length": len(dataset) if index is not None and hasattr(dataset, "__len__") else None,
        "fingerprint": fingerprint,
        "num_workers": loader.num_workers,
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "sampler": None if index is None else index.compatibility,
    }


def _found(state: Any, key: str) -> Any:
    """The first value under `key` that is not None, however deep the library keeps it."""
    if not isinstance(state, dict):
        return None
    if state.get(key) is not None:
        return state[key]
    return next((value for value in (_found(inner, key) for inner in state.values()) if value is not None), None)


def _asked_once_more(library: Any) -> Any:
    """With workers the library asks a restored dataset once more even if it had ended; so it shall be without them."""
    if library.get(_FETCHER_STATE):
        library[_FETCHER_STATE][_FETCHER_ENDED] = False
    return library


def _iterator_keeps_state(library: Any) -> bool:
    return _found(library, _DATASET_ITER_STATE) is not None
