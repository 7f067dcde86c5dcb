"""A rank's training state: what is captured comes back to the bit, and what does not fit changes nothing."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.nn.parallel import DistributedDataParallel

from cosmos_worker import dcp
from cosmos_worker.errors import UsageError
from cosmos_worker.shards import HashingFile
from cosmos_worker.snapshots import snapshot
from cosmos_worker.stamps import Stamp
from cosmos_worker.state import StateError, capture, check, load_sharded, restore, sharded

STAMP = Stamp(rank=1, steps=3, updates=6, execution_id="e", checkpoint_id="c")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Counted:
    """The application's own."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["count"] < 0:
            raise ValueError("no count")
        self.count = state["count"]


class Training:
    """A model with everything that training changes."""

    def __init__(self, *, width: int = 4, groups: int = 1, dtype: torch.dtype = torch.float32) -> None:
        self.model = torch.nn.Sequential(
            torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.5), torch.nn.Linear(width, 1)
        ).to(dtype)
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD([{"params": parameters[i::groups]} for i in range(groups)], 0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.counted = Counted()

    def parts(self, **others: Any) -> dict[str, Any]:
        named = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "counted": self.counted,
        }
        return named | others

    def step(self) -> list[float]:
        """One update with draws from all three generators; what it came to."""
        noise = random.random() + float(np.random.random())
        loss = (self.model(torch.rand(5, 3)) + noise).pow(2).mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.counted.count += 1
        return [loss.item(), *self.scheduler.get_last_lr(), *(each.sum().item() for each in self.model.parameters())]


@pytest.fixture
def trained() -> Training:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    training = Training()
    for _ in range(3):
        training.step()
    return training


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def everything(parts: dict[str, Any]) -> bytes:
    """All that restoring could change, as bytes."""
    file = io.BytesIO()
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save((states, random.getstate(), tuple(np.random.get_state())[1:], torch.get_rng_state()), file)
    return file.getvalue()


def test_g3_what_was_captured_goes_on_to_the_bit(trained: Training) -> None:
    state = through_a_file(capture(trained.parts(), STAMP))
    wanted = [trained.step() for _ in range(3)]
    again = Training()
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(99)
    assert restore(state, again.parts(), STAMP) == STAMP
    assert again.counted.count == 3
    assert [again.step() for _ in range(3)] == wanted
    # And once more: what the file gave was not trained on.
    third = Training()
    assert restore(through_a_file(state), third.parts(), STAMP) == STAMP


def test_a_copy_is_what_was_captured_whatever_is_trained_afterwards(trained: Training) -> None:
    live = capture(trained.parts(), STAMP)
    wanted = io.BytesIO()
    torch.save(live, wanted)
    copied, found = snapshot(live), io.BytesIO()
    trained.step()
    torch.save(copied, found)
    assert found.getvalue() == wanted.getvalue()
    # A module's versions go with it.
    assert copied["parts"]["model"]._metadata["1"] == {"version": 2}


def test_a_wrapped_model_is_what_it_wraps(trained: Training, alone: None) -> None:
    wrapped = DistributedDataParallel(trained.model)
    state = through_a_file(capture(trained.parts(model=wrapped), STAMP))
    assert state["parts"]["model"].keys() == trained.model.state_dict().keys()
    plain, other = Training(), Training()
    restore(state, plain.parts(), STAMP)
    restore(state, other.parts(model=DistributedDataParallel(other.model)), STAMP)
    assert everything(plain.parts()) == everything(other.parts())


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_is_sharded_is_sent_to_dcp(trained: Training, alone: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(trained.model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(StateError, match=r"part 'model'\['0\.weight'\] is sharded over ranks: .*sharded\(\)"):
        capture(trained.parts(), STAMP)
    with pytest.raises(UsageError, match="DTensor"):
        snapshot(trained.model.state_dict())


OTHERS: dict[str, Any] = {"rank": 0, "steps": 4, "updates": 5, "execution_id": "another", "checkpoint_id": "another"}


@pytest.mark.parametrize("name", OTHERS)
def test_g3_the_state_of_another_rank_step_or_execution_is_refused(trained: Training, name: str) -> None:
    state = through_a_file(capture(trained.parts(), dataclasses.replace(STAMP, **{name: OTHERS[name]})))
    before = everything(trained.parts())
    with pytest.raises(StateError) as caught:
        restore(state, trained.parts(), STAMP)
    wanted = f"{name}: expected {getattr(STAMP, name)!r}, found {OTHERS[name]!r}"
    assert str(caught.value) == f"the training state belongs elsewhere ({wanted}); states do not mix"
    assert everything(trained.parts()) == before


def test_g3_another_worlds_random_states_are_left_alone_and_all_else_is_checked_and_restored(
    trained: Training, caplog: pytest.LogCaptureFixture
) -> None:
    state = through_a_file(capture(trained.parts(), STAMP))
    again = Training()
    expected = dataclasses.replace(STAMP, resharded=True)
    before = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()
    assert restore(state, again.parts(), expected) == STAMP
    assert before == (random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes())
    assert "random states are not restored" in caplog.text
    assert torch.equal(again.model[0].weight, trained.model[0].weight)
    assert again.scheduler.state_dict() == trained.scheduler.state_dict()
    # Which world reads is no part of the stamp, and lets no other one in.
    assert expected.values() == STAMP.values()
    state["stamp"]["steps"] += 1
    with pytest.raises(StateError, match="steps: expected 3, found 4"):
        restore(state, again.parts(), expected)


def test_a_stamp_is_compared_by_type() -> None:
    assert STAMP.differences(STAMP.values()) == []
    assert STAMP.differences(STAMP.values() | {"rank": True}) == ["rank: expected 1, found True"]
    assert STAMP.differences(STAMP.values() | {"more": 1}) == ["more: expected 'nothing', found 1"]
    assert STAMP.differences(None) == ["it is a NoneType, not a dict"]
    with pytest.raises(TypeError):
        dataclasses.replace(STAMP, steps=True)


def drop(*path: str) -> Callable[[dict[str, Any]], Any]:
    def harm(state: dict[str, Any]) -> None:
        for name in path[:-1]:
            state = state[name]
        del state[path[-1]]

    return harm


def put(value: Any, *path: str) -> Callable[[dict[str, Any]], Any]:
    def harm(state: dict[str, Any]) -> None:
        for name in path[:-1]:
            state = state[name]
        state[path[-1]] = value(state[path[-1]]) if callable(value) else value

    return harm


HARMS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no format": (drop("format"), "no format"),
    "another format": (put(2, "format"), "format 2, and this version reads 1"),
    "a true format": (put(True, "format"), "format True"),
    "no stamp": (drop("stamp"), "lacks 'stamp'"),
    "no rank": (drop("stamp", "rank"), "rank: expected 1, found 'nothing'"),
    "no parts": (put(None, "parts"), "lacks 'parts'"),
    "no optimizer": (drop("parts", "optimizer"), "part 'optimizer' is missing"),
    "no own part": (drop("parts", "counted"), "part 'counted' is missing"),
    "more": (put({}, "parts", "critic"), "part 'critic' is not known here"),
    "no tensor": (drop("parts", "model", "3.bias"), r"part 'model': tensor '3\.bias' is missing"),
    "another tensor": (put(1, "parts", "model", "4"), "part 'model': tensor '4' is not known here"),
    "no tensor but a number": (put(1, "parts", "model", "3.bias"), r"'3\.bias' is a int"),
    "another shape": (
        put(lambda tensor: tensor[:, :2].clone(), "parts", "model", "0.weight"),
        r"'0\.weight' is float32\[4, 2\], and the model's is float32\[4, 3\]",
    ),
    "another dtype": (put(lambda tensor: tensor.double(), "parts", "model", "3.bias"), r"is float64\[1\]"),
    "no module's": (put([], "parts", "model"), "no module's state"),
    "groups": (
        put(lambda groups: groups * 2, "parts", "optimizer", "param_groups"),
        r"groups of \[6, 6\] parameters, and the optimizer of \[6\]",
    ),
    "no optimizer's": (put({}, "parts", "optimizer"), "no optimizer's state"),
    "no moments": (drop("parts", "optimizer", "state"), "no optimizer's state"),
    "scaler": (put({}, "parts", "scaler"), "part 'scaler': its state is empty"),
    "no place": (drop("parts", "scheduler", "last_epoch"), "part 'scheduler': it lacks the schedule's place"),
    "no numpy": (drop("random", "numpy"), "random state 'numpy' is missing"),
    "another generator": (put(1, "random", "xpu"), "random state 'xpu' is not known here"),
    "python": (put(lambda state: state[:2], "random", "python"), "random state 'python'"),
    "torch": (put(lambda state: state[:-1].clone(), "random", "torch"), "random state 'torch'"),
    "numpy": (put(lambda state: (state[0], state[1][:9], *state[2:]), "random", "numpy"), "random state 'numpy'"),
}


@pytest.mark.parametrize("name", HARMS)
def test_g3_what_does_not_fit_is_refused_before_anything_is_loaded(trained: Training, name: str) -> None:
    harm, message = HARMS[name]
    state = through_a_file(capture(trained.parts(), STAMP))
    for _ in range(2):
        trained.step()
    before = everything(trained.parts())
    harm(state)
    for call in (check, restore):
        with pytest.raises(StateError, match=message):
            call(state, trained.parts(), STAMP)
    assert everything(trained.parts()) == before


@pytest.mark.parametrize("state", [None, [], {}, {"model": {}}])
def test_what_is_no_training_state_is_refused(trained: Training, state: Any) -> None:
    with pytest.raises(StateError, match="no training state"):
        restore(state, trained.parts(), STAMP)


def test_g3_the_devices_random_state_is_one_of_them(trained: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the device. On a real one only the canaries keep random states, by their own code."""
    without = through_a_file(capture(trained.parts(), STAMP))
    device, plain = torch.Generator(), torch.Generator
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", device.get_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", device.set_state)
    monkeypatch.setattr(torch, "Generator", lambda _device="cpu": plain())
    device.manual_seed(3)
    state = through_a_file(capture(trained.parts(), STAMP))
    wanted = torch.rand(4, generator=device)
    restore(state, trained.parts(), STAMP)
    assert torch.equal(torch.rand(4, generator=device), wanted)
    before = device.get_state()
    with pytest.raises(StateError, match="random state 'cuda' is missing"):
        restore(without, trained.parts(), STAMP)
    put(lambda saved: saved[:-1].clone(), "random", "cuda")(state)
    with pytest.raises(StateError, match="random state 'cuda'"):
        restore(state, trained.parts(), STAMP)
    assert torch.equal(device.get_state(), before)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StateError, match="random state 'cuda' is not known here"):
        restore(state, trained.parts(), STAMP)


def test_all_that_is_wrong_is_said_at_once(trained: Training) -> None:
    state = through_a_file(capture(trained.parts(), STAMP))
    for path in (("parts", "model", "0.bias"), ("parts", "scheduler"), ("random", "torch")):
        drop(*path)(state)
    with pytest.raises(StateError) as caught:
        restore(state, trained.parts(), STAMP)
    for what in ("tensor '0.bias' is missing", "part 'scheduler' is missing", "random state 'torch' is missing"):
        assert what in str(caught.value)


def test_a_part_that_refuses_its_state_is_named(trained: Training) -> None:
    trained.counted.count = -1
    state = through_a_file(capture(trained.parts(), STAMP))
    with pytest.raises(StateError, match=r"part 'counted' refused .*no count; it, and \['model'.*do not confirm"):
        restore(state, trained.parts(), STAMP)


class Holds:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return {"a": [self.value]}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["a"][0]


@pytest.mark.parametrize(
    "value", [np.zeros(2), np.float64(1.0), defaultdict(list), object(), lambda: None, {"x": Counted()}, frozenset()]
)
def test_g4_what_could_not_be_loaded_again_is_refused_when_it_is_captured(value: Any) -> None:
    with pytest.raises(
        StateError,
        match=r"part 'mine' could not be loaded again with torch\.load\(weights_only=True\): \w+: \S.*; give tensors",
    ):
        capture({"mine": Holds(value)}, STAMP)
    with pytest.raises(Exception, match=r"weights_only|Weights only|pickle"):
        through_a_file({"a": [value]})


def keys() -> st.SearchStrategy[Any]:
    return st.text(max_size=3) | st.integers(-5, 5) | st.tuples(st.integers(0, 3), st.text(max_size=2))


def values() -> st.SearchStrategy[Any]:
    leaves: st.SearchStrategy[Any] = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.complex_numbers(allow_nan=False)
        | st.text(max_size=5)
        | st.binary(max_size=5)
        | st.sampled_from([torch.float16, torch.device("cpu"), torch.Size([1, 2]), Counter("aab")])
        | st.sets(st.integers(), max_size=3)
    )
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.dictionaries(keys(), inner, max_size=3)
            | st.dictionaries(keys(), inner, max_size=3).map(OrderedDict)
        ),
        max_leaves=12,
    )


@given(value=values())
@settings(max_examples=100, deadline=None)
def test_what_is_captured_can_be_loaded_again_and_nothing_else_is_captured(value: Any) -> None:
    found = Holds(None)
    try:
        state = capture({"mine": Holds(value)}, STAMP)
    except StateError:
        with pytest.raises(pickle.UnpicklingError):
            through_a_file(value)
        return
    assert restore(through_a_file(state), {"mine": found}, STAMP) == STAMP
    assert found.value == value


# -- copies


def even(base: torch.Tensor) -> torch.Tensor:
    return base[: len(base) // 2 * 2].view(-1, 2)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda base: base,
    "slice": lambda base: base[len(base) // 2 :],
    "transposed": lambda base: even(base).t(),
    "bits": lambda base: base.view(torch.int32),
    "parameter": torch.nn.Parameter,
    "result": lambda base: base.clone().requires_grad_() * 2,
    "conjugate": lambda base: torch.view_as_complex(even(base)).conj(),
    "sparse": torch.Tensor.to_sparse,
    "expanded": lambda base: base[:1].expand(len(base[:1]) and 4),
}


@st.composite
def structures(draw: Any) -> Any:
    """A nested value of tensors, many of which are views of the same storages, or are there twice."""
    bases = [torch.rand(draw(st.integers(0, 20))) for _ in range(draw(st.integers(1, 3)))]
    tensors = [VIEWS[draw(st.sampled_from(sorted(VIEWS)))](draw(st.sampled_from(bases))) for _ in range(6)]
    leaves: st.SearchStrategy[Any] = st.sampled_from(tensors) | st.integers() | st.builds(list)
    return draw(
        st.recursive(
            leaves,
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.tuples(inner, inner)
                | st.dictionaries(st.integers(0, 9), inner, max_size=3)
                | st.dictionaries(st.integers(0, 9), inner, max_size=3).map(OrderedDict)
            ),
            max_leaves=10,
        )
    )


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_of(item)]


def shape_of(value: Any) -> Any:
    """Everything but the tensors."""
    if isinstance(value, dict):
        return type(value), [(key, shape_of(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [shape_of(item) for item in value]
    return "tensor" if isinstance(value, torch.Tensor) else value


def storage_of(tensor: torch.Tensor) -> int | None:
    """Where its bytes are; None where nothing tells, or nothing could be shared."""
    if tensor.layout != torch.strided or tensor.is_conj() or not tensor.untyped_storage().nbytes():
        return None
    return tensor.untyped_storage().data_ptr()


def sharing(tensors: list[torch.Tensor], among: list[torch.Tensor]) -> list[list[bool]]:
    """Which of `tensors` share a storage, of those whose fellows in `among` could."""
    places = [storage_of(tensor) for tensor, fellow in zip(tensors, among, strict=True) if storage_of(fellow)]
    return [[place == other for other in places] for place in places]


@given(value=structures())
@settings(max_examples=100, deadline=None)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_copy_is_equal_shares_nothing_and_keeps_what_is_shared(value: Any) -> None:
    copied = snapshot(value)
    live, mine = tensors_of(value), tensors_of(copied)
    assert shape_of(copied) == shape_of(value)
    assert sharing(mine, live) == sharing(live, live)
    assert [tensor.requires_grad for tensor in mine] == [False] * len(mine)
    for tensor, original in zip(mine, live, strict=True):
        assert (tensor.dtype, tensor.shape) == (original.dtype, original.shape)
        if storage_of(original):
            assert tensor.stride() == original.stride()
    wanted = [tensor.detach().to_dense().resolve_conj().clone() for tensor in live]
    with torch.no_grad():
        for original in live:
            (
                original._values()
                if original.is_sparse
                else torch.as_strided(original, [1], [1])
                if original.numel()
                else original
            ).fill_(7)
    assert all(torch.equal(tensor.to_dense(), before) for tensor, before in zip(mine, wanted, strict=True))


def test_a_structure_that_holds_itself_is_copied_once() -> None:
    value: dict[str, Any] = {"list": [1], "tensor": torch.zeros(1)}
    value["self"], value["again"] = value, value["list"]
    copied = snapshot(value)
    assert copied["self"] is copied
    assert copied["again"] is copied["list"]
    assert copied["list"] is not value["list"]
    twice = snapshot([value["tensor"], value["tensor"]])
    assert twice[0] is twice[1]


def test_objects_are_copied_with_what_they_hold() -> None:
    holds = Holds(torch.zeros(2))
    copied = snapshot({"mine": holds})["mine"]
    holds.value.fill_(1)
    assert copied.value.tolist() == [0.0, 0.0]


# -- through torch.distributed.checkpoint


class Folder:
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def open(self, name: str) -> Any:
        return HashingFile(self.directory / name)

    def of_rank(self, rank: int) -> dict[str, Any]:
        assert rank == 0
        return {path.name: io.BytesIO(path.read_bytes()) for path in self.directory.iterdir()}


def test_a_model_and_its_optimizer_go_through_a_distributed_checkpoint(trained: Training, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    dcp_save(sharded(trained.model, trained.optimizer), storage_writer=dcp.SaveWriter(folder, "m"))
    rest: dict[str, Any] = {"scheduler": trained.scheduler, "scaler": trained.scaler}
    state = through_a_file(capture(rest, STAMP))
    wanted = [trained.step() for _ in range(2)]
    again = Training()
    load_sharded(folder, "m", again.model, again.optimizer)
    restore(state, {"scheduler": again.scheduler, "scaler": again.scaler}, STAMP)
    assert [again.step() for _ in range(2)] == wanted


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (torch.nn.Sequential(torch.nn.Linear(3, 4)), "lack.*model\\.1\\."),
        (torch.nn.Sequential(*Training().model, torch.nn.Linear(1, 1)), "Missing key.*model\\.4\\."),
        (Training(width=6).model, "(?i)size mismatch"),
    ],
    ids=["smaller", "larger", "wider"],
)
def test_a_distributed_checkpoint_of_another_model_is_refused_before_anything_is_read(
    trained: Training, tmp_path: Path, model: torch.nn.Module, message: str
) -> None:
    folder = Folder(tmp_path)
    dcp_save(sharded(trained.model), storage_writer=dcp.SaveWriter(folder, "m"))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BaseException, match=message):
        load_sharded(folder, "m", model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
