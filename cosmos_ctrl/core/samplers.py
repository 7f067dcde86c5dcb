"""A sampler that is restored by arithmetic: seed, epoch and position say everything.

* The order of an epoch is a keyed permutation of ``range(length)`` that is computed a position at a time, so seeking costs
  the same anywhere, no epoch is ever materialised, and no library's random generator can change the order.
* A state of another length, seed or order is refused: it would name other prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from cosmos_ctrl.core.resume import require_count

_ROUNDS = 6


class SeekableSampler:
    """Indices 0 … length-1, in order or shuffled anew each epoch.

    The shuffle is a Feistel network over the next even power of two with cycle walking (Black and Rogaway, "Ciphers
    with Arbitrary Finite Domains", 2002), keyed by seed and epoch.
    """

    def __init__(self, length: int, *, shuffle: bool = True, seed: int = 0) -> None:
        self._length = require_count("length", length, least=1)
        self._shuffle = shuffle
        self._seed = require_count("seed", seed)
        self._half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
        self._epoch = 1
        self._position = 0

    def __len__(self) -> int:
        return self._length

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`, from 1, at its first index."""
        self._epoch = require_count("epoch", epoch, least=1)
        self._position = 0

    def __iter__(self) -> Iterator[int]:
        while self._position < self._length:
            index = self._index(self._position)
            self._position += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        """The position as plain JSON; right after a draw it points at the next index."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "length": self._length,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` says.

        Raises:
            ValueError: the state is of another length, seed or order, or is not one of ours; nothing changes.
        """
        own = self.state_dict()
        if type(state) is not dict or state.keys() != own.keys():
            raise ValueError(f"not a SeekableSampler state: expected the keys {sorted(own)}")
        for key in ("length", "seed", "shuffle"):
            if type(state[key]) is not type(own[key]) or state[key] != own[key]:
                raise ValueError(f"the saved position has {key}={state[key]!r}, this sampler {own[key]!r}")
        epoch = require_count("epoch", state["epoch"], least=1)
        position = require_count("position", state["position"])
        if position > self._length:
            raise ValueError(f"the saved position {position} lies beyond the {self._length} indices")
        self._epoch, self._position = epoch, position

    def _index(self, position: int) -> int:
        if not self._shuffle:
            return position
        value = self._permute(position)
        while value >= self._length:
            value = self._permute(value)
        return value

    def _permute(self, value: int) -> int:
        bits = self._half_bits
        mask = (1 << bits) - 1
        left, right = value >> bits, value & mask
        for round_ in range(_ROUNDS):
            digest = blake2b(f"{self._seed}/{self._epoch}/{round_}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        return left << bits | right
