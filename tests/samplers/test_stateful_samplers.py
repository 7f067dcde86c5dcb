"""StatefulSampler and ReplayedIterable: any object, restored through its own state or by replay."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from owner_loop import Loop, check_every_position, shown
from sampler_datasets import Counting, LazyLines, Lines, StatefulLines, Texts, loader

from cosmos_ctrl.core.samplers import SeekableSampler
from cosmos_ctrl.samplers import ReplayedIterable, StatefulSampler


class Curriculum:
    """Draws by weights that it keeps as a live array, and by generators of three libraries."""

    def __init__(self) -> None:
        self.weights = numpy.ones(4, dtype=numpy.float32)
        self.torch_generator = torch.Generator().manual_seed(1)
        self.numpy_generator = numpy.random.Generator(numpy.random.MT19937(2))
        self.random = random.Random(3)
        self.left = numpy.int64(5)
        self.live: dict[Any, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        while self.left:
            self.left -= 1
            index = int(self.numpy_generator.choice(4, p=self.weights / self.weights.sum()))
            self.weights[index] += 1
            yield index, int(torch.randint(99, (), generator=self.torch_generator)), self.random.randrange(99)
        self.left = numpy.int64(5)

    def state_dict(self) -> Any:
        self.live.update(
            weights=self.weights,
            torch=self.torch_generator.get_state(),
            numpy=self.numpy_generator.bit_generator.state,
            random=self.random.getstate(),
            left=self.left,
        )
        return self.live

    def load_state_dict(self, state: Any) -> None:
        assert state["weights"].dtype == numpy.float32
        self.weights, self.left = state["weights"], state["left"]
        self.torch_generator.set_state(state["torch"])
        self.numpy_generator.bit_generator.state = state["numpy"]
        self.random.setstate(state["random"])


@pytest.mark.parametrize(
    "make",
    [Curriculum, StatefulLines, LazyLines, lambda: SeekableSampler(7, seed=3), Counting, lambda: torch_nodes()],
    ids=["curriculum", "live", "lazy", "own", "map-style", "node"],
)
def test_g1_every_position_of_three_epochs_resumes_as_if_nothing_had_happened(make: Any) -> None:
    assert len({step.epoch for step in check_every_position(lambda: StatefulSampler(make()))}) == 3


def torch_nodes(*, restart: bool = False) -> Any:
    from torchdata.nodes import IterableWrapper, Loader

    return Loader(IterableWrapper(list(range(6))), restart_on_stop_iteration=restart)


def test_a_node_that_begins_anew_by_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="restart_on_stop_iteration=False"):
        StatefulSampler(torch_nodes(restart=True))


def test_a_live_state_that_changes_does_not_matter() -> None:
    loop = Loop(StatefulSampler(Curriculum()))
    kept = loop.draw()
    state = loop.owner.state_dict()
    rest = [loop.draw() for _ in range(3)]
    assert state == kept.state
    again = Loop(StatefulSampler(Curriculum()), kept)
    assert shown([again.draw() for _ in range(3)]) == shown(rest)


def test_after_the_end_the_state_is_the_last_items() -> None:
    owner = StatefulSampler(Curriculum())
    whole = Loop(owner).epochs(1)
    assert owner.state_dict() == whole[-1].state


def test_it_is_told_the_epochs_it_wants_to_know() -> None:
    class Epochs:
        heard: list[int]

        def __init__(self) -> None:
            self.heard = []

        def set_epoch(self, epoch: int) -> None:
            self.heard.append(epoch)

        def __iter__(self) -> Iterator[int]:
            return iter([1])

        def state_dict(self) -> Any:
            return {}

        def load_state_dict(self, state: Any) -> None:
            pass

    wrapped = Epochs()
    Loop(StatefulSampler(wrapped)).epochs(3)
    assert wrapped.heard == [1, 2, 3]


def test_what_was_declared_is_kept() -> None:
    assert not StatefulSampler(Curriculum()).deterministic
    owner = StatefulSampler(Curriculum(), deterministic=True, compatibility={"files": ["a"]})
    assert owner.deterministic
    assert owner.compatibility["files"] == ["a"]
    assert owner.compatibility["of"].endswith("Curriculum")
    state = Loop(owner).draw().state
    with pytest.raises(ValueError, match=r"files was \['a'\], here \['b'\]"):
        StatefulSampler(Curriculum(), compatibility={"files": ["b"]}).load_state_dict(state)
    with pytest.raises(ValueError, match=r"files was \['a'\], here absent.*"):
        StatefulSampler(Curriculum()).load_state_dict(state)
    with pytest.raises(ValueError, match=r"of was .*Curriculum', here .*SeekableSampler'"):
        StatefulSampler(SeekableSampler(3)).load_state_dict(state)
    with pytest.raises(TypeError, match=r"compatibility\['files'\] is a builtins.set"):
        StatefulSampler(Curriculum(), compatibility={"files": {"a"}})


def test_a_state_that_would_not_come_back_is_refused_when_it_is_made() -> None:
    class Opaque(Curriculum):
        def state_dict(self) -> Any:
            return {"generator": self.numpy_generator}

    with pytest.raises(TypeError, match=r"state\['generator'\] is a numpy.random._generator.Generator"):
        next(iter(StatefulSampler(Opaque())))


class Half:
    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("wrapped", "message"),
    [
        (Texts(), "keeps no state.*ReplayedIterable"),
        ([1, 2], "keeps no state"),
        (loader(Texts()), "use RestorableLoader"),
        (Half(), "neither iterable nor map-style"),
    ],
)
def test_what_cannot_be_an_owner_is_refused(wrapped: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        StatefulSampler(wrapped)


# -- replays


class Numbers:
    """Other numbers each epoch; a plain class, without torch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter([{"epoch": self.epoch, "number": number} for number in range(5)])


@pytest.mark.parametrize("make", [Numbers, Lines, lambda: ["a", "b"]], ids=["numbers", "lines", "list"])
def test_g1_a_replay_resumes_at_every_position(make: Any) -> None:
    check_every_position(lambda: ReplayedIterable(make()))
    assert ReplayedIterable(make()).deterministic


def test_a_replay_that_goes_another_way_is_refused_and_never_skipped() -> None:
    whole = Loop(ReplayedIterable(["a", "b", "c"])).epochs(1)
    for other, message in [
        (["a", "c", "b"], "not those that were given"),
        (["b", "a", "c"], "not those that were given"),
        (["x", "b", "c"], "not those that were given"),
        (["a"], "ended after 1 items, but 2 were given"),
    ]:
        owner = ReplayedIterable(other)
        owner.load_state_dict(whole[1].state)
        with pytest.raises(ValueError, match=message):
            next(iter(owner))


def test_a_replay_refuses_what_begins_only_once_or_not_at_all() -> None:
    with pytest.raises(TypeError, match="cannot begin again"):
        ReplayedIterable(iter([1]))
    with pytest.raises(TypeError, match="not iterable"):
        ReplayedIterable(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no digest"):
        next(iter(ReplayedIterable([object()])))


def test_a_replay_holds_its_configuration() -> None:
    state = Loop(ReplayedIterable([1], compatibility={"files": "a"})).draw().state
    with pytest.raises(ValueError, match="files was 'a', here 'b'"):
        ReplayedIterable([1], compatibility={"files": "b"}).load_state_dict(state)
    with pytest.raises(ValueError, match="a 'ReplayedIterable' state is not a StatefulSampler state"):
        StatefulSampler(Curriculum()).load_state_dict(state)
