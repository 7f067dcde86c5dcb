"""The protos keep their own rules, their reference is what they say, and what breaks a released contract does not pass."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor

from cosmos_ctrl.v1 import checkpoint_pb2, controller_service_pb2, reports_pb2

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

import frozen

ROOT = Path(__file__).resolve().parent.parent
FILES: list[FileDescriptor] = [each.DESCRIPTOR for each in (checkpoint_pb2, controller_service_pb2, reports_pb2)]
SERVICE = controller_service_pb2.DESCRIPTOR.services_by_name["ControllerService"]

#: Measured values, where neither exactness nor order matters.
FLOATS = {
    "RolloutRows.rewards",
    "CompletionPayload.reward",
    "RunState.mean_reward",
    "Metric.value",
}


def messages() -> Iterator[Descriptor]:
    for file in FILES:
        yield from file.message_types_by_name.values()


def enums() -> Iterator[EnumDescriptor]:
    for file in FILES:
        yield from file.enum_types_by_name.values()


def test_numbers_from_1000_to_1999_are_kept_free_everywhere() -> None:
    for message in messages():
        proto = descriptor_pb2.DescriptorProto()
        message.CopyToProto(proto)
        assert [(each.start, each.end) for each in proto.reserved_range] == [(1000, 2000)], message.name
    for enum in enums():
        enum_proto = descriptor_pb2.EnumDescriptorProto()
        enum.CopyToProto(enum_proto)
        # An enum's end is inclusive.
        assert [(each.start, each.end) for each in enum_proto.reserved_range] == [(1000, 1999)], enum.name


def test_what_must_be_exact_or_in_order_is_no_float_and_no_map() -> None:
    floats = set()
    for message in messages():
        for field in message.fields:
            assert not (field.message_type and field.message_type.GetOptions().map_entry), field.full_name
            if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
                floats.add(f"{message.name}.{field.name}")
    assert floats == FLOATS


def test_every_response_begins_with_the_header_and_every_fenced_request_with_who_asks() -> None:
    unfenced = {"GetResumeState", "RegisterWorker", "WatchRun", "ListCheckpoints", "ExplainResume", "ListWorkers"}
    for method in SERVICE.methods:
        header = method.output_type.fields_by_number[1]
        assert (header.name, header.message_type.name) == ("header", "ResponseHeader"), method.name
        worker = method.input_type.fields_by_name.get("worker")
        assert (worker is None) == (method.name in unfenced), method.name
        assert worker is None or (worker.number, worker.message_type.name) == (1, "WorkerIdentity")
    assert SERVICE.methods_by_name["RegisterWorker"].input_type.fields_by_number[1].name == "execution_id"


def test_the_reference_is_what_the_comments_say(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "tools" / "reference.py", tmp_path], check=True, timeout=60)
    fresh, kept = ({path.name: path.read_text() for path in at.iterdir()} for at in (tmp_path, ROOT / "docs/reference"))
    assert fresh == kept, "run `make generate`"


# -- what is frozen

#: sha256 of every frozen descriptor; one is added with a release, and none is ever changed.
FROZEN = {
    "0.1.0.binpb": "0f5b0a1733f620e64898e601fe663c211c2b7987145f2843c82df9c1f1e45135",
}


def test_what_is_frozen_stays_as_it_is() -> None:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in frozen.frozen(ROOT)}
    assert found == FROZEN


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The protos, and what is frozen of them."""
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    return tmp_path


def edit(root: Path, file: str, old: str, new: str) -> None:
    path = root / "proto" / "cosmos_ctrl" / "v1" / f"{file}.proto"
    assert path.read_text().count(old) == 1, f"{old!r} is not once in {file}.proto"
    path.write_text(path.read_text().replace(old, new))


BREAKING = {
    "a field is renamed": ("reports", "uint64 applied = 1;", "uint64 acknowledged = 1;"),
    "a field is renumbered": ("reports", "uint64 applied = 1;", "uint64 applied = 7;"),
    "a type is changed": ("reports", "uint64 applied = 1;", "uint32 applied = 1;"),
    "a wire type is changed": ("reports", "fixed64 mask = 7;", "uint64 mask = 7;"),
    "a field is removed": ("reports", "fixed64 mask = 7;", ""),
    "a field is removed, its number and name reserved": (
        "reports",
        "fixed64 mask = 7;",
        'reserved 7;\n  reserved "mask";',
    ),
    "a column becomes a single value": ("reports", "repeated double rewards = 9;", "double rewards = 9;"),
    "presence is lost": ("controller_service", "optional uint32 dp_rank = 3;", "uint32 dp_rank = 3;"),
    "an enum's value is removed": ("reports", "OUTCOME_RETURNED = 4;", ""),
    "an enum's value is renumbered": ("reports", "OUTCOME_RETURNED = 4;", "OUTCOME_RETURNED = 5;"),
    "a oneof's member leaves it": (
        "reports",
        "    LeasesCancelled cancelled = 4;\n  }",
        "  }\n  // Left it.\n  LeasesCancelled cancelled = 4;",
    ),
    "an RPC is removed": (
        "controller_service",
        "  rpc ListWorkers(ListWorkersRequest) returns (ListWorkersResponse);\n",
        "",
    ),
    "an RPC becomes a stream": (
        "controller_service",
        "returns (NextCommandResponse)",
        "returns (stream NextCommandResponse)",
    ),
    "a private number is taken": (
        "reports",
        "message ReportAck {\n  reserved 1000 to 1999;\n",
        "message ReportAck {\n  // Taken.\n  uint64 taken = 1000;\n",
    ),
}

ADDITIVE = {
    "a field": ("reports", "uint64 applied = 1;", "uint64 applied = 1;\n  // New.\n  uint64 pending = 3;"),
    "a value": ("reports", "OUTCOME_RETURNED = 4;", "OUTCOME_RETURNED = 4;\n  // New.\n  OUTCOME_DEFERRED = 5;"),
    "a kind of notice": (
        "reports",
        "LeasesCancelled cancelled = 4;",
        "LeasesCancelled cancelled = 4;\n    // New.\n    PayloadsFreed kept = 5;",
    ),
    "an RPC": (
        "controller_service",
        "(ListWorkersResponse);\n",
        "(ListWorkersResponse);\n  // New.\n  rpc Rest(WatchRunRequest) returns (WatchRunResponse);\n",
    ),
}


@pytest.mark.parametrize("what", BREAKING)
def test_a_change_that_breaks_a_client_does_not_pass(copy: Path, capfd: pytest.CaptureFixture[str], what: str) -> None:
    edit(copy, *BREAKING[what])
    assert frozen.check(copy) != 0, what
    assert ".proto:" in capfd.readouterr().out


@pytest.mark.parametrize("what", ADDITIVE)
def test_what_is_added_passes(copy: Path, what: str) -> None:
    edit(copy, *ADDITIVE[what])
    assert frozen.check(copy) == 0


def test_what_is_frozen_is_not_written_again(copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in frozen.frozen(copy)}
    edit(copy, *ADDITIVE["a field"])
    assert frozen.add("9.1.0", copy) == 0
    added = copy / "proto" / "frozen" / "9.1.0.binpb"
    kept = added.read_bytes()
    assert kept not in before.values()
    assert frozen.add("9.1.0", copy) == 0, "the same again is no conflict"
    edit(copy, *ADDITIVE["a value"])
    assert frozen.add("9.1.0", copy) == 1
    assert "is frozen with other content" in capfd.readouterr().err
    assert {path: path.read_bytes() for path in frozen.frozen(copy)} == {**before, added: kept}
    # Each is held to: a value may not go once it is frozen, though the first release does not have it.
    assert frozen.add("9.2.0", copy) == 0
    edit(copy, "reports", "  // New.\n  OUTCOME_DEFERRED = 5;", "")
    assert frozen.check(copy) != 0


def test_nothing_frozen_is_no_pass(copy: Path) -> None:
    shutil.rmtree(copy / "proto" / "frozen")
    assert frozen.check(copy) == 1
