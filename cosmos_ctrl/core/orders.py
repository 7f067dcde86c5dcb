"""Which index stands at a position of an epoch: pure functions, computed a position at a time.

* An order is named by its seed and epoch; nothing is drawn from a generator, so any position is reached without those before it.
* A shuffled epoch is a permutation of ``range(length)``: each index once.
* A weighted epoch draws each position for itself, with replacement; an index of weight zero is never drawn.
* No epoch is ever materialised, and no library's random generator can change an order.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b, sha256

Order = Callable[[int], int]
"""The index at a position of one epoch."""

_MASK = (1 << 64) - 1
_FIRST, _SECOND = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53  # MurmurHash3's multipliers
_ROUND_PAIRS = 4
_LEAST_SIDE = 4  # below that too few permutations can be reached


def sequential(position: int) -> int:
    """The order of an epoch that is not shuffled."""
    return position


def shuffled(length: int, *, seed: int, epoch: int) -> Order:
    """A keyed permutation of ``range(length)``.

    A generalised Feistel network over a rectangle that just covers the range, with cycle walking (Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains", 2002).
    """
    rows = max(_LEAST_SIDE, math.isqrt(length - 1) + 1)
    columns = max(_LEAST_SIDE, -(-length // rows))
    keys = _words(f"shuffled/{seed}/{epoch}", 2 * _ROUND_PAIRS)
    rounds = tuple(zip(keys[::2], keys[1::2], strict=True))

    def index_at(position: int) -> int:
        value = position
        while True:
            row, column = divmod(value, columns)
            # Each round adds a keyed 64-bit hash of the other coordinate; it is written out, as a call would double the cost.
            for row_key, column_key in rounds:
                word = (((column ^ row_key) * _FIRST & _MASK) >> 29) * _SECOND & _MASK
                row = (row + (word ^ word >> 32)) % rows
                word = (((row ^ column_key) * _FIRST & _MASK) >> 29) * _SECOND & _MASK
                column = (column + (word ^ word >> 32)) % columns
            value = row * columns + column
            if value < length:
                return value

    return index_at


class Weights:
    """Weights of the indices, prepared for drawing: once O(n), then O(1) a draw (Vose's alias method, 1991)."""

    def __init__(self, weights: Sequence[float]) -> None:
        """Check and prepare `weights`.

        Raises:
            TypeError: a weight is not a number.
            ValueError: a weight is negative or not finite, or all are zero.
        """
        checked = [_weight(index, weight) for index, weight in enumerate(weights)]
        try:
            total = math.fsum(checked)
        except OverflowError:
            total = math.inf
        if not 0 < total < math.inf:
            raise ValueError(f"the weights add up to {total}, expected a finite sum above zero: scale them")
        packed = struct.pack(f"<{len(checked)}d", *checked)
        self.digest = f"sha256:{sha256(packed).hexdigest()}"
        # Those of weight zero get no cell, so that no rounding can draw them.
        self._indices = [index for index, weight in enumerate(checked) if weight]
        count = len(self._indices)
        shares = [checked[index] / total * count for index in self._indices]
        self._chance, self._alias = [1.0] * count, list(range(count))
        small = [cell for cell, share in enumerate(shares) if share < 1]
        large = [cell for cell, share in enumerate(shares) if share >= 1]
        while small and large:
            low, high = small.pop(), large[-1]
            self._chance[low], self._alias[low] = shares[low], high
            shares[high] -= 1 - shares[low]
            if shares[high] < 1:
                small.append(large.pop())

    def order(self, *, seed: int, epoch: int) -> Order:
        """The draws of an epoch, each from a counter-based hash of its position."""
        indices, chance, alias = self._indices, self._chance, self._alias
        count = len(indices)
        key = _key(f"weighted/{seed}/{epoch}")

        def index_at(position: int) -> int:
            digest = blake2b(position.to_bytes(16, "little"), digest_size=16, key=key).digest()
            cell = int.from_bytes(digest[:8], "little") * count >> 64
            fraction = (int.from_bytes(digest[8:], "little") >> 11) * 2.0**-53
            return indices[cell if fraction < chance[cell] else alias[cell]]

        return index_at


def _weight(index: int, weight: float) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise TypeError(f"weights[{index}] must be a number, not {type(weight).__name__}: {weight!r}")
    try:
        value = float(weight)
    except OverflowError:
        value = math.inf
    if not 0 <= value < math.inf:
        raise ValueError(f"weights[{index}] is {weight!r}, expected a finite number of at least zero")
    return value + 0.0  # -0.0 is 0.0


def _key(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=64).digest()


def _words(name: str, count: int) -> tuple[int, ...]:
    return struct.unpack(f"<{count}Q", _key(name)[: 8 * count])
