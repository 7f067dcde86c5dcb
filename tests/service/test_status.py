"""The error table is total, both ways: every domain error has a code and a reason, crosses the wire, and comes back equal."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from service_harness import soon

from cosmos_ctrl.core import errors
from cosmos_ctrl.core.errors import ERRORS_BY_REASON, ControlError
from cosmos_ctrl.service.status import CODES, DOMAIN, from_rpc_error, to_status
from cosmos_ctrl.v1 import controller_service_pb2 as pb

_Code = grpc.StatusCode

#: The design's table, by hand.
EXPECTED_CODES = {
    "STALE_EXECUTION": _Code.FAILED_PRECONDITION,
    "SUPERSEDED": _Code.FAILED_PRECONDITION,
    "WRONG_STEP": _Code.FAILED_PRECONDITION,
    "RESUME_MISMATCH": _Code.FAILED_PRECONDITION,
    "MALFORMED": _Code.INVALID_ARGUMENT,
    "UNKNOWN_WORK": _Code.OUT_OF_RANGE,
    "SEQUENCE_GAP": _Code.ABORTED,
    "NOT_REGISTERED": _Code.ABORTED,
    "CONFLICTING_RETRY": _Code.ALREADY_EXISTS,
    "RESTORING": _Code.UNAVAILABLE,
    "AWAITING_AGREEMENT": _Code.UNAVAILABLE,
    "WINDOW_FULL": _Code.RESOURCE_EXHAUSTED,
    "WORKER_LIMIT": _Code.RESOURCE_EXHAUSTED,
    "MESSAGE_TOO_LARGE": _Code.RESOURCE_EXHAUSTED,
    "CHECKPOINT_NOT_FOUND": _Code.NOT_FOUND,
    "CHECKPOINT_UNCOMMITTED": _Code.NOT_FOUND,
    "CHECKPOINT_SWEPT": _Code.NOT_FOUND,
    "CHECKPOINT_DELETING": _Code.FAILED_PRECONDITION,
    "CHECKPOINT_DAMAGED": _Code.DATA_LOSS,
    "ARTIFACT_MISSING": _Code.DATA_LOSS,
    "ARTIFACT_UNEXPECTED": _Code.DATA_LOSS,
    "ARTIFACT_FOREIGN": _Code.FAILED_PRECONDITION,
    "UNSAFE_NAME": _Code.INVALID_ARGUMENT,
    "CHECKPOINT_INCOMPATIBLE": _Code.FAILED_PRECONDITION,
    "UNKNOWN_SCHEMA": _Code.FAILED_PRECONDITION,
    "CHECKPOINT_CONFLICT": _Code.ALREADY_EXISTS,
    "STORAGE_UNAVAILABLE": _Code.UNAVAILABLE,
    "EXECUTION_ENDED": _Code.FAILED_PRECONDITION,
    "NOT_ALLOWED": _Code.FAILED_PRECONDITION,
    "INTERNAL": _Code.INTERNAL,
}
RETRYABLE = {"RESTORING", "AWAITING_AGREEMENT", "WINDOW_FULL", "WORKER_LIMIT"}

LEAVES = sorted(ERRORS_BY_REASON.values(), key=lambda cls: cls.reason)


def sample(cls: type[ControlError]) -> ControlError:
    """An error of the class with a value of its own in every attribute."""
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for number, field in enumerate(dataclasses.fields(cls), start=1):
        kind = hints[field.name]
        if kind is int:
            values[field.name] = number * 1_000_003
        elif kind is str:
            values[field.name] = f'{field.name} "ä…/{number}"\n'
        else:
            values[field.name] = (f"{field.name}-1", "with, comma", 'quote"')
    return cls(**values)


class Call(grpc.RpcError):
    """A failed call as the library hands it out."""

    def __init__(self, status: grpc.Status) -> None:
        self._status = status

    def code(self) -> grpc.StatusCode:
        return self._status.code

    def details(self) -> str:
        return self._status.details

    def trailing_metadata(self) -> Sequence[tuple[str, Any]] | None:
        return self._status.trailing_metadata


def details(error: ControlError) -> list[any_pb2.Any]:
    status = status_pb2.Status()
    status.ParseFromString(dict(to_status(error).trailing_metadata)["grpc-status-details-bin"])
    assert status.message == str(error)
    return list(status.details)


def unpacked(packed: list[any_pb2.Any], cls: Any) -> list[Any]:
    found = []
    for item in packed:
        message = cls()
        if item.Unpack(message):
            found.append(message)
    return found


def test_the_table_holds_every_error_that_has_a_reason_and_no_other():
    assert set(CODES) == set(LEAVES)
    assert {cls.reason: code for cls, code in CODES.items()} == EXPECTED_CODES


def test_no_two_errors_share_a_reason():
    def leaves(cls: type[ControlError]) -> list[type[ControlError]]:
        return [cls] * bool(cls.reason) + [leaf for child in cls.__subclasses__() for leaf in leaves(child)]

    found = leaves(ControlError)
    assert len(found) == len({cls.reason for cls in found}) == len(set(found))


def test_the_reasons_are_the_enum_of_the_proto():
    names = {name.removeprefix("ERROR_REASON_") for name in pb.ErrorReason.keys()}  # noqa: SIM118 - no mapping
    assert names - {"UNSPECIFIED"} == set(ERRORS_BY_REASON)


@pytest.mark.parametrize("cls", LEAVES, ids=lambda cls: cls.reason)
def test_an_error_crosses_and_comes_back_equal(cls):
    error = sample(cls)
    back = from_rpc_error(Call(to_status(error)))
    assert type(back) is cls
    assert back.attributes() == error.attributes()
    assert str(back) == str(error)


@pytest.mark.parametrize("cls", LEAVES, ids=lambda cls: cls.reason)
def test_a_status_has_one_error_info_of_our_domain(cls):
    (info,) = unpacked(details(sample(cls)), error_details_pb2.ErrorInfo)
    assert (info.domain, info.reason) == (DOMAIN, cls.reason) == ("cosmos_ctrl.v1", cls.reason)
    assert info.metadata.keys() == {field.name for field in dataclasses.fields(cls)}


@pytest.mark.parametrize("cls", LEAVES, ids=lambda cls: cls.reason)
def test_what_is_retried_says_when(cls):
    found = unpacked(details(sample(cls)), error_details_pb2.RetryInfo)
    assert bool(found) == (cls.reason in RETRYABLE)
    assert all(info.retry_delay.ToMilliseconds() > 0 for info in found)


def test_a_mismatch_has_a_violation_per_key():
    error = errors.ResumeMetadataMismatch(
        place="trainer policy/1", missing=("a", "b"), unexpected=("c",), changed=("epoch", "d")
    )
    (failure,) = unpacked(details(error), error_details_pb2.PreconditionFailure)
    assert [(violation.type, violation.subject) for violation in failure.violations] == [
        ("MISSING", "a"),
        ("MISSING", "b"),
        ("UNEXPECTED", "c"),
        ("CHANGED", "epoch"),
        ("CHANGED", "d"),
    ]


def status_with(info: error_details_pb2.ErrorInfo | None) -> grpc.Status:
    from grpc_status import rpc_status

    message = status_pb2.Status(code=_Code.FAILED_PRECONDITION.value[0], message="text")
    if info is not None:
        message.details.add().Pack(info)
    return rpc_status.to_status(message)


STALE = {"stated": "a", "current": "b"}


@pytest.mark.parametrize(
    "info",
    [
        pytest.param(None, id="no details"),
        pytest.param(
            error_details_pb2.ErrorInfo(domain="other.example", reason="STALE_EXECUTION", metadata=STALE),
            id="other domain",
        ),
        pytest.param(error_details_pb2.ErrorInfo(domain=DOMAIN, reason="FROM_THE_FUTURE"), id="unknown reason"),
        pytest.param(error_details_pb2.ErrorInfo(domain=DOMAIN, reason="", metadata=STALE), id="no reason"),
        pytest.param(
            error_details_pb2.ErrorInfo(domain=DOMAIN, reason="STALE_EXECUTION", metadata={"stated": "a"}),
            id="missing attribute",
        ),
        pytest.param(
            error_details_pb2.ErrorInfo(
                domain=DOMAIN, reason="SEQUENCE_GAP", metadata={"what": "batch", "expected": "soon", "found": "2"}
            ),
            id="attribute of another type",
        ),
        pytest.param(
            error_details_pb2.ErrorInfo(domain=DOMAIN, reason="AWAITING_AGREEMENT", metadata={"missing": "policy/1"}),
            id="list of another form",
        ),
    ],
)
def test_what_this_version_cannot_read_is_the_bare_status(info):
    assert from_rpc_error(Call(status_with(info))) is None


def test_attributes_of_a_newer_version_are_passed_over():
    info = error_details_pb2.ErrorInfo(domain=DOMAIN, reason="STALE_EXECUTION", metadata=STALE | {"new": "x"})
    assert from_rpc_error(Call(status_with(info))).attributes() == STALE


def test_a_status_of_the_library_is_none_of_ours():
    class Bare(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return _Code.RESOURCE_EXHAUSTED

        def details(self) -> str:
            return "Received message larger than max"

        def trailing_metadata(self) -> None:
            return None

    assert from_rpc_error(Bare()) is None


async def test_an_unreachable_controller_is_none_of_ours():
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        call = channel.unary_unary("/x/y")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await soon(call(b"", timeout=5))
    assert from_rpc_error(caught.value) is None


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(
            errors.AwaitingAgreementError(missing=tuple(f"trainer policy/{rank}" for rank in range(4096))),
            id="four thousand missing ranks",
        ),
        pytest.param(
            errors.ArtifactMissingError(
                path="checkpoints/x",
                artifacts=tuple(f"layers/{number:05d}/shard.safetensors" for number in range(2000)),
            ),
            id="two thousand missing artifacts",
        ),
        pytest.param(errors.StaleExecutionError(stated="x" * 100_000, current="b" * 32), id="a very long ID"),
        pytest.param(errors.MalformedError(what="ü" * 20_000), id="a very long sentence"),
    ],
)
async def test_a_long_error_still_reaches_the_client_as_itself(error):
    """Trailers are limited to some KiB; beyond them the library answers RESOURCE_EXHAUSTED, which a client takes as final."""

    async def refuse(_request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await context.abort_with_status(to_status(error))
        raise AssertionError

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(refuse)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Refuse": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await soon(channel.unary_unary("/test/Refuse")(b""))
    finally:
        await server.stop(None)
    back = from_rpc_error(caught.value)
    assert type(back) is type(error), caught.value
    assert str(back)[:40] == str(error)[:40]
