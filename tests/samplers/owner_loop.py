"""The reference loop: what core/sampling.py does with an owner, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cosmos_ctrl.core.state import EncodedState

Make = Callable[[], Any]


@dataclass
class Step:
    epoch: int
    item: Any
    state: Any
    """As it comes back from a checkpoint."""


def through_json(state: Any) -> Any:
    EncodedState.of(state)  # refuses what is not plain
    return json.loads(json.dumps(state))


class Loop:
    """Draws from an owner, fresh or resumed."""

    def __init__(self, owner: Any, at: Step | None = None) -> None:
        self.owner = owner
        self.epoch = 1 if at is None else at.epoch
        self._set_epoch()
        if at is None:
            # Of a fresh owner, as a checkpoint of step zero holds it.
            self.first_state = through_json(owner.state_dict())
        else:
            owner.load_state_dict(at.state)
        self._iterator = iter(owner)

    def draw(self) -> Step:
        for item in self._iterator:
            return self._step(item)
        self.epoch += 1
        self._set_epoch()
        self._iterator = iter(self.owner)
        for item in self._iterator:
            return self._step(item)
        raise ValueError(f"epoch {self.epoch} yields nothing")

    def epochs(self, last: int) -> list[Step]:
        """Everything up to the end of epoch `last`."""
        steps = []
        while True:
            for item in self._iterator:
                steps.append(self._step(item))
            if self.epoch == last:
                return steps
            self.epoch += 1
            self._set_epoch()
            self._iterator = iter(self.owner)

    def _step(self, item: Any) -> Step:
        return Step(self.epoch, item, through_json(self.owner.state_dict()))

    def _set_epoch(self) -> None:
        if hasattr(self.owner, "set_epoch"):
            self.owner.set_epoch(self.epoch)


def shown(steps: list[Step]) -> list[tuple[int, str]]:
    return [(step.epoch, repr(step.item)) for step in steps]


def check_every_position(make: Make, *, epochs: int = 3, stride: int = 1, second: int = 1) -> list[Step]:
    """Resume at every position of `epochs` epochs, and at every `second` of them once more from a resumed run's state."""
    loop = Loop(make())
    whole = loop.epochs(epochs)
    items = shown(whole)
    at_start = make()
    at_start.set_epoch(1)
    at_start.load_state_dict(loop.first_state)
    assert shown(Loop(at_start, Step(1, None, loop.first_state)).epochs(epochs)) == items, "from the first state"
    for position in range(0, len(whole), stride):
        at = whole[position]
        resumed = Loop(make(), at)
        assert resumed.owner.state_dict() == at.state, f"loaded, not begun, after {position + 1}"
        rest = resumed.epochs(epochs)
        assert shown(rest) == items[position + 1 :], f"after item {position + 1} of {len(whole)}, epoch {at.epoch}"
        later = position + 1 + (position % 3)
        if position % second == 0 and later < len(whole):
            again = Loop(make(), rest[later - position - 1]).epochs(epochs)
            assert shown(again) == items[later + 1 :], f"after {position + 1} and then {later + 1}"
    return whole
