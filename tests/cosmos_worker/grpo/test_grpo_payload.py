from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_worker.grpo import vocab
from cosmos_worker.grpo.payload import PayloadError, decode_completion, encode_completion

characters = st.integers(vocab.UNKNOWN + 1, vocab.VOCAB_SIZE - 1)
logprobs = st.floats(max_value=0.0, min_value=-100.0, width=32)
completions = st.lists(st.tuples(characters, logprobs), min_size=1, max_size=50)


@given(completions, st.booleans())
def test_a_completion_survives_the_wire_to_the_bit(pairs: list[tuple[int, float]], ended: bool) -> None:
    tokens = [token for token, _ in pairs] + [vocab.END] * ended
    scores = [logprob for _, logprob in pairs] + [-0.5] * ended

    decoded = decode_completion(encode_completion(tokens, scores))

    assert decoded.tokens == tuple(tokens)
    assert decoded.logprobs == tuple(scores)


@given(st.binary(max_size=64))
def test_bytes_that_decode_are_what_encoding_makes(data: bytes) -> None:
    try:
        decoded = decode_completion(data)
    except PayloadError:
        return
    assert encode_completion(decoded.tokens, decoded.logprobs) == data


@given(completions, st.data())
def test_a_cut_or_longer_payload_is_refused(pairs: list[tuple[int, float]], data: st.DataObject) -> None:
    good = encode_completion(*zip(*pairs, strict=True))
    cut = data.draw(st.integers(0, len(good) - 1))

    for bad in (good[:cut], good + b"\0"):
        with pytest.raises(PayloadError):
            decode_completion(bad)


@pytest.mark.parametrize(
    ("tokens", "scores", "reason"),
    [
        ([], [], "no tokens"),
        ([vocab.PAD], [-1.0], "never samples"),
        ([70], [0.5], "positive or not finite"),
        ([70], [math.nan], "positive or not finite"),
        ([70], [-math.inf], "positive or not finite"),
        ([70, 71], [-1.0], "2 tokens but 1 log-probabilities"),
    ],
)
def test_what_no_policy_sampled_is_refused_at_both_ends(tokens: list[int], scores: list[float], reason: str) -> None:
    with pytest.raises(PayloadError, match=reason):
        encode_completion(tokens, scores)
    if len(tokens) == len(scores):
        count = len(tokens)
        with pytest.raises(PayloadError, match=reason):
            decode_completion(struct.pack(f"<4sI{count}i{count}f", b"GRP1", count, *tokens, *scores))


def test_another_format_is_refused() -> None:
    with pytest.raises(PayloadError, match="GRP9"):
        decode_completion(b"GRP9" + encode_completion([70], [-1.0])[4:])
