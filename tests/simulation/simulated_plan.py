"""What a simulated run is like, drawn from its seed: policy, sampler, and how much goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cosmos_ctrl.core.policy import RunPolicy
from cosmos_ctrl.core.samplers import SeekableSampler
from cosmos_ctrl.core.sampling import PromptFeedback

SESSION_TTL_S = 10.0
LARGEST_GROUP = 4

#: Told of every draw: epoch, keys, state right after.
OnDraw = Callable[[int, list[str], Any], None]


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
    feedback: bool
    """Whether what is drawn depends on what became of earlier draws."""
    reorders: bool
    """Whether each execution may shuffle otherwise, and make groups of another size, as a careless owner's would."""
    records: tuple[Any, ...]
    """What an execution's checkpoints may record of their window."""
    shrinks: bool
    """Whether an execution's limits may be smaller than those before it."""
    rollouts: int
    lives: int
    crash: float
    """Probability of a crash at any event."""
    crash_at_publication: float
    policy: RunPolicy

    @property
    def largest_group(self) -> int:
        """Completions that a group of any execution may have at most."""
        return LARGEST_GROUP if self.reorders else self.n

    @staticmethod
    def of(rng: random.Random) -> Plan:
        prompts, n, ranks = rng.randint(1, 12), rng.choice([1, 1, 2, 3, 4]), rng.choice([1, 1, 2, 3])
        batch, crash = rng.choice([0, 0, 0, 2, 3]), rng.choice([0.01, 0.01, 0.02, 0.05])
        feedback = rng.random() < 0.3
        return Plan(
            prompts=prompts,
            n=n,
            budget=rng.randint(1, 4 * prompts * n),
            batch=batch,
            drop_last=batch != 0 and prompts >= batch and rng.random() < 0.3,
            shuffle=rng.random() < 0.5,
            feedback=feedback,
            reorders=not feedback and rng.random() < 0.15,
            records=rng.choice(
                [
                    ("nothing",),
                    ("settled",),
                    ("keys",),
                    ("keys",) if feedback else ("settled",),
                    ("keys",) if feedback else ("settled",),
                    ("settled", "keys", "nothing"),
                ]
            ),
            shrinks=rng.random() < 0.5,
            rollouts=rng.randint(1, 3),
            lives=rng.randint(1, 8),
            crash=crash,
            crash_at_publication=rng.choice([crash, crash, 0.6]),
            policy=RunPolicy(
                trainer_groups=(("policy", ranks),) if rng.random() < 0.7 else (("policy", ranks), ("critic", 1)),
                groups_per_step=rng.choice([1, 1, 2, 3, 4]),
                max_training_steps=rng.choice([None, None, None, rng.randint(0, 12)]),
                save_every_steps=rng.choice([0, 1, 1, 1, 2, 3]),
                tail=rng.choice(["train", "train", "discard", "wait"]),
                min_completions_per_group=rng.choice([1, 1, 1, 2]),
                max_staleness=rng.choice([None, None, 0, 1, 2]),
                on_stale=rng.choice(["discard", "regenerate"]),
                poison_limit=rng.randint(1, 3),
                max_outstanding_groups=rng.choice([rng.randint(1, 12), rng.randint(6, 16)]),
                max_buffered_bytes=rng.choice([1 << 30, 1 << 30, 30, 1]),
                max_window_draws=rng.choice([1 << 20, 1 << 20, 1, rng.randint(2, 6)]),
                max_window_bytes=rng.choice([1 << 30, 1 << 30, rng.randint(60, 400)]),
                on_full_window=rng.choice(["wait", "discard"]),
                announces_weights=rng.random() < 0.5,
                lease_deadline_s=rng.choice([None, None, 6.0]),
                session_ttl_s=SESSION_TTL_S,
                gate_timeout_s=60.0,
                save_timeout_s=40.0,
                stop_grace_s=1000.0,
            ),
        )

    def policy_of(self, rng: random.Random) -> RunPolicy:
        """The policy of one more execution."""
        policy = replace(self.policy, records_window=rng.choice(self.records))
        if self.shrinks and rng.random() < 0.7:
            policy = replace(
                policy,
                max_outstanding_groups=rng.randint(1, policy.max_outstanding_groups),
                max_window_draws=rng.choice([policy.max_window_draws, rng.randint(1, min(3, policy.max_window_draws))]),
                max_window_bytes=rng.choice([policy.max_window_bytes, rng.randint(1, 200)]),
                on_full_window=rng.choice(["wait", "discard"]),
            )
        return policy


class EpochSampler:
    """A seekable sampler that also says in which epoch it is, so that a key names one place in the stream.

    Its state has another size after every draw, as a feedback-driven sampler's may.
    """

    def __init__(self, plan: Plan, seed: int) -> None:
        self._sampler = SeekableSampler(plan.prompts, shuffle=plan.shuffle, seed=seed)
        self.epoch = 1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(self._sampler)

    def state_dict(self) -> dict[str, Any]:
        position = self._sampler.state_dict()["position"]
        return {"position": position, "padding": "x" * (31 * position % 47)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # A shuffle of another seed is not refused here: the record must find it out.
        self._sampler.load_state_dict(self._sampler.state_dict() | {"position": state["position"]})


class PoolSampler:
    """A curriculum: which prompt comes next, and how large the state is, depends on the feedback so far."""

    def __init__(self, plan: Plan) -> None:
        self._scores = [0] * plan.prompts
        self.epoch, self._position = 1, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self._position = epoch, 0

    def __iter__(self) -> Iterator[int]:
        while self._position < len(self._scores):
            heard = sum((index + 1) * score for index, score in enumerate(self._scores))
            self._position += 1
            yield (7 * self._position + heard) % len(self._scores)

    def feedback(self, results: Sequence[PromptFeedback]) -> None:
        for result in results:
            self._scores[int(result.key.split("/")[1])] += 1 + len(result.rewards)

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": self._position,
            "scores": list(self._scores),
            "padding": "x" * (17 * sum(self._scores) % 61),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position, self._scores = state["position"], list(state["scores"])


class Batches:
    """A batch sampler over it, whose state is the sampler's."""

    def __init__(self, sampler: Any, size: int, drop_last: bool) -> None:
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


class Owner:
    """The owner of the position; it tells of every draw, so that nobody has to ask the core what was drawn."""

    def __init__(self, prompts: Any, drawn_from: Any, on_draw: OnDraw) -> None:
        self._prompts, self._drawn_from, self._on_draw = prompts, drawn_from, on_draw

    def set_epoch(self, epoch: int) -> None:
        self._prompts.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        for item in self._drawn_from:
            keys = [f"{self._prompts.epoch}/{index}" for index in (item if isinstance(item, list) else [item])]
            self._on_draw(self._prompts.epoch, keys, self.state_dict())
            yield item

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._prompts.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._prompts.load_state_dict(state)


class HearingOwner(Owner):
    """One that wants feedback."""

    def __init__(
        self, prompts: Any, drawn_from: Any, on_draw: OnDraw, on_feedback: Callable[[Sequence[PromptFeedback]], None]
    ) -> None:
        super().__init__(prompts, drawn_from, on_draw)
        self._on_feedback = on_feedback

    def feedback(self, results: Sequence[PromptFeedback]) -> None:
        self._on_feedback(results)
        self._prompts.feedback(results)


def samplers_of(
    plan: Plan,
    seed: int,
    on_draw: OnDraw,
    on_feedback: Callable[[Sequence[PromptFeedback]], None] = lambda _results: None,
) -> tuple[Any, Owner]:
    """The sampler of prompts and the owner of the position, as a new process builds them."""
    prompts = PoolSampler(plan) if plan.feedback else EpochSampler(plan, seed)
    drawn_from = Batches(prompts, plan.batch, plan.drop_last) if plan.batch else prompts
    if plan.feedback:
        return prompts, HearingOwner(prompts, drawn_from, on_draw, on_feedback)
    return prompts, Owner(prompts, drawn_from, on_draw)


def first_state(plan: Plan) -> Any:
    """The sampler's state before anything is drawn."""
    _, owner = samplers_of(plan, 0, lambda *_: None)
    owner.set_epoch(1)
    return owner.state_dict()


def uninterrupted(plan: Plan, seed: int) -> list[tuple[int, list[str]]] | None:
    """Epoch and keys of every draw of one uninterrupted pass, by nested loops; None where there is no telling."""
    if plan.feedback or plan.reorders:
        return None
    draws: list[tuple[int, list[str]]] = []
    _, owner = samplers_of(plan, seed, lambda epoch, keys, _state: draws.append((epoch, keys)))
    epoch = 0
    while plan.n * sum(len(keys) for _, keys in draws) < plan.budget:
        epoch += 1
        owner.set_epoch(epoch)
        for _ in owner:
            pass
    return draws
