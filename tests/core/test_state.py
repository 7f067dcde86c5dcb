"""Opaque states: encoded once, decoded fresh, refused when JSON would change them."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_ctrl.core.state import EncodedState, same_value

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(json_values)
def test_a_plain_value_comes_back_the_same_with_its_types(value: Any) -> None:
    assert same_value(EncodedState.of(value).decode(), value)


@given(st.binary())
def test_bytes_come_back_as_they_are(value: bytes) -> None:
    assert EncodedState.of(value) == EncodedState(value, "bytes")
    assert EncodedState.of(value).decode() == value


def test_every_decoding_is_a_fresh_copy() -> None:
    state = EncodedState.of({"a": [1]})
    state.decode()["a"].append(2)
    assert state.decode() == {"a": [1]}


def test_an_encoded_state_is_passed_on_by_reference() -> None:
    state = EncodedState(b"anything", "torch")
    assert EncodedState.of(state) is state


class Text(str):
    __slots__ = ()


class Kind(str, Enum):
    A = "a"


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ((1, 2), "sampler_state"),
        ({"a": (1,)}, "sampler_state['a']"),
        ({"a": [0, {1}]}, "sampler_state['a'][1]"),
        ({1: 2}, "sampler_state"),
        ({"a": {None: 1}}, "sampler_state['a']"),
        (math.nan, "sampler_state"),
        ([math.inf], "sampler_state[0]"),
        ({"a": b"x"}, "sampler_state['a']"),
        ([object()], "sampler_state[0]"),
        ([Text("a")], "sampler_state[0]"),
        ([Kind.A], "sampler_state[0]"),
        ({Text("a"): 1}, "sampler_state"),
        ("\ud800", "sampler_state"),
    ],
)
def test_what_json_would_change_is_refused_by_name(value: Any, place: str) -> None:
    with pytest.raises(TypeError) as caught:
        EncodedState.of(value)
    assert str(caught.value).startswith(f"{place} ")


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ValueError, match="torch"):
        EncodedState(b"", "torch").decode()


def test_a_long_state_is_not_spelled_out() -> None:
    assert repr(EncodedState.of(b"x" * 1000)) == "EncodedState(<1000 bytes>, 'bytes')"


@pytest.mark.parametrize(
    ("a", "b"),
    [(True, 1), (1, 1.0), ("1", 1), ([1], (1,)), ({"a": True}, {"a": 1}), ([0], [False]), ({"a": 1}, {"a": 1, "b": 1})],
)
def test_equality_is_typed(a: Any, b: Any) -> None:
    assert not same_value(a, b)
    assert not same_value(EncodedState.of({"v": a}), EncodedState.of({"v": b})) if not isinstance(b, tuple) else True


def test_the_order_of_keys_does_not_count() -> None:
    assert same_value(EncodedState.of({"a": 1, "b": [2]}), EncodedState.of({"b": [2], "a": 1}))
    assert not same_value(EncodedState.of({"a": 1}), EncodedState.of({"a": True}))
    assert not same_value(EncodedState(b"1", "json"), EncodedState(b"1", "bytes"))
    assert same_value(EncodedState(b"?", "torch"), EncodedState(b"?", "torch"))


@pytest.mark.parametrize("garbage", [b"", b"{", b"\xff\xfe", b"nope"])
def test_g3_bytes_that_are_no_json_differ_and_do_not_raise(garbage: bytes) -> None:
    assert not same_value(EncodedState.of({"a": 1}), EncodedState(garbage, "json"))
