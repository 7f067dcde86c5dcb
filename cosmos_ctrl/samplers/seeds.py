"""Seeds of an epoch, derived from the run's seed, so that an order depends on nothing that happened before."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any


def epoch_seed(seed: int, epoch: int, purpose: str) -> int:
    """63 bits for one generator in one epoch."""
    digest = blake2b(f"{purpose}/{seed}/{epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def require_given_seed(owner: str, saved: Any, given: int | None) -> int:
    """The seed of a saved position, unless the user asked for another one.

    Raises:
        ValueError: the seed that was given to `owner` is not the one that was saved.
    """
    if type(saved) is not int:
        raise ValueError(f"the saved position has the seed {saved!r}, expected an int")
    if given not in (None, saved):
        raise ValueError(f"the saved position has seed={saved}, this {owner} was given {given}: give that one, or none")
    return saved
