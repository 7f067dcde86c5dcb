"""One completion on the wire: what a learner needs that it cannot work out itself.

Layout, little-endian: four bytes `GRP1`, the number of tokens n as uint32, n token ids as int32, n natural
log-probabilities of the sampling policy as float32. Decoding accepts exactly what encoding makes, and nothing else.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from cosmos_worker.grpo.vocab import is_completion

CODEC = "grpo-v1"
"""Name that travels beside the bytes."""

MAX_TOKENS = 65_536
_MAGIC = b"GRP1"
_HEADER = struct.Struct("<4sI")


class PayloadError(ValueError):
    """Bytes that are no completion, or a completion that cannot be put into bytes."""


@dataclass(frozen=True, slots=True)
class CompletionPayload:
    """A completion's tokens and how likely the sampling policy found each."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


def encode_completion(tokens: Sequence[int], logprobs: Sequence[float]) -> bytes:
    """Bytes of one completion; log-probabilities are rounded to float32."""
    _check(tokens, logprobs)
    count = len(tokens)
    return _HEADER.pack(_MAGIC, count) + struct.pack(f"<{count}i{count}f", *tokens, *logprobs)


def decode_completion(data: bytes) -> CompletionPayload:
    """The completion that `encode_completion` made these bytes of; raises `PayloadError` for any others."""
    if len(data) < _HEADER.size:
        raise PayloadError(f"{len(data)} bytes are too few for a header of {_HEADER.size}")
    magic, count = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise PayloadError(f"starts with {magic!r}, not {_MAGIC!r}")
    if len(data) != _HEADER.size + 8 * count:
        raise PayloadError(f"{count} tokens take {_HEADER.size + 8 * count} bytes, not {len(data)}")
    numbers = struct.unpack_from(f"<{count}i{count}f", data, _HEADER.size)
    tokens, logprobs = numbers[:count], numbers[count:]
    _check(tokens, logprobs)
    return CompletionPayload(tokens, logprobs)


def _check(tokens: Sequence[int], logprobs: Sequence[float]) -> None:
    if len(tokens) != len(logprobs):
        raise PayloadError(f"{len(tokens)} tokens but {len(logprobs)} log-probabilities")
    if len(tokens) > MAX_TOKENS:
        raise PayloadError(f"{len(tokens)} tokens exceed the limit of {MAX_TOKENS}")
    if not is_completion(tokens):
        raise PayloadError("holds no tokens, or some that the policy never samples")
    if not all(math.isfinite(logprob) and logprob <= 0.0 for logprob in logprobs):
        raise PayloadError("a log-probability is positive or not finite")
