"""Domain errors as gRPC statuses, and back: the one table.

* Every error of `cosmos_ctrl.core.errors` has exactly one code here; a test proves the table total.
* A status carries one ErrorInfo (our domain, the reason, the error's attributes as strings), so the client raises the same
  error with the same text. RESUME_MISMATCH carries a violation per key too, and retryable errors carry RetryInfo.
* RESOURCE_EXHAUSTED and UNAVAILABLE also come from the library; what has no ErrorInfo of our domain is not one of ours.
* A status travels in HTTP/2 trailers, which the library limits to 8 KiB and answers with RESOURCE_EXHAUSTED beyond: an error
  that is longer (a thousand missing ranks, a path of the operator's) is sent with its attributes cut.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, get_type_hints

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from cosmos_ctrl.core import errors
from cosmos_ctrl.core.errors import ERRORS_BY_REASON, ControlError

DOMAIN = "cosmos_ctrl.v1"

_Code = grpc.StatusCode

CODES: dict[type[ControlError], grpc.StatusCode] = {
    errors.StaleExecutionError: _Code.FAILED_PRECONDITION,
    errors.SupersededError: _Code.FAILED_PRECONDITION,
    errors.WrongStepError: _Code.FAILED_PRECONDITION,
    errors.ResumeMetadataMismatch: _Code.FAILED_PRECONDITION,
    errors.MalformedError: _Code.INVALID_ARGUMENT,
    errors.UnknownWorkError: _Code.OUT_OF_RANGE,
    errors.SequenceGapError: _Code.ABORTED,
    errors.NotRegisteredError: _Code.ABORTED,
    errors.ConflictingRetryError: _Code.ALREADY_EXISTS,
    errors.RestoringError: _Code.UNAVAILABLE,
    errors.AwaitingAgreementError: _Code.UNAVAILABLE,
    errors.WindowFullError: _Code.RESOURCE_EXHAUSTED,
    errors.WorkerLimitError: _Code.RESOURCE_EXHAUSTED,
    errors.MessageTooLargeError: _Code.RESOURCE_EXHAUSTED,
    errors.CheckpointNotFoundError: _Code.NOT_FOUND,
    errors.CheckpointUncommittedError: _Code.NOT_FOUND,
    errors.CheckpointSweptError: _Code.NOT_FOUND,
    errors.CheckpointDeletingError: _Code.FAILED_PRECONDITION,
    errors.CheckpointDamagedError: _Code.DATA_LOSS,
    errors.ArtifactMissingError: _Code.DATA_LOSS,
    errors.ArtifactUnexpectedError: _Code.DATA_LOSS,
    errors.ArtifactForeignError: _Code.FAILED_PRECONDITION,
    errors.UnsafeNameError: _Code.INVALID_ARGUMENT,
    errors.CheckpointIncompatibleError: _Code.FAILED_PRECONDITION,
    errors.UnknownSchemaError: _Code.FAILED_PRECONDITION,
    errors.CheckpointConflictError: _Code.ALREADY_EXISTS,
    errors.StorageUnavailableError: _Code.UNAVAILABLE,
    errors.ExecutionEndedError: _Code.FAILED_PRECONDITION,
    errors.NotAllowedError: _Code.FAILED_PRECONDITION,
    errors.InternalError: _Code.INTERNAL,
}

#: How long a client waits at least before it asks again, in seconds.
RETRY_DELAY_S = 0.2

#: Most bytes of an error's attributes. The trailers hold them twice, once escaped to up to three times the size.
_MOST_ATTRIBUTE_BYTES = 1024


def to_status(error: ControlError) -> grpc.Status:
    """The status that carries `error`, for ``context.abort_with_status``."""
    error = _fitting(error)
    info = error_details_pb2.ErrorInfo(
        reason=error.reason,
        domain=DOMAIN,
        metadata={name: _to_text(value) for name, value in error.attributes().items()},
    )
    details = [_packed(info)]
    if isinstance(error, errors.RetryLaterError):
        delay = duration_pb2.Duration(nanos=int(RETRY_DELAY_S * 1e9))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    if isinstance(error, errors.ResumeMetadataMismatch):
        violations = [
            error_details_pb2.PreconditionFailure.Violation(type=kind.upper(), subject=key)
            for kind in ("missing", "unexpected", "changed")
            for key in getattr(error, kind)
        ]
        details.append(_packed(error_details_pb2.PreconditionFailure(violations=violations)))
    code = CODES[type(error)]
    status: grpc.Status = rpc_status.to_status(
        status_pb2.Status(code=code.value[0], message=_encodable(str(error)), details=details)
    )
    return status


def from_rpc_error(error: grpc.RpcError) -> ControlError | None:
    """The domain error that a failed call carries; None when the status is the library's own."""
    info = _info_of(_status_of(error))
    return None if info is None else _from_info(info)


def asks_to_retry(error: grpc.RpcError) -> bool:
    """Whether the failed call carries an error of ours, known here or not, that passes by waiting."""
    status = _status_of(error)
    return _info_of(status) is not None and any(
        packed.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for packed in status.details
    )


def _status_of(error: grpc.RpcError) -> status_pb2.Status:
    try:
        return rpc_status.from_call(error) or status_pb2.Status()
    except ValueError:  # code or message of the trailer and the call differ: not written by us
        return status_pb2.Status()


def _info_of(status: status_pb2.Status) -> error_details_pb2.ErrorInfo | None:
    for packed in status.details:
        info = error_details_pb2.ErrorInfo()
        if packed.Unpack(info) and info.domain == DOMAIN:
            return info
    return None


def _from_info(info: error_details_pb2.ErrorInfo) -> ControlError | None:
    # A newer controller may know reasons and attributes that this client does not: it then has the bare status.
    cls = ERRORS_BY_REASON.get(info.reason)
    if cls is None:
        return None
    types = get_type_hints(cls)
    known = {f.name: types[f.name] for f in fields(cls)}
    if not known.keys() <= info.metadata.keys():
        return None
    try:
        return cls(**{name: _from_text(info.metadata[name], kind) for name, kind in known.items()})
    except ValueError:
        return None


def _fitting(error: ControlError) -> ControlError:
    attributes, limit = error.attributes(), _MOST_ATTRIBUTE_BYTES
    while sum(len(_to_text(value).encode()) for value in attributes.values()) > _MOST_ATTRIBUTE_BYTES:
        attributes = {name: _cut(value, limit) for name, value in error.attributes().items()}
        limit //= 2
    return type(error)(**attributes)


def _cut(value: Any, limit: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= limit else f"{value[:limit]}…"
    if not isinstance(value, tuple):
        return value
    kept: list[str] = []
    for item in value:
        if sum(map(len, kept)) + len(item) > limit:
            return (*kept, f"… and {len(value) - len(kept)} more")
        kept.append(item)
    return value


def _to_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, tuple) else _encodable(str(value))


def _encodable(text: str) -> str:
    # A file's name may hold what UTF-8 does not.
    return text.encode(errors="replace").decode()


def _from_text(text: str, kind: Any) -> Any:
    if kind is int:
        return int(text)
    return text if kind is str else tuple(json.loads(text))


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
