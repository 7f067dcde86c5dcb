"""Datasets of every kind, importable by loader workers."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader


def loader(dataset: Any, **options: Any) -> StatefulDataLoader[Any]:
    """Workers are forked: importing torch anew takes seconds."""
    if options.get("num_workers"):
        options.setdefault("multiprocessing_context", "fork")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)  # torchdata 0.11 with torch 2.13
        return StatefulDataLoader(dataset, **options)


def share(items: Any) -> Any:
    """This worker's part of `items`."""
    info = get_worker_info()
    return items if info is None else items[info.id :: info.num_workers]


class Texts(Dataset[str]):
    """Map-style, and it counts its calls."""

    def __init__(self, length: int = 11) -> None:
        self.length, self.calls = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> str:
        self.calls += 1
        if not 0 <= index < self.length:
            raise IndexError(index)
        return f"text {index}"


class Untouchable(Texts):
    def __getitem__(self, index: int) -> str:
        raise AssertionError("the dataset was read")


class Pairs(Texts):
    def __getitem__(self, index: int) -> Any:
        return f"question {index}", f"answer {index}"


class Counting(Texts):
    """Map-style with a state: how often it was read."""

    def __init__(self, length: int = 11) -> None:
        super().__init__(length)
        self.state = {"reads": [0]}

    def __getitem__(self, index: int) -> str:
        self.state["reads"][0] += 1
        return f"{super().__getitem__(index)}, read {self.state['reads'][0]}"

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class EpochTexts(Texts):
    """Map-style, and its texts name the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> str:
        return f"text {index} of epoch {self.epoch}"


class Lines(IterableDataset[str]):
    """Iterable, without state, other lines each epoch."""

    epoch = 0

    def __init__(self, length: int = 11) -> None:
        self.length = length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[str]:
        return (f"line {i} of epoch {self.epoch}" for i in share(range(self.length)))


class PlainLines(IterableDataset[str]):
    """Iterable, without state and without epochs."""

    def __iter__(self) -> Iterator[str]:
        return (f"line {i}" for i in share(range(11)))


class ShuffledLines(PlainLines):
    """Shuffled by the process's own random generator."""

    def __iter__(self) -> Iterator[str]:
        lines = [f"line {i}" for i in share(range(11))]
        random.shuffle(lines)
        return iter(lines)


class StatefulLines(IterableDataset[Any]):
    """Iterable, with a state that is live, nested and changed in place, and holds a tensor and a tuple."""

    def __init__(self, length: int = 11) -> None:
        self.length = length
        self.state: dict[str, Any] = {"at": [0], "tensor": torch.zeros(2), "tuple": (1, "a"), 7: None}

    def __iter__(self) -> Iterator[Any]:
        lines = share(range(self.length))
        while self.state["at"][0] < len(lines):
            self.state["at"][0] += 1
            self.state["tensor"] += 1
            yield f"line {lines[self.state['at'][0] - 1]}, {self.state['tensor'].tolist()}"
        self.state["at"][0] = 0

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        assert type(state["tensor"]) is torch.Tensor
        assert state["tuple"] == (1, "a")
        self.state = state


class LazyLines(IterableDataset[str]):
    """Iterable, and what it loads becomes its state only when it is iterated, as with Hugging Face's."""

    def __init__(self, length: int = 11) -> None:
        self.length, self.at, self.starting = length, 0, 0

    def __iter__(self) -> Iterator[str]:
        lines = share(range(self.length))
        self.at, self.starting = self.starting, 0
        while self.at < len(lines):
            self.at += 1
            yield f"line {lines[self.at - 1]}"

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.starting = state["at"]


class IteratorLines(IterableDataset[str]):
    """Iterable whose iterators keep the state, and it does not."""

    def __init__(self, length: int = 11) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return _LineIterator(self.length)


class DoublyStatefulLines(IteratorLines):
    """Its iterators keep the position, and it keeps how many of them there were."""

    def __init__(self, length: int = 11) -> None:
        super().__init__(length)
        self.passes = [0]

    def __iter__(self) -> Any:
        self.passes[0] += 1
        return super().__iter__()

    def state_dict(self) -> Any:
        return {"passes": self.passes}

    def load_state_dict(self, state: Any) -> None:
        self.passes = [state["passes"][0] - 1]  # the restored pass is begun once more


class _LineIterator:
    def __init__(self, length: int) -> None:
        self.lines, self.state = share(range(length)), {"at": [0]}

    def __iter__(self) -> _LineIterator:
        return self

    def __next__(self) -> str:
        if self.state["at"][0] == len(self.lines):
            raise StopIteration
        self.state["at"][0] += 1
        return f"line {self.lines[self.state['at'][0] - 1]}"

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
