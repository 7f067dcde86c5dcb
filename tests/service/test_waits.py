"""G9: every wait has a deadline and a named reason for its end: the event, the failure, or the deadline itself."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from service_harness import DEADLINE_S, House, Worker, completed, refusal, seconds, soon, until

from cosmos_ctrl.checkpoints.claims import claim_execution
from cosmos_ctrl.core.errors import (
    ExecutionEndedError,
    MalformedError,
    NotRegisteredError,
    ResumeMetadataMismatch,
    StorageUnavailableError,
)
from cosmos_ctrl.service import runtime as runtime_module
from cosmos_ctrl.service import servicer as servicer_module
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1 import reports_pb2

WAITING = ["ConfirmResume", "LeasePrompts", "NextCommand"]


class Scene:
    """A controller in which each waiting call has nothing to be answered with yet."""

    def __init__(self, house: House, trainers: list[Worker], rollout: Worker) -> None:
        self.house, self.trainers, self.rollout = house, trainers, rollout

    def call(self, name: str, wait: float) -> Any:
        if name == "ConfirmResume":
            return self.house.stub.ConfirmResume(self.trainers[0].confirmation(wait=seconds(wait)))
        if name == "LeasePrompts":
            request = pb.LeasePromptsRequest(worker=self.rollout.identity, max_groups=1, wait=seconds(wait))
            request.number = self.rollout.requests + 1
            return self.house.stub.LeasePrompts(request)
        request = pb.NextCommandRequest(worker=self.trainers[0].identity, number=1, wait=seconds(wait))
        return self.house.stub.NextCommand(request)

    async def event(self, name: str) -> None:
        """What the call waits for."""
        if name == "ConfirmResume":
            await self.trainers[1].confirm()
        elif name == "LeasePrompts":
            await self.trainers[0].announce(0)
        else:
            await self.rollout.submit(completed((await self.rollout.lease(2)).groups))

    @staticmethod
    def is_empty(name: str, response: Any) -> bool:
        if name == "ConfirmResume":
            return not response.agreed and list(response.missing) == ["trainer policy/1"]
        if name == "LeasePrompts":
            return not response.groups and not response.no_more
        return response.WhichOneof("command") is None


async def scene_of(houses, name: str, **options: Any) -> Scene:
    house = await houses(**options)
    trainers = await house.trainers(confirm=False)
    rollout = await house.rollout()
    if name != "ConfirmResume":
        for trainer in trainers:
            await trainer.confirm()
    if name == "NextCommand":
        await trainers[0].announce(0)
    return Scene(house, trainers, rollout)


async def timed(awaitable: Any) -> tuple[Any, float]:
    loop = asyncio.get_running_loop()
    start = loop.time()
    return await soon(awaitable), loop.time() - start


@pytest.mark.parametrize("name", WAITING)
async def test_a_wait_of_zero_answers_at_once(houses, name):
    scene = await scene_of(houses, name)
    response, took = await timed(scene.call(name, 0))
    assert scene.is_empty(name, response)
    assert took < 1
    assert scene.house.waiting == 0


@pytest.mark.parametrize("name", WAITING)
async def test_a_wait_ends_at_its_deadline_with_nothing(houses, name):
    scene = await scene_of(houses, name)
    response, took = await timed(scene.call(name, 0.2))
    assert scene.is_empty(name, response)
    assert 0.19 <= took < 2
    assert scene.house.waiting == 0


@pytest.mark.parametrize("name", WAITING)
async def test_a_wait_longer_than_the_longest_is_cut(houses, monkeypatch, name):
    monkeypatch.setattr(servicer_module, "MAX_WAIT_S", 0.1)
    scene = await scene_of(houses, name)
    response, took = await timed(scene.call(name, 1e9))
    assert scene.is_empty(name, response)
    assert took < 2


@pytest.mark.parametrize("name", WAITING)
async def test_a_wait_ends_with_its_event(houses, name):
    scene = await scene_of(houses, name)
    call = scene.call(name, 50)
    await scene.house.until_waiting(1)
    scene.rollout.requests += name == "LeasePrompts"
    await scene.event(name)
    response = await soon(call)
    assert not scene.is_empty(name, response)


@pytest.mark.parametrize("name", WAITING)
async def test_other_changes_do_not_end_a_wait(houses, name):
    scene = await scene_of(houses, name)
    call = scene.call(name, 50)
    await scene.house.until_waiting(1)
    for replica in (5, 6, 7):
        await scene.house.rollout(replica=replica)
    await scene.house.until_waiting(1)
    assert not call.done()
    await scene.event(name) if name != "LeasePrompts" else await scene.trainers[0].announce(0)
    await soon(call)


@pytest.mark.parametrize("name", WAITING)
async def test_a_wait_ends_with_the_failure_of_the_execution(houses, name):
    scene = await scene_of(houses, name)
    call = scene.call(name, 50)
    await scene.house.until_waiting(1)
    scene.house.core.fail("it broke")
    scene.house.runtime.settle()
    error = await refusal(call)
    assert isinstance(error, ExecutionEndedError)
    assert error.message == "it broke"


@pytest.mark.parametrize("name", WAITING)
async def test_a_wait_ends_when_the_gate_or_the_silence_limit_says_so(houses, name):
    scene = await scene_of(houses, name, session_ttl_s=5.0)
    call = scene.call(name, 50)
    await scene.house.until_waiting(1)
    scene.house.pass_time(6)
    error = await refusal(call)
    assert isinstance(error, ExecutionEndedError | NotRegisteredError)


@pytest.mark.parametrize("name", WAITING)
async def test_a_stopped_client_with_an_open_call_lapses(houses, name):
    """A call that waits is no sign of life: the process behind it may be stopped."""
    scene = await scene_of(houses, name, session_ttl_s=5.0)
    house = scene.house
    call = scene.call(name, 50)
    await house.until_waiting(1)
    waits = scene.rollout if name == "LeasePrompts" else scene.trainers[0]
    everyone = [*scene.trainers, scene.rollout]
    for round_ in range(4):
        house.pass_time(2)
        if house.core.lifecycle.failure is not None:
            break
        await house.rollout(replica=10 + round_)  # a change, for which the waiting call looks again
        for worker in everyone:
            if worker is not waits:
                await worker.submit()
    error = await refusal(call)
    place = next(worker for worker in house.core.workers if worker.info.incarnation == waits.incarnation)
    assert place.session == ""
    assert isinstance(error, NotRegisteredError)
    if name == "NextCommand":
        assert "was not heard" in (await refusal(scene.trainers[1].submit())).message


@pytest.mark.parametrize("name", WAITING)
async def test_a_negative_wait_is_malformed(houses, name):
    scene = await scene_of(houses, name)
    before = scene.house.snapshot()
    assert isinstance(await refusal(scene.call(name, -1)), MalformedError)
    assert scene.house.snapshot() == before


@pytest.mark.parametrize("name", WAITING)
async def test_a_hundred_waits_end_together(houses, name):
    scene = await scene_of(houses, name)
    calls = [scene.call(name, 50) for _ in range(100)]
    await scene.house.until_waiting(100)
    scene.rollout.requests += name == "LeasePrompts"
    await scene.event(name)
    answers = await soon(asyncio.gather(*calls))
    assert len({str(getattr(answer, "groups", "")) for answer in answers}) == 1
    assert scene.house.waiting == 0


# -- agreement


async def resumed_house(houses) -> House:
    first = await houses(save_every_steps=1)
    trainers = await first.trainers()
    await first.train_one(trainers, await first.rollout(), 1)
    await first.save(trainers, 2)
    return await houses()


async def test_a_mismatch_reaches_the_rank_that_had_confirmed_and_waits(houses):
    house = await resumed_house(houses)
    first, second = await house.trainers(confirm=False)
    waiting = house.stub.ConfirmResume(first.confirmation(wait=seconds(50)))
    await house.until_waiting(1)
    own = await refusal(second.confirm(completed_optimizer_updates=7))
    other = await refusal(waiting)
    for error in (own, other):
        assert isinstance(error, ResumeMetadataMismatch)
        assert error.place == "trainer policy/1"
        assert error.changed == ("restored_optimizer_updates",)
    for worker in (first, second):
        assert isinstance(await refusal(worker.next(1, wait=50)), ResumeMetadataMismatch)


async def test_a_fresh_rank_in_a_resumed_run_and_the_other_way_round(houses):
    house = await resumed_house(houses)
    first, _ = await house.trainers(confirm=False)
    request = pb.ConfirmResumeRequest(worker=first.identity, fresh=pb.FreshStart())
    assert isinstance(await refusal(house.stub.ConfirmResume(request)), ResumeMetadataMismatch)
    fresh = await houses(resume=False)
    rank, _ = await fresh.trainers(confirm=False)
    request = rank.confirmation()
    request.metadata.CopyFrom(first.confirmation().metadata)
    assert isinstance(await refusal(fresh.stub.ConfirmResume(request)), ResumeMetadataMismatch)


async def test_a_state_that_is_no_json_does_not_end_the_execution(houses):
    house = await resumed_house(houses)
    first, second = await house.trainers(confirm=False)
    request = first.confirmation()
    request.metadata.sampler_state.data = b"{broken"
    before = house.snapshot()
    assert isinstance(await refusal(house.stub.ConfirmResume(request)), MalformedError)
    assert house.snapshot() == before
    for worker in (first, second):
        response = await worker.confirm()
    assert response.agreed


async def test_the_gate_has_a_deadline(houses):
    scene = await scene_of(houses, "ConfirmResume", gate_timeout_s=30.0, session_ttl_s=1000.0)
    call = scene.call("ConfirmResume", 50)
    await scene.house.until_waiting(1)
    scene.house.pass_time(31)
    error = await refusal(call)
    assert isinstance(error, ExecutionEndedError)
    assert "trainer policy/1 did not confirm within 30 s" in error.message


async def test_damage_is_recorded_and_ends_the_execution_for_who_waits(houses):
    house = await resumed_house(houses)
    first, second = await house.trainers(confirm=False)
    waiting = house.stub.ConfirmResume(first.confirmation(wait=seconds(50)))
    await house.until_waiting(1)
    damaged = pb.ConfirmResumeRequest(worker=second.identity)
    damaged.damaged.name, damaged.damaged.explanation = "policy-1.pt", "a flipped bit"
    assert not (await soon(house.stub.ConfirmResume(damaged))).agreed
    assert "a flipped bit" in (await refusal(waiting)).message
    await soon(house.runtime.finish_effects())
    assert house.runtime.damage_recorded
    (record,) = (house.run / "damaged").iterdir()
    assert "a flipped bit" in record.read_text()


async def test_damage_in_a_fresh_run_is_a_bug(houses):
    house = await houses()
    first, _ = await house.trainers(confirm=False)
    damaged = pb.ConfirmResumeRequest(worker=first.identity)
    damaged.damaged.name = "x"
    assert (await refusal(house.stub.ConfirmResume(damaged))).reason == "NOT_ALLOWED"
    assert house.core.lifecycle.failure is None


# -- publication


async def saving(houses, **options: Any) -> tuple[House, list[Worker], pb.SaveCommand]:
    house = await houses(save_every_steps=1, **options)
    trainers = await house.trainers()
    await house.train_one(trainers, await house.rollout(), 1)
    save = (await trainers[0].next(2)).save
    await trainers[0].saved(2, save)
    return house, trainers, save


def manifests(house: House) -> list[Any]:
    return list(house.run.rglob("manifest.json"))


async def test_the_last_report_is_answered_after_publication_and_training_goes_on_meanwhile(houses, monkeypatch):
    house, (first, second), save = await saving(houses)
    publishing, go_on = threading.Event(), threading.Event()
    publish = runtime_module.publish_from_receipts

    def slow(*arguments: Any) -> str:
        publishing.set()
        assert go_on.wait(DEADLINE_S)
        return publish(*arguments)

    monkeypatch.setattr(runtime_module, "publish_from_receipts", slow)
    last = house.stub.ReportShards(second.shards(2, save))
    assert await asyncio.to_thread(publishing.wait, DEADLINE_S)
    assert not manifests(house)
    assert not last.done()
    assert (await first.submit()).applied
    assert (await soon(house.stub.GetResumeState(pb.GetResumeStateRequest()))).phase == pb.PHASE_RUNNING
    go_on.set()
    response = await soon(last)
    assert response.state == pb.SAVE_STATE_COMMITTED
    assert len(manifests(house)) == 1


async def test_a_superseded_controller_acknowledges_nothing_and_says_so_at_once(houses):
    house, (first, second), save = await saving(houses)
    watching = house.stub.NextCommand(pb.NextCommandRequest(worker=first.identity, number=3, wait=seconds(50)))
    await house.until_waiting(1)
    claim_execution(house.store, execution_id="newer", note={})
    error = await asyncio.wait_for(refusal(house.stub.ReportShards(second.shards(2, save))), 5)
    assert isinstance(error, ExecutionEndedError)
    assert "newer execution" in error.message
    assert isinstance(await refusal(watching), ExecutionEndedError)
    assert house.runtime.superseded
    assert not manifests(house)
    assert house.core.statistics().last_save is None


async def test_a_controller_that_is_superseded_while_it_publishes_acknowledges_nothing(houses, monkeypatch):
    house, (_, second), save = await saving(houses)
    publish = runtime_module.publish_from_receipts

    def overtaken(*arguments: Any) -> str:
        digest = publish(*arguments)
        claim_execution(house.store, execution_id="newer", note={})
        return digest

    monkeypatch.setattr(runtime_module, "publish_from_receipts", overtaken)
    assert isinstance(await refusal(house.stub.ReportShards(second.shards(2, save))), ExecutionEndedError)
    assert house.runtime.superseded
    assert len(manifests(house)) == 1
    assert house.core.statistics().last_save is None
    assert not [event for event in house.journal if event["event"] == "published"]


async def test_a_manifest_that_is_visible_and_perhaps_not_durable_is_neither_acknowledged_nor_abandoned(
    houses, monkeypatch
):
    house, (_, second), save = await saving(houses)
    publish = runtime_module.publish_from_receipts

    def fails_late(*arguments: Any) -> str:
        publish(*arguments)
        raise StorageUnavailableError(path="p", operation=runtime_module.VISIBLE_NOT_DURABLE, cause="EIO")

    monkeypatch.setattr(runtime_module, "publish_from_receipts", fails_late)
    error = await refusal(house.stub.ReportShards(second.shards(2, save)))
    assert isinstance(error, ExecutionEndedError)
    assert "visible and not acknowledged" in error.message
    assert len(manifests(house)) == 1
    assert not [event for event in house.journal if event["event"] in ("published", "abandoned")]


@pytest.mark.parametrize(
    "error",
    [
        StorageUnavailableError(path="p", operation="fsync", cause="EIO"),
        OSError(28, "No space left"),
        ValueError("what"),
    ],
    ids=repr,
)
async def test_a_publication_that_fails_abandons_the_save_and_says_so(houses, monkeypatch, error):
    house, (_, second), save = await saving(houses)

    def broken(*_arguments: Any) -> str:
        raise error

    monkeypatch.setattr(runtime_module, "publish_from_receipts", broken)
    response = await second.saved(2, save)
    assert response.state == pb.SAVE_STATE_ABANDONED
    assert response.manifest_digest == ""
    assert house.core.lifecycle.phase == "RUNNING"


async def test_an_artifact_that_is_not_there_is_never_published(houses):
    house, (_, second), save = await saving(houses)
    request = second.shards(2, save)
    (house.run / save.path / "policy-0.pt").unlink()
    response = await soon(house.stub.ReportShards(request))
    assert response.state == pb.SAVE_STATE_ABANDONED
    assert not manifests(house)


async def test_what_failed_before_its_publication_began_is_not_published(houses):
    house, (_, second), save = await saving(houses)
    async with house.runtime._publishing:  # another publication is under way
        last = house.stub.ReportShards(second.shards(2, save))
        await until(lambda: house.core.commands.save(2).state == "PUBLISHING")
        house.core.fail("a second signal")
        house.runtime.settle()
    assert isinstance(await refusal(last), ExecutionEndedError)
    await soon(house.runtime.finish_effects())
    assert not manifests(house)


async def test_a_save_has_a_deadline(houses):
    house, (first, _), save = await saving(houses, save_timeout_s=20.0, session_ttl_s=1000.0)
    house.pass_time(21)
    assert (await first.saved(2, save)).state == pb.SAVE_STATE_ABANDONED


async def test_a_stop_has_a_deadline(houses):
    house = await houses(session_ttl_s=1000.0)
    trainers = await house.trainers()
    await house.rollout()
    request = pb.RequestStopRequest(worker=trainers[0].identity, reason="stop", deadline=seconds(5))
    await soon(house.stub.RequestStop(request))
    waiting = house.stub.NextCommand(pb.NextCommandRequest(worker=trainers[0].identity, number=2, wait=seconds(50)))
    await soon(house.stub.NextCommand(pb.NextCommandRequest(worker=trainers[1].identity, number=1)))
    await house.until_waiting(1)
    house.pass_time(6)
    assert "grace" in (await refusal(waiting)).message


async def test_everyone_hears_of_the_end_and_the_controller_knows_it(houses):
    house = await houses(prompts=2)
    trainers = await house.trainers()
    rollout = await house.rollout()
    await house.train_one(trainers, rollout, 1)
    command = (await trainers[0].next(2)).save
    assert command.final
    await house.save(trainers, 2)
    assert house.core.lifecycle.phase == "ENDED"
    assert not house.core.everyone_knows
    assert (await rollout.lease(1)).no_more
    for worker in (*trainers, rollout):
        if worker.role == pb.ROLE_TRAINER:
            end = (await worker.next(3)).end
            assert end.reason == pb.END_REASON_BUDGET_EXHAUSTED
            assert end.completed_training_steps == 1
        await worker.submit(reports_pb2.ReportBatch(end=reports_pb2.EndReport(reason="done")))
    assert house.core.everyone_knows


async def test_once_every_rank_was_refused_with_the_mismatch_everyone_knows(houses):
    house = await resumed_house(houses)
    first, second = await house.trainers(confirm=False)
    waiting = house.stub.ConfirmResume(first.confirmation(wait=seconds(50)))
    await house.until_waiting(1)
    await refusal(second.confirm(completed_optimizer_updates=7))
    await refusal(waiting)
    assert house.core.everyone_knows


async def test_once_everyone_was_refused_for_a_wrong_step_everyone_knows(houses):
    house = await houses(ranks=1)
    (trainer,) = await house.trainers()
    rollout = await house.rollout()
    await rollout.submit(completed((await rollout.lease(2)).groups))
    train = (await trainer.next(1)).train
    train.step = 9
    await refusal(trainer.complete(1, train))
    await refusal(rollout.submit())
    assert house.core.everyone_knows


@pytest.mark.parametrize("name", ["ConfirmResume", "ReportShards", "SubmitReports"])
async def test_in_a_failed_execution_a_malformed_payload_is_not_looked_at(houses, name):
    house = await resumed_house(houses)
    first, _ = await house.trainers(confirm=False)
    house.core.fail("it broke")
    if name == "ConfirmResume":
        request = first.confirmation()
        request.metadata.schema_version = 7
    elif name == "ReportShards":
        request = pb.ReportShardsRequest(worker=first.identity)
    else:
        request = first.request(reports_pb2.ReportBatch(number=1, rollouts=[reports_pb2.RolloutRows(outcome=99)]))
    assert (await refusal(getattr(house.stub, name)(request))).reason == "EXECUTION_ENDED"
