"""RestorableLoader with worker processes: prefetching, snapshots, workers that outlive an epoch."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from owner_loop import Loop, check_every_position, shown
from sampler_datasets import (
    Counting,
    EpochTexts,
    IteratorLines,
    LazyLines,
    Lines,
    ShuffledLines,
    StatefulLines,
    Texts,
    loader,
    share,
)
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, get_worker_info

from cosmos_ctrl.core.samplers import SeekableSampler
from cosmos_ctrl.samplers import RestorableLoader

# Python 3.12 and newer; the forked workers take no lock that another thread could hold.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")


def two(dataset: Any, **options: Any) -> Any:
    return loader(dataset, num_workers=2, **options)


# The epochs to check: a resume costs the start of two processes an epoch.
LOADERS: dict[str, tuple[int, Callable[[], Any]]] = {
    "shuffled, own generator": (2, lambda: two(Texts(6), batch_size=2, shuffle=True, generator=torch.Generator())),
    "torch's RandomSampler": (2, lambda: two(Texts(5), batch_size=2, sampler=RandomSampler(Texts(5)), drop_last=True)),
    "own sampler, items": (2, lambda: two(Texts(3), batch_size=None, sampler=SeekableSampler(3))),
    "own sampler, batches": (2, lambda: two(Texts(5), batch_sampler=BatchSampler(SeekableSampler(5), 2, False))),
    "map-style with state": (2, lambda: two(Counting(4), batch_size=1, shuffle=True)),
    "map-style with epochs": (2, lambda: two(EpochTexts(4), batch_size=2)),
    "snapshots of 2": (2, lambda: two(Texts(8), batch_size=2, shuffle=True, snapshot_every_n_steps=2)),
    "snapshots of 3, persistent": (
        2,
        lambda: two(Texts(9), batch_size=2, shuffle=True, snapshot_every_n_steps=3, persistent_workers=True),
    ),
    "no snapshots": (2, lambda: two(Texts(6), batch_size=2, shuffle=True, snapshot_every_n_steps=0)),
    "persistent, further ahead": (
        2,
        lambda: two(Texts(7), batch_size=2, shuffle=True, persistent_workers=True, prefetch_factor=4),
    ),
    "iterable": (2, lambda: two(Lines(7), batch_size=2)),
    "iterable, items": (2, lambda: two(Lines(3), batch_size=None)),
    "iterable, shuffled by its worker": (2, lambda: two(ShuffledLines(), batch_size=3)),
    "iterable with state": (2, lambda: two(StatefulLines(7), batch_size=2)),
    "iterable with state, dropped": (2, lambda: two(StatefulLines(7), batch_size=2, drop_last=True)),
    "iterable with state, snapshots of 3": (2, lambda: two(StatefulLines(7), batch_size=2, snapshot_every_n_steps=3)),
    "iterable that loads lazily": (2, lambda: two(LazyLines(7), batch_size=2)),
    "iterators with state": (2, lambda: two(IteratorLines(7), batch_size=2)),
}


@pytest.mark.parametrize("name", LOADERS)
def test_g1_every_position_resumes_as_if_nothing_had_happened(name: str) -> None:
    epochs, make = LOADERS[name]
    whole = check_every_position(lambda: RestorableLoader(make(), seed=5), epochs=epochs, second=2)
    assert {step.epoch for step in whole} == set(range(1, epochs + 1))


class Sharded(IterableDataset[str]):
    """Its share is set from outside, as PyTorch's documentation shows."""

    def __init__(self) -> None:
        self.lines = [f"line {i}" for i in range(8)]
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < len(self.lines):
            self.at += 1
            yield self.lines[self.at - 1]

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


def take_share(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    dataset.lines = share(dataset.lines)


@pytest.mark.parametrize("stateful", [True, False])
def test_a_worker_init_fn_sees_the_users_own_dataset(stateful: bool) -> None:
    kind = Sharded if stateful else type("Bare", (Sharded,), {"state_dict": None, "load_state_dict": None})
    whole = check_every_position(
        lambda: RestorableLoader(two(kind(), batch_size=2, worker_init_fn=take_share)), epochs=1
    )
    assert [step.item for step in whole] == [
        ["line 0", "line 2"],
        ["line 1", "line 3"],
        ["line 4", "line 6"],
        ["line 5", "line 7"],
    ]


class Recorded(Texts):
    """Writes every call down, whichever process makes it."""

    def __init__(self, path: Path) -> None:
        super().__init__(40)
        self.path = path

    def __getitem__(self, index: int) -> str:
        with self.path.open("a") as file:
            file.write(f"{index}\n")
        return super().__getitem__(index)


def test_seeking_reads_only_what_is_ahead(tmp_path: Path) -> None:
    def make() -> RestorableLoader:
        data = Recorded(tmp_path / "reads")
        return RestorableLoader(two(data, batch_size=1, shuffle=True), fingerprint="x", seed=1)

    whole = Loop(make()).epochs(1)
    (tmp_path / "reads").unlink()
    loop = Loop(make(), whole[29])
    assert shown([loop.draw()]) == shown([whole[30]])
    ahead = {str(step.item[0]).removeprefix("text ") for step in whole[30:36]}
    assert set((tmp_path / "reads").read_text().split()) <= ahead


def test_prefetching_never_runs_ahead_of_the_state() -> None:
    def make() -> RestorableLoader:
        return RestorableLoader(two(Texts(12), batch_size=1, shuffle=True, prefetch_factor=5), seed=1)

    loop = Loop(make())
    first = [loop.draw() for _ in range(3)]
    rest = Loop(make(), first[0]).epochs(1)
    assert shown(rest[:2]) == shown(first[1:])
    assert len({str(step.item) for step in [first[0], *rest]}) == 12


def test_workers_that_are_spawned_get_the_same() -> None:
    def make() -> RestorableLoader:
        own = loader(
            StatefulLines(5), batch_size=2, num_workers=1, multiprocessing_context="spawn", worker_init_fn=nothing
        )
        return RestorableLoader(own, seed=1)

    here = Loop(RestorableLoader(two(StatefulLines(5), batch_size=2), seed=1)).epochs(1)
    assert len(here) == 3
    first = Loop(make()).draw()
    assert shown([Loop(make(), first).draw()]) == [(1, repr(["line 2, [3.0, 3.0]", "line 3, [4.0, 4.0]"]))]


def nothing(worker_id: int) -> None:
    pass


def test_a_workers_random_state_is_the_epochs() -> None:
    def epochs() -> list[Any]:
        random.seed()
        return shown(Loop(RestorableLoader(two(ShuffledLines(), batch_size=3), seed=2)).epochs(2))

    whole = epochs()
    assert whole == epochs()
    assert [item for epoch, item in whole if epoch == 1] != [item for epoch, item in whole if epoch == 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_epoch_reaches_the_dataset(workers: int) -> None:
    for data, name in ((EpochTexts(3), "text 0"), (Lines(3), "line 0")):
        whole = Loop(RestorableLoader(loader(data, batch_size=1, num_workers=workers))).epochs(3)
        firsts = [step.item for step in whole if name in step.item[0]]
        assert firsts == [[f"{name} of epoch {epoch}"] for epoch in (1, 2, 3)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_first_item_that_fails_is_not_skipped(workers: int) -> None:
    owner = RestorableLoader(loader(Failing(True), batch_size=1, num_workers=workers, sampler=[2, 0]), fingerprint="x")
    with pytest.raises(OSError, match="unreadable"):
        next(iter(owner))
    kept = owner.state_dict()
    resumed = RestorableLoader(
        loader(Failing(False), batch_size=1, num_workers=workers, sampler=[2, 0]), fingerprint="x"
    )
    resumed.set_epoch(1)
    resumed.load_state_dict(kept)
    assert list(resumed) == [["text 2"], ["text 0"]]


def test_a_failing_worker_skips_nothing() -> None:
    def make(broken: bool) -> RestorableLoader:
        return RestorableLoader(two(Failing(broken), batch_size=1), fingerprint="x")

    owner = make(True)
    loop = Loop(owner)
    first = loop.draw()
    with pytest.raises(OSError, match="unreadable"):
        loop.epochs(1)
    kept = owner.state_dict()
    assert kept["position"] == 2
    resumed = make(False)
    resumed.set_epoch(1)
    resumed.load_state_dict(kept)
    assert [first.item, ["text 1"], *resumed] == [[f"text {i}"] for i in range(5)]


class Failing(Texts):
    def __init__(self, broken: bool) -> None:
        super().__init__(5)
        self.broken = broken

    def __getitem__(self, index: int) -> str:
        if self.broken and index == 2:
            raise OSError("unreadable")
        return super().__getitem__(index)
