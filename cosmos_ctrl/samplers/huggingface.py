"""What of Hugging Face's streaming datasets can be restored from their own state, found without importing the library.

* A shuffle buffer's content is not in the state: after a restore the library fills the buffer anew, and what was in it is
  skipped. A dataset with one anywhere is replayed from the epoch's start instead.
* Only stages that were tried at every position are trusted; one that is not known here is replayed too.
* A buffer that is shuffled without a seed has another order in every process: it cannot be restored at all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

_EXACT = frozenset(
    {
        "ArrowExamplesIterable",
        "CyclingMultiSourcesExamplesIterable",
        "ExamplesIterable",
        "FilteredExamplesIterable",
        "FormattedExamplesIterable",
        "HorizontallyConcatenatedMultiSourcesExamplesIterable",
        "MappedExamplesIterable",
        "RandomlyCyclingMultiSourcesExamplesIterable",
        "RebatchedArrowExamplesIterable",
        "RepeatExamplesIterable",
        "SelectColumnsIterable",
        "SkipExamplesIterable",
        "StepExamplesIterable",
        "TakeExamplesIterable",
        "VerticallyConcatenatedMultiSourcesExamplesIterable",
    }
)
_UNSEEDED_BITS = 64  # NumPy takes 128 random bits where no seed is given
_DEPTH = 4


def is_streaming(value: Any) -> bool:
    """Whether `value` is an ``IterableDataset`` of the datasets library."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(value, datasets.IterableDataset)


def state_is_exact(owner: Any) -> bool:
    """Whether `owner`'s own state leads back to the very next example.

    Raises:
        ValueError: a streaming dataset in it is shuffled without a seed.
    """
    stages = [stage for dataset in _streaming_in(owner, _DEPTH, set()) for stage in _stages(dataset._ex_iterable)]
    for stage in stages:
        if type(stage).__name__ == "BufferShuffledExamplesIterable":
            entropy = stage.generator.bit_generator.seed_seq.entropy
            if isinstance(entropy, int) and entropy >> _UNSEEDED_BITS:
                raise ValueError(
                    "the dataset is shuffled without a seed, so a resumed process would shuffle it in another way and skip "
                    "examples: give one, as in shuffle(seed=0)"
                )
    return all(type(stage).__name__ in _EXACT for stage in stages)


def _streaming_in(value: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    """The streaming datasets that `value` is or holds in its attributes, lists and dicts."""
    if id(value) in seen or depth < 0:
        return
    seen.add(id(value))
    if is_streaming(value):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _streaming_in(item, depth - 1, seen)
    else:
        held = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        for item in held.values():
            yield from _streaming_in(item, depth - 1, seen)


def _stages(stage: Any) -> Iterator[Any]:
    yield stage
    if hasattr(stage, "ex_iterable"):
        yield from _stages(stage.ex_iterable)
    for source in getattr(stage, "ex_iterables", ()):
        yield from _stages(source)
