"""What the core's tests share: a hand-turned clock, counted IDs, and workers that speak for themselves."""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

from cosmos_ctrl.core.admission import Batch, WeightAnnouncement
from cosmos_ctrl.core.agreement import Restored, Resumed
from cosmos_ctrl.core.commands import Command, CompletionReport, DisposedRows, Save, ShardReceipt, Train
from cosmos_ctrl.core.controller import Acknowledgement, Controller, Publish
from cosmos_ctrl.core.execution import ExecutionIdentity, Place, WorkerInfo
from cosmos_ctrl.core.groups import Lease, RolloutRows
from cosmos_ctrl.core.leasing import LeaseReply
from cosmos_ctrl.core.ledger import SamplingBoundary
from cosmos_ctrl.core.policy import RunPolicy
from cosmos_ctrl.core.resume import ControllerResumeMetadata
from cosmos_ctrl.core.samplers import SeekableSampler
from cosmos_ctrl.core.sampling import Prompt, Sampling


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def counted_ids() -> Callable[[], str]:
    numbers = itertools.count(1)
    return lambda: f"{next(numbers):032x}"


def prompt_of(index: Any) -> Prompt:
    return Prompt(key=str(index))


def make_policy(**overrides: Any) -> RunPolicy:
    values: dict[str, Any] = {"trainer_groups": (("policy", 1),), "groups_per_step": 2, "announces_weights": False}
    return RunPolicy(**values | overrides)


def metadata_of(save: Save, **overrides: Any) -> ControllerResumeMetadata:
    """What a resume from a save has."""
    values: dict[str, Any] = {
        "checkpoint_path": save.path,
        "checkpoint_id": save.checkpoint_id,
        "completed_training_steps": save.steps,
        "completed_optimizer_updates": save.updates,
        "remaining_completions": save.boundary.remaining_completions,
        "epoch": save.boundary.epoch,
        "sampling_owner": "sampler",
        "sampler_state": save.boundary.encoded_state,
    }
    return ControllerResumeMetadata(**values | overrides)


class LoadState:
    """An adapter over ``load_state_dict``."""

    def load_metadata(self, config: Any) -> None:
        return None

    def restore_sampler(self, sampler: Any, metadata: ControllerResumeMetadata) -> None:
        sampler.load_state_dict(metadata.sampler_state)


def rows(outcome: Any, *leases: tuple[Lease, int], reason: str = "", **columns: Any) -> RolloutRows:
    """Rows of (lease, mask); a mask beyond 64 bits takes further rows with words."""
    groups, numbers, masks, words = [], [], [], []
    for lease, mask in leases:
        word = 0
        while mask:
            if part := mask & (1 << 64) - 1:
                groups.append(lease.group)
                numbers.append(lease.number)
                masks.append(part)
                words.append(word)
            mask >>= 64
            word += 1
    if outcome == "completed":
        count = sum(map(int.bit_count, masks))
        version = columns.pop("version", 0)
        columns = {
            "lowest_versions": [version] * len(masks),
            "highest_versions": [version] * len(masks),
            "rewards": [1.0] * count,
        } | columns
    elif outcome in ("discarded", "failed"):
        reason = reason or "because"
    return RolloutRows(
        outcome=outcome,
        groups=groups,
        leases=numbers,
        masks=masks,
        words=words if any(words) else (),
        reason=reason,
        **columns,
    )


def disposed_row(group: int, mask: int, disposition: Any, reason: str = "") -> DisposedRows:
    """What the leader says of one group."""
    return DisposedRows(disposition, ((group, mask),), reason)


class Worker:
    """One process life: it numbers its batches and requests, and confirms what it has seen."""

    def __init__(self, house: House, info: WorkerInfo) -> None:
        self.house, self.info = house, info
        self.session = ""
        self.execution = house.controller.identity.id
        self.batches = 0
        self.requests = 0
        self.confirmed_notices = 0
        self.notices: list[Any] = []
        self.register()

    @property
    def place(self) -> Place:
        return self.info.place

    def register(self) -> None:
        self.session = self.house.controller.register(self.execution, self.info).session

    def submit(self, *, number: int | None = None, digest: bytes | None = None, **parts: Any) -> Acknowledgement:
        """The next batch, or `number` again."""
        number = self.batches + 1 if number is None else number
        digest = (
            hashlib.blake2b(repr(sorted(parts.items())).encode(), digest_size=8).digest() if digest is None else digest
        )
        batch = Batch(number=number, digest=digest, **parts)
        ack = self.house.controller.submit(self.execution, self.session, self.batches, self.confirmed_notices, batch)
        self.batches = max(self.batches, number)
        self._heard(ack)
        return ack

    def report(self, outcome: Any, *leases: tuple[Lease, int], **columns: Any) -> Acknowledgement:
        if outcome == "completed":
            resumed = self.house.controller.resumed
            columns.setdefault("version", resumed.metadata.completed_training_steps if resumed else 0)
        return self.submit(rollouts=(rows(outcome, *leases, **columns),))

    def complete(self, *leases: Lease, **columns: Any) -> Acknowledgement:
        return self.report("completed", *((lease, lease.mask) for lease in leases), **columns)

    def heartbeat(self) -> Acknowledgement:
        self.house.controller.hear(self.execution, self.session)
        ack = self.house.controller.heartbeat(self.execution, self.session, self.batches, self.confirmed_notices)
        self._heard(ack)
        return ack

    def lease_reply(self, most: int = 1, *, number: int | None = None, last_call: bool = True) -> LeaseReply | None:
        number = self.requests + 1 if number is None else number
        reply = self.house.controller.lease(self.execution, self.session, number, most, last_call=last_call)
        if reply is not None:
            self.requests = max(self.requests, number)
        return reply

    def lease(self, most: int = 1) -> list[Lease]:
        reply = self.lease_reply(most)
        assert reply is not None
        return list(reply.leases)

    def confirm(self, **overrides: Any) -> tuple[str, ...]:
        return self.house.controller.confirm(self.execution, self.session, self.restored(**overrides))

    def restored(self, **overrides: Any) -> Restored:
        resumed = self.house.controller.resumed
        values: dict[str, Any] = {
            "metadata": resumed.metadata if resumed else None,
            "manifest_digest": resumed.manifest_digest if resumed else "",
            "training_steps": resumed.metadata.completed_training_steps if resumed else 0,
            "optimizer_updates": resumed.metadata.completed_optimizer_updates if resumed else 0,
            "artifact_names": (f"{self.place.group}{self.place.rank}.pt",),
        }
        return Restored(**values | overrides)

    def command(self, number: int) -> Command | None:
        return self.house.controller.next_command(self.execution, self.session, number)

    def trained(
        self, command: Train, *, updates: int = 1, disposed: Sequence[DisposedRows] | None = None, **parts: Any
    ) -> Acknowledgement:
        """Report a command complete; the leader names every completion, trained unless `disposed` says otherwise."""
        if disposed is None:
            disposed = [DisposedRows("trained", command.rows)]
        report = CompletionReport(
            command=command.number,
            step=command.step,
            optimizer_updates=updates,
            disposed=tuple(disposed) if self.place == self.house.controller.commands.leader else (),
        )
        return self.submit(completions=(report,), **parts)

    def receipts(self, save: Save, **overrides: Any) -> tuple[ShardReceipt, ...]:
        identity = self.house.controller.identity
        values: dict[str, Any] = {
            "name": f"{self.place.group}{self.place.rank}.pt",
            "size_bytes": 10,
            "digest": "sha256:00",
            "completed_training_steps": save.steps,
            "completed_optimizer_updates": save.updates,
            "rank": self.place.rank,
            "execution_number": identity.number,
            "execution_id": identity.id,
            "checkpoint_id": save.checkpoint_id,
        }
        return (ShardReceipt(**values | overrides),)

    def saved(self, save: Save, *, note: str = "", **overrides: Any) -> Save:
        receipts = self.receipts(save, **overrides)
        return self.house.controller.report_receipts(self.execution, self.session, save.number, receipts, note)

    def abandon(self, save: Save, reason: str = "disk full") -> Save:
        return self.house.controller.report_abandoned(self.execution, self.session, save.number, reason)

    def announce(self, version: int) -> Acknowledgement:
        return self.submit(weights=(WeightAnnouncement(version, f"weights-{version}"),))

    def _heard(self, ack: Acknowledgement) -> None:
        new = [notice for notice in ack.notices if notice.number > self.confirmed_notices]
        self.notices += [notice.content for notice in new]
        if ack.notices:
            self.confirmed_notices = ack.notices[-1].number


class House:
    """A controller with everything around it."""

    def __init__(
        self,
        *,
        prompts: int = 6,
        n: int = 2,
        budget: int | None = None,
        number: int = 1,
        execution_id: str | None = None,
        resumed: Resumed | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        sampling: Sampling | None = None,
        clock: Clock | None = None,
        **overrides: Any,
    ) -> None:
        self.clock = clock or Clock()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.sampler = sampler or SeekableSampler(prompts, shuffle=False)
        sampling = sampling or Sampling(self.sampler, batch_sampler, prompt_of=prompt_of, completions_per_prompt=n)
        start: SamplingBoundary
        start = (
            sampling.start(prompts * n if budget is None else budget)
            if resumed is None
            else sampling.restore(LoadState(), resumed.metadata)
        )
        self._incarnations = itertools.count(number * 1000)
        self.controller = Controller(
            make_policy(**overrides),
            ExecutionIdentity(number, f"execution-{number}" if execution_id is None else execution_id),
            sampling,
            start,
            resumed,
            clock=self.clock,
            new_id=counted_ids(),
            record=lambda event, **values: self.events.append((event, values)),
        )

    def worker(self, place: Place, **overrides: Any) -> Worker:
        incarnation = f"{next(self._incarnations):032x}"
        ranks = dict(self.controller.policy.trainer_groups) if place.role == "trainer" else {}
        info = WorkerInfo(
            place=place, incarnation=incarnation, world_size=max(ranks.get(place.group, 0), place.rank + 1)
        )
        return Worker(self, replace(info, **overrides))

    def trainer(self, rank: int = 0, group: str = "policy", **overrides: Any) -> Worker:
        return self.worker(Place("trainer", group, 0, rank), **overrides)

    def rollout(self, replica: int = 0, rank: int = 0, **overrides: Any) -> Worker:
        return self.worker(Place("rollout", "rollout", replica, rank), **overrides)

    def open_gate(self) -> list[Worker]:
        """Every trainer rank registers and confirms."""
        trainers = [self.worker(place) for place in self.controller.commands.ranks]
        for trainer in trainers:
            trainer.confirm()
        assert self.controller.lifecycle.gate_open
        return trainers

    def publish(self) -> list[Save]:
        """Perform what is to be published."""
        saves = [effect.save for effect in self.controller.take_effects() if isinstance(effect, Publish)]
        for save in saves:
            self.controller.publication_succeeded(save, f"sha256:{save.checkpoint_id}")
        return saves

    def settled(self, outcome: str | None = None) -> int:
        return sum(
            mask.bit_count()
            for event, values in self.events
            if event == "settle" and outcome in (None, values["outcome"])
            for _, mask in values["rows"]
        )

    def reasons(self) -> list[str]:
        return [
            values["reason"] for event, values in self.events if event == "settle" and values["outcome"] == "discarded"
        ]


def resume_from(save: Save, *, number: int = 2, **overrides: Any) -> House:
    """The next execution, from what a save would have published."""
    resumed = Resumed(
        metadata=metadata_of(save),
        manifest_digest=f"sha256:{save.checkpoint_id}",
        repeat_bound_completions=save.window_completions,
    )
    return House(number=number, resumed=resumed, **overrides)


def fingerprint(value: Any, *, ignore: Iterable[str] = ("refused", "last_heard")) -> Any:
    """Everything reachable from `value` as nested plain values, so that two moments can be compared."""
    seen: dict[int, int] = {}
    ignored = frozenset(ignore)

    def walk(item: Any) -> Any:
        if item is None or isinstance(item, bool | int | float | str | bytes | Enum):
            return item
        if id(item) in seen:
            return ("again", seen[id(item)])
        seen[id(item)] = len(seen)
        if isinstance(item, dict):
            return [(walk(key), walk(content)) for key, content in item.items()]
        if isinstance(item, list | tuple | deque | range):
            return [walk(content) for content in item]
        if isinstance(item, set | frozenset):
            return sorted(repr(content) for content in item)
        if callable(item) or isinstance(item, type):
            return "callable"
        names = [f.name for f in fields(item)] if is_dataclass(item) else list(getattr(item, "__dict__", {}))
        return type(item).__name__, [(name, walk(getattr(item, name))) for name in names if name not in ignored]

    return walk(value)
