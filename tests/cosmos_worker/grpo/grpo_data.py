"""A cheap source of training groups, the same in every process."""

from __future__ import annotations

import random

from cosmos_worker.grpo import vocab
from cosmos_worker.grpo.groups import TrainCompletion, TrainGroup
from cosmos_worker.grpo.payload import encode_completion


def make_groups(count: int, seed: int) -> list[TrainGroup]:
    """Groups of four completions of any kind, whose rewards differ within each group."""
    draw = random.Random(seed)

    def completion(index: int) -> TrainCompletion:
        tokens = vocab.encode_answer(str(draw.randrange(1000)))
        logprobs = [-draw.uniform(3.0, 6.0) for _ in tokens]
        return TrainCompletion(index, encode_completion(tokens, logprobs), float(index % 2))

    return [
        TrainGroup(group, f"{draw.randrange(10)} + {draw.randrange(100)} =", [completion(i) for i in range(4)])
        for group in range(count)
    ]
