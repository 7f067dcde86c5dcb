"""The core in a running process: its effects performed, its clock ticked, its waiters woken.

* The core is touched from the event loop only; disk work runs in a thread, one publication at a time.
* After every change, who waits in a line is served until nobody there can be given anything.
* Retention has its turn after a publication, in a thread of its own that no save waits for; what it cannot delete is logged, and tried
  again after the next one.
* An execution that has failed begins no publication. Before one, and again after the manifest is visible and before anyone
  is told, the claims are read: a superseded controller acknowledges nothing, and ends.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from cosmos_ctrl.checkpoints.artifacts import Artifact
from cosmos_ctrl.checkpoints.claims import is_superseded
from cosmos_ctrl.checkpoints.compatibility import TOPOLOGY, Topology
from cosmos_ctrl.checkpoints.damage import record_damage
from cosmos_ctrl.checkpoints.document import Parent
from cosmos_ctrl.checkpoints.manifest import CheckpointManifest, publish_from_receipts
from cosmos_ctrl.checkpoints.retention import KEEP_ALL, Decision, RetentionPolicy, Round, retain
from cosmos_ctrl.checkpoints.stores import VISIBLE_NOT_DURABLE, Store
from cosmos_ctrl.checkpoints.window import write_record
from cosmos_ctrl.core.commands import Save
from cosmos_ctrl.core.controller import Controller, Effect, Publish, RecordDamage
from cosmos_ctrl.core.errors import ControlError, StorageUnavailableError
from cosmos_ctrl.core.replay import Doubt
from cosmos_ctrl.core.resume import SamplingOwner
from cosmos_ctrl.service.messages import save_metadata
from cosmos_ctrl.service.watch import Line, Revisions

_log = logging.getLogger(__name__)

T = TypeVar("T")

_STALL_S = 1.0
_RETENTION_S = 10.0
"""How long deleting may go on once the execution is over."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What the service says of the run beside the core's state."""

    name: str
    uri: str
    sampling_owner: SamplingOwner
    compatibility: Mapping[str, Any]
    topology: Topology
    on_corrupt: Any
    max_record_bytes: int
    """Largest record of a window."""
    retention: RetentionPolicy = KEEP_ALL
    """Which checkpoints are kept."""


class Superseded(Exception):
    """A newer execution has claimed the run."""


class Unacknowledged(Exception):
    """The manifest is visible, and it is not known whether it may be acknowledged."""


class Runtime:
    """Drives one controller."""

    def __init__(self, controller: Controller, info: RunInfo, store: Store | None) -> None:
        """`store` is the run's; None for legacy, which publishes nothing."""
        self.controller, self.info, self.store = controller, info, store
        self.revisions = Revisions()
        self.leases, self.commands, self.confirmations, self.saves = Line(), Line(), Line(), Line(shared=False)
        """Calls that wait, by what they wait for; each waits for a save of its own."""
        self.over = asyncio.Event()
        """The execution is over. Who waits for nothing else is not woken by every report."""
        self._served = 0
        self.superseded = False
        self.damage_recorded = False
        self._publishing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._retaining: asyncio.Task[None] | None = None
        self._retention_due = False
        self._all_swept = False
        self._leaving = threading.Event()

    @property
    def waiting(self) -> int:
        """Calls that wait for something."""
        lines = (self.leases, self.commands, self.confirmations, self.saves)
        return sum(len(line) for line in lines) + len(self.revisions)

    def settle(self) -> None:
        """After an event: serve who waits, start the effects, and wake who watches."""
        lifecycle, workers = self.controller.lifecycle, self.controller.workers
        while self._served != lifecycle.revision:
            self._served = lifecycle.revision
            departed = workers.take_departed()
            for line in (self.confirmations, self.commands, self.saves, self.leases):
                line.serve(departed)
        for effect in self.controller.take_effects():
            task = asyncio.create_task(self._perform(effect))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if lifecycle.over:
            self.over.set()
        self.revisions.publish(lifecycle.revision)

    async def until(self, line: Line, session: str, attempt: Callable[[bool], T | None], wait_s: float) -> T | None:
        """`attempt(last_call)` for the worker of `session` now, in turn as `line` is served, and when `wait_s` has passed: until it gives
        something."""
        try:
            result = attempt(wait_s <= 0)
        finally:
            self.settle()
        if result is None and wait_s > 0:
            result = await line.wait(session, lambda: attempt(False), wait_s)
            if result is None:
                try:
                    return attempt(True)
                finally:
                    self.settle()
        return result

    async def tick_forever(self, interval_s: float) -> None:
        """Let time pass for the core. While this process itself stood still (stopped, or its machine suspended) it could hear
        nobody: that time is not held against the workers."""
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(interval_s)
            stood_still_s = loop.time() - before - interval_s
            if stood_still_s > _STALL_S:
                _log.warning("the controller stood still for %.1f s", stood_still_s)
                self.controller.workers.excuse(stood_still_s)
            self.controller.tick()
            self.settle()

    async def finish_effects(self) -> None:
        """Wait for what was started."""
        while self._tasks:
            await asyncio.gather(*self._tasks)
        if self._retaining is not None:
            await asyncio.wait([self._retaining], timeout=_RETENTION_S)
            self._leaving.set()
            await self._retaining

    async def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Publish):
            async with self._publishing:
                await self._publish(effect.save)
        elif isinstance(effect, RecordDamage):
            await self._record_damage(effect)
        self.settle()

    async def _publish(self, save: Save) -> None:
        failure = self.controller.lifecycle.failure
        if failure is not None:
            self.controller.publication_failed(save, failure)
            return
        if self.store is None:
            error = StorageUnavailableError(path=save.path, operation="publish", cause="a legacy run has no store")
            self.controller.publication_failed(save, error)
            return
        try:
            manifest = self._manifest(save, await self._record_window(self.store, save))
            digest = await asyncio.to_thread(self._publish_blocking, self.store, save.path, manifest)
        except Superseded:
            self.superseded = True
            self.controller.fail("a newer execution has claimed this run; nothing more is published or acknowledged")
        except Unacknowledged as error:
            # It is there, so it cannot be abandoned; it may not last, so nobody may be told. The next execution sees.
            self.controller.fail(f"the checkpoint of step {save.steps} is visible and not acknowledged: {error}")
        except ControlError as error:
            _log.error("checkpoint of step %d is not committed: %s", save.steps, error)
            self.controller.publication_failed(save, error)
        except Exception as error:
            _log.exception("checkpoint of step %d is not committed", save.steps)
            cause = StorageUnavailableError(path=save.path, operation="publish", cause=repr(error))
            self.controller.publication_failed(save, cause)
        else:
            _log.info("checkpoint of step %d is committed: %s (%s)", save.steps, save.path, digest)
            self.controller.publication_succeeded(save, digest)
            self._begin_retention(self.store)

    def _begin_retention(self, store: Store) -> None:
        if self._all_swept:
            return
        self._retention_due = True
        if self._retaining is None or self._retaining.done():
            self._retaining = asyncio.create_task(self._retain(store))

    async def _retain(self, store: Store) -> None:
        """Rounds of retention, as long as publications have made one due."""
        while self._retention_due and not self._leaving.is_set():
            self._retention_due = False
            try:
                done = await asyncio.to_thread(self._retain_blocking, store, asyncio.get_running_loop())
            except Exception as error:
                # Whatever it is, the run goes on without.
                _log.warning(
                    "retention could not look at the run: %s", error, exc_info=not isinstance(error, ControlError)
                )
                continue
            for failure in done.failures:
                _log.warning("%s is not deleted, and tried again after the next save: %s", failure.path, failure.why)
            # What dead executions left does not grow again, and with everything kept there is nothing else to look for.
            self._all_swept = self.info.retention == KEEP_ALL and not done.failures
            if done.superseded:
                _log.warning("retention stopped: a newer execution has claimed this run")

    def _retain_blocking(self, store: Store, loop: asyncio.AbstractEventLoop) -> Round:
        def note(decision: Decision) -> None:
            loop.call_soon_threadsafe(self._note_deletion, decision)

        return retain(
            store,
            self.info.retention,
            number=self.controller.identity.number,
            may_go_on=lambda: not self._leaving.is_set(),
            on_deleted=note,
        )

    def _note_deletion(self, decision: Decision) -> None:
        event = "retired" if decision.action == "retire" else "swept"
        _log.info("%s %s: %s", event, decision.holding.path, decision.why)
        self.controller.lifecycle.record(event, path=decision.holding.path, why=decision.why)

    async def _record_window(self, store: Store, save: Save) -> dict[str, Artifact]:
        if save.window is None:
            return {}
        checkpoint, limit = store.within(save.path), self.info.max_record_bytes
        written = await asyncio.to_thread(write_record, checkpoint, save.window, most_bytes=limit)
        if isinstance(written, Doubt):
            _log.warning("a resume from the checkpoint of step %d will repeat more: %s", save.steps, written.why)
            self.controller.doubt_record(written.why)
            return {}
        return written

    def _publish_blocking(self, store: Store, path: str, manifest: CheckpointManifest) -> str:
        if is_superseded(store, manifest.execution_number):
            raise Superseded
        try:
            digest = publish_from_receipts(store.within(path), manifest)
        except StorageUnavailableError as error:
            if error.operation == VISIBLE_NOT_DURABLE:
                raise Unacknowledged(str(error)) from error
            raise
        try:
            superseded = is_superseded(store, manifest.execution_number)
        except ControlError as error:
            raise Unacknowledged(str(error)) from error
        if superseded:
            raise Superseded
        return digest

    async def _record_damage(self, effect: RecordDamage) -> None:
        if self.store is None:
            return
        try:
            arguments = (self.store, effect.checkpoint_path, effect.artifact, effect.explanation)
            await asyncio.to_thread(record_damage, *arguments)
        except ControlError as error:
            _log.error("damage of %s could not be recorded: %s", effect.checkpoint_path, error)
        else:
            self.damage_recorded = True

    def _manifest(self, save: Save, record: dict[str, Artifact]) -> CheckpointManifest:
        artifacts = {
            receipt.name: Artifact(receipt.size_bytes, receipt.digest, receipt.rank, place.group)
            for place, receipts in save.receipts.items()
            for receipt in receipts
        }
        return CheckpointManifest(
            metadata=save_metadata(save, self.info.sampling_owner),
            artifacts=artifacts | record,
            compatibility={**self.info.compatibility, TOPOLOGY: self.info.topology.groups},
            execution_number=self.controller.identity.number,
            execution_id=self.controller.identity.id,
            parent=self._parent(save),
            repeat_bound_completions=save.window_completions,
            horizon_training_steps=self.controller.horizon_training_steps,
            application_note=save.application_note,
        )

    def _parent(self, save: Save) -> Parent | None:
        last, resumed = save.parent, self.controller.resumed
        if last is not None:
            return Parent(checkpoint_id=last.checkpoint_id, manifest_digest=last.manifest_digest)
        if resumed is not None:
            return Parent(checkpoint_id=resumed.metadata.checkpoint_id, manifest_digest=resumed.manifest_digest)
        return None
