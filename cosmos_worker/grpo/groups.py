"""What a trainer rank is given to train on, checked and turned into samples.

- A completion that cannot be trained is rejected by name with a reason; the rest of its group is trained.
- Advantages are relative to the completions of the group that can be trained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cosmos_worker.grpo import vocab
from cosmos_worker.grpo.objective import group_advantages
from cosmos_worker.grpo.payload import CompletionPayload, PayloadError, decode_completion


@dataclass(frozen=True, slots=True)
class TrainCompletion:
    """One completion as it came over the wire."""

    index: int
    """Its place in the group."""
    payload: bytes
    """As `encode_completion` makes it."""
    reward: float


@dataclass(frozen=True, slots=True)
class TrainGroup:
    """Completions of one prompt; some of the group's may be absent, having been discarded before."""

    group_id: int
    prompt: str
    completions: Sequence[TrainCompletion]


@dataclass(frozen=True, slots=True)
class RejectedCompletion:
    """A completion that is not trained, and why."""

    group_id: int
    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion, ready to be trained."""

    prompt: list[int]
    completion: CompletionPayload
    advantage: float


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a training step."""

    samples: list[Sample]
    rewards: list[float]
    rejected: list[RejectedCompletion]


def prepare_share(groups: Sequence[TrainGroup], *, context_tokens: int) -> Share:
    """Decode and check every completion of these groups."""
    share = Share([], [], [])
    for group in groups:
        prompt = vocab.encode_prompt(group.prompt)
        kept: list[tuple[CompletionPayload, float]] = []
        for completion in group.completions:
            try:
                kept.append((_decode(completion, max(context_tokens - len(prompt), 0)), completion.reward))
            except PayloadError as error:
                share.rejected.append(RejectedCompletion(group.group_id, completion.index, str(error)))
        if not kept:
            continue
        rewards = [reward for _, reward in kept]
        share.rewards.extend(rewards)
        share.samples.extend(
            Sample(prompt, payload, advantage)
            for (payload, _), advantage in zip(kept, group_advantages(rewards), strict=True)
        )
    return share


def _decode(completion: TrainCompletion, room: int) -> CompletionPayload:
    payload = decode_completion(completion.payload)
    if len(payload.tokens) > room:
        raise PayloadError(f"{len(payload.tokens)} tokens exceed the {room} that the context has left")
    if not math.isfinite(completion.reward):
        raise PayloadError(f"the reward is {completion.reward}")
    return payload
