"""A sampler that is restored by arithmetic: seed, epoch and position say everything.

* The index at a position is computed from seed and epoch alone, so seeking costs the same anywhere (`orders`).
* The shards of an epoch partition it: each position belongs to one rank, none is padded and none dropped, also when uneven.
* A state of another length, seed, order, weights or shard is refused: it would name other prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cosmos_ctrl.core.orders import Order, Weights, sequential, shuffled
from cosmos_ctrl.core.resume import require_count
from cosmos_ctrl.core.state import same_value


class SeekableSampler:
    """Indices below `length`: in order, shuffled anew each epoch, or drawn by weight; all of them or a rank's share."""

    deterministic = True
    """What follows depends only on the state and the epoch."""

    def __init__(
        self,
        length: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        weights: Sequence[float] | None = None,
        shard: tuple[int, int] | None = None,
    ) -> None:
        """Describe the order; nothing is drawn.

        Args:
            length: indices, and positions of an epoch before it is sharded.
            shuffle: a new order each epoch; False: 0, 1, 2 …
            seed: what the orders are derived from.
            weights: a finite number of at least zero for each index: an epoch is `length` draws with replacement.
            shard: ``(rank, of)``: only the positions ``rank``, ``rank + of``, … of each epoch.
        """
        self._length = require_count("length", length, least=1)
        if type(shuffle) is not bool:
            raise TypeError(f"shuffle must be a bool, not {type(shuffle).__name__}: {shuffle!r}")
        self._shuffle = shuffle
        self._seed = require_count("seed", seed)
        self._rank, self._of = (0, 1) if shard is None else _checked_shard(shard)
        if weights is not None and len(weights) != length:
            raise ValueError(f"there are {len(weights)} weights for {length} indices: give one weight for each index")
        if weights is not None and not shuffle:
            raise ValueError("weights and shuffle=False exclude each other: a weighted epoch is drawn at random")
        self._weights = None if weights is None else Weights(weights)
        self._count = max(0, -(-(length - self._rank) // self._of))
        self._epoch = 1
        self._position = 0

    @property
    def compatibility(self) -> dict[str, Any]:
        """What a resumed run must share."""
        return {
            "length": self._length,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "weights": None if self._weights is None else self._weights.digest,
            "shard": [self._rank, self._of],
        }

    def __len__(self) -> int:
        """Indices an epoch gives here."""
        return self._count

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`, from 1, at its first index."""
        self._epoch = require_count("epoch", epoch, least=1)
        self._position = 0

    def __iter__(self) -> Iterator[int]:
        rank, of, last = self._rank, self._of, self._count
        epoch, index_at = self._epoch, self._order()
        while self._position < last:
            if epoch != self._epoch:  # a living iterator follows `set_epoch` and `load_state_dict`
                epoch, index_at = self._epoch, self._order()
            index = index_at(rank + self._position * of)
            self._position += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        """The position as plain JSON; right after a draw it points at the next index."""
        return {"epoch": self._epoch, "position": self._position, **self.compatibility}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` says.

        Raises:
            ValueError: the state is of another configuration, or is not one of ours; nothing changes.
        """
        own = self.compatibility
        if type(state) is not dict or state.keys() != own.keys() | {"epoch", "position"}:
            raise ValueError(f"not a SeekableSampler state: expected the keys {sorted(self.state_dict())}")
        other = [key for key in own if not same_value(state[key], own[key])]
        if other:
            differences = "; ".join(f"{key} was {state[key]!r}, here {own[key]!r}" for key in other)
            raise ValueError(f"the saved position belongs to another sampler: {differences}. Build it as it was")
        epoch = require_count("epoch", state["epoch"], least=1)
        position = require_count("position", state["position"])
        if position > self._count:
            raise ValueError(f"the saved position {position} lies beyond the {self._count} indices")
        self._epoch, self._position = epoch, position

    def _order(self) -> Order:
        if self._weights is not None:
            return self._weights.order(seed=self._seed, epoch=self._epoch)
        if self._shuffle:
            return shuffled(self._length, seed=self._seed, epoch=self._epoch)
        return sequential


def _checked_shard(shard: tuple[int, int]) -> tuple[int, int]:
    if type(shard) is not tuple or len(shard) != 2:
        raise TypeError(f"shard must be a tuple (rank, of), not {shard!r}")
    of = require_count("shard[1], the number of shards,", shard[1], least=1)
    rank = require_count("shard[0], the rank,", shard[0])
    if rank >= of:
        raise ValueError(f"shard has rank {rank} of {of}: ranks count from 0 to {of - 1}")
    return rank, of
