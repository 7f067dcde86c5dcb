"""A crash and a resume through the real core, in memory: no torch, no network, no disk.

Two rollout workers answer out of order, one trainer rank trains and saves every few steps, and everything dies in the
middle of a step. A second execution resumes from the newest committed checkpoint and finishes. What it prints is counted
from the journals, by the same audit as a real run's.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cosmos_ctrl.audit import RunReport, audit_journals
from cosmos_ctrl.core.admission import Batch, WeightAnnouncement
from cosmos_ctrl.core.agreement import Restored, Resumed
from cosmos_ctrl.core.commands import CompletionReport, DisposedRows, Save, ShardReceipt, Train
from cosmos_ctrl.core.controller import Controller, Publish
from cosmos_ctrl.core.errors import StaleExecutionError
from cosmos_ctrl.core.execution import ExecutionIdentity, Place, WorkerInfo
from cosmos_ctrl.core.groups import Lease, RolloutRows
from cosmos_ctrl.core.policy import RunPolicy
from cosmos_ctrl.core.resume import ControllerResumeMetadata
from cosmos_ctrl.core.samplers import SeekableSampler
from cosmos_ctrl.core.sampling import Prompt, Sampling

_PROMPTS, _GENERATION, _CRASH_AFTER_STEP = 96, 4, 7

_POLICY = RunPolicy(trainer_groups=(("policy", 1),), groups_per_step=6, save_every_steps=3, max_outstanding_groups=24)


@dataclass
class _Worker:
    """A client of the core: its session and its numbers."""

    core: Controller
    execution_id: str
    place: Place
    session: str = ""
    batches: int = 0
    requests: int = 0
    held: list[Lease] = field(default_factory=list)

    def register(self) -> None:
        info = WorkerInfo(place=self.place, incarnation=f"{id(self):032x}", world_size=1)
        self.session = self.core.register(self.execution_id, info).session

    def send(self, **content: Any) -> None:
        self.batches += 1
        batch = Batch(number=self.batches, digest=b"", **content)
        self.core.submit(self.execution_id, self.session, self.batches - 1, 0, batch)

    def lease(self) -> None:
        reply = self.core.lease(self.execution_id, self.session, self.requests + 1, 4, last_call=True)
        self.requests += 1
        self.held += reply.leases if reply else ()

    def complete_one(self, choice: random.Random, version: int) -> None:
        """Finish any held group: results come out of order."""
        if not self.held:
            return
        lease = self.held.pop(choice.randrange(len(self.held)))
        rows = RolloutRows(
            outcome="completed",
            groups=[lease.group],
            leases=[lease.number],
            masks=[lease.mask],
            lowest_versions=[version],
            highest_versions=[version],
            rewards=[choice.random() for _ in range(lease.mask.bit_count())],
        )
        self.send(rollouts=(rows,))


class _Execution:
    """One start of the controller with fresh workers."""

    def __init__(self, number: int, saved: Save | None, choice: random.Random) -> None:
        self.choice = choice
        self.journal: list[dict[str, Any]] = []
        self.committed: Save | None = None
        ids = itertools.count()
        sampling = Sampling(
            SeekableSampler(_PROMPTS, seed=1),
            prompt_of=lambda index: Prompt(f"prompt-{index}"),
            completions_per_prompt=_GENERATION,
        )
        metadata = None if saved is None else _metadata(saved)
        start = sampling.start(_PROMPTS * _GENERATION) if metadata is None else sampling.restore(_Adapter(), metadata)
        self.core = Controller(
            _POLICY,
            ExecutionIdentity(number, f"execution-{number}"),
            sampling,
            start,
            Resumed(metadata=metadata, manifest_digest="in memory") if metadata else None,
            clock=lambda: 0.0,
            new_id=lambda: f"{number:02x}{next(ids):030x}",
            record=self._record,
        )
        self.trainer = self._worker(Place("trainer", "policy", 0, 0))
        self.rollouts = [self._worker(Place("rollout", "pool", replica, 0)) for replica in range(2)]
        restored = Restored(
            metadata=metadata,
            manifest_digest="in memory" if metadata else "",
            training_steps=self.core.commands.steps,
            optimizer_updates=self.core.commands.updates,
            artifact_names=("policy-0/state.pt",),
        )
        self.core.confirm(self.core.identity.id, self.trainer.session, restored)
        self.announce()
        self.next_command = 1

    def run(self, stop: Callable[[Controller], bool]) -> None:
        """Go on until `stop`, or to the end."""
        while not self.core.lifecycle.over and not stop(self.core):
            for worker in self.rollouts:
                worker.lease()
                worker.complete_one(self.choice, self.core.commands.steps)
            self.train()

    def train(self) -> None:
        """Do what the trainer is told."""
        command = self.core.next_command(self.core.identity.id, self.trainer.session, self.next_command)
        if command is None:
            return
        self.next_command += 1
        if isinstance(command, Train):
            disposed = (DisposedRows("trained", command.rows),)
            report = CompletionReport(command=command.number, step=command.step, optimizer_updates=1, disposed=disposed)
            self.trainer.send(completions=(report,))
            self.announce()
        elif isinstance(command, Save):
            self.save(command)

    def save(self, command: Save) -> None:
        """Send the receipts; committing is instant here."""
        receipt = ShardReceipt(
            name="policy-0/state.pt",
            size_bytes=1,
            digest="sha256:" + "0" * 64,
            completed_training_steps=command.steps,
            completed_optimizer_updates=command.updates,
            rank=0,
            execution_number=self.core.identity.number,
            execution_id=self.core.identity.id,
            checkpoint_id=command.checkpoint_id,
        )
        self.core.report_receipts(self.core.identity.id, self.trainer.session, command.number, (receipt,), "")
        for effect in self.core.take_effects():
            if isinstance(effect, Publish):
                self.core.publication_succeeded(effect.save, "in memory")
                self.committed = effect.save

    def announce(self) -> None:
        """Weights of the present step exist."""
        self.trainer.send(weights=(WeightAnnouncement(self.core.commands.steps, "in memory"),))

    def _worker(self, place: Place) -> _Worker:
        worker = _Worker(self.core, self.core.identity.id, place)
        worker.register()
        return worker

    def _record(self, event: str, **values: Any) -> None:
        self.journal.append({"event": event, "t": float(len(self.journal)), **values})


class _Adapter:
    """Restores a seekable sampler."""

    def load_metadata(self, config: object) -> ControllerResumeMetadata | None:
        """Not asked here: the demo hands the metadata over itself."""
        raise NotImplementedError

    def restore_sampler(self, sampler: Any, metadata: ControllerResumeMetadata) -> None:
        """Hand over the saved position."""
        sampler.load_state_dict(metadata.sampler_state)


def _metadata(save: Save) -> ControllerResumeMetadata:
    return ControllerResumeMetadata(
        checkpoint_path=save.path,
        checkpoint_id=save.checkpoint_id,
        completed_training_steps=save.steps,
        completed_optimizer_updates=save.updates,
        remaining_completions=save.boundary.remaining_completions,
        epoch=save.boundary.epoch,
        sampling_owner="sampler",
        sampler_state=save.boundary.encoded_state,
    )


def crash_and_resume(seed: int = 0) -> RunReport:
    """Run both executions; returns what an audit of their journals counts."""
    choice = random.Random(seed)
    first = _Execution(1, None, choice)
    first.run(lambda core: core.commands.steps >= _CRASH_AFTER_STEP)
    second = _Execution(2, first.committed, choice)
    survivor = first.rollouts[0]
    survivor.core, survivor.session = second.core, second.rollouts[0].session
    try:
        survivor.complete_one(choice, second.core.commands.steps)
    except StaleExecutionError:
        pass
    else:
        raise AssertionError("a worker of the first execution was let into the second")
    second.run(lambda _: False)
    return audit_journals([first.journal, second.journal])


def main() -> int:
    """Print what happened."""
    report = crash_and_resume()
    first, second = report.executions
    saved = next(checkpoint for checkpoint in report.checkpoints if checkpoint.id == second.resumed_from)
    print(f"execution 1  {_PROMPTS} prompts × {_GENERATION} completions, killed in step {_CRASH_AFTER_STEP + 1}")
    print(
        f"execution 2  resumed from the checkpoint of step {saved.step}, finished at step {report.completed_training_steps}"
    )
    print()
    print(f"  a restart from the live cursor would have lost   {report.live_cursor_would_skip:4d} prompts")
    print(f"  this run skipped                                 {report.skipped:4d} completions")
    print(
        f"  repeated (the restored model contained them)     {report.repeated:4d} of at most {report.window_at_checkpoint}"
    )
    print(f"  spared (the checkpoint's record proved them)     {report.spared:4d}")
    print(f"  redone (trained after the checkpoint, so lost)   {report.redone:4d}")
    print(f"  reports of the dead execution refused            {report.stale_reports_refused:4d}")
    print(f"  completions left in the budget                   {report.remaining_completions:4d}")
    return 0 if report.skipped == 0 and first.number == 1 else 1
