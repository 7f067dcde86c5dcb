"""Hugging Face's streaming datasets at every position: through their own state where it is exact, else by replay."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import pytest
from datasets import Dataset, IterableDataset, concatenate_datasets, interleave_datasets
from datasets.distributed import split_dataset_by_node
from owner_loop import Loop, check_every_position, shown
from sampler_datasets import loader
from torch.utils.data import IterableDataset as TorchIterableDataset

from cosmos_ctrl.samplers import RestorableLoader, StatefulSampler
from cosmos_ctrl.samplers.huggingface import state_is_exact

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)
    yield
    datasets.logging.set_verbosity(before)


def generate(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for number in range(3):
            yield {"a": shard * 10 + number}


def generated(shards: int = 2) -> Any:
    return IterableDataset.from_generator(generate, gen_kwargs={"shards": list(range(shards))})


def arrow(rows: int = 7, shards: int = 2) -> Any:
    return Dataset.from_dict({"a": list(range(rows))}).to_iterable_dataset(num_shards=shards)


EXACT: dict[str, Callable[[], Any]] = {
    "generated": generated,
    "arrow": arrow,
    "map": lambda: generated().map(lambda row: {"b": row["a"] + 1}),
    "batched map": lambda: arrow().map(lambda rows: {"b": rows["a"]}, batched=True, batch_size=3),
    "filter": lambda: arrow().filter(lambda row: row["a"] % 2 == 0),
    "skip and take": lambda: generated(3).skip(2).take(5),
    "select": lambda: arrow().select_columns(["a"]),
    "repeat": lambda: arrow(3).repeat(2),
    "interleave": lambda: interleave_datasets([generated(), generated(1)]),
    "interleave by chance": lambda: interleave_datasets([generated(), generated()], probabilities=[0.3, 0.7], seed=1),
    "concatenate": lambda: concatenate_datasets([generated(), generated(1)]),
    "beside": lambda: concatenate_datasets([arrow(), arrow().rename_column("a", "b")], axis=1),
    "torch": lambda: arrow().with_format("torch"),
    "batch": lambda: arrow().batch(3),
    "node": lambda: split_dataset_by_node(generated(), rank=1, world_size=2),
    "node's examples": lambda: split_dataset_by_node(generated(3), rank=1, world_size=2),
}
REPLAYED: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: arrow().shuffle(seed=1, buffer_size=4),
    "shuffled generated": lambda: generated(3).shuffle(seed=1, buffer_size=3),
    "shuffled, then mapped": lambda: generated().shuffle(seed=1, buffer_size=3).map(lambda row: {"b": 1}),
    "a shuffled source": lambda: interleave_datasets([generated(), generated().shuffle(seed=1, buffer_size=3)]),
}


@pytest.mark.parametrize("name", [*EXACT, *REPLAYED])
def test_g1_a_stream_resumes_at_every_position(name: str) -> None:
    make = (EXACT | REPLAYED)[name]
    assert state_is_exact(make()) == (name in EXACT)
    whole = check_every_position(lambda: StatefulSampler(make()))
    assert (whole[0].state["state"] is None) == (name in REPLAYED)


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("generated", 0),
        ("generated", 2),
        ("arrow", 0),
        ("batched map", 0),
        ("batched map", 2),
        ("interleave by chance", 0),
        ("shuffled", 0),
        ("shuffled", 2),
    ],
)
def test_g1_a_stream_in_a_loader_resumes_at_every_position(name: str, workers: int) -> None:
    make = (EXACT | REPLAYED)[name]

    def owner() -> RestorableLoader:
        return RestorableLoader(loader(make(), batch_size=2, collate_fn=list, num_workers=workers), seed=1)

    whole = check_every_position(owner, epochs=2 if workers else 3, second=2 if workers else 1)
    assert (whole[0].state["library"] is None) == (name == "shuffled")


def test_persistent_workers_hear_the_epoch() -> None:
    def owner() -> RestorableLoader:
        own = loader(arrow(12, 6), batch_size=2, collate_fn=list, num_workers=2, persistent_workers=True)
        return RestorableLoader(own, seed=1)

    whole = check_every_position(owner, epochs=3, stride=4)
    orders = [[step.item for step in whole if step.epoch == epoch] for epoch in (1, 2, 3)]
    assert orders[0] != orders[1] != orders[2]
    alone = StatefulSampler(arrow(12, 6))
    for epoch, order in enumerate(orders, start=1):
        alone.set_epoch(epoch)
        assert sorted(row["a"] for batch in order for row in batch) == sorted(row["a"] for row in alone)


def test_the_library_alone_would_skip_what_was_in_the_buffer() -> None:
    """Why there are replays at all; when this fails, the library keeps its buffers."""
    stream = generated(3).shuffle(seed=1, buffer_size=4)
    whole = list(stream)
    iterator = iter(stream)
    for _ in range(4):
        next(iterator)
    state = stream.state_dict()
    again = generated(3).shuffle(seed=1, buffer_size=4)
    again.load_state_dict(state)
    assert len(list(again)) < len(whole) - 4


def test_a_shuffle_without_a_seed_is_refused_when_it_is_wrapped() -> None:
    for stream in (arrow().shuffle(buffer_size=3), arrow().shuffle(buffer_size=3).map(lambda row: row)):
        with pytest.raises(ValueError, match=r"shuffled without a seed.*shuffle\(seed=0\)"):
            StatefulSampler(stream)
        with pytest.raises(ValueError, match="shuffled without a seed"):
            RestorableLoader(loader(stream))


def test_a_seed_that_changed_is_refused_and_never_skipped() -> None:
    step = [Loop(StatefulSampler(arrow().shuffle(seed=1, buffer_size=4))).epochs(1)[2]][0]
    with pytest.raises(ValueError, match="not those that were given"):
        Loop(StatefulSampler(arrow().shuffle(seed=2, buffer_size=4)), step).draw()


class Formatted(TorchIterableDataset[str]):
    """Keeps a stream somewhere inside, and passes its state on."""

    def __init__(self, stream: Any) -> None:
        self.parts = {"train": [stream]}

    def set_epoch(self, epoch: int) -> None:
        self.parts["train"][0].set_epoch(epoch)

    def __iter__(self) -> Iterator[str]:
        return (f"question {row['a']}" for row in self.parts["train"][0])

    def state_dict(self) -> Any:
        return self.parts["train"][0].state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.parts["train"][0].load_state_dict(state)


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_stream_inside_another_dataset_is_found(shuffled: bool) -> None:
    def inner() -> Any:
        return generated(3).shuffle(seed=1, buffer_size=4) if shuffled else generated(3)

    check_every_position(lambda: StatefulSampler(Formatted(inner())))
    check_every_position(lambda: RestorableLoader(loader(Formatted(inner()), batch_size=2)))
    one_worker = Loop(RestorableLoader(loader(Formatted(inner()), batch_size=2, num_workers=1))).epochs(2)
    resumed = Loop(RestorableLoader(loader(Formatted(inner()), batch_size=2, num_workers=1)), one_worker[2])
    assert shown(resumed.epochs(2)) == shown(one_worker[3:])


def test_an_unknown_stage_is_replayed() -> None:
    class Surprise(datasets.iterable_dataset.ExamplesIterable):
        pass

    def keyed(shards: list[int]) -> Iterator[Any]:
        return enumerate(generate(shards))

    def make() -> Any:
        return IterableDataset(Surprise(keyed, {"shards": [1, 2]}))

    assert not state_is_exact(make())
    check_every_position(lambda: StatefulSampler(make()))
