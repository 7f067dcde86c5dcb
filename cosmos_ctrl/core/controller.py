"""The controller: one object that composes the core. Events in, effects out.

* Plain and synchronous: no network, no disk, no clock but what it is given. The edge calls a method per event, performs
  the effects that `take_effects` hands out, and calls `tick` often enough for deadlines.
* Every fenced method checks in one order: execution → session → failure → the rest. A refusal changes nothing.
* A method that finds nothing yet returns None; the edge waits for the next revision, up to the caller's deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cosmos_ctrl.core.admission import Admission, Batch, WeightAnnouncement
from cosmos_ctrl.core.agreement import Agreement, CheckNames, Restored, Resumed
from cosmos_ctrl.core.commands import Command, CommandLog, End, Save, ShardReceipt, Train
from cosmos_ctrl.core.errors import (
    AwaitingAgreementError,
    ConflictingRetryError,
    ControlError,
    MalformedError,
    NotAllowedError,
    ResumeMetadataMismatch,
    UnknownWorkError,
    WrongStepError,
)
from cosmos_ctrl.core.execution import ExecutionIdentity, Fence, Incarnation, Notice, Place, WorkerInfo, Workers
from cosmos_ctrl.core.groups import CompletionPayload
from cosmos_ctrl.core.leasing import LeaseReply, Leasing
from cosmos_ctrl.core.ledger import SamplingBoundary, SamplingReplayLedger
from cosmos_ctrl.core.lifecycle import Lifecycle, Record
from cosmos_ctrl.core.policy import RunPolicy
from cosmos_ctrl.core.replay import Replay
from cosmos_ctrl.core.rollouts import Rollouts
from cosmos_ctrl.core.sampling import Prompt, Sampling
from cosmos_ctrl.core.statistics import RunStatistics
from cosmos_ctrl.core.training import Training

#: Groups of execution e are numbered from e × 2^40 + 1, so a number names one group over all executions of a run.
_GROUPS_PER_EXECUTION = 1 << 40


@dataclass(frozen=True, slots=True)
class GroupPayloads:
    """A command's part of one group."""

    group: int
    prompt: Prompt
    completions: tuple[CompletionPayload, ...]


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """Answer to every batch and heartbeat."""

    applied: int
    notices: tuple[Notice, ...]


@dataclass(frozen=True, slots=True)
class Publish:
    """Effect: commit this save, then call `publication_succeeded` or `publication_failed`."""

    save: Save


@dataclass(frozen=True, slots=True)
class RecordDamage:
    """Effect: note durably beside the checkpoint that an artifact of it is damaged."""

    checkpoint_path: str
    artifact: str
    explanation: str


Effect = Publish | RecordDamage


class Controller:
    """The control plane of one execution."""

    def __init__(
        self,
        policy: RunPolicy,
        identity: ExecutionIdentity,
        sampling: Sampling,
        start: SamplingBoundary,
        resumed: Resumed | None,
        *,
        replay: Replay | None = None,
        clock: Callable[[], float],
        new_id: Callable[[], str],
        record: Record = lambda _event, **_values: None,
        check_artifact_names: CheckNames = lambda _names: None,
        check_digest: Callable[[str], object] = lambda _digest: None,
    ) -> None:
        """Begin an execution, with the sampler where it starts.

        Args:
            start: where the budget stands: the boundary of the checkpoint, or a fresh one.
            resumed: None for a fresh run.
            replay: what is issued before `sampling` is drawn from, as `cosmos_ctrl.core.replay.restore` gave it.
            check_artifact_names: raises a domain error for names that could not be published.
            check_digest: raises ValueError for a digest that could not be.
        """
        self._check_digest = check_digest
        self.policy, self.identity, self.resumed = policy, identity, resumed
        self._clock = clock
        self._effects: list[Effect] = []
        self._settled_counts = {"trained": 0, "discarded": 0, "recorded": 0}
        self.replay_doubts = 0
        self.turned_away: set[Place] = set()
        """Trainer ranks that came after the failure, and heard of it."""
        self._damage_reported = False
        self._stop_deadline: float | None = None
        self._stopped_by_rank = False
        self._gate_deadline = clock() + policy.gate_timeout_s
        self._first_group = identity.number * _GROUPS_PER_EXECUTION + 1

        metadata = resumed.metadata if resumed else None
        restored_steps = metadata.completed_training_steps if metadata else 0
        kept_horizon = resumed.horizon_training_steps if resumed else None
        self._groups_in = sampling.groups_in
        self.horizon_training_steps = (
            self.planned_training_steps(start.remaining_completions, after=restored_steps)
            if kept_horizon is None
            else kept_horizon
        )
        """Steps that the lineage was planned to take when it began: a schedule made for them does not change with a restart."""
        leader_group, leader_rank = policy.leader
        ranks = tuple(Place("trainer", group, 0, rank) for group, size in policy.trainer_groups for rank in range(size))

        record(
            "start",
            number=identity.number,
            id=identity.id,
            resumed_from=metadata.checkpoint_id if metadata else None,
            step=restored_steps,
            updates=metadata.completed_optimizer_updates if metadata else 0,
            remaining=start.remaining_completions,
            epoch=start.epoch,
        )
        self.lifecycle = Lifecycle(record)
        self.fence = Fence(identity)
        self.workers = Workers(
            max_workers=policy.max_workers,
            max_unacknowledged=policy.max_unacknowledged_batches,
            session_ttl_s=policy.session_ttl_s,
            clock=clock,
            new_id=new_id,
        )
        self.ledger = SamplingReplayLedger(
            start,
            first_token=self._first_group,
            max_draws=policy.max_window_draws,
            max_bytes=policy.max_window_bytes,
            clock=clock,
        )
        self.rollouts = Rollouts(policy, self._settled, clock)
        self.commands = CommandLog(
            ranks,
            Place("trainer", leader_group, 0, leader_rank),
            steps=restored_steps,
            updates=metadata.completed_optimizer_updates if metadata else 0,
        )
        self.agreement = Agreement(
            ranks,
            resumed,
            self.lifecycle,
            legacy=not identity.id,
            saves_artifacts=not policy.application_owns_checkpoints,
            check_artifact_names=check_artifact_names,
        )
        self.leasing = Leasing(
            policy,
            sampling,
            self.ledger,
            self.rollouts,
            self.lifecycle,
            oldest_version=restored_steps,
            on_recorded=lambda group, mask: self._settled(((group, mask),), "recorded", ""),
        )
        self.training = Training(
            policy,
            identity,
            self.commands,
            self.ledger,
            self.rollouts,
            self.lifecycle,
            resumed_steps=restored_steps if resumed else None,
            lineage_remaining=start.remaining_completions - (resumed.repeat_bound_completions if resumed else 0),
            can_give=lambda: self.leasing.can_give,
            clock=clock,
            new_id=new_id,
            publish=lambda save: self._effects.append(Publish(save)),
            on_feedback=sampling.feedback if sampling.wants_feedback else None,
        )
        self._admission = Admission(
            policy,
            self.rollouts,
            self.commands,
            issued=lambda: (self._first_group, self.ledger.next_token),
            versions=lambda: (restored_steps, self._newest_version()),
            on_commit=self.training.commit,
            on_weights=self._announce,
            on_end=self._end_worker,
        )
        settled_groups = replay.settled_groups if replay else 0
        groups_left = sampling.groups_in(start.remaining_completions) - settled_groups
        self.training.finish_if_nothing_is_left(groups_left)
        if replay is not None and self.lifecycle.ending is None:
            self._replay(replay)

    # -- state

    def planned_training_steps(self, completions: int, *, after: int = 0) -> int:
        """Steps after so many more completions than `after` steps took, if none is discarded; no more than the hard limit."""
        planned, limit = after + self.policy.steps_for(self._groups_in(completions)), self.policy.max_training_steps
        return planned if limit is None else min(planned, limit)

    @property
    def everyone_knows(self) -> bool:
        """Whether the execution is over and every connected worker has heard so."""
        return self.lifecycle.over and all(worker.ended or worker.told for worker in self.workers if worker.session)

    @property
    def tells_latecomers(self) -> bool:
        """Whether trainer ranks may still be on their way that should hear why it is over: what ended it did not need them all."""
        failure = self.lifecycle.failure
        return failure is None or isinstance(failure, ResumeMetadataMismatch) or self._damage_reported

    def take_effects(self) -> list[Effect]:
        """What the edge has to do, once each."""
        effects, self._effects = self._effects, []
        return effects

    def statistics(self) -> RunStatistics:
        """The run as it is."""
        ledger = self.ledger.statistics()
        train = self.commands.last
        weights = self.leasing.weights
        return RunStatistics(
            phase=self.lifecycle.phase,
            completed_training_steps=self.commands.steps,
            completed_optimizer_updates=self.commands.updates,
            remaining_completions=self.ledger.cursor.remaining_completions,
            safe_remaining_completions=self.ledger.snapshot().remaining_completions,
            epoch=self.ledger.cursor.epoch,
            window_draws=ledger.window_draws,
            window_completions=ledger.window_completions,
            gap_age_s=ledger.gap_age_s if ledger.blocking_token is not None else None,
            blocking_group=ledger.blocking_token or 0,
            blocking_worker=self.rollouts.holder_of(ledger.blocking_token),
            groups_pending=self.rollouts.pending_groups,
            groups_leased=self.rollouts.leased_groups,
            groups_ready=self.rollouts.ready_groups,
            groups_training=len(train.rows) if isinstance(train, Train) and not train.committed else 0,
            trained_completions=self._settled_counts["trained"],
            discarded_completions=self._settled_counts["discarded"],
            spared_completions=self._settled_counts["recorded"],
            replay_doubts=self.replay_doubts,
            stale_refused=self.fence.refused,
            lease_lost=self.rollouts.lease_lost,
            weights_version=weights.version if weights is not None else None,
            mean_reward=self.training.mean_reward,
            saves_pending=len(self.commands.saves),
            last_save=self.training.last_save,
            end=self.lifecycle.end,
        )

    # -- workers

    def register(self, execution_id: str, info: WorkerInfo) -> Incarnation:
        """Open a session. An ID is checked if stated; a process that states none is told it."""
        if execution_id:
            self.pass_fence(execution_id)
        if self.lifecycle.failure is not None and info.place in self.commands.ranks:
            self.turned_away.add(info.place)
            self.lifecycle.touch()
        self._raise_failure(None)
        trainer = info.place.role == "trainer"
        if trainer and info.place not in self.commands.ranks:
            raise NotAllowedError(what=f"{info.place} is not one of this run's trainer ranks ({self._trainers()})")
        if trainer and info.world_size != dict(self.policy.trainer_groups)[info.place.group]:
            what = f"{info.place} is one of {info.world_size} ranks, and this run has {self._trainers()}"
            raise NotAllowedError(what=what)
        loser = self.workers.check_registration(info)
        holder = self.workers.at(info.place)
        if trainer and self.lifecycle.phase in ("RUNNING", "DRAINING") and holder is loser:
            who = f"{loser} was replaced" if loser else f"{info.place} appeared anew"
            self.lifecycle.fail(f"{who} after training had begun; fresh processes for every rank are the recovery")
            self._raise_failure(None)
        registration = self.workers.register(info)
        if registration.retired is not None:
            self.rollouts.expire(registration.retired)
            self.agreement.forget(info.place)
        self.lifecycle.record("register", worker=str(info.place), host=info.host, pid=info.pid, new=registration.new)
        self.lifecycle.touch()
        return registration.worker

    def hear(self, execution_id: str, session: str, what: str = "request") -> None:
        """A message of this worker has arrived. The edge says so once per message: a call that waits here for long is no
        sign of life, since the process behind it may be stopped."""
        self.pass_fence(execution_id, what)
        self.workers.hear(session)
        self._raise_failure(self.workers.of(session))

    def heartbeat(self, execution_id: str, session: str, acked_through: int, notices_through: int) -> Acknowledgement:
        """The worker lives; returns the present ack."""
        worker = self._enter(execution_id, session, "report")
        worker.log.confirm(acked_through, notices_through)
        return Acknowledgement(worker.log.applied, tuple(worker.log.notices))

    def submit(
        self, execution_id: str, session: str, acked_through: int, notices_through: int, batch: Batch
    ) -> Acknowledgement:
        """Apply a batch once; a true repeat gets the present ack."""
        worker = self._enter(execution_id, session, "report")
        worker.log.confirm(acked_through, notices_through)
        if not worker.log.is_repeat(batch.number, batch.digest):
            try:
                self._admission.check(worker, batch)
            except WrongStepError as error:
                self.lifecycle.fail(error)
                self._raise_failure(worker)
            self._admission.apply(worker, batch)
            worker.log.record(batch.number, batch.digest)
            self.lifecycle.touch()
        return Acknowledgement(worker.log.applied, tuple(worker.log.notices))

    # -- agreement

    def confirm(self, execution_id: str, session: str, restored: Restored) -> tuple[str, ...]:
        """Note what a trainer rank restored; returns the ranks that are still missing. As `Agreement.confirm`."""
        worker = self._enter_trainer(execution_id, session)
        try:
            self.agreement.confirm(worker.place, restored)
        except ResumeMetadataMismatch:
            self._raise_failure(worker)
        return self.agreement.missing

    def report_damage(self, execution_id: str, session: str, artifact: str, explanation: str) -> None:
        """A trainer rank found an artifact damaged while loading: it is recorded, and the execution fails."""
        worker = self._enter_trainer(execution_id, session)
        if self.resumed is None:
            raise NotAllowedError(what=f"{worker.place} reports damage in a run that resumed from nothing")
        path = self.resumed.metadata.checkpoint_path
        self._damage_reported = True
        self._effects.append(RecordDamage(path, artifact, explanation))
        self.lifecycle.fail(f"{worker.place} found {artifact} of {path} damaged: {explanation}")

    # -- rollouts

    def lease(self, execution_id: str, session: str, number: int, most: int, *, last_call: bool) -> LeaseReply | None:
        """Groups for a rollout worker. As `Leasing.lease`."""
        return self.leasing.lease(self._enter(execution_id, session), number, most, last_call=last_call)

    # -- training

    def next_command(self, execution_id: str, session: str, number: int) -> Command | None:
        """Command `number` for a trainer rank; None when there is none yet.

        Raises:
            AwaitingAgreementError: the gate is closed.
        """
        worker = self._enter_trainer(execution_id, session)
        if not self.lifecycle.gate_open and self.lifecycle.phase != "ENDED":
            raise AwaitingAgreementError(missing=self.agreement.missing)
        command = self.training.command(number, worker.place)
        worker.given_end = worker.given_end or isinstance(command, End)
        return command

    def dp_size(self, session: str) -> int:
        """Data-parallel size of the asking worker: row i of its commands belongs to share i modulo the size."""
        return self.workers.of(session).info.dp_size

    def payloads(self, execution_id: str, session: str, number: int, dp_rank: int | None) -> list[GroupPayloads]:
        """The payloads of a data-parallel share of a TRAIN command that is not committed, in its order."""
        worker = self._enter_trainer(execution_id, session)
        share, size = worker.info.dp_rank if dp_rank is None else dp_rank, worker.info.dp_size
        if share >= size:
            raise UnknownWorkError(what=f"share {share} of {size}")
        command = self.commands.train(number)
        if command.committed:
            raise NotAllowedError(what=f"command {number} is committed, its payloads are gone")
        found = []
        for token, mask in command.rows[share::size]:
            group = self.rollouts.group(token)
            if group is None:
                raise UnknownWorkError(what=f"group {token}")
            found.append(GroupPayloads(token, group.prompt, tuple(self.rollouts.payloads(token, mask))))
        return found

    def report_receipts(
        self, execution_id: str, session: str, number: int, receipts: tuple[ShardReceipt, ...], note: str
    ) -> Save:
        """A rank has written and made durable all its artifacts of a save."""
        worker, save = self._enter_save(execution_id, session, number)
        if self.policy.application_owns_checkpoints:
            if receipts:
                what = f"{worker.place} sends receipts in a run whose application commits checkpoints"
                raise NotAllowedError(what=what)
            return save  # a rank that has no part in the commit says only that it is through
        declared = self.agreement.artifacts_of(worker.place)
        self.commands.check_receipts(save, worker.place, receipts, declared, self.identity)
        for receipt in receipts:
            try:
                self._check_digest(receipt.digest)
            except ValueError as error:
                raise MalformedError(what=f"the digest of {receipt.name}: {error}") from error
        self.training.receive(save, worker.place, receipts, note)
        return save

    def report_abandoned(self, execution_id: str, session: str, number: int, reason: str) -> Save:
        """A rank cannot finish a save: nothing of it is published."""
        worker, save = self._enter_save(execution_id, session, number)
        if save.state == "PENDING":
            self.training.abandon(save, f"{worker.place}: {reason}")
        return save

    def report_committed(self, execution_id: str, session: str, number: int, checkpoint_path: str) -> Save:
        """The application has committed the save in its own format."""
        worker, save = self._enter_save(execution_id, session, number)
        if not self.policy.application_owns_checkpoints:
            raise NotAllowedError(what=f"{worker.place} reports its own commit in a run whose manifest is ours")
        if save.state == "PENDING":
            save.path = checkpoint_path
            self.training.committed(save, "")
        elif save.state == "COMMITTED" and save.path != checkpoint_path:
            raise ConflictingRetryError(what="commit of command", number=number)
        return save

    def publication_succeeded(self, save: Save, manifest_digest: str) -> None:
        """The manifest is visible and durable."""
        self.training.committed(save, manifest_digest)

    def publication_failed(self, save: Save, error: ControlError) -> None:
        """The manifest could not be published, or must not be acknowledged."""
        self.training.abandon(save, str(error))

    # -- ends

    def request_stop(self, execution_id: str, session: str, reason: str, grace_s: float | None) -> str:
        """Finish issued updates, save, end; returns the reason that counts, which is the first one."""
        self.pass_fence(execution_id)
        worker = self.workers.of(session) if session else None
        self._raise_failure(None)
        if worker is not None and worker.place.role == "trainer" and self.lifecycle.ending is None:
            self._stopped_by_rank = True
        return self.stop(reason, grace_s)

    def stop(self, reason: str, grace_s: float | None = None) -> str:
        """As `request_stop`, from the controller's own process."""
        if not self.lifecycle.over:
            # Also of a run that is ending already: the first reason counts, and so does the first grace.
            if self._stop_deadline is None:
                self._stop_deadline = self._clock() + (self.policy.stop_grace_s if grace_s is None else grace_s)
            self.training.stop_giving_work("STOP_REQUESTED", reason)
            self.training.form()
        return self.lifecycle.ending[1] if self.lifecycle.ending is not None else reason

    @property
    def deserters(self) -> tuple[Place, ...]:
        """Of a run that a trainer rank asked to stop, the ranks that have not heard of its end. They may be why it asked: a launcher
        signals the siblings of a rank that died."""
        found = [(rank, self.workers.at(rank)) for rank in self.commands.ranks if self._stopped_by_rank]
        return tuple(rank for rank, worker in found if worker is None or not (worker.given_end or worker.ended))

    def fail(self, message: str) -> None:
        """End the execution at once, for a reason from outside the core."""
        self.lifecycle.fail(message)

    def tick(self) -> None:
        """Let time pass: sessions lapse, leases expire, deadlines end waits."""
        for worker in self.workers.silent():
            silence = self.workers.silence_s(worker)
            self.workers.lapse(worker)
            self.rollouts.expire(worker)
            self.lifecycle.record("lapse", worker=str(worker.place))
            self.lifecycle.touch()
            if worker.place.role == "trainer":
                if self.lifecycle.phase in ("RUNNING", "DRAINING"):
                    self.lifecycle.fail(f"{worker} was not heard for {silence:.1f} s")
                elif not self.lifecycle.gate_open:
                    self.agreement.forget(worker.place)
        if self.rollouts.expire_overdue():
            self.lifecycle.touch()
        self.training.fail_overdue_step()
        self.training.abandon_overdue()
        self.training.end_if_exhausted()
        now, phase = self._clock(), self.lifecycle.phase
        if phase == "AWAITING_AGREEMENT" and now > self._gate_deadline:
            missing = ", ".join(self.agreement.missing)
            self.lifecycle.fail(f"{missing} did not confirm within {self.policy.gate_timeout_s:.0f} s")
        if phase == "DRAINING" and self._stop_deadline is not None and now > self._stop_deadline:
            self.lifecycle.fail("the stop was not finished within its grace; unfinished saves are abandoned")

    def doubt_record(self, why: str) -> None:
        """A record of the window was not made, or is not believed: a resume repeats more than it would have to."""
        self.replay_doubts += 1
        self.lifecycle.record("replay_doubt", why=why)
        self.lifecycle.touch()

    # -- callbacks of the parts

    def _replay(self, replay: Replay) -> None:
        if replay.doubt:
            self.doubt_record(replay.doubt)
        self.leasing.replay(replay.draws)

    def _settled(self, rows: Sequence[tuple[int, int]], outcome: str, reason: str) -> None:
        self._settled_counts[outcome] += self.ledger.settle_rows(rows)
        self.lifecycle.record("settle", rows=rows, outcome=outcome, reason=reason, step=self.commands.steps)

    def _announce(self, worker: Incarnation, announcement: WeightAnnouncement) -> None:
        if worker.place == self.commands.leader:
            self.leasing.announce(announcement)

    def _newest_version(self) -> int:
        # Whoever trains may generate with what it has just trained before anybody was told of it.
        last, weights = self.commands.last, self.leasing.weights
        given = last.step if isinstance(last, Train) else self.commands.steps
        return given if weights is None else max(given, weights.version)

    def _end_worker(self, worker: Incarnation, reason: str) -> None:
        self.workers.end(worker)
        self.rollouts.expire(worker)
        self.lifecycle.record("worker_end", worker=str(worker.place), reason=reason)
        if worker.place.role == "trainer" and not self.lifecycle.over:
            self.lifecycle.fail(f"{worker} ended before the run did: {reason}")

    # -- entry

    def _trainers(self) -> str:
        return ", ".join(f"{group} × {size}" for group, size in self.policy.trainer_groups)

    def pass_fence(self, execution_id: str, what: str = "request") -> None:
        """Raises StaleExecutionError for another execution's ID; `what` it was that came is for the journal."""
        try:
            self.fence.check(execution_id)
        except ControlError:
            self.lifecycle.record("stale_refused", stated=execution_id, what=what)
            raise

    def _enter(self, execution_id: str, session: str, what: str = "request") -> Incarnation:
        self.pass_fence(execution_id, what)
        worker = self.workers.of(session)
        self._raise_failure(worker)
        return worker

    def _enter_trainer(self, execution_id: str, session: str) -> Incarnation:
        worker = self._enter(execution_id, session)
        if worker.place.role != "trainer":
            raise NotAllowedError(what=f"{worker.place} is no trainer")
        return worker

    def _enter_save(self, execution_id: str, session: str, number: int) -> tuple[Incarnation, Save]:
        return self._enter_trainer(execution_id, session), self.commands.save(number)

    def _raise_failure(self, worker: Incarnation | None) -> None:
        if self.lifecycle.failure is not None:
            if worker is not None and not worker.told:
                worker.told = True
                self.lifecycle.touch()
            # One error for everyone: without this each raise would add to its traceback, and keep the frames.
            raise self.lifecycle.failure.with_traceback(None)
