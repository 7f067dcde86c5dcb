"""Restoring by replay: iterate the epoch from its start and drop what was given already.

* Every item given is noted in a running digest, so a replay that goes another way is found out and refused: what it drops
  must be what was given, or something would be skipped.
* It costs as much as it cost to come here. Nothing is asked of the iterable but to begin the epoch again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Any

from cosmos_ctrl.core.resume import require_count
from cosmos_ctrl.samplers.configurations import require_same, require_state
from cosmos_ctrl.samplers.fingerprints import value_digest
from cosmos_ctrl.samplers.values import from_json, to_json

_NAME = "ReplayedIterable"


class Replay:
    """What was given in an epoch so far: how much, and a digest of it."""

    def __init__(self) -> None:
        self.position = 0
        self.digest = ""

    def note(self, item: Any) -> None:
        """Count `item` as given.

        Raises:
            TypeError: it has no digest, so a replay could not be checked.
        """
        running = bytes.fromhex(self.digest) + value_digest(item, f"item {self.position}")
        self.digest = sha256(running).hexdigest()[:32]
        self.position += 1

    def repeat(self, items: Iterator[Any], position: int, digest: str) -> None:
        """Drop the first `position` of `items`, which must have `digest`.

        Raises:
            ValueError: they are other items than were given.
        """
        for item in items:
            self.note(item)
            if self.position == position:
                break
        if self.position != position:
            raise ValueError(
                f"the replay ended after {self.position} items, but {position} were given: the data is not what it was"
            )
        if self.digest != digest:
            raise ValueError(
                f"the first {position} items of the epoch are not those that were given: the data or its order differs between "
                "processes, and going on would skip some. Make the order depend on the epoch and a fixed seed only, or give the "
                "dataset state_dict() and load_state_dict()"
            )


class ReplayedIterable:
    """An owner of the position around an iterable without state that gives the same items in every process."""

    deterministic = True
    """Declared by using this class; a replay that differs is refused."""

    def __init__(self, iterable: Iterable[Any], *, compatibility: dict[str, Any] | None = None) -> None:
        """Wrap `iterable`, which is told each epoch if it has ``set_epoch``.

        Args:
            iterable: begins its items again at every ``iter()``; plain values, tensors or arrays.
            compatibility: plain JSON that a resumed run must share, such as the names and digests of the files.

        Raises:
            TypeError: it is not iterable, or an iterator, which begins only once.
        """
        if not isinstance(iterable, Iterable):
            raise TypeError(f"a {type(iterable).__name__} is not iterable")
        if isinstance(iterable, Iterator):
            raise TypeError(
                f"a {type(iterable).__name__} is an iterator and cannot begin again: give an object whose __iter__ makes a new one"
            )
        self._iterable = iterable
        self._configuration = {
            "of": type(iterable).__qualname__,
            **from_json(to_json(compatibility or {}, "compatibility")),
        }
        self._epoch = 1
        self._replay = Replay()
        self._pending: tuple[int, str] | None = None
        self._iterator: Iterator[Any] | None = None

    @property
    def compatibility(self) -> dict[str, Any]:
        """What a resumed run must share."""
        return dict(self._configuration)

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`, from 1, at its first item."""
        self._epoch = require_count("epoch", epoch, least=1)
        self._replay, self._pending, self._iterator = Replay(), None, None
        if hasattr(self._iterable, "set_epoch"):
            self._iterable.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = iter(self._iterable)
            if self._pending is not None:
                pending, self._pending = self._pending, None
                self._replay.repeat(self._iterator, *pending)
        for item in self._iterator:
            self._replay.note(item)
            yield item

    def state_dict(self) -> dict[str, Any]:
        """The position as plain JSON; right after an item it points at the next one."""
        position, digest = self._pending or (self._replay.position, self._replay.digest)
        where = {"epoch": self._epoch, "position": position, "digest": digest}
        return {"type": _NAME, "configuration": self._configuration, **where}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` says; the replay happens at the first item.

        Raises:
            ValueError: the state is of another configuration.
        """
        state = require_state(_NAME, state, {"configuration", "epoch", "position", "digest"})
        require_same(_NAME, state["configuration"], self._configuration)
        self.set_epoch(state["epoch"])
        if state["position"]:
            self._pending = (state["position"], state["digest"])
