"""Trainer ranks: they take commands, train what they are given, save at once or later or never, and die."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import simulated_storage as storage
from oracle import Checkpoint, lost_before
from simulated_world import Crash, World, bits_of, prompt_of

from cosmos_ctrl.core.admission import Batch, WeightAnnouncement
from cosmos_ctrl.core.agreement import Restored
from cosmos_ctrl.core.commands import CompletionReport, DisposedRows, End, Save, ShardReceipt, Train
from cosmos_ctrl.core.controller import Publish
from cosmos_ctrl.core.errors import StorageUnavailableError
from cosmos_ctrl.core.execution import WorkerInfo
from cosmos_ctrl.core.resume import ControllerResumeMetadata
from cosmos_ctrl.core.sampling import PromptFeedback


@dataclass
class Trainer:
    """A rank's process."""

    info: WorkerInfo
    session: str
    alive: bool = True
    position: int = 1
    """Number of the next command."""
    batches: int = 0
    command: Train | None = None
    saves: list[Save] = field(default_factory=list)
    """Being written, oldest first."""
    ended: bool = False


class TrainerSide:
    """All trainer ranks of an execution, and the disk."""

    def __init__(self, world: World) -> None:
        self.world, self.rng, self.core = world, world.rng, world.controller
        self.trainers: list[Trainer] = []
        self.publishing: list[Save] = []
        self.has_forgotten_a_save = False
        """Whether a rank never answered one; its deadline may end the execution when nobody is at fault any more."""
        self.leader_steps = world.steps_before
        """Steps in the leader's model, whether or not they are committed."""
        self._models: dict[str, Counter[int]] = {}
        """The leader's model as it was when it was told to save."""

    @property
    def leader(self) -> Trainer:
        return self.trainers[0]

    def start(self) -> None:
        """Every rank registers and confirms, in any order."""
        ranks = self.core.commands.ranks
        parent = self.world.parent
        for place in self.rng.sample(ranks, len(ranks)):
            info = self.world.info(place)
            trainer = Trainer(info, self.core.register(self.world.id, info).session)
            self.trainers.append(trainer)
            metadata = parent.metadata if parent else None
            restored = Restored(
                metadata=metadata,
                manifest_digest=parent.digest if parent else "",
                training_steps=metadata.completed_training_steps if metadata else 0,
                optimizer_updates=metadata.completed_optimizer_updates if metadata else 0,
                artifact_names=(f"{place.group}{place.rank}",),
            )
            self.core.confirm(self.world.id, trainer.session, restored)
        self.trainers.sort(key=lambda trainer: trainer.info.place != self.core.commands.leader)
        if self.world.policy.announces_weights:
            self.announce(self.world.steps_before)

    def any(self) -> Trainer:
        return self.rng.choice(self.trainers)

    def any_saving(self) -> Trainer:
        """One that has a save in hand, if there is one."""
        return self.rng.choice([trainer for trainer in self.trainers if trainer.saves] or self.trainers)

    # -- steps

    def train(self, trainer: Trainer) -> None:
        """Ask for a command, or finish the one in hand."""
        if trainer.ended or not trainer.alive:
            return
        if trainer.command is None:
            self._ask(trainer)
        else:
            self._finish(trainer, trainer.command)

    def _ask(self, trainer: Trainer) -> None:
        command = self.core.next_command(self.world.id, trainer.session, trainer.position)
        if command is None:
            return
        assert self.core.next_command(self.world.id, trainer.session, trainer.position) is command
        if isinstance(command, End):
            trainer.ended = True
        elif isinstance(command, Save):
            trainer.position += 1
            trainer.saves.append(command)
            if trainer is self.leader:
                self._models[command.checkpoint_id] = Counter(self.world.oracle.model)
        else:
            trainer.command = command
            self._check_payloads(trainer, command)

    def _finish(self, trainer: Trainer, command: Train) -> None:
        leads, oracle = trainer is self.leader, self.world.oracle
        rows = self._dispose(command) if leads else ()
        if leads:
            self.leader_steps = command.step
        for block in rows:
            for group, mask in block.rows if block.disposition == "trained" else ():
                oracle.model.update(oracle.names(group, mask))
        if leads:
            self.world.due_feedback = self._feedback_of(rows)
        updates = 1 + command.step % 2
        report = CompletionReport(command=command.number, step=command.step, optimizer_updates=updates, disposed=rows)
        self._submit(trainer, completions=(report,))
        trainer.command = None
        trainer.position += 1
        announces = leads and self.world.policy.announces_weights
        if announces and not self.core.lifecycle.over and (self.world.calm or self.rng.random() < 0.7):
            self.announce(command.step)

    def announce(self, version: int) -> None:
        self._submit(self.leader, weights=(WeightAnnouncement(version, "w"),))

    def _submit(self, trainer: Trainer, **parts: Any) -> None:
        batch = Batch(number=trainer.batches + 1, digest=self.world.digest(), **parts)
        ack = self.core.submit(self.world.id, trainer.session, trainer.batches, 0, batch)
        trainer.batches = batch.number
        self.world.check()
        if self.rng.random() < 0.2 and not self.core.lifecycle.over:
            counts = self.world.counts()
            assert self.core.submit(self.world.id, trainer.session, batch.number - 1, 0, batch) == ack
            assert self.world.counts() == counts, "G6: a repeated batch changed something"

    def _check_payloads(self, trainer: Trainer, command: Train) -> None:
        """What is trained is what was generated for that very completion."""
        assert 0 < len(command.rows) <= self.world.policy.groups_per_step
        if command.committed:
            return
        found = self.core.payloads(self.world.id, trainer.session, command.number, None)
        limit = self.world.policy.max_staleness
        for part, (group, mask) in zip(found, command.rows, strict=True):
            assert part.group == group
            assert [completion.completion for completion in part.completions] == bits_of(mask)
            assert part.prompt == prompt_of(self.world.oracle.key_of[group])
            for completion in part.completions:
                text = completion.handle or (completion.payload or b"").decode()
                assert text == f"{part.prompt.key}:{completion.completion}", "a payload of another completion"
                assert completion.reward == float(completion.completion)
                stale = limit is not None and command.step - 1 - completion.lowest_version > limit
                assert not stale, "a stale completion was trained"

    def _dispose(self, command: Train) -> tuple[DisposedRows, ...]:
        rows: list[DisposedRows] = []
        for group, mask in command.rows:
            if self.world.calm or self.rng.random() < 0.7:
                rows.append(DisposedRows("trained", ((group, mask),)))
                continue
            left = mask
            while left:
                part = self.world.part_of(left)
                left &= ~part
                disposition: Any = self.rng.choice(["trained", "trained", "discarded", "returned", "payload_lost"])
                reason = "trainer-rejected" if disposition == "discarded" else ""
                rows.append(DisposedRows(disposition, ((group, part),), reason))
        self.rng.shuffle(rows)
        return tuple(rows)

    def _feedback_of(self, rows: tuple[DisposedRows, ...]) -> list[PromptFeedback]:
        """What the sampler is told: each prompt once, in the order of the rows, with what was trained or discarded of it."""
        told = [row for block in rows if block.disposition in ("trained", "discarded") for row in block.rows]
        masks = {group: sum(mask for other, mask in told if other == group) for group, _ in told}
        key_of = self.world.oracle.key_of
        return [
            PromptFeedback(key_of[group], "pool", tuple(map(float, bits_of(mask)))) for group, mask in masks.items()
        ]

    # -- saves

    def save(self, trainer: Trainer) -> None:
        """Finish the oldest save in hand, give it up, or never answer."""
        if not trainer.saves or not trainer.alive:
            return
        save, fault = trainer.saves.pop(0), 1.0 if self.world.calm else self.rng.random()
        if fault < 0.05:
            self.core.report_abandoned(self.world.id, trainer.session, save.number, "disk full")
        elif fault < 0.1:
            self.has_forgotten_a_save = True
        else:
            receipt = ShardReceipt(
                name=f"{trainer.info.place.group}{trainer.info.place.rank}",
                size_bytes=1,
                digest="sha256:0",
                completed_training_steps=save.steps,
                completed_optimizer_updates=save.updates,
                rank=trainer.info.place.rank,
                execution_number=self.world.number,
                execution_id=self.world.id,
                checkpoint_id=save.checkpoint_id,
            )
            for _ in range(2 if self.rng.random() < 0.2 else 1):
                self.core.report_receipts(self.world.id, trainer.session, save.number, (receipt,), "")

    def take_effects(self) -> None:
        self.publishing += [effect.save for effect in self.core.take_effects() if isinstance(effect, Publish)]

    def publish(self) -> None:
        """The disk answers: the checkpoint is visible, or it is not and never will be."""
        if not self.publishing:
            return
        save = self.publishing.pop(self.rng.randrange(len(self.publishing)))
        if not self.world.calm and self.rng.random() < 0.1:
            error = StorageUnavailableError(path=save.path, operation="link", cause="EIO")
            self.core.publication_failed(save, error)
            assert save.window is None, "a save that is over keeps its window"
            return
        checkpoint = self._checkpoint(save)
        cut = checkpoint.cut
        assert cut.boundary == self.world.plan.budget - save.boundary.remaining_completions
        lost = lost_before(cut.boundary, cut.line, checkpoint.model, cut.discarded)
        assert not lost, f"G1: the checkpoint of step {save.steps} skips {lost}"
        self.world.run.published.append(checkpoint)
        if not self.world.calm and self.rng.random() < self.world.plan.crash_at_publication:
            raise Crash  # visible, and nobody was told
        self.core.publication_succeeded(save, checkpoint.digest)
        assert save.window is None, "a save that is over keeps its window"
        if not self.world.calm and self.rng.random() < self.world.plan.crash_at_publication:
            raise Crash

    def _checkpoint(self, save: Save) -> Checkpoint:
        metadata = ControllerResumeMetadata(
            checkpoint_path=save.path,
            checkpoint_id=save.checkpoint_id,
            completed_training_steps=save.steps,
            completed_optimizer_updates=save.updates,
            remaining_completions=save.boundary.remaining_completions,
            epoch=save.boundary.epoch,
            sampling_owner=self.world.sampling_owner,
            sampler_state=save.boundary.encoded_state,
        )
        cut = self.world.cuts[save.checkpoint_id]
        record = storage.write(save, cut, self.world.policy.records_window)
        if save.window is not None and self.rng.random() < 0.05:
            self.core.doubt_record("the record takes too many bytes")
            self.world.doubts += 1
            record = None
        if save.steps < self.core.commands.steps:
            self.world.run.seen["recorded while a later step trained"] += record is not None
        return Checkpoint(
            execution=self.world.number,
            metadata=metadata,
            digest=f"sha256:{save.checkpoint_id}",
            repeat_bound=save.window_completions,
            model=self._models[save.checkpoint_id],
            cut=cut,
            record=record,
        )
