"""A trainer rank: what to resume, agreement, commands, reports, saves.

* The order is enforced: resume, restore, confirm, then commands one by one; a TRAIN command is completed, and a SAVE begun,
  before the next is asked for. A call out of order is `UsageError`, and changes nothing.
* A command is complete for the user when the controller has acknowledged it.
* A save may go on in the background, one at a time. That it failed is raised by the user's next call, before it does anything.
* Every wait has a deadline; a rank whose execution is over hears of it in its next call, or is ended by the client's thread.
* SIGTERM and SIGUSR1 to a rank stop the run well; a second one ends the rank. See `signals`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cosmos_ctrl.checkpoints.digests import new_hasher
from cosmos_ctrl.core.errors import ExecutionEndedError, WindowFullError
from cosmos_ctrl.core.resume import require_count
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1 import reports_pb2
from cosmos_worker.agreement import Agreement
from cosmos_worker.artifacts import Artifacts
from cosmos_worker.background import Background
from cosmos_worker.client import Connection
from cosmos_worker.commands import EndReason, Named, SaveWork, TrainGroup, TrainWork, Work, dispositions, work_of
from cosmos_worker.errors import DeadlineError, UsageError
from cosmos_worker.report_items import CompletionItem, MetricItem, WeightsItem
from cosmos_worker.resuming import Resume
from cosmos_worker.saves import Save, SavePlace
from cosmos_worker.settings import RUN_DIRECTORY, ClientConfig, Endpoint, WorkerPlace, count_from
from cosmos_worker.shared_commands import Ask, shared
from cosmos_worker.signals import StopSignals
from cosmos_worker.training_calls import TrainingCalls

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["EndReason", "Resume", "Save", "SaveWork", "TrainGroup", "TrainWork", "Trainer"]

_log = logging.getLogger(__name__)


class Trainer:
    """One rank. Use it with ``with``; `from_env` makes it."""

    def __init__(
        self,
        endpoint: Endpoint,
        place: WorkerPlace,
        *,
        artifacts: Sequence[str] = ("state.pt",),
        run_directory: str = "",
        config: ClientConfig | None = None,
        **connection: Any,
    ) -> None:
        """See `from_env`, which most programs use.

        Raises:
            ValueError: two artifacts of one name, or an unknown digest.
            ModuleNotFoundError: the package of the digest is not installed.
        """
        if isinstance(artifacts, str) or len(set(artifacts)) != len(artifacts):
            raise ValueError(f"artifacts must be distinct names, not {artifacts!r}")
        new_hasher((config or ClientConfig()).digest)  # now, not at the first save
        self._artifacts = tuple(artifacts)
        self._connection = Connection(endpoint, place, config=config, **connection)
        self._calls = TrainingCalls(self._connection)
        self._agreement = Agreement(self._connection, self._artifacts, run_directory)
        self._background = Background(self._connection)
        self._signals = StopSignals(self._connection, self._calls)
        self._number = 0
        """Of the last command received."""
        self._open: Work | None = None
        self._save: Save | None = None
        """The last one begun."""
        self._end: EndReason | None = None

    @classmethod
    def from_env(
        cls,
        *,
        group: str = "policy",
        dp: tuple[int, int] | None = None,
        artifacts: Sequence[str] = ("state.pt",),
        rank: int | None = None,
        world_size: int | None = None,
        address: str | None = None,
        execution_id: str | None = None,
        run_directory: str | None = None,
        config: ClientConfig | None = None,
        environ: Mapping[str, str] | None = None,
        **connection: Any,
    ) -> Self:
        """From the environment, torchrun's included; an argument wins over its variable.

        Args:
            group: the trainer group.
            dp: data-parallel rank and size; None: one share per rank.
            artifacts: names of the files that this rank saves in every checkpoint; they lie in a folder of its own.
            rank: else RANK, else 0.
            world_size: else WORLD_SIZE, else 1.
            address: ``host:port`` of the controller; else COSMOS_CTRL_ADDRESS.
            execution_id: the execution this process was launched for; else COSMOS_CTRL_EXECUTION_ID, else the one it is told first.
            run_directory: where this machine has the run, a path or URI; else COSMOS_CTRL_RUN_DIR, else where the controller has it.
            config: limits.
            environ: instead of the process's environment.

        Raises:
            ValueError: there is no address, or a value cannot be read or does not fit.
        """
        environ = os.environ if environ is None else environ
        rank = count_from(environ, "RANK", 0) if rank is None else rank
        world_size = count_from(environ, "WORLD_SIZE", 1) if world_size is None else world_size
        dp_rank, dp_size = (rank, world_size) if dp is None else dp
        place = WorkerPlace(
            role="trainer",
            group=group,
            replica=0,
            rank=rank,
            world_size=world_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
        )
        return cls(
            Endpoint.find(address=address, execution_id=execution_id, environ=environ),
            place,
            artifacts=artifacts,
            run_directory=environ.get(RUN_DIRECTORY, "") if run_directory is None else run_directory,
            config=config,
            **connection,
        )

    def __enter__(self) -> Self:
        opening = self._connection.start()
        try:
            opening.result()
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)

    # --- resume and agreement ---

    def resume(self) -> Resume:
        """What this execution starts from; waits while the controller is still finding out.

        Raises:
            ExecutionEndedError: it failed already.
            ControllerUnreachableError: there was no answer.
        """
        return self._agreement.resume()

    def artifacts(self, resume: Resume) -> Artifacts:
        """This rank's files of the checkpoint, verified, open for reading, by the names they were saved under. When it is resharded,
        they are of the rank that ``stamp.rank`` of the answer says.

        They are closed by `confirm`, at the latest. When something is damaged or missing, the controller is told (it
        records that, and ends) before the error is raised.

        Raises:
            UsageError: the run is fresh, or `confirm` was called.
            CheckpointDamagedError, ArtifactMissingError: the checkpoint is not what was committed.
            StorageUnavailableError: it could not be read.
        """
        return self._agreement.artifacts(resume)

    def confirm(self, *, steps: int, updates: int) -> None:
        """Say what this rank restored, and wait until all ranks agree.

        Args:
            steps: completed training steps, as found in what was loaded; 0 when fresh.
            updates: completed optimizer updates, as found there; 0 when fresh.

        Raises:
            UsageError: `resume` was not called, or there is a checkpoint and `artifacts` was not called; or it is agreed on already.
            ResumeMetadataMismatch: some rank restored something else; nothing is trained.
            AgreementTimeoutError: ranks are missing; it names them.
        """
        end = self._agreement.confirm(steps, updates)
        if end is not None:
            self._ended(EndReason(end.end_reason, end.message, steps))
        else:
            # Not before: there would be nothing to save, and a launcher signals the siblings of a rank that did not come up.
            self._signals.install()

    # --- commands ---

    def commands(self, process_group: Any = None) -> Iterator[Work]:
        """Commands, one by one, until the execution has ended as it should; then `end_reason` is set.

        Args:
            process_group: ranks that must see the same (a replica's); its rank 0 asks for all. None: each rank asks.

        Raises:
            UsageError: `confirm` was not called, or the command before was neither completed nor begun to be saved.
            SaveFailedError: an asynchronous save failed; nothing was asked for.
            ExecutionEndedError: the execution failed.
            StaleExecutionError, SupersededError: it is over for this process: exit with code 10.
            DeadlineError: there was no command for ``idle_total_s``.
        """
        if not self._agreement.agreed:
            raise UsageError("commands come after confirm()")
        ask = shared(self._ask, process_group)
        while self._end is None:
            if self._open is not None:
                what = (
                    "saved: use save(command)" if self._open.is_save else "completed: call complete(command, updates=)"
                )
                raise UsageError(f"command {self._open.number} was not {what}")
            if self._save is not None and not self._save.left:
                raise UsageError(
                    f"command {self._number} was not saved: the with statement of its save has to end before the next command"
                )
            work = self._next(ask)
            if work is None:
                return
            self._number, self._open = work.number, work
            yield work

    def complete(
        self,
        command: Work,
        *,
        updates: int,
        discarded: Named = (),
        returned: Named = (),
        lost: Named = (),
    ) -> None:
        """The TRAIN command is complete on this rank; returns when the controller has acknowledged that.

        Only the leader's word about completions counts, and it speaks for all ranks: what it does not name was trained.

        Args:
            command: the present one.
            updates: optimizer updates that this command did on this rank.
            discarded: rejected for good.
            returned: not used; they come again.
            lost: their payloads could not be had; they are generated again.

        Raises:
            UsageError: the command is not the present one, or a named completion is not its.
            SaveFailedError: an asynchronous save failed; nothing was reported.
            WrongStepError: ranks disagree about the updates; the execution ends.
        """
        self._check()
        require_count("updates", updates)
        if self._open is not command or not isinstance(command, TrainWork):
            raise UsageError(
                f"command {command.number} is not the one to complete: each is completed once, in its turn"
            )
        rows: list[reports_pb2.DisposedRows] = []
        if self._connection.leader:
            rows = dispositions(command, discarded=discarded, returned=returned, lost=lost)
        report = reports_pb2.CompletionReport(
            command=command.number,
            completed_training_step=command.step,
            optimizer_updates=updates,
            rows=rows,
        )
        self._open = None
        self._calls.say_and_wait(CompletionItem(report))

    def save(self, command: Work) -> Save:
        """The save of a SAVE command, for a ``with`` statement; see `Save`. Waits until an asynchronous one before it is over.

        Raises:
            UsageError: the command is not the present one.
            SaveFailedError: the asynchronous one before failed; this one has not begun.
            DeadlineError: the asynchronous one before is not over after ``save_total_s``.
        """
        resume = self._agreement.resumed
        if self._open is not command or not isinstance(command, SaveWork) or resume is None:
            raise UsageError("save(command) needs the present SAVE command, once")
        self._background.wait_released(self._connection.config.save_total_s)
        self._connection.check()
        self._open = None
        connection = self._connection
        place = SavePlace(
            store=resume.store,
            prefix=connection.place.prefix,
            names=self._artifacts,
            rank=connection.place.rank,
            execution_id=connection.execution_id,
            leader=self._connection.leader,
            digest=connection.config.digest,
            background=self._background,
            total_s=connection.config.save_total_s,
        )
        self._save = Save(command, place, self._calls.report_shards)
        return self._save

    # --- the rest ---

    def announce_weights(self, version: int, handle: str) -> None:
        """Tell rollout workers where the weights after `version` training steps are. Said by the leader; else ignored."""
        self._check()
        require_count("version", version)
        if self._connection.leader:
            self._calls.say(WeightsItem(version, handle))

    def metric(self, name: str, value: float) -> None:
        """Show operators a number with this worker. Dropped while the report window is full."""
        self._check()
        try:
            self._connection.reports.append(MetricItem(name, float(value)))
        except WindowFullError:
            _log.debug("metric %s dropped: the report window is full", name)

    def stop(self, reason: str, *, deadline_s: float | None = None, wait: bool = True) -> None:
        """Ask the controller to finish issued updates, save at the real step, and end.

        Args:
            reason: in words.
            deadline_s: time to finish in; None: as the controller is configured.
            wait: False: only send it off, as a signal handler does.
        """
        self._calls.request_stop(reason, deadline_s, wait=wait)

    @property
    def end_reason(self) -> EndReason | None:
        """Why the execution ended; None while it runs."""
        return self._end

    @property
    def leader(self) -> bool:
        """Whether this rank speaks for all."""
        return self._connection.leader

    @property
    def execution_id(self) -> str:
        """The execution this process belongs to; empty with a legacy controller."""
        return self._connection.execution_id

    def _next(self, ask: Ask) -> Work | None:
        config = self._connection.config
        started = time.monotonic()
        while time.monotonic() - started < config.idle_total_s:
            self._background.check()
            response = ask()
            work = work_of(response, self._number + 1, self._connection.place.dp_rank, self._calls.fetch_payloads)
            if isinstance(work, EndReason):
                self._ended(work)
                return None
            if work is not None:
                return work
        raise DeadlineError(f"command {self._number + 1}", config.idle_total_s)

    def _ask(self) -> pb.NextCommandResponse:
        return self._calls.next_command(self._number + 1)

    def _ended(self, end: EndReason) -> None:
        if end.name == "FAILURE":
            raise ExecutionEndedError(end_reason=end.name, message=end.message)
        self._end = end
        # Whatever comes of the connection from here on is no news.
        self._connection.finishing = True

    def _check(self) -> None:
        self._background.check()
        self._connection.check()

    def _leave(self, error: BaseException | None) -> None:
        self._agreement.close()
        failure = error
        try:
            failure = self._end_save(error)
            self._say_goodbye(failure)
        finally:
            self._signals.restore()
            self._connection.stop()
        if failure is not None and failure is not error:
            raise failure

    def _end_save(self, error: BaseException | None) -> BaseException | None:
        """Wait for an asynchronous save. What the rank leaves with: `error`, if there is one, else what came of the save."""
        config = self._connection.config
        try:
            self._background.wait_finished(config.save_total_s if error is None else config.close_s)
        except Exception as failure:
            if error is None:
                return failure
            _log.warning("leaving after %s: %s", type(error).__name__, failure)
        return error

    def _say_goodbye(self, error: BaseException | None) -> None:
        reason = str(self._end or "left") if error is None else f"{type(error).__name__}: {error}"
        try:
            self._calls.leave(reason)
        except Exception as failure:
            if error is None:
                raise
            _log.warning("leaving after %s: %s", type(error).__name__, failure)
