"""Any object with ``state_dict`` and ``load_state_dict`` as an owner of the sampling position.

* The object's state is encoded right after each item, as what it is then: tensors, arrays and tuples included, and nothing
  shared with the live object.
* A map-style object is gone through by index; the index is part of the state, beside what the object says.
* A Hugging Face stream whose own state would skip examples (`huggingface`) is replayed instead.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from cosmos_ctrl.core.resume import require_count
from cosmos_ctrl.samplers.configurations import require_same, require_state
from cosmos_ctrl.samplers.huggingface import state_is_exact
from cosmos_ctrl.samplers.replays import Replay
from cosmos_ctrl.samplers.values import from_json, to_json

_NAME = "StatefulSampler"


class StatefulSampler:
    """An owner of the position around an object that keeps its own state."""

    def __init__(
        self, wrapped: Any, *, deterministic: bool = False, compatibility: dict[str, Any] | None = None
    ) -> None:
        """Wrap an object; it is not asked for anything yet.

        Args:
            wrapped: iterable, or map-style with a length; told each epoch if it has ``set_epoch``. Its state right after an
                epoch's last item must lead to the end of that epoch, not to the start of another.
            deterministic: what follows depends only on its state and the epoch.
            compatibility: plain JSON that a resumed run must share.

        Raises:
            TypeError: it has no state, or another class here is for it.
            ValueError: it holds a stream that is shuffled without a seed, or begins anew by itself.
        """
        kind = f"{type(wrapped).__module__}.{type(wrapped).__qualname__}"
        torch_data = sys.modules.get("torch.utils.data")
        if torch_data is not None and isinstance(wrapped, torch_data.DataLoader):
            raise TypeError(f"a {kind} is a loader: use RestorableLoader with a StatefulDataLoader")
        if not callable(getattr(wrapped, "state_dict", None)) or not callable(
            getattr(wrapped, "load_state_dict", None)
        ):
            raise TypeError(
                f"a {kind} keeps no state: give it state_dict() and load_state_dict(), or use RestorableSampler for PyTorch's "
                "samplers, or ReplayedIterable if it gives the same items in every process"
            )
        if getattr(wrapped, "restart_on_stop_iteration", False):  # torchdata.nodes.Loader
            raise ValueError(
                f"a {kind} with restart_on_stop_iteration=True begins another epoch when it is restored at the end of one, so the "
                "epochs would be miscounted: make it with restart_on_stop_iteration=False"
            )
        self._by_index = not isinstance(wrapped, Iterable)
        if self._by_index and not (hasattr(wrapped, "__getitem__") and hasattr(wrapped, "__len__")):
            raise TypeError(f"a {kind} is neither iterable nor map-style with a length")
        self.deterministic = deterministic
        """What follows depends only on the state and the epoch."""
        self._wrapped = wrapped
        self._exact = state_is_exact(wrapped)
        given = from_json(to_json(compatibility or {}, "compatibility"))
        self._configuration = {"of": kind, "restored_by": "state" if self._exact else "replay", **given}
        self._epoch, self._position = 1, 0
        self._replay = Replay()
        self._kept: dict[str, Any] | None = None
        self._iterator: Iterator[Any] | None = None

    @property
    def compatibility(self) -> dict[str, Any]:
        """What a resumed run must share."""
        return dict(self._configuration)

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`, from 1."""
        self._epoch, self._position = require_count("epoch", epoch, least=1), 0
        self._replay, self._kept, self._iterator = Replay(), None, None
        if hasattr(self._wrapped, "set_epoch"):
            self._wrapped.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = self._begin()
        for item in self._iterator:
            self._position += 1
            if not self._exact:
                self._replay.note(item)
            self._kept = self._made()
            yield item

    def state_dict(self) -> dict[str, Any]:
        """The position as plain JSON: the state right after the newest item, or the one that was loaded.

        Raises:
            TypeError: the object's state holds something that would not come back the same.
        """
        return self._kept or self._made()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` says.

        Raises:
            ValueError: the state is of another configuration.
        """
        state = require_state(_NAME, state, {"configuration", "epoch", "position", "digest", "state"})
        require_same(_NAME, state["configuration"], self._configuration)
        self.set_epoch(state["epoch"])
        self._position, self._kept = state["position"], state
        if self._exact:
            self._wrapped.load_state_dict(from_json(state["state"]))

    def _begin(self) -> Iterator[Any]:
        if self._by_index:
            return (self._wrapped[index] for index in range(self._position, len(self._wrapped)))
        items: Iterator[Any] = iter(self._wrapped)
        if not self._exact and self._kept is not None and self._position:
            self._replay.repeat(items, self._position, self._kept["digest"])
        return items

    def _made(self) -> dict[str, Any]:
        where = {"epoch": self._epoch, "position": self._position, "digest": self._replay.digest}
        state = to_json(self._wrapped.state_dict()) if self._exact else None
        return {"type": _NAME, "configuration": self._configuration, **where, "state": state}
