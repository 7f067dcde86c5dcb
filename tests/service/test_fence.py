"""G5: a request of another execution changes nothing, is refused before its payload is looked at, and for good.

The matrix: every fenced RPC × every wrong ID × every phase × {adapter, legacy}, with a whole payload and with one that means
nothing. Before and after each refusal everything reachable from the controller is compared, its files and its journal too.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import duration_pb2
from service_harness import House, Worker, completed, disposed, refusal, soon

from cosmos_ctrl.core.errors import ControlError, MalformedError, NotRegisteredError, StaleExecutionError
from cosmos_ctrl.v1 import checkpoint_pb2, reports_pb2
from cosmos_ctrl.v1 import controller_service_pb2 as pb

PHASES = ["before the gate", "running", "draining", "ended", "failed"]
IDS = ["missing", "random", "other run's", "stale", "almost"]

_NEGATIVE = duration_pb2.Duration(seconds=-1)


class Scene:
    """A controller in a phase, with as much state as the phase can have, and who would speak to it."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.trainers: list[Worker] = []
        self.rollout: Worker
        self.groups: list[Any] = []
        self.command = 1
        self.save: pb.SaveCommand | None = None


async def scene_of(houses, phase: str, *, legacy: bool) -> Scene:
    house = await houses(
        legacy=legacy, save_every_steps=2, application_owns_checkpoints=legacy, max_outstanding_groups=8
    )
    scene = Scene(house)
    scene.trainers = await house.trainers(confirm=False)
    scene.rollout = await house.rollout()
    await scene.trainers[0].confirm()
    if phase == "before the gate":
        return scene
    await scene.trainers[1].confirm()
    await scene.trainers[0].announce(0)
    for number in (1, 2):
        await house.train_one(scene.trainers, scene.rollout, number)
    if phase == "ended":
        await end(scene)
        return scene
    # Every queue holds something: a save that waits for receipts, a command that waits for a rank, groups ready, leased and
    # returned, notices that are not confirmed.
    scene.groups = list((await scene.rollout.lease(6)).groups)
    await scene.rollout.submit(completed(scene.groups[:3], version=2, handles=[f"h{n}" for n in range(6)]))
    await scene.rollout.submit(disposed(scene.groups[3:4], reports_pb2.OUTCOME_RETURNED))
    await scene.rollout.submit(completed(scene.groups[3:4], version=2))
    if not legacy:
        scene.save = (await scene.trainers[0].next(3)).save
        assert scene.save.checkpoint_id
    scene.command = house.core.commands.next_number
    train = (await scene.trainers[0].next(scene.command)).train
    assert train.step == 3
    await scene.trainers[1].complete(scene.command, train)
    if phase == "draining":
        await soon(house.stub.RequestStop(pb.RequestStopRequest(worker=scene.trainers[0].identity, reason="enough")))
    if phase == "failed":
        house.core.fail("it broke")
        house.runtime.settle()
    return scene


async def end(scene: Scene) -> None:
    house, leader = scene.house, scene.trainers[0]
    await soon(house.stub.RequestStop(pb.RequestStopRequest(worker=leader.identity, reason="enough")))
    number = 3
    while house.core.lifecycle.phase != "ENDED":
        command = await leader.next(number)
        if command.WhichOneof("command") == "save":
            for trainer in scene.trainers:
                await trainer.saved(number, command.save)
        number += 1
        assert number < 9


def wrong_id(kind: str, house: House) -> str:
    current = house.core.identity.id or "0" * 32
    return {
        "missing": "",
        "random": secrets.token_hex(16),
        "other run's": "run-of-somebody-else",
        "stale": "0" * 31 + "1",
        "almost": current[:-1] + ("0" if current[-1] != "0" else "1"),
    }[kind]


def whole_requests(scene: Scene) -> dict[str, Any]:
    """A request of each fenced RPC that would change something, from a worker with a session."""
    leader, rank, rollout = *scene.trainers, scene.rollout
    group = scene.groups[4] if scene.groups else pb.LeasedGroup(group=1, lease=1, masks=[3])
    batch = completed([group], version=2)
    batch.number = rollout.batches + 1
    if scene.save is not None:
        shards = leader.shards(3, scene.save)
    else:
        shards = pb.ReportShardsRequest(worker=leader.identity, command=3)
        shards.abandoned.reason = "no"
    return {
        "RegisterWorker": pb.RegisterWorkerRequest(
            role=pb.ROLE_ROLLOUT, group="pool", replica=9, world_size=1, incarnation=secrets.token_hex(16)
        ),
        "ConfirmResume": rank.confirmation(),
        "LeasePrompts": pb.LeasePromptsRequest(worker=rollout.identity, number=rollout.requests + 1, max_groups=2),
        "StreamReports": pb.StreamReportsRequest(worker=rollout.identity, batch=batch),
        "SubmitReports": pb.SubmitReportsRequest(worker=rollout.identity, batch=batch),
        "NextCommand": pb.NextCommandRequest(worker=leader.identity, number=scene.command + 1),
        "FetchPayloads": pb.FetchPayloadsRequest(worker=leader.identity, command=scene.command),
        "ReportShards": shards,
        "RequestStop": pb.RequestStopRequest(worker=leader.identity, reason="mine"),
    }


def malformed_requests(scene: Scene) -> dict[str, Any]:
    """The same with a payload that is MALFORMED, or worse, as soon as somebody looks at it."""
    requests = whole_requests(scene)
    requests["RegisterWorker"].role = 99
    confirmation = requests["ConfirmResume"]
    confirmation.metadata.CopyFrom(checkpoint_pb2.ResumeMetadata(schema_version=9, sampling_owner=99))
    confirmation.wait.CopyFrom(_NEGATIVE)
    requests["LeasePrompts"].number = 77
    requests["LeasePrompts"].wait.CopyFrom(_NEGATIVE)
    for name in ("StreamReports", "SubmitReports"):
        batch = requests[name].batch
        batch.number = 0
        batch.rollouts[0].outcome = 99
        batch.rollouts[0].masks.append(0)
        requests[name].acked_through = 10**9
    requests["NextCommand"].number = 10**9
    requests["NextCommand"].wait.CopyFrom(_NEGATIVE)
    requests["FetchPayloads"].command = 10**9
    requests["ReportShards"].receipts.application_note = "no JSON"
    requests["RequestStop"].deadline.CopyFrom(_NEGATIVE)
    return requests


def unregistered_requests(scene: Scene) -> dict[str, Any]:
    """The same from nobody: the session is unknown too, and the ID is what is said."""
    requests = whole_requests(scene)
    for request in requests.values():
        if hasattr(request, "worker"):
            request.worker.session_id = "nobody"
    return requests


FENCED = [
    "RegisterWorker",
    "ConfirmResume",
    "LeasePrompts",
    "StreamReports",
    "SubmitReports",
    "NextCommand",
    "FetchPayloads",
    "ReportShards",
    "RequestStop",
]


def state(request: Any, execution_id: str) -> Any:
    if hasattr(request, "worker"):
        request.worker.execution_id = execution_id
    else:
        request.execution_id = execution_id
    return request


async def call(house: House, name: str, request: Any) -> Any:
    method = getattr(house.stub, name)
    if name == "StreamReports":
        return await soon(method(iter([request])).read())
    if name == "FetchPayloads":
        return [response async for response in method(request, timeout=10)]
    return await soon(method(request))


async def outcome(house: House, name: str, request: Any) -> ControlError | None:
    """What the call is refused with; None when it is not."""
    try:
        await call(house, name, request)
    except grpc.aio.AioRpcError:
        return await refusal(call(house, name, request))
    return None


async def check_refusals(house: House, requests: dict[str, Any], kinds: list[str]) -> int:
    refused = 0
    for name, request in requests.items():
        for kind in kinds:
            if name == "RegisterWorker" and kind == "missing":
                continue  # a fresh process that was given none is told
            stated = wrong_id(kind, house)
            house.clock.now += 0.125
            before = house.snapshot()
            error = await refusal(call(house, name, state(request, stated)))
            where = f"{name} with the {kind} ID"
            assert isinstance(error, StaleExecutionError), f"{where}: {error!r}"
            assert (error.stated, error.current) == (stated, house.core.identity.id), where
            assert house.snapshot() == before, where
            refused += 1
    return refused


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    "payload", [whole_requests, malformed_requests, unregistered_requests], ids=["whole", "malformed", "unregistered"]
)
async def test_another_executions_id_changes_nothing(houses, phase, payload):
    scene = await scene_of(houses, phase, legacy=False)
    house, requests = scene.house, payload(scene)
    assert list(requests) == FENCED
    counted = house.core.fence.refused
    refused = await check_refusals(house, requests, IDS)
    assert house.core.fence.refused - counted == refused == len(FENCED) * len(IDS) - 1
    noted = [event for event in house.journal if event["event"] == "stale_refused"]
    assert len(noted) == house.core.fence.refused


async def test_what_the_matrix_compares_sees_whatever_the_right_id_changes(houses):
    """The other half of the proof: each RPC that changes something changes what is compared, and so does every part of it."""
    scene = await scene_of(houses, "running", legacy=False)
    house, rollout = scene.house, scene.rollout
    unseen = []
    for name, request in whole_requests(scene).items():
        if name == "StreamReports":
            continue  # the same batch as SubmitReports, which is next
        house.clock.now += 0.125
        before = house.snapshot()
        await outcome(house, name, state(request, house.core.identity.id))
        if house.snapshot() == before:
            unseen.append(name)
    assert unseen == []
    core = house.core
    groups = core.rollouts._groups.values()
    held = next(segment for group in groups for segment in group.segments if segment.handles)
    parts: dict[str, Any] = {
        "a counter": lambda: setattr(core.rollouts, "lease_lost", core.rollouts.lease_lost + 1),
        "a queue": lambda: core.rollouts._pending.append(1),
        "the ledger": lambda: core.ledger.settle_mask(next(iter(groups)).id, 1),
        "payload ownership": lambda: setattr(held, "held", 0),
        "a session": lambda: core.workers.hear(rollout.session),
        "the worker table": lambda: core.workers.lapse(core.workers.of(rollout.session)),
        "a checkpoint": lambda: core.commands.save(3).receipts.clear(),
        "the sampler": lambda: core.leasing._sampling.draw(100),
        "a claim on disk": lambda: (house.run / "executions" / "00000002.json").write_text("{}"),
        "the journal": lambda: core.lifecycle.record("settle"),
    }
    for name, change in parts.items():
        house.clock.now += 0.125
        before = house.snapshot()
        change()
        assert house.snapshot() != before, name


async def test_an_id_of_an_earlier_execution_of_the_run_and_of_another_run_are_of_no_use(houses, tmp_path):
    first = await houses()
    second = await houses()
    elsewhere = House(tmp_path / "elsewhere")
    await elsewhere.open()
    try:
        for other in (first, elsewhere):
            worker = await other.rollout()
            before = second.snapshot()
            request = pb.SubmitReportsRequest(worker=worker.identity, batch=reports_pb2.ReportBatch(number=1))
            error = await refusal(second.stub.SubmitReports(request))
            assert isinstance(error, StaleExecutionError)
            assert second.snapshot() == before
            assert (await soon(other.stub.SubmitReports(request))).ack.applied == 1
    finally:
        await elsewhere.close()


async def test_every_rpc_with_an_identity_is_in_the_matrix():
    service = pb.DESCRIPTOR.services_by_name["ControllerService"]
    fenced = {m.name for m in service.methods if {"worker", "execution_id"} & set(m.input_type.fields_by_name)}
    assert fenced == set(FENCED)


@pytest.mark.parametrize("phase", PHASES)
async def test_the_right_id_is_let_in(houses, phase):
    scene = await scene_of(houses, phase, legacy=False)
    for name, request in whole_requests(scene).items():
        error = await outcome(scene.house, name, state(request, scene.house.core.identity.id))
        assert not isinstance(error, StaleExecutionError), name


@pytest.mark.parametrize("kind", IDS)
@pytest.mark.parametrize("phase", PHASES)
async def test_legacy_accepts_any_id_or_none_and_states_none(houses, phase, kind):
    scene = await scene_of(houses, phase, legacy=True)
    house = scene.house
    for name, request in whole_requests(scene).items():
        error = await outcome(house, name, state(request, wrong_id(kind, house)))
        assert not isinstance(error, StaleExecutionError), name
    state_ = await soon(house.stub.GetResumeState(pb.GetResumeStateRequest()))
    assert state_.header.execution_id == ""
    assert state_.execution_number == 0
    assert house.core.fence.refused == 0


async def test_legacy_keeps_sessions_and_numbers(houses):
    house = await houses(legacy=True, application_owns_checkpoints=True)
    rollout = await house.rollout()
    rollout.execution_id = "anything"
    ack = await rollout.submit(reports_pb2.ReportBatch())
    assert ack.applied == 1
    rollout.session = "nobody"
    assert isinstance(await refusal(rollout.submit()), NotRegisteredError)


async def test_a_process_that_was_given_no_id_is_told_it_at_registration(houses):
    house = await houses()
    worker = Worker(house, pb.ROLE_ROLLOUT)
    worker.execution_id = ""
    response = await worker.register()
    assert response.header.execution_id == house.core.identity.id
    worker.execution_id = response.header.execution_id
    assert (await worker.submit()).applied == 0


async def test_the_fence_stands_before_the_session(houses):
    """A worker of the dead execution has no session here either; NOT_REGISTERED would make it register."""
    house = await houses()
    request = pb.SubmitReportsRequest(worker={"execution_id": "dead", "session_id": "dead too"})
    assert isinstance(await refusal(house.stub.SubmitReports(request)), StaleExecutionError)


async def test_each_message_of_a_stream_is_fenced(houses):
    house = await houses()
    rollout = await house.rollout()
    stream = house.stub.StreamReports()
    batch = reports_pb2.ReportBatch(number=1)
    await soon(stream.write(pb.StreamReportsRequest(worker=rollout.identity, batch=batch)))
    assert (await soon(stream.read())).ack.applied == 1
    before = house.snapshot()
    stale = pb.StreamReportsRequest(worker={"execution_id": "other", "session_id": rollout.session})
    stale.batch.number = 2
    await soon(stream.write(stale))
    assert isinstance(await refusal(stream.read()), StaleExecutionError)
    assert house.snapshot() == before


async def test_a_stale_stream_does_not_keep_a_session_alive(houses):
    house = await houses(session_ttl_s=5.0)
    rollout = await house.rollout()
    for _ in range(4):
        house.pass_time(2)
        stale = pb.SubmitReportsRequest(worker={"execution_id": "other", "session_id": rollout.session})
        await refusal(house.stub.SubmitReports(stale))
    assert not house.core.workers.at(next(iter(house.core.workers)).place).session


async def test_a_stale_worker_cannot_take_a_place(houses):
    house = await houses()
    (trainer, _) = await house.trainers(confirm=False)
    before = house.snapshot()
    impostor = pb.RegisterWorkerRequest(execution_id="other", incarnation=secrets.token_hex(16), **trainer.place)
    assert isinstance(await refusal(house.stub.RegisterWorker(impostor)), StaleExecutionError)
    assert house.snapshot() == before
    assert (await trainer.submit()).applied == 0


async def test_a_stale_call_that_would_wait_is_refused_at_once(houses):
    house = await houses()
    rollout = await house.rollout()
    request = pb.LeasePromptsRequest(worker=rollout.identity, number=1, max_groups=1, wait={"seconds": 50})
    request.worker.execution_id = "other"
    error = await asyncio.wait_for(refusal(house.stub.LeasePrompts(request)), 2)
    assert isinstance(error, StaleExecutionError)
    assert house.waiting == 0


@pytest.mark.parametrize("name", FENCED)
async def test_a_payload_that_means_nothing_changes_nothing_under_the_right_id_either(houses, name):
    """The rest of the order: nothing changes before the whole message has passed."""
    scene = await scene_of(houses, "running", legacy=False)
    house = scene.house
    request = state(malformed_requests(scene)[name], house.core.identity.id)
    before = house.snapshot()
    error = await refusal(call(house, name, request))
    assert error.reason in ("MALFORMED", "SEQUENCE_GAP", "UNKNOWN_WORK"), error
    assert house.snapshot() == before


async def test_an_unknown_stop_session_is_not_registered(houses):
    house = await houses()
    identity = {"execution_id": house.core.identity.id, "session_id": "nobody"}
    before = house.snapshot()
    assert isinstance(await refusal(house.stub.RequestStop(pb.RequestStopRequest(worker=identity))), NotRegisteredError)
    assert house.snapshot() == before


async def test_a_negative_stop_deadline_is_malformed(houses):
    house = await houses()
    identity = {"execution_id": house.core.identity.id}
    request = pb.RequestStopRequest(worker=identity, deadline=_NEGATIVE)
    assert isinstance(await refusal(house.stub.RequestStop(request)), MalformedError)
    assert house.core.lifecycle.ending is None
