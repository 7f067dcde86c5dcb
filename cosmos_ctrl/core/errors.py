"""The closed tree of domain errors.

* Every error that can cross the wire is one class here with one stable ``reason``; ``service/status.py`` maps it to a gRPC
  code and back, and a test proves the mapping total.
* An error's variables are typed, keyword-only attributes. Its text is made from them, so a client that decodes the
  attributes reads the same sentence as the server's log.
* A sentence says which thing, what was expected, what was found, and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar


@dataclass(kw_only=True, eq=False)
class ControlError(Exception):
    """Base of all domain errors."""

    reason: ClassVar[str] = ""

    def __post_init__(self) -> None:
        super().__init__()

    def __str__(self) -> str:
        return type(self).__doc__ or self.reason

    def attributes(self) -> dict[str, Any]:
        """The error's variables by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.attributes())


def _rebuild(cls: type[ControlError], attributes: dict[str, Any]) -> ControlError:
    return cls(**attributes)


# --- identity and order ---


@dataclass(kw_only=True, eq=False)
class StaleExecutionError(ControlError):
    """The request states another execution's ID, or none where one is due."""

    reason: ClassVar[str] = "STALE_EXECUTION"
    stated: str
    current: str

    def __str__(self) -> str:
        stated = f"execution {self.stated}" if self.stated else "no execution"
        return (
            f"the request states {stated}, this controller runs execution {self.current}; nothing was changed. "
            "The process belongs to an attempt that is over: end it and start a fresh one."
        )


@dataclass(kw_only=True, eq=False)
class SupersededError(ControlError):
    """A newer incarnation holds this worker's place."""

    reason: ClassVar[str] = "SUPERSEDED"
    place: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.place} was taken over by a newer process; incarnation {self.incarnation} is retired for good. End this process."


@dataclass(kw_only=True, eq=False)
class WrongStepError(ControlError):
    """A trainer reported a step or an update count that does not fit the command."""

    reason: ClassVar[str] = "WRONG_STEP"
    place: str
    what: str
    expected: int
    found: int

    def __str__(self) -> str:
        return (
            f"{self.place} reported {self.what} {self.found}, expected {self.expected}. Trainer ranks have diverged: "
            "the execution ends, restart from the newest checkpoint."
        )


@dataclass(kw_only=True, eq=False)
class SequenceGapError(ControlError):
    """A number was left out."""

    reason: ClassVar[str] = "SEQUENCE_GAP"
    what: str
    expected: int
    found: int

    def __str__(self) -> str:
        return f"{self.what} {self.found} came where {self.expected} was due. Send again from {self.expected}."


@dataclass(kw_only=True, eq=False)
class NotRegisteredError(ControlError):
    """The session is unknown or has lapsed."""

    reason: ClassVar[str] = "NOT_REGISTERED"
    session: str

    def __str__(self) -> str:
        session = f"session {self.session}" if self.session else "no session was stated, and none"
        return f"{session} is open here. Register again, then send again what is not acknowledged."


@dataclass(kw_only=True, eq=False)
class ConflictingRetryError(ControlError):
    """A number was used twice with different content."""

    reason: ClassVar[str] = "CONFLICTING_RETRY"
    what: str
    number: int

    def __str__(self) -> str:
        return f"{self.what} {self.number} was sent before with other content. A retry repeats the same bytes; this is a client bug."


@dataclass(kw_only=True, eq=False)
class ResumeMetadataMismatch(ControlError):
    """Two parts of a resumed run do not stand at the same checkpoint. Names keys, never their values."""

    reason: ClassVar[str] = "RESUME_MISMATCH"
    place: str
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [
            f"{word}: {', '.join(keys)}"
            for word, keys in (
                ("missing", self.missing),
                ("unexpected", self.unexpected),
                ("changed", self.changed),
            )
            if keys
        ]
        return (
            f"{self.place} restored something else than the controller ({'; '.join(parts)}). All parts of a run resume from one "
            "checkpoint: nothing was trained, restart every process from the same one."
        )


# --- requests ---


@dataclass(kw_only=True, eq=False)
class MalformedError(ControlError):
    """The message cannot mean anything."""

    reason: ClassVar[str] = "MALFORMED"
    what: str

    def __str__(self) -> str:
        return f"malformed request: {self.what}. Nothing was changed; this is a client bug."


@dataclass(kw_only=True, eq=False)
class UnknownWorkError(ControlError):
    """The message names work that was never given."""

    reason: ClassVar[str] = "UNKNOWN_WORK"
    what: str

    def __str__(self) -> str:
        return f"{self.what} was never given in this execution. Nothing was changed; this is a client bug."


@dataclass(kw_only=True, eq=False)
class NotAllowedError(ControlError):
    """The call does not fit the worker's role or the command's state."""

    reason: ClassVar[str] = "NOT_ALLOWED"
    what: str

    def __str__(self) -> str:
        return f"not allowed: {self.what}."


# --- come back later ---


@dataclass(kw_only=True, eq=False)
class RetryLaterError(ControlError):
    """Base of the errors that a client answers by waiting and asking again."""


@dataclass(kw_only=True, eq=False)
class RestoringError(RetryLaterError):
    """The controller is still finding and loading its checkpoint."""

    reason: ClassVar[str] = "RESTORING"


@dataclass(kw_only=True, eq=False)
class AwaitingAgreementError(RetryLaterError):
    """Not every trainer rank has confirmed what it restored."""

    reason: ClassVar[str] = "AWAITING_AGREEMENT"
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"waiting for {', '.join(self.missing) or 'trainer ranks'} to confirm what they restored."


@dataclass(kw_only=True, eq=False)
class LimitError(RetryLaterError):
    """Base of the limits that time or acknowledgement relieves."""

    limit: int
    found: int


@dataclass(kw_only=True, eq=False)
class WindowFullError(LimitError):
    """Too much is unacknowledged or unsettled."""

    reason: ClassVar[str] = "WINDOW_FULL"
    what: str

    def __str__(self) -> str:
        return f"{self.what}: {self.found} would exceed the limit of {self.limit}. Wait for earlier work to settle, then send again."


@dataclass(kw_only=True, eq=False)
class WorkerLimitError(LimitError):
    """The controller remembers as many worker processes as it may."""

    reason: ClassVar[str] = "WORKER_LIMIT"

    def __str__(self) -> str:
        return f"{self.found} worker processes would exceed the limit of {self.limit} (workers.max)."


@dataclass(kw_only=True, eq=False)
class MessageTooLargeError(ControlError):
    """A message is larger than the controller takes. It does not shrink by waiting."""

    reason: ClassVar[str] = "MESSAGE_TOO_LARGE"
    limit: int
    found: int
    unit: str = "bytes"
    """Or completions."""

    def __str__(self) -> str:
        key = "server.max_message_bytes" if self.unit == "bytes" else "workers.max_batch_completions"
        return f"a message of {self.found} {self.unit} exceeds the limit of {self.limit}. Split it, or raise {key}."


# --- checkpoints ---


@dataclass(kw_only=True, eq=False)
class CheckpointError(ControlError):
    """Base of everything that can be wrong with a checkpoint."""

    path: str


@dataclass(kw_only=True, eq=False)
class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint, or no run, of that name."""

    reason: ClassVar[str] = "CHECKPOINT_NOT_FOUND"
    what: str = "checkpoint"
    """Or run."""

    def __str__(self) -> str:
        otherwise = ", or resume automatically" if self.what == "checkpoint" else ""
        return f"{self.path}: no such {self.what}. Name an existing one{otherwise}."


@dataclass(kw_only=True, eq=False)
class CheckpointUncommittedError(CheckpointError):
    """The save was never committed."""

    reason: ClassVar[str] = "CHECKPOINT_UNCOMMITTED"

    def __str__(self) -> str:
        return f"{self.path}: has no manifest, so the save was never committed. Choose a committed checkpoint."


@dataclass(kw_only=True, eq=False)
class CheckpointSweptError(CheckpointUncommittedError):
    """The save was never committed, and its leftovers were swept."""

    reason: ClassVar[str] = "CHECKPOINT_SWEPT"
    execution: int

    def __str__(self) -> str:
        return (
            f"{self.path}: was never committed and was swept by execution {self.execution}; nothing can be published there any more. "
            "Choose a committed checkpoint."
        )


@dataclass(kw_only=True, eq=False)
class CheckpointDeletingError(CheckpointError):
    """Retention has begun to delete it."""

    reason: ClassVar[str] = "CHECKPOINT_DELETING"
    intent: str

    def __str__(self) -> str:
        return (
            f"{self.path}: is being deleted ({self.intent} says so), and at any moment it may be gone. Choose another one; or, once no "
            f"earlier controller and no gc of this run is alive, remove {self.intent} and start again."
        )


@dataclass(kw_only=True, eq=False)
class CheckpointDamagedError(CheckpointError):
    """Something committed is not what it was."""

    reason: ClassVar[str] = "CHECKPOINT_DAMAGED"
    artifact: str
    what: str
    expected: str
    found: str

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.artifact} is damaged: {self.what} expected {self.expected}, found {self.found}. Restore it from a copy, "
            'or resume from the previous checkpoint (checkpoints.on_corrupt = "previous").'
        )


@dataclass(kw_only=True, eq=False)
class ArtifactMissingError(CheckpointError):
    """A named artifact is not there."""

    reason: ClassVar[str] = "ARTIFACT_MISSING"
    artifacts: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path}: missing {', '.join(self.artifacts)}. The set of artifacts is closed; nothing was loaded."


@dataclass(kw_only=True, eq=False)
class ArtifactUnexpectedError(CheckpointError):
    """There is an artifact that nobody named."""

    reason: ClassVar[str] = "ARTIFACT_UNEXPECTED"
    artifacts: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path}: unexpected {', '.join(self.artifacts)}. The set of artifacts is closed; remove it or name it."


@dataclass(kw_only=True, eq=False)
class ArtifactForeignError(CheckpointError):
    """An artifact was written by another execution, for another step, or by another rank."""

    reason: ClassVar[str] = "ARTIFACT_FOREIGN"
    artifact: str
    what: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.path}: {self.artifact} belongs elsewhere: {self.what} expected {self.expected}, found {self.found}. Shards of two attempts do not mix."


@dataclass(kw_only=True, eq=False)
class UnsafeNameError(CheckpointError):
    """A name that is not a safe relative path."""

    reason: ClassVar[str] = "UNSAFE_NAME"
    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.path}: {self.name!r} is not a safe artifact name: {self.why}."


@dataclass(kw_only=True, eq=False)
class CheckpointIncompatibleError(CheckpointError):
    """The checkpoint belongs to another dataset, topology or setting."""

    reason: ClassVar[str] = "CHECKPOINT_INCOMPATIBLE"
    keys: tuple[str, ...]
    """Paths in the compatibility record, sorted."""
    differences: tuple[str, ...]
    """Each with the values on both sides, in words."""

    def __str__(self) -> str:
        advice = "Use the settings it was saved with, or another run directory."
        if any(key.split(".")[0] == "topology" for key in self.keys):
            advice += (
                " With checkpoints.reshard = true a trainer group may have another world size, mesh or sharding, if its state is saved by "
                "torch.distributed.checkpoint."
            )
        return f"{self.path}: not compatible with this run. {'; '.join(self.differences)}. {advice}"


@dataclass(kw_only=True, eq=False)
class UnknownSchemaError(CheckpointError):
    """A schema version that this version does not know."""

    reason: ClassVar[str] = "UNKNOWN_SCHEMA"
    found: str

    def __str__(self) -> str:
        return f"{self.path}: schema version {self.found} is not known here. Upgrade cosmos-ctrl, or resume from a checkpoint it wrote."


@dataclass(kw_only=True, eq=False)
class CheckpointConflictError(CheckpointError):
    """Something else is committed under that name."""

    reason: ClassVar[str] = "CHECKPOINT_CONFLICT"
    what: str

    def __str__(self) -> str:
        return f"{self.path}: already exists with other content ({self.what}). Nothing was replaced."


@dataclass(kw_only=True, eq=False)
class StorageUnavailableError(CheckpointError):
    """Storage could not be read or written: neither absent nor damaged, but unknown."""

    reason: ClassVar[str] = "STORAGE_UNAVAILABLE"
    operation: str
    cause: str

    def __str__(self) -> str:
        return f"{self.path}: {self.operation} failed: {self.cause}. Nothing is known about what is there; mend the storage and start again."


# --- ends ---


@dataclass(kw_only=True, eq=False)
class ExecutionEndedError(ControlError):
    """The execution is over."""

    reason: ClassVar[str] = "EXECUTION_ENDED"
    end_reason: str
    message: str

    def __str__(self) -> str:
        return f"the execution has ended ({self.end_reason}): {self.message}"


@dataclass(kw_only=True, eq=False)
class InternalError(ControlError):
    """The controller failed in a way it does not know."""

    reason: ClassVar[str] = "INTERNAL"
    incident: str

    def __str__(self) -> str:
        return f"internal error, incident {self.incident}; the controller's log has the trace under that number."


def _leaves(cls: type[ControlError]) -> list[type[ControlError]]:
    own = [cls] if cls.reason else []
    return own + [leaf for child in cls.__subclasses__() for leaf in _leaves(child)]


#: Every error that may cross the wire, by its reason.
ERRORS_BY_REASON: dict[str, type[ControlError]] = {cls.reason: cls for cls in _leaves(ControlError)}
