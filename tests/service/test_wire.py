"""Messages put together from parts are what the library makes of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cosmos_ctrl.service import wire
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1 import reports_pb2

SIZES = [0, 1, 127, 128, 300, 16383, 16384, 1 << 21]
payloads = st.lists(st.one_of(st.binary(max_size=40), st.sampled_from(SIZES).map(bytes)), max_size=5)


@given(payloads, st.lists(st.integers(0, 2**64 - 1), max_size=5), st.text(max_size=5), st.integers(0, 2**64 - 1))
def test_parts_are_read_as_the_message_they_stand_for(content, groups, codec, number):
    whole = pb.StreamReportsRequest(acked_through=number)
    rows = whole.batch.rollouts.add(groups=groups, payload_codec=codec, payloads=content)
    whole.batch.number = 7

    head = reports_pb2.RolloutRows(groups=rows.groups, payload_codec=codec).SerializeToString()
    parts = [head]
    for payload in content:
        parts += wire.field(reports_pb2.RolloutRows, "payloads", [payload])
    parts = wire.field(reports_pb2.ReportBatch, "rollouts", parts)
    parts = [reports_pb2.ReportBatch(number=7).SerializeToString(), *parts]
    parts = wire.field(pb.StreamReportsRequest, "batch", parts)
    data = b"".join([pb.StreamReportsRequest(acked_through=number).SerializeToString(), *parts])

    assert pb.StreamReportsRequest.FromString(data) == whole
    assert len(data) == whole.ByteSize()


def test_a_field_of_a_message_may_come_in_pieces():
    one = wire.field(pb.FetchPayloadsResponse, "header", [pb.ResponseHeader(execution_id="e").SerializeToString()])
    two = wire.field(pb.FetchPayloadsResponse, "header", [pb.ResponseHeader(revision=3).SerializeToString()])
    read = pb.FetchPayloadsResponse.FromString(b"".join(one + two))
    assert read.header == pb.ResponseHeader(execution_id="e", revision=3)


def test_a_payload_is_not_copied():
    payload = bytes(1 << 16)
    assert wire.field(reports_pb2.RolloutRows, "payloads", [payload])[-1] is payload
