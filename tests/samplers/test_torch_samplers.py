"""RestorableSampler: every sampler of torch, restored at every position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchdata.stateful_dataloader.sampler as torchdata_samplers
from hypothesis import given, settings
from hypothesis import strategies as st
from owner_loop import Loop, Step, check_every_position, shown
from sampler_datasets import Texts, Untouchable, loader
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from cosmos_ctrl.core.samplers import SeekableSampler
from cosmos_ctrl.samplers import RestorableSampler

DATA = Untouchable(7)
WEIGHTS = [0.5, 1.0, 0.0, 3.0]

MAKERS: dict[str, Callable[[], Any]] = {
    "sequential": lambda: SequentialSampler(DATA),
    "random": lambda: RandomSampler(DATA),
    "random, own generator": lambda: RandomSampler(DATA, generator=torch.Generator().manual_seed(3)),
    "random, fewer": lambda: RandomSampler(DATA, num_samples=4),
    "random, more": lambda: RandomSampler(DATA, num_samples=17),
    "replacement": lambda: RandomSampler(DATA, replacement=True),
    "replacement, more than a chunk": lambda: RandomSampler(DATA, replacement=True, num_samples=70),
    "torchdata random": lambda: torchdata_samplers.RandomSampler(DATA),
    "torchdata replacement": lambda: torchdata_samplers.RandomSampler(DATA, replacement=True, num_samples=40),
    "subset": lambda: SubsetRandomSampler([3, 1, 4, 15, 9]),
    "subset, tensor": lambda: SubsetRandomSampler(torch.tensor([3, 1, 4, 15, 9])),  # type: ignore[arg-type]
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, 9),
    "weighted, without replacement": lambda: WeightedRandomSampler(WEIGHTS, 3, replacement=False),
    "distributed": lambda: DistributedSampler(DATA, 3, 1),
    "distributed, drop": lambda: DistributedSampler(DATA, 3, 2, drop_last=True),
    "distributed, in order": lambda: DistributedSampler(DATA, 2, 0, shuffle=False),
    "stateful distributed": lambda: torchdata_samplers.StatefulDistributedSampler(DATA, 2, 1),
    "list": lambda: [5, 3, 1],
    "own": lambda: SeekableSampler(7, seed=2),
    "own, weighted": lambda: SeekableSampler(4, weights=WEIGHTS),
}
BATCHES: dict[str, Callable[[Any], Any]] = {
    "single": lambda sampler: sampler,
    "batches of 3": lambda sampler: BatchSampler(sampler, 3, False),
    "batches of 2, drop": lambda sampler: torchdata_samplers.BatchSampler(sampler, 2, True),
}


@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("maker", MAKERS)
def test_g1_every_position_of_three_epochs_resumes_as_if_nothing_had_happened(maker: str, batches: str) -> None:
    def make() -> RestorableSampler:
        return RestorableSampler(BATCHES[batches](MAKERS[maker]()), seed=5)

    whole = check_every_position(make)
    assert make().deterministic
    orders = [[step.item for step in whole if step.epoch == epoch] for epoch in (1, 2, 3)]
    if maker not in ("sequential", "distributed, in order", "list", "weighted, without replacement", "subset"):
        assert orders[0] != orders[1] or orders[1] != orders[2]


@pytest.mark.parametrize("maker", MAKERS)
def test_an_epoch_holds_what_the_sampler_itself_would_draw(maker: str) -> None:
    own = MAKERS[maker]()
    wrapped = RestorableSampler(MAKERS[maker](), seed=1)
    wrapped.set_epoch(1)
    items = list(wrapped)
    assert all(type(item) is int for item in items)
    assert len(items) == len(own)
    if (
        "replacement" not in maker
        and "weighted" not in maker
        and "random, " not in maker
        and "distributed" not in maker
    ):
        assert sorted(items) == sorted(map(int, own))


def test_a_distributed_sampler_keeps_its_own_orders() -> None:
    for rank in range(3):
        own, wrapped = (
            DistributedSampler(DATA, 3, rank, seed=8),
            RestorableSampler(DistributedSampler(DATA, 3, rank, seed=8)),
        )
        for epoch in (1, 2):
            own.set_epoch(epoch)
            wrapped.set_epoch(epoch)
            assert list(wrapped) == list(own)


def test_the_end_of_an_epoch_rolls_exactly_once() -> None:
    def make() -> RestorableSampler:
        return RestorableSampler(BatchSampler(RandomSampler(DATA), 3, False), seed=1)

    whole = Loop(make()).epochs(3)
    last = max(index for index, step in enumerate(whole) if step.epoch == 1)
    resumed = make()
    resumed.set_epoch(1)
    resumed.load_state_dict(whole[last].state)
    assert list(resumed) == []
    loop = Loop(make(), whole[last])
    assert shown([loop.draw() for _ in range(3)]) == shown(whole[last + 1 : last + 4])
    assert loop.epoch == 2


def test_the_users_sampler_is_left_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    sampler = RandomSampler(DATA, generator=generator)
    wrapped = RestorableSampler(BatchSampler(sampler, 2, False))
    torch_before = torch.get_rng_state()
    Loop(wrapped).epochs(2)
    assert sampler.generator is generator
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(torch.get_rng_state(), torch_before)
    distributed = torchdata_samplers.StatefulDistributedSampler(DATA, 2, 0)
    distributed.load_state_dict({"yielded": 2})
    assert len(list(RestorableSampler(distributed))) == 4
    assert distributed.next_yielded == 2


def test_the_receiver_may_change_its_batch() -> None:
    wrapped = RestorableSampler(BatchSampler(SequentialSampler(DATA), 2, False))
    for batch in wrapped:
        batch.clear()
        wrapped.load_state_dict(wrapped.state_dict())
        break
    assert next(iter(wrapped)) == [2, 3]


# -- seeds


def test_the_seed_is_the_argument_else_the_generators_else_torchs() -> None:
    def order(sampler: Any, **options: Any) -> list[int]:
        return list(RestorableSampler(sampler, **options))

    three = torch.Generator().manual_seed(3)
    assert order(RandomSampler(DATA, generator=three)) == order(RandomSampler(DATA), seed=3)
    assert order(RandomSampler(DATA, generator=three), seed=4) == order(RandomSampler(DATA), seed=4)
    assert order(RandomSampler(DATA)) == order(RandomSampler(DATA), seed=torch.initial_seed())
    assert order(DistributedSampler(DATA, 1, 0), seed=6) == order(DistributedSampler(DATA, 1, 0, seed=6))


def test_a_seed_that_was_not_given_gives_way_and_one_that_was_is_held() -> None:
    whole = Loop(RestorableSampler(RandomSampler(DATA), seed=1)).epochs(2)
    at = whole[2]
    follower = RestorableSampler(RandomSampler(DATA, generator=torch.Generator().manual_seed(9)))
    assert shown(Loop(follower, at).epochs(2)) == shown(whole[3:])
    assert follower.state_dict()["seed"] == 1
    with pytest.raises(ValueError, match=r"seed=1, this RestorableSampler was given 2"):
        RestorableSampler(RandomSampler(DATA), seed=2).load_state_dict(at.state)


@pytest.mark.parametrize("seed", [-1, True, 1.5, "1"])
def test_a_seed_is_a_count(seed: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="seed"):
        RestorableSampler(RandomSampler(DATA), seed=seed)


# -- refusals


@pytest.mark.parametrize(
    ("was", "now", "keys"),
    [
        (RandomSampler(DATA), RandomSampler(Untouchable(8)), ["length was 7, here 8", "num_samples was 7, here 8"]),
        (RandomSampler(DATA), RandomSampler(DATA, replacement=True), ["replacement was False, here True"]),
        (RandomSampler(DATA), RandomSampler(DATA, num_samples=3), ["num_samples was 7, here 3"]),
        (
            RandomSampler(DATA),
            SequentialSampler(DATA),
            ["sampler was 'torch.RandomSampler', here 'torch.SequentialSampler'"],
        ),
        (
            RandomSampler(DATA),
            torchdata_samplers.RandomSampler(DATA),
            ["'torch.RandomSampler', here 'torchdata.RandomSampler'"],
        ),
        (SubsetRandomSampler([1, 2]), SubsetRandomSampler([2, 1]), ["indices was 'sha256:"]),
        (WeightedRandomSampler([1, 2], 3), WeightedRandomSampler([1, 3], 3), ["weights was 'sha256:"]),
        (DistributedSampler(DATA, 2, 0), DistributedSampler(DATA, 2, 1), ["rank was 0, here 1"]),
        (
            DistributedSampler(DATA, 2, 0),
            DistributedSampler(DATA, 4, 0, shuffle=False, drop_last=True),
            ["num_replicas was 2, here 4", "shuffle was True, here False", "drop_last was False, here True"],
        ),
        (
            BatchSampler(SequentialSampler(DATA), 2, False),
            BatchSampler(RandomSampler(DATA), 3, True),
            [
                "batch_size was 2, here 3",
                "drop_last was False, here True",
                "of.sampler was",
                "of.replacement was absent",
            ],
        ),
        (SeekableSampler(7), SeekableSampler(7, seed=1), ["compatibility.seed was 0, here 1"]),
        ([1, 2], [2, 1], ["items was 'sha256:"]),
    ],
)
def test_another_configuration_is_refused_by_every_key_and_changes_nothing(was: Any, now: Any, keys: list[str]) -> None:
    state = Loop(RestorableSampler(was, seed=1)).draw().state
    other = RestorableSampler(now, seed=1)
    before = other.state_dict()
    with pytest.raises(ValueError, match="belongs to another RestorableSampler") as refusal:
        other.load_state_dict(state)
    for key in keys:
        assert key in str(refusal.value)
    assert other.state_dict() == before


@pytest.mark.parametrize("last", [3, None, [3], True, "3"])
def test_an_order_that_changed_is_refused_and_changes_nothing(last: Any) -> None:
    wrapped = RestorableSampler(SequentialSampler(DATA))
    state = Loop(RestorableSampler(SequentialSampler(DATA))).draw().state
    before = wrapped.state_dict()
    with pytest.raises(ValueError, match="the order has changed"):
        wrapped.load_state_dict(state | {"last": last})
    with pytest.raises(ValueError, match="the order has changed"):
        wrapped.load_state_dict(state | {"position": 8})
    assert wrapped.state_dict() == before


@pytest.mark.parametrize(
    "change",
    [{"type": "Other"}, {"epoch": 0}, {"epoch": True}, {"position": -1}, {"position": 1.0}, {"seed": "1"}, {"more": 1}],
)
def test_a_state_that_is_not_one_is_refused(change: dict[str, Any]) -> None:
    wrapped = RestorableSampler(SequentialSampler(DATA))
    with pytest.raises((TypeError, ValueError)):
        wrapped.load_state_dict(wrapped.state_dict() | change)
    with pytest.raises(ValueError, match="expected the keys"):
        wrapped.load_state_dict([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no configuration"):
        wrapped.load_state_dict(wrapped.state_dict() | {"configuration": None})


class Unknown(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Twisted(RandomSampler):
    """A subclass may draw in any way."""


@pytest.mark.parametrize("sampler", [Unknown(), Twisted(DATA), {1, 2}, BatchSampler(Unknown(), 2, False), iter([1])])
def test_an_unknown_sampler_without_state_is_refused_with_advice(sampler: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot be restored.*state_dict\(\) and load_state_dict\(\).*SeekableSampler"):
        RestorableSampler(sampler)


def test_loaders_and_datasets_are_sent_elsewhere() -> None:
    from sampler_datasets import Lines

    with pytest.raises(TypeError, match="use RestorableLoader"):
        RestorableSampler(loader(Texts()))
    with pytest.raises(TypeError, match="use StatefulSampler"):
        RestorableSampler(Lines())


# -- samplers with a state of their own


class Drawing(Sampler[int]):
    """Draws from a generator that it saves, and knows no epochs."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.left = 5

    def __iter__(self) -> Iterator[int]:
        while self.left:
            self.left -= 1
            yield int(torch.randint(100, (), generator=self.generator))
        self.left = 5

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.left = state["left"]


class Lazy(Sampler[int]):
    """Loads when it is iterated, and does not go back at its end."""

    at = starting = 0

    def __iter__(self) -> Iterator[int]:
        self.at, self.starting = self.starting, 0
        while self.at < 5:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.starting = state["at"]


@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("kind", [Drawing, Lazy])
def test_a_sampler_with_a_state_of_its_own_is_restored_through_it(kind: Any, batches: str) -> None:
    def make() -> RestorableSampler:
        return RestorableSampler(BATCHES[batches](kind()))

    assert not make().deterministic
    check_every_position(make)


def test_the_state_shares_nothing_with_the_sampler() -> None:
    wrapped = RestorableSampler(Drawing())
    steps = [Loop(wrapped).draw() for _ in range(2)]
    assert steps[0].state != steps[1].state


def test_a_growing_dataset_is_seen_at_the_next_epoch() -> None:
    data = Texts(3)
    wrapped = RestorableSampler(SequentialSampler(data))
    loop = Loop(wrapped)
    loop.epochs(1)
    data.length = 5
    wrapped.set_epoch(2)
    assert wrapped.state_dict()["configuration"]["length"] == 5


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 40),
    batch=st.integers(1, 9),
    drop=st.booleans(),
    seed=st.integers(0, 1 << 63),
    replacement=st.booleans(),
    draws=st.integers(1, 50),
    position=st.integers(0, 60),
)
def test_any_position_of_any_configuration(
    length: int, batch: int, drop: bool, seed: int, replacement: bool, draws: int, position: int
) -> None:
    def make() -> RestorableSampler:
        sampler = RandomSampler(Untouchable(length), replacement=replacement, num_samples=draws)
        return RestorableSampler(BatchSampler(sampler, batch, drop), seed=seed)

    whole = Loop(make()).epochs(3)
    if whole:
        at = min(position, len(whole) - 1)
        assert shown(Loop(make(), whole[at]).epochs(3)) == shown(whole[at + 1 :])


def test_a_state_of_no_epoch_yet_is_the_first_position() -> None:
    first = RestorableSampler(RandomSampler(DATA), seed=1)
    state = Loop(first).first_state
    assert shown(Loop(RestorableSampler(RandomSampler(DATA)), Step(1, None, state)).epochs(2)) == shown(
        Loop(RestorableSampler(RandomSampler(DATA), seed=1)).epochs(2)
    )
