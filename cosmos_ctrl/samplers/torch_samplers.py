"""PyTorch's samplers and batch samplers, restored by arithmetic and without touching the dataset.

* An epoch's order depends on (seed, epoch) only; the state is configuration, seed, epoch and position, and the last item
  given, so that an order that changed (with another torch, say) is found out.
* Restoring draws the epoch's indices again up to the position: it costs as much as drawing them did, and no dataset call.
* A sampler that keeps its own state is restored through it, also inside a batch sampler; its state is not looked into.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from cosmos_ctrl.core.resume import require_count
from cosmos_ctrl.core.state import same_value
from cosmos_ctrl.samplers.configurations import require_same, require_state
from cosmos_ctrl.samplers.seeds import require_given_seed
from cosmos_ctrl.samplers.torch_orders import order_of
from cosmos_ctrl.samplers.values import from_json, to_json

_NAME = "RestorableSampler"


class RestorableSampler:
    """An owner of the position around a sampler or batch sampler.

    Takes PyTorch's and torchdata's SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler,
    DistributedSampler, a list, any sampler with ``state_dict`` and ``load_state_dict``, and a BatchSampler of any of these.
    """

    def __init__(self, sampler: Any, *, seed: int | None = None) -> None:
        """Wrap `sampler`; it is copied where it draws, and never changed.

        Args:
            sampler: what to restore.
            seed: what its orders are derived from; otherwise its generator's seed or its own, otherwise torch's. One that
                is given must be the state's, one that is not gives way to it. A sampler with a state of its own has its own seed.

        Raises:
            TypeError: the sampler cannot be restored; the message says what can.
        """
        self._order = order_of(sampler)
        self._given_seed = None if seed is None else require_count("seed", seed)
        found = self._order.own_seed if seed is None else seed
        self._seed = torch.initial_seed() if found is None else found
        self._configuration = self._order.configuration()
        self._epoch, self._position = 1, 0
        self._last: Any = None
        self._iterator: Iterator[Any] | None = None

    @property
    def deterministic(self) -> bool:
        """Whether what follows depends only on the state and the epoch."""
        leaf = self._order.leaf
        return leaf is None or leaf.deterministic

    @property
    def compatibility(self) -> dict[str, Any]:
        """What a resumed run must share."""
        return dict(self._configuration)

    @property
    def seed(self) -> int:
        """What the orders are derived from."""
        return self._seed

    @property
    def replayed(self) -> bool:
        """Whether seed, epoch and position say everything: no sampler in it keeps a state of its own."""
        return self._order.leaf is None

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`, from 1, at its first item."""
        self._epoch = require_count("epoch", epoch, least=1)
        self._position, self._last, self._iterator = 0, None, None
        if self._order.leaf is not None:
            self._order.leaf.set_epoch(epoch)
        self._configuration = self._order.configuration()  # a dataset may have grown

    def __iter__(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = self._order.begin(self._seed, self._epoch)
        for item in self._iterator:
            self._position += 1
            self._last = list(item) if isinstance(item, list) else item  # the receiver may change its batch
            yield item

    def state_dict(self) -> dict[str, Any]:
        """The position as plain JSON; right after an item it points at the next one."""
        state = {"type": _NAME, "configuration": self._configuration, "epoch": self._epoch}
        if self._order.leaf is not None:
            return state | {"state": self._order.leaf.state()}
        return state | {"seed": self._seed, "position": self._position, "last": to_json(self._last, "item")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` says.

        Raises:
            ValueError: the state is of another configuration or seed, or the order has changed; nothing changes then.
        """
        leaf = self._order.leaf
        keys = {"configuration", "epoch", "state"} if leaf is not None else _REPLAYED
        state = require_state(_NAME, state, keys)
        require_same(_NAME, state["configuration"], self._configuration)
        if leaf is not None:
            self.set_epoch(state["epoch"])
            leaf.load(state["state"])
            return
        seed = require_given_seed(_NAME, state["seed"], self._given_seed)
        iterator = self._skipped(state, seed)
        self._epoch, self._position, self._seed = state["epoch"], state["position"], seed
        self._last, self._iterator = from_json(state["last"]), iterator

    def _skipped(self, state: dict[str, Any], seed: int) -> Iterator[Any]:
        """The epoch's items after the position, which are known to be those that would have come."""
        position = state["position"]
        iterator = self._order.begin(seed, state["epoch"])
        last = None
        if position:
            last = next(islice(iterator, position - 1, None), None)
        if not same_value(to_json(last, "item"), state["last"]):
            raise ValueError(
                f"item {position} of epoch {state['epoch']} was {state['last']!r}, but is {last!r} now: the order has changed "
                "under the same configuration and seed. Resume with the version of torch and the sampler that it was saved with"
            )
        return iterator


_REPLAYED = {"configuration", "epoch", "seed", "position", "last"}
