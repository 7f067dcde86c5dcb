"""Fingerprints of datasets, and library state as plain JSON."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from datasets import Dataset as HuggingFaceDataset
from hypothesis import given
from hypothesis import strategies as st
from sampler_datasets import Texts
from torch.utils.data import TensorDataset

from cosmos_ctrl.core.state import EncodedState, same_value
from cosmos_ctrl.samplers import dataset_fingerprint
from cosmos_ctrl.samplers.values import from_json, to_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.just("$tuple"), inner, max_size=3)
    ),
    max_leaves=6,
)


def test_a_fingerprint_is_stable() -> None:
    items = ["a", b"b", 1, 1.5, None, True, [1, (2,)], {"k": "v"}]
    assert dataset_fingerprint(items) == "sha256:44aef49cd801e1aa140d5e9fcc4a620bc6270102954cc08f55872ee37e50ad85"


@given(st.lists(VALUES, max_size=4), st.lists(VALUES, max_size=4))
def test_two_sequences_share_a_fingerprint_only_if_they_are_the_same(a: list[Any], b: list[Any]) -> None:
    same = _shape(a) == _shape(b)
    assert (dataset_fingerprint(a) == dataset_fingerprint(b)) == same


def _shape(value: Any) -> str:
    """Equal for what counts as the same: types, order of sequences, not the order of dicts."""
    if isinstance(value, dict):
        return f"d{sorted((_shape(key), _shape(item)) for key, item in value.items())}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}{[_shape(item) for item in value]}"
    if isinstance(value, float):
        import struct

        return struct.pack("<d", value).hex()
    return f"{type(value).__name__}{value!r}"


def test_what_could_run_together_does_not() -> None:
    groups = [
        ["ab", "c"],
        ["a", "bc"],
        ["abc"],
        ["abc", ""],
        [["abc"]],
        [["a"], "bc"],
        [("abc",)],
        [b"abc"],
        [{"abc": None}],
    ]
    groups += [
        [1],
        ["1"],
        [1.0],
        [True],
        [None],
        ["None"],
        [],
        [[]],
        [()],
        [{}],
        [1, 2],
        [2, 1],
        [[1], [2]],
        [[1, 2]],
        [12],
    ]
    groups += [[torch.tensor([1, 2])], [torch.tensor([[1, 2]])], [torch.tensor([1.0, 2.0])], [torch.tensor([2, 1])]]
    groups += [[numpy.array([1, 2])], [numpy.array([1, 2], dtype=numpy.int32)], [numpy.int64(1)], [0.0], [-0.0]]
    fingerprints = [dataset_fingerprint(group) for group in groups]
    assert len(set(fingerprints)) == len(groups)


def test_every_kind_of_dataset_has_the_fingerprint_of_its_items() -> None:
    items = [f"text {i}" for i in range(5)]
    expected = dataset_fingerprint(items)
    assert (
        dataset_fingerprint(Texts(5))
        == dataset_fingerprint(tuple(items))
        == dataset_fingerprint(iter(items))
        == expected
    )
    rows = HuggingFaceDataset.from_dict({"a": items})
    assert dataset_fingerprint(rows) == dataset_fingerprint([{"a": item} for item in items])
    assert dataset_fingerprint(rows.select([1, 0, 2, 3, 4])) != dataset_fingerprint(rows)
    tensors = TensorDataset(torch.arange(3), torch.ones(3, dtype=torch.bfloat16))
    assert dataset_fingerprint(tensors) == dataset_fingerprint([tensors[i] for i in range(3)])
    assert len({dataset_fingerprint(Texts(length)) for length in range(5)}) == 5


def test_the_order_of_a_dict_does_not_count() -> None:
    rows = [{"a": 1, "b": 2, "c": 3}, {"c": 3, "b": 2, "a": 1}, {"b": 2, "a": 1, "c": 3}]
    assert len({dataset_fingerprint([row]) for row in rows}) == 1
    assert dataset_fingerprint([{"a": 2, "b": 1, "c": 3}]) != dataset_fingerprint([rows[0]])


def test_it_streams() -> None:
    alive = 0

    class Item(str):
        def __new__(cls, text: str) -> Any:
            nonlocal alive
            alive += 1
            return super().__new__(cls, text)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def items() -> Iterator[str]:
        for i in range(50):
            yield Item(str(i))
            assert alive <= 2

    assert dataset_fingerprint(items()) == dataset_fingerprint([str(i) for i in range(50)])


@pytest.mark.parametrize(
    ("items", "place"),
    [
        ([1, object()], "item 1 is a builtins.object"),
        ([{"a": [0, {1}]}], r"item 0\['a'\]\[1\] is a builtins.set"),
        ([numpy.array([None])], "item 0 is a numpy.ndarray"),
        ([{object(): 1}], "item 0: a key is a builtins.object"),
        (5, "neither iterable nor a map-style dataset"),
        ([torch.eye(2).to_sparse()], "item 0 is a torch.Tensor"),
    ],
)
def test_what_has_no_digest_is_refused_by_its_place(items: Any, place: str) -> None:
    with pytest.raises(TypeError, match=place):
        dataset_fingerprint(items)


# -- library state


@given(VALUES)
def test_a_state_comes_back_as_it_was(value: Any) -> None:
    EncodedState.of(to_json(value))
    assert _same(from_json(json.loads(json.dumps(to_json(value)))), value)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    if isinstance(a, dict) and type(a) is type(b):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(_same, a, b))
    return same_value(a, b)


@pytest.mark.parametrize(
    "array",
    [
        torch.arange(6).reshape(2, 3).T,
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.Generator().manual_seed(1).get_state(),
        torch.arange(1000)[3:5],
        torch.tensor([1 + 2j]).conj(),
        numpy.arange(6, dtype=">i4").reshape(2, 3).T,
        numpy.zeros((0, 2)),
        numpy.random.default_rng(1).bit_generator.state["state"]["state"],
        numpy.float32(1.5),
        numpy.bool_(True),
    ],
    ids=repr,
)
def test_arrays_come_back_with_their_type_and_share_nothing(array: Any) -> None:
    written = json.dumps(to_json({"x": (array, 7)}))
    back, seven = from_json(json.loads(written))["x"]
    assert seven == 7
    assert type(back) is type(array)
    assert getattr(back, "dtype", None) == getattr(array, "dtype", None)
    if isinstance(array, torch.Tensor):
        assert back.shape == array.shape
        assert torch.equal(back, array)
    else:
        assert numpy.array_equal(back, array)
    assert len(written) < 8000


def test_an_ordered_dict_stays_one() -> None:
    value = OrderedDict([(1, "a"), ("b", (2,))])
    back = from_json(to_json(value))
    assert type(back) is OrderedDict
    assert back == value


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        object(),
        numpy.array([None]),
        numpy.array(["a"]),
        torch.zeros(1, requires_grad=True),
        torch.nn.Parameter(torch.zeros(1)),
        torch.zeros(1, device="meta"),
        torch.eye(2).to_sparse(),
        type("Sub", (dict,), {})(),
        range(3),
        numpy.random.default_rng(1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_not_come_back_is_refused_by_its_place(value: Any) -> None:
    with pytest.raises(TypeError, match=r"state\['deep'\]\[1\]"):
        to_json({"deep": [0, value]})


def test_an_unknown_tag_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tag '\$pickle', known here: \$array"):
        from_json({"a": [{"$pickle": "gASV"}]})
