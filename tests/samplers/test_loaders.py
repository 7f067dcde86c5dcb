"""RestorableLoader over StatefulDataLoader without workers, and what it refuses."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset as HuggingFaceDataset
from hypothesis import given, settings
from hypothesis import strategies as st
from owner_loop import Loop, check_every_position, shown
from sampler_datasets import (
    Counting,
    DoublyStatefulLines,
    EpochTexts,
    IteratorLines,
    LazyLines,
    Lines,
    Pairs,
    PlainLines,
    ShuffledLines,
    StatefulLines,
    Texts,
    loader,
)
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler
from torch.utils.data.datapipes.iter import IterableWrapper

from cosmos_ctrl.core.samplers import SeekableSampler
from cosmos_ctrl.samplers import RestorableLoader, RestorableSampler, dataset_fingerprint


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


LOADERS: dict[str, Callable[[], Any]] = {
    "items": lambda: loader(Texts(), batch_size=None),
    "items, shuffled": lambda: loader(Texts(), batch_size=None, shuffle=True),
    "batches": lambda: loader(Texts(), batch_size=3),
    "batches, dropped": lambda: loader(Texts(), batch_size=3, drop_last=True),
    "shuffled": lambda: loader(Texts(), batch_size=2, shuffle=True),
    "shuffled, own generator": lambda: loader(Texts(), batch_size=2, shuffle=True, generator=seeded(3)),
    "torch's RandomSampler": lambda: loader(Texts(), batch_size=2, sampler=RandomSampler(Texts(), generator=seeded(3))),
    "replacement": lambda: loader(
        Texts(), batch_size=4, sampler=RandomSampler(Texts(), replacement=True, num_samples=50)
    ),
    "distributed": lambda: loader(Texts(), batch_size=2, sampler=DistributedSampler(Texts(), 2, 1)),
    "own sampler": lambda: loader(Texts(), batch_size=4, sampler=SeekableSampler(11, seed=4)),
    "own sampler, items": lambda: loader(Texts(), batch_size=None, sampler=SeekableSampler(11, shard=(1, 3))),
    "batch sampler": lambda: loader(Texts(), batch_sampler=BatchSampler(RandomSampler(Texts()), 3, False)),
    "restorable batch sampler": lambda: loader(
        Texts(), batch_sampler=RestorableSampler(BatchSampler(SequentialSampler(Texts()), 3, False))
    ),
    "written batches": lambda: loader(Texts(), batch_sampler=[[1, 2], [3], [5, 4]]),
    "numbers": lambda: loader(list(range(7)), batch_size=2, shuffle=True),
    "map-style with state": lambda: loader(Counting(), batch_size=2, shuffle=True),
    "map-style with epochs": lambda: loader(EpochTexts(), batch_size=2),
    "hugging face": lambda: loader(
        HuggingFaceDataset.from_dict({"a": list(range(7))}), batch_size=2, shuffle=True, collate_fn=list
    ),
    "iterable": lambda: loader(Lines(), batch_size=2),
    "iterable, items": lambda: loader(Lines(), batch_size=None),
    "iterable, dropped": lambda: loader(Lines(), batch_size=3, drop_last=True),
    "iterable without epochs": lambda: loader(PlainLines(), batch_size=2),
    "iterable with state": lambda: loader(StatefulLines(), batch_size=2),
    "iterable with state, items": lambda: loader(StatefulLines(), batch_size=None),
    "iterable that loads lazily": lambda: loader(LazyLines(), batch_size=2),
    "iterators with state": lambda: loader(IteratorLines(), batch_size=2),
    "both with state": lambda: loader(DoublyStatefulLines(), batch_size=2),
    "shorter than a batch": lambda: loader(Texts(2), batch_size=5),
    "snapshots without workers": lambda: loader(Texts(), batch_size=2, shuffle=True, snapshot_every_n_steps=3),
}


@pytest.mark.parametrize("name", LOADERS)
def test_g1_every_position_of_three_epochs_resumes_as_if_nothing_had_happened(name: str) -> None:
    whole = check_every_position(lambda: RestorableLoader(LOADERS[name](), seed=5))
    epochs = [[step.item for step in whole if step.epoch == epoch] for epoch in (1, 2, 3)]
    assert [len(epoch) for epoch in epochs] == [len(epochs[0])] * 3
    if "shuffled" in name or "Random" in name or "own sampler" in name:
        assert epochs[0] != epochs[1] != epochs[2]


def test_g1_a_run_of_many_lives_gives_what_one_life_gives() -> None:
    def make() -> RestorableLoader:
        return RestorableLoader(loader(Texts(), batch_size=2, shuffle=True))

    torch.manual_seed(1)
    whole = Loop(make()).epochs(3)
    step, given_items = None, []
    for life in range(7):
        torch.manual_seed(life)
        loop = Loop(make(), step)
        if step is None:
            loop = Loop(RestorableLoader(loader(Texts(), batch_size=2, shuffle=True), seed=whole[0].state["seed"]))
        steps = [loop.draw() for _ in range(1 + life % 3)]
        given_items += steps
        step = steps[-1]
    assert shown(given_items) == shown(whole)[: len(given_items)]


def test_the_end_of_an_epoch_rolls_exactly_once_and_a_further_iter_is_empty() -> None:
    def make() -> RestorableLoader:
        return RestorableLoader(loader(Texts(), batch_size=4, shuffle=True), seed=1)

    whole = Loop(make()).epochs(2)
    resumed = make()
    resumed.set_epoch(1)
    resumed.load_state_dict(whole[2].state)
    assert list(resumed) == list(resumed) == []
    assert resumed.state_dict() == whole[2].state
    resumed.set_epoch(2)
    assert list(resumed) == [step.item for step in whole[3:]]


def test_a_dataset_beside_its_iterators_is_asked_as_it_is_now() -> None:
    def make() -> RestorableLoader:
        return RestorableLoader(loader(DoublyStatefulLines(4), batch_size=2))

    whole = Loop(make()).epochs(3)
    resumed = Loop(make(), whole[0]).epochs(3)
    for step, again in zip(whole[1:], resumed, strict=True):
        assert (
            step.state["library"]["dataset_state"]
            == {"passes": [step.epoch]}
            == again.state["library"]["dataset_state"]
        )


def test_an_empty_dataset_and_one_shorter_than_a_dropped_batch_give_nothing() -> None:
    for options in ({"dataset": Texts(0)}, {"dataset": Texts(2), "batch_size": 3, "drop_last": True}):
        owner = RestorableLoader(loader(**options))
        loop = Loop(owner)
        with pytest.raises(ValueError, match="yields nothing"):
            loop.draw()
        assert owner.state_dict()["position"] == 0


def test_seeking_reads_nothing_again() -> None:
    whole = Loop(RestorableLoader(loader(Texts(1000), batch_size=1, shuffle=True), seed=1, fingerprint="x")).epochs(1)
    data = Texts(1000)
    resumed = RestorableLoader(loader(data, batch_size=1, shuffle=True), seed=1, fingerprint="x")
    loop = Loop(resumed, whole[899])
    assert data.calls == 0
    assert loop.draw().item == whole[900].item
    assert data.calls == 1


def test_wrapping_reads_a_map_style_dataset_once_for_its_fingerprint_or_not_at_all() -> None:
    data = Texts(5)
    owner = RestorableLoader(loader(data))
    assert data.calls == 5
    assert owner.compatibility["fingerprint"] == dataset_fingerprint(Texts(5))
    RestorableLoader(loader(data), fingerprint="mine")
    assert data.calls == 5
    assert RestorableLoader(loader(Lines())).compatibility["fingerprint"] == ""


def test_the_users_loader_is_left_alone() -> None:
    own = loader(Texts(), batch_size=2, shuffle=True, generator=seeded(3))
    generator, before, torch_before = own.generator, seeded(3).get_state(), torch.get_rng_state()
    Loop(RestorableLoader(own)).epochs(2)
    assert own.generator is generator
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert len(list(own)) == 6


def test_nothing_is_asked_of_the_library_before_the_state_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    own = loader(Texts(), batch_size=2)
    whole = Loop(RestorableLoader(loader(Texts(), batch_size=2))).epochs(1)
    for name in ("__iter__", "state_dict", "load_state_dict"):
        method = getattr(type(own), name)
        monkeypatch.setattr(
            type(own), name, lambda *a, _name=name, _method=method: (asked.append(_name), _method(*a))[1]
        )
    owner = RestorableLoader(own)
    owner.set_epoch(1)
    owner.state_dict()
    assert owner.deterministic
    assert asked == []
    owner.load_state_dict(whole[1].state)
    assert asked == ["load_state_dict"]
    assert next(iter(owner)) == whole[2].item


def test_an_iteration_that_is_under_way_cannot_begin_again() -> None:
    owner = RestorableLoader(loader(Texts(), batch_size=2))
    first = iter(owner)
    next(first)
    with pytest.raises(RuntimeError, match="under way"):
        next(iter(owner))
    assert next(first) == ["text 2", "text 3"]
    with pytest.raises(RuntimeError, match="fresh one"):
        owner.load_state_dict(owner.state_dict())


def test_deterministic_is_what_can_be_known() -> None:
    assert RestorableLoader(loader(Texts())).deterministic
    assert RestorableLoader(loader(Texts(), sampler=SeekableSampler(11))).deterministic
    assert not RestorableLoader(loader(Lines())).deterministic
    declared = Lines()
    declared.deterministic = True  # type: ignore[attr-defined]
    assert RestorableLoader(loader(declared)).deterministic


# -- batches


@pytest.mark.parametrize(
    ("collate", "samples"),
    [
        (lambda batch: tuple(batch), ["text 0", "text 1"]),
        (list, ["text 0", "text 1"]),
        (lambda batch: torch.tensor([1.5, 2.5]), [1.5, 2.5]),
    ],
)
def test_a_batch_is_a_list_of_samples(collate: Any, samples: list[Any]) -> None:
    assert next(iter(RestorableLoader(loader(Texts(), batch_size=2, collate_fn=collate)))) == samples


Row = namedtuple("Row", "text number")  # noqa: PYI024


@pytest.mark.parametrize(
    ("data", "options"),
    [
        ([{"a": 1}, {"a": 2}], {}),
        (Pairs(), {}),
        ([(1, 2), (3, 4)], {}),
        ([torch.zeros(2), torch.zeros(2)], {}),
        ([Row("a", 1), Row("b", 2)], {}),
        (Texts(), {"collate_fn": lambda batch: "".join(batch)}),
        (Texts(), {"collate_fn": lambda batch: Row(*batch)}),
        (Texts(), {"collate_fn": len}),
        (Texts(), {"collate_fn": lambda batch: torch.zeros(2, 2)}),
    ],
)
def test_a_batch_that_was_collated_into_something_else_is_refused(data: Any, options: dict[str, Any]) -> None:
    owner = RestorableLoader(loader(data, batch_size=2, **options), fingerprint="x")
    with pytest.raises(TypeError, match="collate_fn=list"):
        next(iter(owner))


# -- refusals


def state_of(own: Any, **options: Any) -> Any:
    return Loop(RestorableLoader(own, **options)).draw().state


@pytest.mark.parametrize(
    ("was", "now", "keys"),
    [
        (loader(Texts()), loader(Texts(12)), ["length was 11, here 12", "fingerprint was 'sha256:"]),
        (loader(Texts()), loader(Pairs(), collate_fn=list), ["fingerprint was 'sha256:"]),
        (
            loader(Texts(), batch_size=2),
            loader(Texts(), batch_size=3, drop_last=True, num_workers=2),
            ["batch_size was 2, here 3", "drop_last was False, here True", "num_workers was 0, here 2"],
        ),
        (loader(Texts(), num_workers=1), loader(Texts(), num_workers=2), ["num_workers was 1, here 2"]),
        (loader(Texts()), loader(Texts(), shuffle=True), ["sampler.of.sampler was 'torch.SequentialSampler'"]),
        (loader(Texts()), loader(Lines()), ["dataset was 'map-style', here 'iterable'"]),
        (
            loader(Texts(), batch_sampler=BatchSampler(SequentialSampler(Texts()), 2, False)),
            loader(Texts(), batch_sampler=BatchSampler(SequentialSampler(Texts()), 3, False)),
            ["sampler.batch_size was 2, here 3"],
        ),
    ],
)
def test_another_configuration_is_refused_by_every_key_before_the_library_is_touched(
    was: Any, now: Any, keys: list[str]
) -> None:
    state = RestorableLoader(was, seed=1).state_dict()
    other = RestorableLoader(now, seed=1)
    before = other.state_dict()
    with pytest.raises(ValueError, match="belongs to another RestorableLoader") as refusal:
        other.load_state_dict(state)
    for key in keys:
        assert key in str(refusal.value)
    assert other.state_dict() == before


def test_a_given_fingerprint_and_a_given_seed_are_held() -> None:
    state = state_of(loader(Lines()), fingerprint="a", seed=1)
    with pytest.raises(ValueError, match="fingerprint was 'a', here 'b'"):
        RestorableLoader(loader(Lines()), fingerprint="b", seed=1).load_state_dict(state)
    for own in (Lines(), Texts()):
        state = state_of(loader(own, batch_size=2), fingerprint="a", seed=1)
        with pytest.raises(ValueError, match="seed=1, this RestorableLoader was given 2"):
            RestorableLoader(loader(own, batch_size=2), fingerprint="a", seed=2).load_state_dict(state)


@pytest.mark.parametrize("own", [Texts, Lines, StatefulLines])
def test_a_seed_that_was_not_given_gives_way(own: Any) -> None:
    options = {"shuffle": True} if own is Texts else {}
    torch.manual_seed(1)
    whole = Loop(RestorableLoader(loader(own(), **options))).epochs(2)
    torch.manual_seed(2)
    resumed = RestorableLoader(loader(own(), **options))
    assert shown(Loop(resumed, whole[4]).epochs(2)) == shown(whole[5:])
    first = Loop(RestorableLoader(loader(own(), **options), seed=3)).first_state
    again = RestorableLoader(loader(own(), **options))
    again.load_state_dict(first)
    assert again.state_dict()["seed"] == 3
    assert list(again) == [step.item for step in Loop(RestorableLoader(loader(own(), **options), seed=3)).epochs(1)]


def test_an_order_that_changed_is_refused_when_the_state_is_loaded() -> None:
    state = state_of(loader(Texts(), batch_size=2))
    state["library"]["_index_sampler_state"]["last"] = [9, 9]
    with pytest.raises(ValueError, match="the order has changed"):
        RestorableLoader(loader(Texts(), batch_size=2)).load_state_dict(state)


def test_an_iterable_that_comes_in_another_order_is_refused_and_never_skipped() -> None:
    random.seed(1)
    state = state_of(loader(ShuffledLines()))
    resumed = RestorableLoader(loader(ShuffledLines()))
    resumed.load_state_dict(state)
    with pytest.raises(ValueError, match="not those that were given"):
        next(iter(resumed))


def test_an_iterable_that_became_shorter_is_refused() -> None:
    whole = Loop(RestorableLoader(loader(Lines(9)))).epochs(1)
    resumed = RestorableLoader(loader(Lines(5)))
    resumed.load_state_dict(whole[6].state)
    with pytest.raises(ValueError, match="ended after 5 items, but 7 were given"):
        next(iter(resumed))


def test_an_iterable_whose_items_have_no_digest_is_refused_at_its_first() -> None:
    class Objects(PlainLines):
        def __iter__(self) -> Any:
            return iter([object()])

    with pytest.raises(TypeError, match=r"item 0.* is a builtins.object, which has no digest"):
        next(iter(RestorableLoader(loader(Objects(), collate_fn=list))))


def test_a_state_that_would_not_come_back_is_refused_when_it_is_made() -> None:
    class Opaque(StatefulLines):
        def state_dict(self) -> Any:
            return {"deep": [{"inner": {1, 2}}]}

    with pytest.raises(TypeError, match=r"the loader's state.*'deep'\]\[0\]\['inner'\] is a builtins.set"):
        next(iter(RestorableLoader(loader(Opaque()))))


def iterated(own: Any) -> Any:
    iter(own)
    return own


def asked(own: Any) -> Any:
    own.state_dict()
    return own


def told(own: Any) -> Any:
    own.load_state_dict(loader(Texts()).state_dict())
    return own


@pytest.mark.parametrize(
    ("own", "error", "message"),
    [
        (DataLoader(Texts()), TypeError, "use torchdata.stateful_dataloader.StatefulDataLoader"),
        (Texts(), TypeError, "keeps no position"),
        (iterated(loader(Texts())), ValueError, "right after it is made"),
        (asked(loader(Texts())), ValueError, "right after it is made"),
        (told(loader(Texts())), ValueError, "right after it is made"),
        (loader(Texts(), num_workers=1, in_order=False), ValueError, "in_order=True"),
        (loader(EpochTexts(), num_workers=1, persistent_workers=True), ValueError, "set_epoch does not reach"),
        (loader(StatefulLines(), num_workers=1, persistent_workers=True), ValueError, "between two epochs"),
        (loader(PlainLines(), num_workers=1, persistent_workers=True), ValueError, "between two epochs"),
        (loader(Texts(), timeout=1), ValueError, "timeout=1 needs workers"),
        (loader(Texts(), sampler={1, 2}), TypeError, "cannot be restored"),
        (loader(Texts(), batch_sampler=iter([[1]])), TypeError, "cannot be restored"),
        (loader(IterableWrapper([1, 2])), TypeError, "DataPipe"),
        (loader([object()]), TypeError, "Give a fingerprint of your own"),
    ],
)
def test_what_could_not_be_restored_is_refused_when_it_is_wrapped(
    own: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        RestorableLoader(own)


def test_in_order_without_workers_does_not_matter() -> None:
    check_every_position(lambda: RestorableLoader(loader(Texts(), in_order=False)), epochs=2)


@pytest.mark.parametrize(
    "change", [{"type": "RestorableSampler"}, {"epoch": 0}, {"seed": None}, {"position": -1}, {"more": 1}]
)
def test_a_state_that_is_not_one_is_refused(change: dict[str, Any]) -> None:
    owner = RestorableLoader(loader(Texts()))
    with pytest.raises((TypeError, ValueError)):
        owner.load_state_dict(owner.state_dict() | change)


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 30),
    batch=st.one_of(st.none(), st.integers(1, 7)),
    shuffle=st.booleans(),
    drop=st.booleans(),
    seed=st.integers(0, 1 << 63),
    position=st.integers(0, 60),
)
def test_any_position_of_any_configuration(
    length: int, batch: int | None, shuffle: bool, drop: bool, seed: int, position: int
) -> None:
    def make() -> RestorableLoader:
        own = loader(Texts(length), batch_size=batch, shuffle=shuffle, drop_last=drop and batch is not None)
        return RestorableLoader(own, seed=seed, fingerprint="x")

    whole = Loop(make()).epochs(3)
    if whole:
        at = min(position, len(whole) - 1)
        assert shown(Loop(make(), whole[at]).epochs(3)) == shown(whole[at + 1 :])
