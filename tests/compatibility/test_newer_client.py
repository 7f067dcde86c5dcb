"""What a newer client adds to its requests: an unknown field is ignored, an unknown value or kind refuses the whole request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from service_harness import SERVICE, House, Worker, completed, refusal, soon
from versions import ADDED_MEMBER, ADDED_VALUE, Version, enums_of, filled, newer

from cosmos_ctrl.core.errors import ConflictingRetryError, MalformedError
from cosmos_ctrl.service.status import from_rpc_error
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1 import reports_pb2

NEWER = newer()

#: Enums that a request may hold; the others are only answered.
OF_REQUESTS = {"Role", "Outcome", "Disposition", "SamplingOwner"}


class Scene:
    """A run in its second step, with a checkpoint that waits for receipts."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.value = ADDED_VALUE
        """Of the enum that a request gets wrong; zero: nothing is said."""

    async def play(self) -> None:
        house = self.house
        (self.trainer,) = await house.trainers()
        self.rollout = await house.rollout()
        await house.train_one([self.trainer], self.rollout, 1)
        self.save = (await self.trainer.next(2)).save
        self.groups = list((await self.rollout.lease(3)).groups)
        await self.rollout.submit(completed(self.groups[:2], version=1))
        self.train = (await self.trainer.next(3)).train

    def of_another_kind(self, message: Any, oneof: str) -> Any:
        """`message` with the oneof's added member; without any, where nothing is said."""
        message.ClearField(oneof)
        if self.value:
            setattr(message, ADDED_MEMBER[0], b"a kind of its own")
        return message

    def call(self, rpc: str, message: Any) -> Awaitable[Any]:
        """The RPC with a message of the newer version."""
        method = self.house.channel.unary_unary(
            f"/{SERVICE}/{rpc}", lambda one: one.SerializeToString(), NEWER.response_type(rpc).FromString
        )
        return soon(method(message))


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    house = House(tmp_path / "run", ranks=1, save_every_steps=1)
    await house.open()
    scene = Scene(house)
    await scene.play()
    yield scene
    await house.close()


def as_newer(message: Any, version: Version = NEWER) -> Any:
    """The same message, of the newer version."""
    return version.type(message.DESCRIPTOR.name).FromString(message.SerializeToString())


def batch_of(worker: Worker, batch: reports_pb2.ReportBatch) -> Any:
    """The worker's next batch, of the newer version."""
    batch.number = worker.batches + 1
    return as_newer(worker.request(batch))


def unknown_role(scene: Scene) -> Any:
    worker = Worker(scene.house, pb.ROLE_ROLLOUT, replica=5)
    request = NEWER.request("RegisterWorker", group="pool", world_size=1, incarnation=worker.incarnation)
    request.role = scene.value
    return request


def unknown_outcome(scene: Scene) -> Any:
    message = batch_of(scene.rollout, completed(scene.groups[2:], version=1))
    # The first block would be applied if it were alone.
    rows = message.batch.rollouts.add(groups=[scene.groups[2].group], leases=[scene.groups[2].lease], masks=[1])
    rows.outcome = scene.value
    return message


def unknown_disposition(scene: Scene) -> Any:
    report = scene.trainer.completion(3, scene.train)
    message = batch_of(scene.trainer, reports_pb2.ReportBatch(completions=[report]))
    message.batch.completions[0].rows[0].disposition = scene.value
    return message


def unknown_restored(scene: Scene) -> Any:
    message = as_newer(scene.trainer.confirmation())
    return scene.of_another_kind(message, "restored")


def unknown_owner(scene: Scene) -> Any:
    metadata = {"schema_version": 1, "checkpoint_path": "checkpoints/1", "checkpoint_id": "1", "epoch": 1}
    message = as_newer(scene.trainer.confirmation())
    message.metadata.MergeFrom(NEWER.new("ResumeMetadata", sampler_state={"codec": "json", "data": b"1"}, **metadata))
    message.metadata.sampling_owner = scene.value
    return message


def unknown_result_of_a_save(scene: Scene) -> Any:
    message = as_newer(scene.trainer.shards(2, scene.save))
    return scene.of_another_kind(message, "outcome")


UNKNOWN: dict[str, tuple[str, Callable[[Scene], Any]]] = {
    "Role": ("RegisterWorker", unknown_role),
    "Outcome": ("SubmitReports", unknown_outcome),
    "Disposition": ("SubmitReports", unknown_disposition),
    "SamplingOwner": ("ConfirmResume", unknown_owner),
    "ConfirmResumeRequest.restored": ("ConfirmResume", unknown_restored),
    "ReportShardsRequest.outcome": ("ReportShards", unknown_result_of_a_save),
}


def test_every_enum_and_oneof_of_a_request_is_among_them() -> None:
    reached: set[str] = set()
    seen: set[str] = set()

    def walk(message: Any) -> None:
        if message.full_name in seen:
            return
        seen.add(message.full_name)
        reached.update(f"{message.name}.{oneof.name}" for oneof in message.oneofs if not oneof.name.startswith("_"))
        for field in message.fields:
            if field.enum_type is not None:
                reached.add(field.enum_type.name)
            if field.message_type is not None:
                walk(field.message_type)

    for rpc in NEWER.rpcs.values():
        walk(rpc.input_type)
    assert reached == UNKNOWN.keys()
    assert UNKNOWN.keys() & {enum.name for enum in enums_of(NEWER)} == OF_REQUESTS


@pytest.mark.parametrize("value", [ADDED_VALUE, 0], ids=["unknown", "unspecified"])
@pytest.mark.parametrize("what", UNKNOWN)
async def test_an_unknown_value_or_kind_or_none_refuses_the_whole_request(scene: Scene, what: str, value: int) -> None:
    rpc, make = UNKNOWN[what]
    scene.value = value
    message = make(scene)
    before = scene.house.snapshot()
    error = await refusal(scene.call(rpc, message))
    assert isinstance(error, MalformedError), error
    assert scene.house.snapshot() == before


@pytest.mark.parametrize("what", ["Outcome", "Disposition"])
async def test_a_refused_batch_does_not_consume_its_number(scene: Scene, what: str) -> None:
    rpc, make = UNKNOWN[what]
    await refusal(scene.call(rpc, make(scene)))
    if what == "Outcome":
        number = scene.rollout.batches + 1
        ack = await scene.rollout.submit(completed(scene.groups[2:], version=1), number=number)
    else:
        number = scene.trainer.batches + 1
        ack = await scene.trainer.complete(3, scene.train)
    assert ack.applied == number


async def test_unknown_fields_are_part_of_what_a_number_was_sent_with(scene: Scene) -> None:
    plain = batch_of(scene.rollout, completed(scene.groups[2:], version=1))
    sent = filled(as_newer(plain))
    answer = await scene.call("SubmitReports", sent)
    again = await scene.call("SubmitReports", sent)
    assert answer.ack.applied == again.ack.applied == scene.rollout.batches + 1
    assert scene.house.core.rollouts.ready_groups == 1
    # A retry repeats the same bytes: without the field it is another batch.
    assert isinstance(await refusal(scene.call("SubmitReports", plain)), ConflictingRetryError)


async def test_an_rpc_that_only_a_newer_version_has_is_unimplemented_and_no_error_of_ours(scene: Scene) -> None:
    before = scene.house.snapshot()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await soon(scene.house.channel.unary_unary(f"/{SERVICE}/Rebalance")(b""))
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert from_rpc_error(caught.value) is None
    assert scene.house.snapshot() == before
