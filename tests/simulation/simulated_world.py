"""One execution's controller, its clock, and an oracle that listens to what the core says happened."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from oracle import Checkpoint, Oracle, Stream
from simulated_plan import Plan, samplers_of

from cosmos_ctrl.core.agreement import Resumed
from cosmos_ctrl.core.commands import Save
from cosmos_ctrl.core.controller import Controller
from cosmos_ctrl.core.execution import ExecutionIdentity, Place, WorkerInfo
from cosmos_ctrl.core.resume import ControllerResumeMetadata
from cosmos_ctrl.core.sampling import Prompt, Sampling


class Crash(Exception):
    """The controller dies here."""


class _Adapter:
    def load_metadata(self, config: Any) -> None:
        return None

    def restore_sampler(self, sampler: Any, metadata: ControllerResumeMetadata) -> None:
        sampler.load_state_dict(metadata.sampler_state)


class World:
    """A controller that resumed from `parent`, and everything that is not a worker."""

    def __init__(
        self, plan: Plan, stream: Stream, rng: random.Random, *, number: int, parent: Checkpoint | None, calm: bool
    ) -> None:
        self.plan, self.policy, self.stream, self.rng = plan, plan.policy, stream, rng
        self.number, self.id, self.parent = number, f"execution-{number}", parent
        self.calm = calm
        """No more faults: from now on the run has to end."""
        self.now = 1000.0 * number
        self.stopped = False
        self.oracle = Oracle(stream, plan.budget, parent)
        self.cuts: dict[str, tuple[dict[int, str], int]] = {}
        """Per checkpoint what was discarded, and how far the lineage had come, when it was cut."""
        self.failures: Counter[int] = Counter()
        """Leases of each group that reported a failure."""
        self.lapsed: set[str] = set()
        """Incarnations whose session has lapsed at least once."""
        self._ids = 0
        prompts, batches = samplers_of(plan)
        sampling = Sampling(
            prompts,
            batches,
            prompt_of=lambda index: Prompt(key=f"{prompts.epoch}/{index}"),
            completions_per_prompt=plan.n,
        )
        self.sampling_owner = sampling.owner_name
        self.resumed = None
        start = sampling.start(plan.budget) if parent is None else sampling.restore(_Adapter(), parent.metadata)
        if parent is not None:
            self.resumed = Resumed(
                metadata=parent.metadata, manifest_digest=parent.digest, repeat_bound_completions=parent.window
            )
        self.steps_before = parent.metadata.completed_training_steps if parent else 0
        self.controller = Controller(
            plan.policy,
            ExecutionIdentity(number, self.id),
            sampling,
            start,
            self.resumed,
            clock=lambda: self.now,
            new_id=self._new_id,
            record=self._record,
        )

    # -- what must hold after every event

    def check(self) -> None:
        """Both budget equations (G1) and the limit (G8)."""
        ledger = self.controller.ledger
        self.oracle.check_ledger(ledger.cursor, ledger.snapshot())
        assert self.controller.rollouts.buffered_bytes >= 0
        limit = self.policy.max_training_steps
        assert limit is None or self.controller.commands.steps <= max(limit, self.steps_before), "G8: past the limit"

    @property
    def no_more_work_is_wanted(self) -> bool:
        """Whether leases may have been cancelled."""
        limit = self.policy.max_training_steps
        return self.stopped or (limit is not None and self.controller.commands.steps >= limit)

    def counts(self) -> Any:
        """Everything that a repeat must not change, cheaply."""
        core = self.controller
        return core.statistics(), core.rollouts.buffered_bytes, core.rollouts.last_lease, core.lifecycle.revision

    # -- what the core says happened

    def _record(self, event: str, **values: Any) -> None:
        oracle = self.oracle
        if event == "issue":
            oracle.on_issue(values["group"], values["key"], values["size"], values["epoch"])
        elif event == "settle":
            oracle.on_settle(values["group"], values["mask"], values["outcome"], values["reason"])
            if values["outcome"] == "discarded":
                self._check_reason(values["group"], values["reason"])
        elif event == "cut":
            save = self.controller.commands.last
            assert isinstance(save, Save)
            self.cuts[save.checkpoint_id] = dict(oracle.discarded), max(oracle.issued, oracle.lineage_issued)
            oracle.check_cut(save.boundary.remaining_completions, save.window_completions)
        elif event == "lapse":
            self.lapsed.update(w.info.incarnation for w in self.controller.workers if str(w.place) == values["worker"])
        elif event == "train":
            assert values["step"] == self.controller.commands.steps + 1

    def _check_reason(self, group: int, reason: str) -> None:
        policy = self.policy
        assert {
            "worker-discarded": True,
            "trainer-rejected": True,
            "poison:worker-failed": self.failures[group] >= policy.poison_limit,
            "stale": policy.max_staleness is not None and policy.on_stale == "discard",
            "below_minimum": policy.min_completions_per_group > 1,
            "tail": policy.tail == "discard" and self.oracle.issued == self.plan.budget,
        }[reason], f"group {group} was discarded as {reason} without cause"

    # -- small things

    def part_of(self, mask: int) -> int:
        """Some of the bits, at least one."""
        bits = [1 << bit for bit in bits_of(mask)]
        return sum(self.rng.sample(bits, self.rng.randint(1, len(bits))))

    def digest(self) -> bytes:
        """Of a batch: no two are alike."""
        return self.rng.randbytes(8)

    def info(self, place: Place) -> WorkerInfo:
        """A new process at `place`."""
        world_size = dict(self.policy.trainer_groups).get(place.group, 1)
        return WorkerInfo(place=place, incarnation=f"{self.rng.getrandbits(128):032x}", world_size=world_size)

    def _new_id(self) -> str:
        self._ids += 1
        return f"{self.number:016x}{self._ids:016x}"


def bits_of(mask: int) -> list[int]:
    """The completions of a mask."""
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]


def fingerprint(value: Any) -> Any:
    """Everything reachable as plain values; the fence's own counter apart."""
    seen: set[int] = set()

    def walk(item: Any) -> Any:
        if item is None or isinstance(item, bool | int | float | str | bytes | Enum):
            return item
        if id(item) in seen:
            return "again"
        seen.add(id(item))
        if isinstance(item, dict):
            return [(walk(key), walk(content)) for key, content in item.items()]
        if isinstance(item, set | frozenset):
            return sorted(map(repr, item))
        if hasattr(item, "__iter__"):
            return [walk(content) for content in item] if hasattr(item, "__len__") else "iterator"
        if callable(item):
            return "callable"
        names = [f.name for f in fields(item)] if is_dataclass(item) else list(getattr(item, "__dict__", {}))
        return [(name, walk(getattr(item, name))) for name in names if name != "refused"]

    return walk(value)
