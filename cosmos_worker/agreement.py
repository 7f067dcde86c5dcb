"""From "what do I resume" to the opened gate, for one trainer rank.

* What is confirmed comes from the manifest that was read and the counters that the user found in its own shard, never from
  what the controller said.
* Damage is told to the controller before it is raised, so that the next execution does not meet it unwarned; what merely
  could not be read is not called damaged.
* The wait for the other ranks has a deadline, and names who is missing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from cosmos_ctrl.checkpoints.manifest import read_manifest
from cosmos_ctrl.core.errors import (
    ArtifactForeignError,
    ArtifactMissingError,
    AwaitingAgreementError,
    CheckpointDamagedError,
    CheckpointError,
    ExecutionEndedError,
)
from cosmos_ctrl.core.resume import ControllerResumeMetadata, require_count
from cosmos_ctrl.service.metadata import metadata_to_message
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_worker.artifacts import Artifacts, open_artifacts
from cosmos_worker.client import Connection
from cosmos_worker.errors import AgreementTimeoutError, DeadlineError, UsageError, is_failure
from cosmos_worker.resuming import Resume, resume_from
from cosmos_worker.transport import duration_of

_log = logging.getLogger(__name__)

#: What the controller records as damage. A checkpoint that is not there is rather a run that is mounted elsewhere.
_DAMAGE = (CheckpointDamagedError, ArtifactMissingError, ArtifactForeignError)


class Agreement:
    """See the module. Called by one thread."""

    def __init__(self, connection: Connection, artifacts: tuple[str, ...], run_directory: str) -> None:
        self._connection = connection
        self._artifacts = artifacts
        self._run_directory = run_directory
        self._resume: Resume | None = None
        self._loaded: tuple[ControllerResumeMetadata, str] | None = None
        self._files: Artifacts | None = None
        self.agreed = False

    @property
    def resumed(self) -> Resume | None:
        """What `resume` answered; None before."""
        return self._resume

    def resume(self) -> Resume:
        """As `Trainer.resume`."""
        connection = self._connection
        response = connection.call(
            connection.unary(connection.stub.GetResumeState, lambda _: pb.GetResumeStateRequest())
        )
        if response.phase == pb.PHASE_FAILED:
            # Any fenced call is answered with what ended it; a heartbeat asks for nothing else.
            connection.call(
                connection.unary(connection.stub.SubmitReports, lambda worker: pb.SubmitReportsRequest(worker=worker))
            )
            raise ExecutionEndedError(end_reason="FAILURE", message=response.end.message)
        self._resume = resume_from(response, self._run_directory, connection.place.group)
        return self._resume

    def artifacts(self, resume: Resume) -> Artifacts:
        """As `Trainer.artifacts`."""
        checkpoint = resume.checkpoint
        if checkpoint is None:
            raise UsageError("the run is fresh: there is nothing to load")
        if self.agreed:
            raise UsageError("artifacts come before confirm(): what was restored is agreed on")
        path = checkpoint.metadata.checkpoint_path
        files_of = resume.store.within(path)
        with self._telling_damage():
            manifest, digest = read_manifest(files_of, path)
            if checkpoint.manifest_digest and digest != checkpoint.manifest_digest:
                raise CheckpointDamagedError(
                    path=path,
                    artifact="manifest.json",
                    what="digest",
                    expected=checkpoint.manifest_digest,
                    found=digest,
                )
        files = open_artifacts(
            files_of,
            manifest,
            self._connection.place,
            path=path,
            resharded=checkpoint.resharded,
            telling=self._telling_damage,
        )
        self.close()
        self._loaded, self._files = (manifest.metadata, digest), files
        return files

    def close(self) -> None:
        """Close what `artifacts` opened. Idempotent."""
        if self._files is not None:
            self._files.close()
            self._files = None

    def confirm(self, steps: int, updates: int) -> ExecutionEndedError | None:
        """As `Trainer.confirm`.

        Returns:
            The execution's end, if it has ended as it should before anything was agreed on.
        """
        if self.agreed:
            raise UsageError("what was restored is agreed on: confirm() comes once")
        require_count("steps", steps)
        require_count("updates", updates)
        request = self._confirmation(steps, updates)
        self.close()
        missing: tuple[str, ...] = ()
        total_s = self._connection.config.confirm_total_s
        started = time.monotonic()
        while (left_s := total_s - (time.monotonic() - started)) > 0:
            try:
                response = self._send(request, wait_s=min(left_s, self._connection.config.poll_s), total_s=left_s)
            except DeadlineError as error:
                if isinstance(error.__cause__, AwaitingAgreementError):
                    raise AgreementTimeoutError(error.__cause__.missing, total_s) from error
                raise
            except ExecutionEndedError as error:
                # A run that is at its limit already has nothing to agree on.
                if is_failure(error):
                    raise
                self.agreed = True
                return error
            if response.agreed:
                self.agreed = True
                return None
            missing = tuple(response.missing)
        raise AgreementTimeoutError(missing, total_s)

    def _confirmation(self, steps: int, updates: int) -> pb.ConfirmResumeRequest:
        if self._resume is None:
            raise UsageError("confirm comes after resume(): ask what to restore first")
        prefix = self._connection.place.prefix
        request = pb.ConfirmResumeRequest(
            completed_training_steps=steps,
            completed_optimizer_updates=updates,
            artifact_names=[prefix + name for name in self._artifacts],
        )
        checkpoint = self._resume.checkpoint
        if checkpoint is None:
            request.fresh.SetInParent()
        elif self._loaded is not None:
            metadata, request.manifest_digest = self._loaded
            request.metadata.CopyFrom(metadata_to_message(metadata))
        elif checkpoint.manifest_digest:
            raise UsageError("confirm comes after restoring: load this rank's files from artifacts(resume) first")
        else:
            # The application owns its checkpoints: only it knows what it loaded, and says so by its counters.
            request.metadata.CopyFrom(metadata_to_message(checkpoint.metadata))
        return request

    @contextmanager
    def _telling_damage(self) -> Iterator[None]:
        try:
            yield
        except _DAMAGE as error:
            self._tell_damage(error)
            raise

    def _tell_damage(self, error: CheckpointError) -> None:
        name = getattr(error, "artifact", "") or ", ".join(getattr(error, "artifacts", ())) or "manifest.json"
        request = pb.ConfirmResumeRequest(damaged=pb.DamagedArtifact(name=name, explanation=str(error)))
        try:
            self._send(request, wait_s=0.0, total_s=self._connection.config.call_s)
        except Exception as answer:
            # The controller ends over it, and may say so in many ways; the damage itself is the news.
            _log.debug("told of the damage, the controller answered: %s", answer)

    def _send(self, content: pb.ConfirmResumeRequest, *, wait_s: float, total_s: float) -> pb.ConfirmResumeResponse:
        def build(worker: pb.WorkerIdentity) -> pb.ConfirmResumeRequest:
            request = pb.ConfirmResumeRequest()
            request.CopyFrom(content)
            request.worker.CopyFrom(worker)
            request.wait.CopyFrom(duration_of(wait_s))
            return request

        connection = self._connection
        return connection.call(
            connection.unary(connection.stub.ConfirmResume, build, wait_s=wait_s, later_total_s=total_s)
        )
