"""One seed, one history: a run with random workers, random faults and random crashes, over the real controller.

* Every choice comes from one random generator, so a seed is a history.
* What survives a crash is what was published: nothing else is carried over, except workers of the dead execution, who go
  on talking.
* The last life of a run is calm: no fault happens, and the run has to end in a bounded number of events (G9).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

from oracle import Checkpoint, Oracle, Stream

from cosmos_ctrl.core.admission import Batch, RolloutRows, RowRefused, WeightAnnouncement
from cosmos_ctrl.core.agreement import Restored, Resumed
from cosmos_ctrl.core.commands import CompletionReport, DisposedRow, End, Save, ShardReceipt, Train
from cosmos_ctrl.core.controller import Controller, Publish
from cosmos_ctrl.core.errors import (
    ExecutionEndedError,
    NotRegisteredError,
    StaleExecutionError,
    StorageUnavailableError,
    SupersededError,
)
from cosmos_ctrl.core.execution import ExecutionIdentity, Place, WorkerInfo
from cosmos_ctrl.core.policy import RunPolicy
from cosmos_ctrl.core.resume import ControllerResumeMetadata
from cosmos_ctrl.core.rollouts import Lease, LeasesCancelled
from cosmos_ctrl.core.samplers import SeekableSampler
from cosmos_ctrl.core.sampling import Prompt, Sampling

_TTL = 10.0
_CALM_ROUNDS = 3000


@dataclass(frozen=True)
class Plan:
    """What a run is like."""

    prompts: int
    n: int
    budget: int
    batch: int
    """Prompts a draw; 0: no batch sampler."""
    drop_last: bool
    shuffle: bool
    ranks: int
    rollouts: int
    lives: int
    crash: float
    """Probability of a crash at any event."""
    policy: RunPolicy

    @staticmethod
    def of(rng: random.Random) -> Plan:
        prompts, n, ranks = rng.randint(1, 9), rng.choice([1, 1, 2, 3, 4]), rng.choice([1, 1, 2, 3])
        batch = rng.choice([0, 0, 0, 2, 3])
        whole = rng.randint(1, 4)
        return Plan(
            prompts=prompts,
            n=n,
            budget=rng.randint(1, 3 * prompts * n),
            batch=batch,
            drop_last=batch != 0 and prompts >= batch and rng.random() < 0.3,
            shuffle=rng.random() < 0.5,
            ranks=ranks,
            rollouts=rng.randint(1, 3),
            lives=rng.randint(1, 8),
            crash=rng.choice([0.01, 0.02, 0.05]),
            policy=RunPolicy(
                trainer_groups=(("policy", ranks),) if rng.random() < 0.7 else (("policy", ranks), ("critic", 1)),
                groups_per_step=whole,
                max_training_steps=rng.choice([None, None, None, rng.randint(0, 12)]),
                save_every_steps=rng.choice([0, 1, 1, 2, 3]),
                tail=rng.choice(["train", "train", "discard"]),
                min_completions_per_group=rng.choice([1, 1, 1, 2]),
                max_staleness=rng.choice([None, None, 0, 1, 2]),
                on_stale=rng.choice(["discard", "regenerate"]),
                poison_limit=rng.randint(1, 3),
                max_outstanding_groups=rng.randint(1, 12),
                max_buffered_bytes=rng.choice([1 << 30, 1 << 30, 30]),
                max_window_draws=rng.choice([1 << 20, rng.randint(1, 8)]),
                max_window_bytes=rng.choice([1 << 30, rng.randint(60, 400)]),
                announces_weights=rng.random() < 0.5,
                lease_deadline_s=rng.choice([None, None, 6.0]),
                session_ttl_s=_TTL,
                gate_timeout_s=60.0,
                save_timeout_s=40.0,
                stop_grace_s=1000.0,
            ),
        )


class Failure(AssertionError):
    """A guarantee was broken; its text names the seed."""


class _Prompts:
    """A seekable sampler that also says in which epoch it is, so that a key names one place in the stream."""

    def __init__(self, plan: Plan) -> None:
        self._sampler = SeekableSampler(plan.prompts, shuffle=plan.shuffle, seed=7)
        self.epoch = 1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(self._sampler)

    def state_dict(self) -> dict[str, Any]:
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict(state)


class _Batches:
    """A batch sampler over it, whose state is the sampler's."""

    def __init__(self, sampler: _Prompts, size: int, drop_last: bool) -> None:
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


class _Adapter:
    def load_metadata(self, config: Any) -> None:
        return None

    def restore_sampler(self, sampler: Any, metadata: ControllerResumeMetadata) -> None:
        sampler.load_state_dict(metadata.sampler_state)


def _samplers(plan: Plan) -> tuple[_Prompts, _Batches | None]:
    prompts = _Prompts(plan)
    return prompts, _Batches(prompts, plan.batch, plan.drop_last) if plan.batch else None


def _stream(plan: Plan) -> Stream:
    """One uninterrupted pass, by nested loops."""
    draws: list[tuple[int, list[str]]] = []
    prompts, batches = _samplers(plan)
    issued, epoch = 0, 0
    while issued < plan.budget:
        epoch += 1
        prompts.set_epoch(epoch)
        for item in batches or prompts:
            keys = [f"{epoch}/{index}" for index in (item if isinstance(item, list) else [item])]
            draws.append((epoch, keys))
            issued += plan.n * len(keys)
    return Stream.of(draws, plan.n, plan.budget)


@dataclass
class _Held:
    lease: Lease
    left: int


@dataclass
class _Rollout:
    """A rollout worker's process."""

    info: WorkerInfo
    session: str
    handles: bool
    alive: bool = True
    batches: int = 0
    requests: int = 0
    notices: int = 0
    version: int = 0
    held: dict[int, _Held] = field(default_factory=dict)
    done: list[tuple[Lease, int]] = field(default_factory=list)
    last: Batch | None = None
    excused: bool = False
    """Whether it may have lost leases: it was silent, or they had a deadline, or the run stops."""


@dataclass
class _Trainer:
    """A trainer rank's process."""

    info: WorkerInfo
    session: str
    position: int = 1
    batches: int = 0
    command: Train | None = None
    saves: list[Save] = field(default_factory=list)
    ended: bool = False
    last: Batch | None = None


class Simulation:
    """A run of several executions."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.plan = Plan.of(self.rng)
        self.stream = _stream(self.plan)
        self.published: list[Checkpoint] = []
        self.executions = 0
        self.events = 0
        self.ghost: tuple[str, _Rollout] | None = None

    def run(self) -> None:
        """All lives, the last one calm; raises Failure with the seed."""
        try:
            for life in range(self.plan.lives):
                if self._live(calm=life == self.plan.lives - 1):
                    break
            self._check_restart_does_nothing()
        except Exception as error:
            raise Failure(f"seed {self.seed}, execution {self.executions}: {type(error).__name__}: {error}\n{self.plan}") from error

    def _live(self, *, calm: bool) -> bool:
        """One execution; True when the run is over."""
        self.executions += 1
        execution = _Execution(self, calm=calm)
        try:
            over = execution.live()
        finally:
            self.events += execution.events
        execution.oracle.check_repeats()
        self.ghost = execution.any_ghost() or self.ghost
        if calm:
            assert over, "G9: the calm run did not end"
        return over

    def newest(self) -> Checkpoint | None:
        return max(self.published, key=lambda checkpoint: checkpoint.order, default=None)

    def _check_restart_does_nothing(self) -> None:
        """G8: a restart of a run that is over is over at once, wherever a limit or the budget ended it."""
        newest = self.newest()
        limit = self.plan.policy.max_training_steps
        if newest is None or (
            newest.metadata.remaining_completions and (limit is None or newest.metadata.completed_training_steps < limit)
        ):
            return
        self.executions += 1
        execution = _Execution(self, calm=True)
        assert execution.controller.lifecycle.phase == "ENDED", "G8: a finished run went on"
        assert execution.controller.commands.steps == newest.metadata.completed_training_steps


class _Crash(Exception):
    """The controller dies here."""


class _Execution:
    """One controller's life."""

    def __init__(self, simulation: Simulation, *, calm: bool) -> None:
        self.simulation, self.rng, self.plan, self.calm = simulation, simulation.rng, simulation.plan, calm
        self.policy = self.plan.policy
        self.number = simulation.executions
        self.id = f"execution-{self.number}"
        self.parent = simulation.newest()
        self.oracle = Oracle(simulation.stream, self.plan.budget, self.parent)
        self.now = 1000.0 * self.number
        self.events = 0
        self._ids = 0
        self.publishing: list[Save] = []
        self.cuts: dict[str, tuple[dict[int, str], int]] = {}
        self.snapshots: dict[str, Counter[int]] = {}
        self.failures: Counter[int] = Counter()
        self.reported: dict[int, str] = {}
        self.stopped = False
        self.rollouts: list[_Rollout] = []
        self.ghosts: list[_Rollout] = []
        self.trainers: list[_Trainer] = []
        prompts, batches = _samplers(self.plan)
        sampling = Sampling(
            prompts,
            batches,
            prompt_of=lambda index: Prompt(key=f"{prompts.epoch}/{index}"),
            completions_per_prompt=self.plan.n,
        )
        self.owner = sampling.owner_name
        if self.parent is None:
            start, resumed = sampling.start(self.plan.budget), None
        else:
            start = sampling.restore(_Adapter(), self.parent.metadata)
            resumed = Resumed(
                metadata=self.parent.metadata,
                manifest_digest=self.parent.digest,
                repeat_bound_completions=self.parent.window,
            )
        self.steps_before = resumed.metadata.completed_training_steps if resumed else 0
        self.controller = Controller(
            self.policy,
            ExecutionIdentity(self.number, self.id),
            sampling,
            start,
            resumed,
            clock=lambda: self.now,
            new_id=self._new_id,
            record=self._record,
        )

    # -- life

    def live(self) -> bool:
        """Until the end, a failure or a crash; True when the run is over."""
        try:
            self._start()
            if self.calm:
                self._be_calm()
            else:
                while not self.controller.lifecycle.over:
                    self._event()
        except _Crash:
            return False
        except ExecutionEndedError:
            assert self.controller.lifecycle.failure is not None
        if self.controller.lifecycle.failure is not None:
            assert not self.calm, f"the calm run failed: {self.controller.lifecycle.failure}"
            return False
        return self._ended()

    def any_ghost(self) -> tuple[str, _Rollout] | None:
        """A worker that survives the controller."""
        return (self.id, self.rng.choice(self.rollouts)) if self.rollouts else None

    def _ended(self) -> bool:
        end = self.controller.lifecycle.end
        assert end is not None
        if end[0] == "BUDGET_EXHAUSTED":
            self.oracle.check_complete()
            return True
        if end[0] == "STEP_LIMIT":
            return True
        assert end[0] == "STOP_REQUESTED"
        assert self.stopped
        return False

    def _start(self) -> None:
        for place in self.rng.sample(self.controller.commands.ranks, len(self.controller.commands.ranks)):
            info = self._info(place)
            trainer = _Trainer(info, self.controller.register(self.id, info).session)
            self.trainers.append(trainer)
            metadata = self.parent.metadata if self.parent else None
            restored = Restored(
                metadata=metadata,
                manifest_digest=self.parent.digest if self.parent else "",
                training_steps=metadata.completed_training_steps if metadata else 0,
                optimizer_updates=metadata.completed_optimizer_updates if metadata else 0,
                artifact_names=(f"{place.group}{place.rank}",),
            )
            self.controller.confirm(self.id, trainer.session, restored)
        self.trainers.sort(key=lambda trainer: trainer.info.place != self.controller.commands.leader)
        for replica in range(self.plan.rollouts):
            self._add_rollout(Place("rollout", "rollout", replica, 0))
        if self.policy.announces_weights:
            self._announce(self.steps_before)

    def _add_rollout(self, place: Place) -> None:
        info = self._info(place)
        session = self.controller.register(self.id, info).session
        self.rollouts.append(_Rollout(info, session, handles=self.rng.random() < 0.5, version=self.steps_before))

    def _be_calm(self) -> None:
        for _ in range(_CALM_ROUNDS):
            self._take_effects()
            if self.controller.lifecycle.over:
                return
            for worker in self.rollouts:
                self._lease(worker)
            for worker in self.rollouts:
                self._report(worker)
            for trainer in self.trainers:
                self._train(trainer)
            for trainer in self.trainers:
                self._save(trainer)
            while self.publishing:
                self._publish()
            self._pass_time(1.0)

    def _event(self) -> None:
        self.events += 1
        if self.rng.random() < self.plan.crash:
            raise _Crash
        action, argument = self._choose()
        action(*argument)
        self._take_effects()
        self._check()

    def _choose(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        roll = self.rng.random()
        if roll < 0.22:
            return self._lease, (self.rng.choice(self.rollouts),)
        if roll < 0.52:
            return self._report, (self.rng.choice(self.rollouts),)
        if roll < 0.75:
            return self._train, (self.rng.choice(self.trainers),)
        if roll < 0.85:
            return self._save, (self.rng.choice(self.trainers),)
        if roll < 0.90:
            return self._publish, ()
        if roll < 0.96:
            return self._pass_time, (self.rng.uniform(0.5, 4.0),)
        if roll < 0.97:
            return self._kill, (self.rng.choice(self.rollouts),)
        if roll < 0.98:
            return self._haunt, ()
        if roll < 0.99:
            return self._reconnect, (self.rng.choice(self.rollouts),)
        if roll < 0.9915:
            return self._stop, ()
        return self._speak_for_the_dead, ()

    def _check(self) -> None:
        ledger = self.controller.ledger
        self.oracle.check_ledger(ledger.cursor, ledger.snapshot())
        assert self.controller.rollouts.buffered_bytes >= 0
        limit = self.policy.max_training_steps
        assert limit is None or self.controller.commands.steps <= max(limit, self.steps_before), "G8: past the limit"

    # -- rollout workers

    def _lease(self, worker: _Rollout) -> None:
        if not worker.alive or not worker.session:
            return
        most = self.rng.randint(1, 4)
        number = worker.requests + 1
        last_call = self.rng.random() < 0.5
        reply = self.controller.lease(self.id, worker.session, number, most, last_call=last_call)
        if reply is None:
            return
        worker.requests = number
        if self.rng.random() < 0.2:
            # The reply was lost: the same request gets the same answer, and nothing is drawn anew.
            before = self.controller.ledger.cursor
            assert self.controller.lease(self.id, worker.session, number, most, last_call=last_call) == reply
            assert self.controller.ledger.cursor is before
        if reply.weights is not None:
            worker.version = reply.weights.version
        for lease in reply.leases:
            for completion in self.oracle.completions(lease.group, lease.mask):
                assert completion not in self.oracle.settled, f"leased {completion}, which is settled"
            worker.held[lease.group] = _Held(lease, lease.mask)

    def _report(self, worker: _Rollout) -> None:
        if not worker.alive or not worker.session:
            return
        wanted = list(worker.held.values())
        self.rng.shuffle(wanted)
        blocks, expected = [], []
        for held in wanted[: self.rng.randint(1, 3)]:
            mask = held.left if self.calm or self.rng.random() < 0.6 else self._part(held.left)
            outcome = self._outcome()
            again = 0
            if not self.calm and self.rng.random() < 0.05:
                again = held.lease.mask & ~held.left  # reported before: refused by itself
            blocks.append(self._rows(worker, held.lease, mask | again, outcome))
            expected.append((held, mask, outcome))
        if not self.calm and worker.done and self.rng.random() < 0.05:
            lease, mask = self.rng.choice(worker.done)
            blocks.append(self._rows(worker, lease, mask, "completed"))
        if not blocks:
            return
        batch = Batch(number=worker.batches + 1, digest=self._digest(), rollouts=tuple(blocks))
        self._failing(expected)
        ack = self._submit(worker, batch)
        lost = self._hear(worker, ack.notices, len(expected))
        for held, mask, outcome in expected:
            if held.lease.number in lost:
                assert worker.excused or self.policy.lease_deadline_s or self.stopped or self._limit_reached(), "a lease was lost for no reason"
                continue
            held.left &= ~mask
            if not held.left:
                worker.held.pop(held.lease.group, None)
                worker.done.append((held.lease, held.lease.mask))

    def _failing(self, expected: list[tuple[_Held, int, str]]) -> None:
        """Explicit failure reports, counted once per lease: what the poison limit counts."""
        for held, _, outcome in expected:
            if outcome == "failed" and self.reported.get(held.lease.number) != "failed":
                self.reported[held.lease.number] = "failed"
                self.failures[held.lease.group] += 1

    def _submit(self, worker: _Rollout | _Trainer, batch: Batch) -> Any:
        acked = worker.batches if self.rng.random() < 0.8 else max(0, worker.batches - 3)
        notices = worker.notices if isinstance(worker, _Rollout) else 0
        ack = self.controller.submit(self.id, worker.session, acked, notices, batch)
        assert ack.applied == batch.number
        worker.batches, worker.last = batch.number, batch
        self._check()
        if self.rng.random() < 0.1 and not self.controller.lifecycle.over:
            # The ack was lost: the batch comes again, and applies once (G6).
            counts = self._counts()
            again = self.controller.submit(self.id, worker.session, acked, notices, batch)
            assert again == ack, "a repeated batch was answered otherwise"
            assert self._counts() == counts, "G6: a repeated batch changed something"
        return ack

    def _counts(self) -> Any:
        core = self.controller
        return (core.statistics(), core.rollouts.buffered_bytes, core.rollouts.last_lease, core.lifecycle.revision)

    def _hear(self, worker: _Rollout, notices: Any, expected: int) -> set[int]:
        """Lease numbers that the worker has lost; forgets those."""
        lost: set[int] = set()
        for notice in notices:
            if notice.number <= worker.notices:
                continue
            worker.notices = notice.number
            content = notice.content
            if isinstance(content, LeasesCancelled):
                lost.update(content.leases)
            elif isinstance(content, RowRefused) and content.block < expected and content.reason != "ALREADY_REPORTED":
                held = worker.held.get(content.group)
                if held is not None:
                    lost.add(held.lease.number)
        for group in [group for group, held in worker.held.items() if held.lease.number in lost]:
            worker.held[group].left = 0
            del worker.held[group]
        return lost

    def _rows(self, worker: _Rollout, lease: Lease, mask: int, outcome: Any) -> RolloutRows:
        bits = [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
        texts = [f"{lease.prompt.key}:{bit}" for bit in bits]
        if outcome != "completed":
            reason = f"worker-{outcome}" if outcome in ("failed", "discarded") else ""
            return RolloutRows(outcome=outcome, groups=[lease.group], leases=[lease.number], masks=[mask], reason=reason)
        version = worker.version if self.policy.announces_weights else self.controller.commands.steps
        if not self.calm and not self.policy.announces_weights:
            version = self.rng.randint(self.steps_before, version)
        return RolloutRows(
            outcome="completed",
            groups=[lease.group],
            leases=[lease.number],
            masks=[mask],
            lowest_versions=[version],
            highest_versions=[version],
            rewards=[float(bit) for bit in bits],
            handles=texts if worker.handles else (),
            payloads=() if worker.handles else [text.encode() for text in texts],
        )

    def _outcome(self) -> str:
        if self.calm:
            return "completed"
        return self.rng.choices(["completed", "discarded", "failed", "returned"], [80, 5, 8, 7])[0]

    # -- trainers

    def _train(self, trainer: _Trainer) -> None:
        if trainer.ended or self.controller.lifecycle.failure is not None:
            return
        leads = trainer is self.trainers[0]
        if trainer.command is None:
            command = self.controller.next_command(self.id, trainer.session, trainer.position)
            if command is None:
                return
            assert self.controller.next_command(self.id, trainer.session, trainer.position) is command
            if isinstance(command, End):
                trainer.ended = True
            elif isinstance(command, Save):
                trainer.position += 1
                trainer.saves.append(command)
                if leads:
                    self.snapshots[command.checkpoint_id] = Counter(self.oracle.model)
            else:
                trainer.command = command
                self._check_payloads(trainer, command)
            return
        command = trainer.command
        rows = self._dispose(command) if leads else ()
        report = CompletionReport(command=command.number, step=command.step, optimizer_updates=1 + command.step % 2, rows=rows)
        weights = (WeightAnnouncement(command.step, "w"),) if leads and self.policy.announces_weights else ()
        if not self.calm and self.rng.random() < 0.3:
            weights = ()
        if leads:
            for row in rows:
                if row.disposition == "trained":
                    for completion in self.oracle.completions(row.group, row.mask):
                        self.oracle.model[completion] += 1
        self._submit(trainer, Batch(number=trainer.batches + 1, digest=self._digest(), completions=(report,), weights=weights))
        trainer.command = None
        trainer.position += 1
        if leads and self.calm and self.policy.announces_weights and not self.controller.lifecycle.over:
            self._announce(command.step)

    def _check_payloads(self, trainer: _Trainer, command: Train) -> None:
        """What is trained is what was generated for that very completion, once."""
        assert 0 < len(command.rows) <= self.policy.groups_per_step
        if command.committed:
            return
        for found, (group, mask) in zip(
            self.controller.payloads(self.id, trainer.session, command.number, None), command.rows, strict=True
        ):
            assert found.group == group
            assert [c.completion for c in found.completions] == [b for b in range(mask.bit_length()) if mask >> b & 1]
            for completion in found.completions:
                text = completion.handle or (completion.payload or b"").decode()
                assert text == f"{found.prompt.key}:{completion.completion}", "a payload of another completion"
                assert completion.reward == float(completion.completion)
                assert self.simulation.stream.base[found.prompt.key] == self.oracle.base_of[group]
            if self.policy.max_staleness is not None:
                oldest = min(completion.lowest_version for completion in found.completions)
                assert command.step - 1 - oldest <= self.policy.max_staleness, "a stale group was trained"

    def _dispose(self, command: Train) -> tuple[DisposedRow, ...]:
        rows: list[DisposedRow] = []
        for group, mask in command.rows:
            if self.calm or self.rng.random() < 0.7:
                rows.append(DisposedRow(group, mask, "trained"))
                continue
            left = mask
            while left:
                part = self._part(left)
                left &= ~part
                disposition: Any = self.rng.choice(["trained", "trained", "discarded", "returned", "payload_lost"])
                rows.append(DisposedRow(group, part, disposition, "trainer-rejected" if disposition == "discarded" else ""))
        self.rng.shuffle(rows)
        return tuple(rows)

    def _announce(self, version: int) -> None:
        leader = self.trainers[0]
        batch = Batch(number=leader.batches + 1, digest=self._digest(), weights=(WeightAnnouncement(version, "w"),))
        self._submit(leader, batch)

    # -- saves

    def _save(self, trainer: _Trainer) -> None:
        if not trainer.saves or self.controller.lifecycle.failure is not None:
            return
        save = trainer.saves.pop(0)
        if not self.calm and self.rng.random() < 0.05:
            self.controller.report_abandoned(self.id, trainer.session, save.number, "disk full")
            return
        if not self.calm and self.rng.random() < 0.05:
            return  # never answers: the deadline ends it
        receipt = ShardReceipt(
            name=f"{trainer.info.place.group}{trainer.info.place.rank}",
            size_bytes=1,
            digest="sha256:0",
            completed_training_steps=save.steps,
            completed_optimizer_updates=save.updates,
            rank=trainer.info.place.rank,
            execution_number=self.number,
            execution_id=self.id,
            checkpoint_id=save.checkpoint_id,
        )
        for _ in range(2 if self.rng.random() < 0.2 else 1):
            self.controller.report_receipts(self.id, trainer.session, save.number, (receipt,), "")

    def _take_effects(self) -> None:
        self.publishing += [effect.save for effect in self.controller.take_effects() if isinstance(effect, Publish)]

    def _publish(self) -> None:
        if not self.publishing:
            return
        save = self.publishing.pop(self.rng.randrange(len(self.publishing)))
        if not self.calm and self.rng.random() < 0.1:
            self.controller.publication_failed(save, StorageUnavailableError(path=save.path, operation="link", cause="EIO"))
            return
        metadata = ControllerResumeMetadata(
            checkpoint_path=save.path,
            checkpoint_id=save.checkpoint_id,
            completed_training_steps=save.steps,
            completed_optimizer_updates=save.updates,
            remaining_completions=save.boundary.remaining_completions,
            epoch=save.boundary.epoch,
            sampling_owner=self.owner,
            sampler_state=save.boundary.encoded_state,
        )
        model = self.snapshots[save.checkpoint_id]
        checkpoint = Checkpoint(
            self.number, metadata, f"sha256:{save.checkpoint_id}", save.window_completions, model, *self.cuts[save.checkpoint_id]
        )
        boundary = self.plan.budget - save.boundary.remaining_completions
        lost = [c for c in range(boundary) if c not in model and c not in checkpoint.discarded]
        assert not lost, f"G1: the checkpoint of step {save.steps} skips {lost}"
        self.simulation.published.append(checkpoint)
        if not self.calm and self.rng.random() < self.plan.crash:
            raise _Crash  # visible, and nobody was told
        self.controller.publication_succeeded(save, checkpoint.digest)

    # -- faults

    def _pass_time(self, seconds: float) -> None:
        self.now += seconds
        for worker in (*self.rollouts, *self.trainers):
            if worker.session and (isinstance(worker, _Trainer) or worker.alive):
                self.controller.hear(self.id, worker.session)
        self.controller.tick()
        known = {id(worker) for worker in self.controller.workers if worker.session}
        for worker in [worker for worker in self.rollouts if not worker.alive]:
            if self.rng.random() < 0.4:
                # A new process takes the place, before or after the old one was found dead.
                self.rollouts.remove(worker)
                self.ghosts.append(worker)
                self._add_rollout(worker.info.place)
        assert known is not None

    def _kill(self, worker: _Rollout) -> None:
        worker.alive = False

    def _haunt(self) -> None:
        """A process that was replaced wakes up: it changes nothing, and cannot come back (G5)."""
        if not self.ghosts or self.ghosts[-1].last is None:
            return
        ghost = self.ghosts[-1]
        before = fingerprint(self.controller)
        for attempt in (
            lambda: self.controller.submit(self.id, ghost.session, 0, 0, ghost.last),
            lambda: self.controller.lease(self.id, ghost.session, ghost.requests + 1, 1, last_call=True),
            lambda: self.controller.register(self.id, ghost.info),
        ):
            try:
                attempt()
            except (NotRegisteredError, SupersededError):
                continue
            raise AssertionError("G5: a superseded process was heard")
        assert fingerprint(self.controller) == before, "G5: a superseded process changed something"

    def _speak_for_the_dead(self) -> None:
        """A worker of a dead execution reports into this one: refused, and nothing changes (G5)."""
        if self.simulation.ghost is None:
            return
        execution, worker = self.simulation.ghost
        last = worker.last or Batch(number=1, digest=b"")
        before = fingerprint(self.controller)
        for attempt in (
            lambda: self.controller.submit(execution, worker.session, 0, 0, last),
            lambda: self.controller.submit(execution, self.rollouts[0].session, 0, 0, last),
            lambda: self.controller.lease(execution, worker.session, 1, 1, last_call=True),
            lambda: self.controller.register(execution, worker.info),
            lambda: self.controller.hear(execution, worker.session),
        ):
            try:
                attempt()
            except StaleExecutionError:
                continue
            raise AssertionError("G5: a dead execution's worker was heard")
        assert fingerprint(self.controller) == before, "G5: a dead execution's worker changed something"

    def _reconnect(self, worker: _Rollout) -> None:
        """The same process opens another session and sends its last batch again: it applies once, its leases stay."""
        if not worker.alive:
            return
        worker.session = self.controller.register(self.id, worker.info).session
        if worker.last is not None:
            counts = self._counts()
            self.controller.submit(self.id, worker.session, 0, worker.notices, worker.last)
            assert self._counts() == counts, "G6: a batch applied again in a new session"

    def _stop(self) -> None:
        self.controller.request_stop(self.id, "", "maintenance", None)
        self.stopped = True

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
            for worker in self.rollouts:
                worker.excused = worker.excused or str(worker.info.place) == values["worker"]
                if str(worker.info.place) == values["worker"]:
                    worker.session = "" if not worker.alive else worker.session
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

    def _limit_reached(self) -> bool:
        limit = self.policy.max_training_steps
        return limit is not None and self.controller.commands.steps >= limit

    # -- small things

    def _part(self, mask: int) -> int:
        bits = [1 << bit for bit in range(mask.bit_length()) if mask >> bit & 1]
        return sum(self.rng.sample(bits, self.rng.randint(1, len(bits))))

    def _digest(self) -> bytes:
        return self.rng.randbytes(8)

    def _new_id(self) -> str:
        self._ids += 1
        return f"{self.number:016x}{self._ids:016x}"

    def _info(self, place: Place) -> WorkerInfo:
        return WorkerInfo(place=place, incarnation=f"{self.rng.getrandbits(128):032x}", world_size=place.rank + 1)


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
