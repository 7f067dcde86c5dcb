"""Clients that do not behave: they read nothing, send too much, speak something else, or come from the future."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from controller_process import DEADLINE_S, refused
from fault_scene import Reporter, Scene, completed, scene

from cosmos_ctrl.core.errors import ConflictingRetryError, MalformedError, MessageTooLargeError
from cosmos_ctrl.service.status import from_rpc_error
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1 import reports_pb2
from cosmos_ctrl.v1.controller_service_pb2_grpc import ControllerServiceStub
from cosmos_worker.rollout import SyncRollout
from cosmos_worker.settings import ClientConfig

MIB = 1 << 20


@pytest.fixture
def house(tmp_path: Path) -> Iterator[Scene]:
    with scene(tmp_path, 160) as opened:
        yield opened


def finish(house: Scene, *reporters: Reporter) -> None:
    """The run goes on to its end as if nothing had been."""
    for reporter in reporters:
        reporter.end()
    house.generate_and_train(16)
    house.check_audit()


def go_on(reporter: Reporter, rounds: int = 1) -> None:
    """Another worker leases and reports."""
    for _ in range(rounds):
        reporter.report(reporter.lease(1))


# -- reads nothing


def test_a_client_that_never_reads_its_stream_is_held_up_and_nobody_else_is(house: Scene) -> None:
    deaf, other = Reporter(house), Reporter(house, replica=1)
    groups = deaf.lease(16)
    deaf.report(groups)
    # Refused by row, and never confirmed: from now on each ack is 25 KiB.
    refusals = 0
    while refusals < 2000:
        ack = deaf.submit(rollouts=[completed(groups)])
        refusals += len(groups)
        house.model.lease_lost += len(groups)
    assert len(ack.notices) == 1024  # an ack tells no more at a time
    unread = ack.ByteSize()
    assert unread > 20_000
    before = house.rss_mib()
    most, sent = 300 * MIB // unread, 0
    # A batch that was applied and confirmed, again and again: large enough that what is on its way is not all of them.
    metrics = [reports_pb2.Metric(name=f"{number:0120d}") for number in range(130)]
    batch = reports_pb2.ReportBatch(number=1, metrics=metrics)
    request = pb.StreamReportsRequest(worker=deaf.identity, acked_through=deaf.batches, batch=batch)

    def repeats() -> Iterator[pb.StreamReportsRequest]:
        nonlocal sent
        while sent < most:
            sent += 1
            yield request

    call = house.controller.stub.StreamReports(repeats())
    seen = -1
    for _ in range(20):
        # It is given its time, which is what others do meanwhile, until it gets no further.
        go_on(other)
        for _ in range(20):
            other.submit()
        if seen == sent:
            break
        seen = sent
    assert sent < most, "all was taken, and nothing read"
    assert house.rss_mib() - before < 64, "what nobody reads is kept"
    call.cancel()
    assert deaf.submit().applied == deaf.batches
    house.model.check(house.controller)
    finish(house, other, deaf)


# -- sends too much


def test_a_hundred_mebibytes_in_one_message_are_refused_unread(house: Scene) -> None:
    reporter, other = Reporter(house), Reporter(house, replica=1)
    groups = reporter.lease(1)
    payload = bytes(50 * MIB)
    request = pb.SubmitReportsRequest(worker=reporter.identity, batch={"number": 1})
    request.batch.rollouts.add().CopyFrom(completed(groups, payloads=[payload, payload], payload_codec="bytes"))
    before = house.rss_mib()
    with grpc.insecure_channel(house.controller.address, options=[("grpc.max_send_message_length", -1)]) as channel:
        stub = ControllerServiceStub(channel)
        stream = pb.StreamReportsRequest(worker=request.worker, batch=request.batch)
        for call in (
            lambda: stub.SubmitReports(request, timeout=DEADLINE_S),
            lambda: next(stub.StreamReports(iter([stream]), timeout=DEADLINE_S)),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            # The library's own: no ErrorInfo, so a client does not try again.
            assert from_rpc_error(caught.value) is None
            house.model.check(house.controller)
            go_on(other)
    assert house.rss_mib() - before < 80
    reporter.report(groups, payloads=[b"small"] * 2, payload_codec="bytes")
    house.model.check(house.controller)
    finish(house, reporter, other)


def test_the_worker_says_by_type_what_is_too_large_and_goes_on(house: Scene) -> None:
    environ = house.environ()
    config = ClientConfig(lease_wait_s=0.05)
    with SyncRollout.from_env(environ=environ, config=config) as rollout:
        group = next(rollout.groups(in_flight=1))
        house.model.leased([group.group_id])
        for too_large in (100 * MIB, 63 * MIB, 33 * MIB):
            with pytest.raises(MessageTooLargeError):
                rollout.report(group, 0, bytes(too_large), reward=1.0)
        for index in group.pending:
            rollout.report(group, index, bytes(20 * MIB), reward=1.0)
        rollout.flush()
        house.model.reported([group.group_id])
        assert rollout.statistics().reports.bytes == 0
    reporter = Reporter(house, replica=1)
    reporter.report(reporter.lease(1))
    finish(house, reporter)


# -- speaks something else

_noise = random.Random(7).randbytes
_HELLO = bytes.fromhex("1603010200010001fc0303") + _noise(64)
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

NONSENSE: dict[str, bytes] = {
    "HTTP/1": b"POST /cosmos_ctrl.v1.ControllerService/SubmitReports HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nsomething",
    "a TLS hello": _HELLO,
    "zeros": bytes(1 << 16),
    "noise": _noise(1 << 16),
    "half a preface": _PREFACE[:11],
    "a preface and noise": _PREFACE + _noise(4096),
    "a frame of 16 MiB": _PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01",
    "headers that are none": _PREFACE
    + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    + b"\x00\x00\x04\x01\x05\x00\x00\x00\x01"
    + b"\xff" * 4,
    "data of no stream": _PREFACE
    + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    + b"\x00\x00\x04\x00\x01\x00\x00\x00\x07aaaa",
}


def test_whatever_comes_to_the_port_changes_nothing(house: Scene) -> None:
    reporter = Reporter(house)
    reporter.report(reporter.lease(2))
    groups = reporter.lease(2)
    host, _, port = house.controller.address.rpartition(":")
    left_open = []
    for data in NONSENSE.values():
        for leave in (True, False):
            connection = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
            try:
                connection.sendall(data)
                if leave:
                    left_open.append(connection)
                    continue
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass
            except OSError:
                pass  # it was cut off, before it had said everything perhaps
            connection.close()
        house.model.check(house.controller)
    reporter.report(groups)
    house.model.check(house.controller)
    for connection in left_open:
        connection.close()
    finish(house, reporter)


# -- comes from the future


def with_unknown_fields(message: Any) -> bytes:
    """The message as a newer client may send it: a varint, a message and bytes that nobody here knows."""
    data: bytes = message.SerializeToString()
    return data + b"\xf8\x3f\x01" + b"\xfa\x3f\x02\x08\x01" + b"\x82\x40\x03abc"


def test_unknown_values_from_a_newer_client_are_refused_whole_and_its_number_stays_free(house: Scene) -> None:
    reporter = Reporter(house)
    groups = reporter.lease(2)
    outcome = completed(groups)
    outcome.outcome = 17
    disposition = reports_pb2.CompletionReport(command=1, completed_training_step=1)
    disposition.rows.add(disposition=17, groups=[1], masks=[1])
    for worker, content in (
        (reporter, {"rollouts": [completed(groups[:1]), outcome]}),
        (house.trainer, {"completions": [disposition]}),
    ):
        before = worker.batches
        error = refused(lambda worker=worker, content=content: worker.submit(**content))
        worker.batches = before
        assert isinstance(error, MalformedError)
        house.model.check(house.controller)
    request = pb.RegisterWorkerRequest(
        execution_id=house.controller.execution_id, role=17, group="g", world_size=1, incarnation="f" * 32
    )
    error = refused(lambda: house.controller.stub.RegisterWorker(request, timeout=DEADLINE_S))
    assert isinstance(error, MalformedError)
    reporter.report(groups)
    house.model.check(house.controller)
    finish(house, reporter)


def test_unknown_fields_from_a_newer_client_are_passed_over_and_still_make_the_batch_what_it_is(house: Scene) -> None:
    reporter = Reporter(house)
    groups = reporter.lease(2)
    rows = reports_pb2.RolloutRows.FromString(with_unknown_fields(completed(groups)))
    batch = reports_pb2.ReportBatch.FromString(with_unknown_fields(reports_pb2.ReportBatch(number=1, rollouts=[rows])))
    request = pb.SubmitReportsRequest(worker=reporter.identity, batch=batch)
    call = house.controller.channel.unary_unary(
        f"/{pb.DESCRIPTOR.services_by_name['ControllerService'].full_name}/SubmitReports",
        response_deserializer=pb.SubmitReportsResponse.FromString,
    )
    for _ in range(3):
        ack = call(with_unknown_fields(request), timeout=DEADLINE_S).ack
        assert (ack.applied, list(ack.notices)) == (1, [])
    house.model.reported(group.group for group in groups)
    house.model.check(house.controller)
    request.batch.DiscardUnknownFields()
    error = refused(lambda: house.controller.stub.SubmitReports(request, timeout=DEADLINE_S))
    assert isinstance(error, ConflictingRetryError)
    reporter.batches = 1
    house.model.check(house.controller)
    finish(house, reporter)
