"""What a simulated run is like, drawn from its seed: policy, sampler, and how much goes wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from oracle import Stream

from cosmos_ctrl.core.policy import RunPolicy
from cosmos_ctrl.core.samplers import SeekableSampler

SESSION_TTL_S = 10.0


@dataclass(frozen=True)
class Plan:
    """A run."""

    prompts: int
    n: int
    budget: int
    batch: int
    """Prompts a draw; 0: no batch sampler."""
    drop_last: bool
    shuffle: bool
    rollouts: int
    lives: int
    crash: float
    """Probability of a crash at any event."""
    policy: RunPolicy

    @staticmethod
    def of(rng: random.Random) -> Plan:
        prompts, n, ranks = rng.randint(1, 9), rng.choice([1, 1, 2, 3, 4]), rng.choice([1, 1, 2, 3])
        batch = rng.choice([0, 0, 0, 2, 3])
        return Plan(
            prompts=prompts,
            n=n,
            budget=rng.randint(1, 3 * prompts * n),
            batch=batch,
            drop_last=batch != 0 and prompts >= batch and rng.random() < 0.3,
            shuffle=rng.random() < 0.5,
            rollouts=rng.randint(1, 3),
            lives=rng.randint(1, 8),
            crash=rng.choice([0.01, 0.02, 0.05]),
            policy=RunPolicy(
                trainer_groups=(("policy", ranks),) if rng.random() < 0.7 else (("policy", ranks), ("critic", 1)),
                groups_per_step=rng.randint(1, 4),
                max_training_steps=rng.choice([None, None, None, rng.randint(0, 12)]),
                save_every_steps=rng.choice([0, 1, 1, 2, 3]),
                tail=rng.choice(["train", "train", "discard"]),
                min_completions_per_group=rng.choice([1, 1, 1, 2]),
                max_staleness=rng.choice([None, None, 0, 1, 2]),
                on_stale=rng.choice(["discard", "regenerate"]),
                poison_limit=rng.randint(1, 3),
                max_outstanding_groups=rng.randint(1, 12),
                max_buffered_bytes=rng.choice([1 << 30, 1 << 30, 30, 1]),
                max_window_draws=rng.choice([1 << 20, rng.randint(1, 8)]),
                max_window_bytes=rng.choice([1 << 30, rng.randint(60, 400)]),
                announces_weights=rng.random() < 0.5,
                lease_deadline_s=rng.choice([None, None, 6.0]),
                session_ttl_s=SESSION_TTL_S,
                gate_timeout_s=60.0,
                save_timeout_s=40.0,
                stop_grace_s=1000.0,
            ),
        )


class EpochSampler:
    """A seekable sampler that also says in which epoch it is, so that a key names one place in the stream.

    Its state has another size after every draw, as a feedback-driven sampler's may.
    """

    def __init__(self, plan: Plan) -> None:
        self._sampler = SeekableSampler(plan.prompts, shuffle=plan.shuffle, seed=7)
        self.epoch = 1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(self._sampler)

    def state_dict(self) -> dict[str, Any]:
        state = self._sampler.state_dict()
        return state | {"padding": "x" * (31 * state["position"] % 47)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict({key: value for key, value in state.items() if key != "padding"})


class Batches:
    """A batch sampler over it, whose state is the sampler's."""

    def __init__(self, sampler: EpochSampler, size: int, drop_last: bool) -> None:
        self._sampler, self._size, self._drop_last = sampler, size, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in self._sampler:
            batch.append(index)
            if len(batch) == self._size:
                yield batch
                batch = []
        if batch and not self._drop_last:
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict(state)


def samplers_of(plan: Plan) -> tuple[EpochSampler, Batches | None]:
    """Fresh samplers, as a new process builds them."""
    prompts = EpochSampler(plan)
    return prompts, Batches(prompts, plan.batch, plan.drop_last) if plan.batch else None


def stream_of(plan: Plan) -> Stream:
    """One uninterrupted pass, by nested loops."""
    draws: list[tuple[int, list[str]]] = []
    prompts, batches = samplers_of(plan)
    issued, epoch = 0, 0
    while issued < plan.budget:
        epoch += 1
        prompts.set_epoch(epoch)
        for item in batches or prompts:
            keys = [f"{epoch}/{index}" for index in (item if isinstance(item, list) else [item])]
            draws.append((epoch, keys))
            issued += plan.n * len(keys)
    return Stream.of(draws, plan.n, plan.budget)
