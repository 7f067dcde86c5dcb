"""Nothing unexpected reaches a client: not the library's text for garbage, not a Python exception's."""

from __future__ import annotations

import logging

import grpc
import grpc.aio
import pytest
from service_harness import DEADLINE_S, SERVICE, completed, refusal, soon, until

from cosmos_ctrl.core.errors import InternalError, MalformedError, RestoringError
from cosmos_ctrl.service.status import from_rpc_error
from cosmos_ctrl.v1 import controller_service_pb2 as pb

METHODS = {method.name: method for method in pb.DESCRIPTOR.services_by_name["ControllerService"].methods}

#: Field 1 is a message in every request that has fields; this says it is longer than what follows.
GARBAGE = [b"\x0a\xff", b"\xff\xff\xff\xff", b"\x0a\x05ab", b"garbage that is no message at all"]


def raw_call(house, method, data: bytes):
    path = f"/{SERVICE}/{method.name}"
    if method.client_streaming:
        return house.channel.stream_stream(path)(iter([data]))
    if method.server_streaming:
        return house.channel.unary_stream(path)(data)
    return house.channel.unary_unary(path)(data)


async def outcome(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await soon(call.read() if hasattr(call, "read") else call)
    return caught.value


def request_of(method):
    return getattr(pb, method.input_type.name)()


async def invoke(house, method, request) -> grpc.aio.AioRpcError:
    """Calls a method of any kind and returns what it is refused with."""
    stub = getattr(house.stub, method.name)
    return await outcome(stub(iter([request])) if method.client_streaming else stub(request))


@pytest.mark.parametrize("data", GARBAGE, ids=repr)
@pytest.mark.parametrize("name", METHODS)
async def test_undecodable_bytes_are_malformed(houses, name, data):
    house = await houses()
    before = house.snapshot()
    error = await outcome(raw_call(house, METHODS[name], data))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
    assert isinstance(from_rpc_error(error), MalformedError)
    assert "Error parsing" not in error.details()
    assert house.snapshot() == before


async def test_garbage_in_the_middle_of_a_stream_ends_it_and_what_was_acknowledged_before_stays(houses):
    house = await houses()
    rollout = await house.rollout()
    call = house.channel.stream_stream(
        f"/{SERVICE}/StreamReports", response_deserializer=pb.StreamReportsResponse.FromString
    )()
    good = pb.StreamReportsRequest(worker=rollout.identity)
    good.batch.number = 1
    await soon(call.write(good.SerializeToString()))
    assert (await soon(call.read())).ack.applied == 1
    await soon(call.write(b"\xff\xff"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await soon(call.read())
    assert isinstance(from_rpc_error(caught.value), MalformedError)
    assert (await rollout.submit()).applied == 1


class Secret(Exception):
    """Its text is nobody's business."""


@pytest.mark.parametrize("name", METHODS)
async def test_an_unexpected_exception_is_an_incident(houses, monkeypatch, caplog, name):
    house = await houses()

    def explode(*_args, **_kwargs):
        raise Secret("password=hunter2")

    for method in ("statistics", "hear", "pass_fence", "register", "request_stop"):
        monkeypatch.setattr(house.core, method, explode)
    monkeypatch.setattr("cosmos_ctrl.service.servicer.list_checkpoints", explode)
    monkeypatch.setattr("cosmos_ctrl.service.servicer.explain", explode)
    monkeypatch.setattr(type(house.core.workers), "__iter__", explode)
    request = request_of(METHODS[name])
    if name == "RegisterWorker":
        request = pb.RegisterWorkerRequest(role=pb.ROLE_ROLLOUT, group="g", world_size=1, incarnation="0" * 32)
    with caplog.at_level(logging.ERROR, logger="cosmos_ctrl"):
        error = await invoke(house, METHODS[name], request)
    assert error.code() is grpc.StatusCode.INTERNAL
    internal = from_rpc_error(error)
    assert isinstance(internal, InternalError)
    assert len(internal.incident) == 8
    everything = f"{error.details()} {error.trailing_metadata()} {error.debug_error_string()}"
    assert "hunter2" not in everything
    assert "Secret" not in everything
    (record,) = [record for record in caplog.records if internal.incident in record.getMessage()]
    assert record.exc_info[0] is Secret
    assert "hunter2" in caplog.text


async def test_two_incidents_have_two_numbers(houses, monkeypatch):
    house = await houses()
    monkeypatch.setattr(house.core, "statistics", lambda: 1 // 0)
    incidents = {(await refusal(house.stub.GetResumeState(pb.GetResumeStateRequest()))).incident for _ in range(3)}
    assert len(incidents) == 3


async def test_a_stream_that_breaks_after_its_first_message_is_an_incident(houses, monkeypatch):
    house = await houses()
    call = house.stub.WatchRun(pb.WatchRunRequest())
    await soon(call.read())
    await house.until_waiting(1)
    monkeypatch.setattr(house.core, "statistics", lambda: 1 // 0)
    house.core.fail("x")
    house.runtime.settle()
    error = await outcome(call)
    assert isinstance(from_rpc_error(error), InternalError)


async def test_a_cancelled_call_ends_its_handler_and_is_no_incident(houses, caplog):
    house = await houses()
    rollout = await house.rollout()
    call = house.stub.LeasePrompts(
        pb.LeasePromptsRequest(worker=rollout.identity, number=1, max_groups=1, wait={"seconds": 50})
    )
    await house.until_waiting(1)
    call.cancel()

    await until(lambda: not house.waiting)
    assert house.core.workers.of(rollout.session).lease_number == 0
    assert not [record for record in caplog.records if "incident" in record.getMessage()]


@pytest.mark.parametrize("name", METHODS)
async def test_everything_answers_restoring_until_the_sampler_is_restored(houses, name):
    house = await houses(attach=False)
    error = await invoke(house, METHODS[name], request_of(METHODS[name]))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert isinstance(from_rpc_error(error), RestoringError)


async def test_an_unknown_method_is_the_librarys_own_answer(houses):
    house = await houses()
    error = await outcome(house.channel.unary_unary(f"/{SERVICE}/Nonsense")(b""))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert from_rpc_error(error) is None


async def test_fields_of_a_newer_client_are_passed_over(houses):
    house = await houses()
    rollout = await house.rollout()
    request = rollout.request(None).SerializeToString() + b"\xf8\x3f\x01"  # field 1023, varint 1
    response = await soon(house.channel.unary_unary(f"/{SERVICE}/SubmitReports")(request, timeout=DEADLINE_S))
    assert pb.SubmitReportsResponse.FromString(response).ack.applied == 0


@pytest.mark.parametrize("token", ["x", "-1", "1.5", "²", "9" * 5000, "1" * 1_000_000], ids=lambda token: token[:10])
@pytest.mark.parametrize("name", ["ListWorkers", "ListCheckpoints", "ExplainResume"])
async def test_a_page_token_that_was_never_given_is_malformed(houses, name, token):
    house = await houses()
    method = METHODS[name]
    request = getattr(pb, method.input_type.name)(page_token=token)
    assert isinstance(await refusal(getattr(house.stub, name)(request)), MalformedError)


async def test_pages_are_whole_and_in_order(houses):
    house = await houses(ranks=1)
    await house.trainers(confirm=False)
    for replica in range(5):
        await house.rollout(replica=replica)
    found, token = [], ""
    while True:
        page = await soon(house.stub.ListWorkers(pb.ListWorkersRequest(page_size=2, page_token=token)))
        found += [(worker.role, worker.replica) for worker in page.workers]
        assert len(page.workers) <= 2
        if not (token := page.next_page_token):
            break
    assert sorted(found) == sorted([(pb.ROLE_ROLLOUT, replica) for replica in range(5)] + [(pb.ROLE_TRAINER, 0)])
    assert [replica for role, replica in found if role == pb.ROLE_ROLLOUT] == list(range(5))


async def test_the_header_of_an_ack_has_the_revision_after_the_batch(houses):
    house = await houses(ranks=1)
    await house.trainers()
    rollout = await house.rollout()
    groups = (await rollout.lease(1)).groups
    request = rollout.request(completed(groups))
    request.batch.number = 1
    response = await soon(house.stub.SubmitReports(request))
    assert response.header.revision == house.core.lifecycle.revision
