"""Levels, not edges: a slow watcher skips states and never misses the last; nobody is left behind in the table of waiters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest
from service_harness import DEADLINE_S, completed, refusal, soon, until

from cosmos_ctrl.service.watch import Line, Revisions
from cosmos_ctrl.v1 import controller_service_pb2 as pb


async def test_a_revision_that_has_passed_is_not_waited_for():
    revisions = Revisions()
    revisions.publish(1)
    assert await soon(revisions.beyond(0, DEADLINE_S))
    assert not revisions._waiters


async def test_every_waiter_is_woken_and_the_level_is_the_last():
    revisions = Revisions()
    waiters = [asyncio.create_task(revisions.beyond(0, DEADLINE_S)) for _ in range(5)]
    await asyncio.sleep(0)
    assert len(revisions._waiters) == 5
    for revision in range(1, 4):
        revisions.publish(revision)
    assert await soon(asyncio.gather(*waiters)) == [True] * 5
    assert revisions.current == 3
    assert not revisions._waiters


async def test_the_same_revision_again_wakes_nobody():
    revisions = Revisions()
    waiter = asyncio.create_task(revisions.beyond(0, 0.02))
    await asyncio.sleep(0)
    revisions.publish(0)
    assert not await soon(waiter)


async def test_a_timeout_leaves_no_waiter_behind():
    revisions = Revisions()
    assert not await revisions.beyond(0, 0.001)
    assert not revisions._waiters
    revisions.publish(1)


async def test_a_cancelled_wait_leaves_no_waiter_behind():
    revisions = Revisions()
    waiter = asyncio.create_task(revisions.beyond(0, DEADLINE_S))
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert not revisions._waiters
    revisions.publish(1)


async def test_a_waiter_that_is_woken_and_cancelled_at_once_harms_nobody():
    revisions = Revisions()
    first, second = (asyncio.create_task(revisions.beyond(0, DEADLINE_S)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    revisions.publish(1)
    assert await soon(second)
    assert (await asyncio.gather(first, return_exceptions=True))[0].__class__ is asyncio.CancelledError


async def test_the_watch_begins_with_the_present_state(houses):
    house = await houses()
    await house.trainers()
    call = house.stub.WatchRun(pb.WatchRunRequest())
    response = await soon(call.read())
    assert response.header.execution_id == house.core.identity.id
    assert response.header.revision == house.core.lifecycle.revision
    assert response.state.phase == pb.PHASE_RUNNING
    assert response.state.remaining_completions == 32
    call.cancel()


async def test_a_watcher_that_reads_nothing_for_long_still_gets_the_last_state_and_the_end_of_the_stream(houses):
    house = await houses(ranks=1)
    trainers = await house.trainers()
    rollout = await house.rollout()
    call = house.stub.WatchRun(pb.WatchRunRequest())
    await soon(call.read())
    for step in range(3):
        await house.train_one(trainers, rollout, step + 1)
    house.core.fail("it broke")
    house.runtime.settle()
    states = []
    while (response := await soon(call.read())) is not grpc.aio.EOF:
        states.append(response.state)
    assert states[-1].phase == pb.PHASE_FAILED
    assert states[-1].end.reason == pb.END_REASON_FAILURE
    assert "it broke" in states[-1].end.message
    assert states[-1].completed_training_steps == 3


async def test_a_run_that_ends_while_a_state_is_being_sent_is_not_missed(houses):
    """The transport may hold a message for as long as it likes; what ends meanwhile is the next message."""
    house = await houses()
    watch = house.servicer.WatchRun(pb.WatchRunRequest(), None)
    first = await soon(anext(watch))
    assert first.state.phase == pb.PHASE_AWAITING_AGREEMENT
    house.core.fail("meanwhile")
    house.runtime.settle()
    last = await soon(anext(watch))
    assert last.state.phase == pb.PHASE_FAILED
    with pytest.raises(StopAsyncIteration):
        await soon(anext(watch))


async def test_a_watch_of_a_run_that_is_over_says_so_and_ends(houses):
    house = await houses()
    house.core.fail("before")
    house.runtime.settle()
    states = [response.state.phase async for response in house.stub.WatchRun(pb.WatchRunRequest(), timeout=DEADLINE_S)]
    assert states == [pb.PHASE_FAILED]


async def test_a_watcher_that_goes_away_is_forgotten(houses):
    house = await houses()
    call = house.stub.WatchRun(pb.WatchRunRequest())
    await soon(call.read())
    await house.until_waiting(1)
    call.cancel()

    await until(lambda: not house.waiting)


async def test_the_state_counts_what_happened(houses):
    house = await houses(ranks=1)
    trainers = await house.trainers()
    rollout = await house.rollout()
    await house.train_one(trainers, rollout, 1)
    groups = (await rollout.lease(3)).groups
    await rollout.submit(completed(groups[:1], version=1))
    stranger = await house.rollout(replica=1)
    stranger.execution_id = "another"
    await refusal(stranger.submit())
    house.clock.now += 3
    call = house.stub.WatchRun(pb.WatchRunRequest())
    state = (await soon(call.read())).state
    call.cancel()
    assert (state.completed_training_steps, state.completed_optimizer_updates) == (1, 1)
    assert (state.remaining_completions, state.safe_remaining_completions) == (32 - 10, 32 - 4)
    assert (state.window_draws, state.window_completions) == (3, 6)
    assert (state.groups_leased, state.groups_ready) == (2, 1)
    assert state.trained_completions == 4
    assert state.stale_refused == 1
    assert state.weights_version == 1
    assert state.mean_reward == 0.5
    assert state.blocking_group == groups[0].group
    assert state.gap_age.seconds == 3
    assert not state.HasField("checkpoint")
    assert not state.HasField("end")


class Shelf:
    """Things that calls wait for; counts how often it is looked at."""

    def __init__(self) -> None:
        self.things: list[str] = []
        self.looks = 0

    def take(self) -> str | None:
        self.looks += 1
        return self.things.pop(0) if self.things else None


def queue(line: Line, *attempts: Callable[[], object], wait_s: float = DEADLINE_S) -> list[asyncio.Task[object]]:
    return [
        asyncio.create_task(line.wait(f"session {number}", attempt, wait_s)) for number, attempt in enumerate(attempts)
    ]


async def test_a_change_costs_what_it_gives_and_not_what_waits():
    line, shelf = Line(), Shelf()
    waiting = queue(line, *[shelf.take] * 1000)
    await asyncio.sleep(0)
    assert len(line) == 1000
    line.serve()
    assert shelf.looks == 1
    shelf.things = ["a", "b"]
    line.serve()
    assert shelf.looks == 4  # two were given something, the third found nothing
    assert await soon(asyncio.gather(*waiting[:2])) == ["a", "b"]  # in the order in which they came
    assert len(line) == 998
    shelf.things = ["x"] * 998
    line.serve()
    assert await soon(asyncio.gather(*waiting[2:])) == ["x"] * 998
    assert len(line) == 0


async def test_what_an_attempt_raises_is_its_own_calls_and_the_next_is_served():
    line, shelf = Line(), Shelf()

    def fail() -> None:
        raise KeyError("lost")

    failing, served = queue(line, fail, shelf.take)
    await asyncio.sleep(0)
    shelf.things = ["a"]
    line.serve()
    with pytest.raises(KeyError, match="lost"):
        await soon(failing)
    assert await soon(served) == "a"


async def test_who_left_is_told_wherever_it_stands_and_nobody_else_is_asked():
    line, nothing, gone = Line(), Shelf(), Shelf()
    gone.things = ["gone"]
    first, second, third = queue(line, nothing.take, gone.take, nothing.take)
    await asyncio.sleep(0)
    line.serve({"session 1"})
    assert await soon(second) == "gone"
    assert nothing.looks == 1  # the first, as always
    for task in (first, third):
        task.cancel()


async def test_in_a_line_that_shares_nothing_each_is_tried():
    line, nothing, something = Line(shared=False), Shelf(), Shelf()
    something.things = ["a"]
    first, second = queue(line, nothing.take, something.take)
    await asyncio.sleep(0)
    line.serve()
    assert await soon(second) == "a"
    assert len(line) == 1
    first.cancel()


async def test_a_call_that_gives_up_leaves_the_line():
    line, shelf = Line(), Shelf()
    (timed,) = queue(line, shelf.take, wait_s=0.001)
    assert await soon(timed) is None
    (cancelled,) = queue(line, shelf.take)
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert len(line) == 0
    shelf.things = ["a"]
    line.serve()
    assert shelf.looks == 0


async def test_who_waits_for_prompts_is_not_asked_by_every_report(houses, monkeypatch):
    house = await houses(ranks=1, max_outstanding_groups=4, groups_per_step=4)
    (trainer,) = await house.trainers()
    await trainer.announce(0)
    busy = await house.rollout()
    groups = (await busy.lease(4)).groups
    idle = [await house.rollout(replica=replica) for replica in range(1, 51)]
    waiting = [asyncio.create_task(worker.lease(1, wait=DEADLINE_S)) for worker in idle]
    await house.until_waiting(len(idle))
    looks, lease = 0, house.core.leasing.lease

    def count(*args, **named):
        nonlocal looks
        looks += 1
        return lease(*args, **named)

    monkeypatch.setattr(house.core.leasing, "lease", count)
    for group in groups[:3]:
        await busy.submit(completed([group], version=0))
    assert looks == 3  # one look a change, however many wait
    monkeypatch.undo()
    house.core.fail("the end")
    house.runtime.settle()
    assert all(isinstance(end, grpc.RpcError) for end in await soon(asyncio.gather(*waiting, return_exceptions=True)))
