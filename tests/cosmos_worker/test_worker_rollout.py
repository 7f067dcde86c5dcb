"""The rollout worker's two faces against a scripted controller."""

# ruff: noqa: PT012  # what is raised comes out of the worker's with statement, body and all
from __future__ import annotations

import asyncio
import threading

import pytest
from fake_controller import group

from cosmos_ctrl.core.errors import StaleExecutionError, SupersededError, UnknownWorkError
from cosmos_ctrl.v1 import reports_pb2
from cosmos_worker.errors import DeadlineError, UsageError, exit_code_for
from cosmos_worker.payloads import Handle
from cosmos_worker.rollout import Rollout, SyncRollout


def masks_of(controller, outcome="COMPLETED"):
    """All completions by group, each bit at most once."""
    seen: dict[int, int] = {}
    for kind, number, _, mask in controller.rows():
        if kind == outcome:
            assert not seen.get(number, 0) & mask, f"group {number} was applied twice"
            seen[number] = seen.get(number, 0) | mask
    return seen


async def test_the_loop_of_the_quickstart(controller, options):
    controller.weights_announced = True
    controller.weights = reports_pb2.WeightAnnouncement(version=3, handle="w3")
    controller.offer(*(group(n, payload=b'{"q":1}', payload_codec="json") for n in range(1, 21)))
    controller.no_more = True
    loaded = []

    async def load(version, handle):
        loaded.append((version, handle))

    async def generate_and_report(rollout, leased):
        assert leased.prompt() == {"q": 1}
        for i in leased.pending:
            await rollout.report(leased, i, [i, i], reward=i / 2, versions=3)

    tasks = []
    async with Rollout.from_env(on_weights=load, **options()) as rollout:
        async for leased in rollout.groups(in_flight=8):
            assert loaded == [(3, "w3")]
            tasks.append(asyncio.ensure_future(generate_and_report(rollout, leased)))
    await asyncio.gather(*tasks)
    assert masks_of(controller) == dict.fromkeys(range(1, 21), 15)
    assert controller.batches[-1].end.reason == "done"
    block = controller.batches[0].rollouts[0]
    assert block.payload_codec == "json"
    assert list(block.lowest_versions) == [3] * len(block.groups)


async def test_completions_of_a_group_share_a_row(controller, options):
    controller.offer(group(1))
    controller.no_more = True
    async with Rollout.from_env(**options()) as rollout:
        async for leased in rollout.groups():
            controller.change(lambda: setattr(controller, "silent", True))
            heard = controller.calls["StreamReports"]
            # The first goes out alone; the rest gather behind it, in any order.
            await rollout.report(leased, 2, b"c", reward=2.0, versions=(5, 4))
            await asyncio.to_thread(controller.until, lambda heard=heard: controller.calls["StreamReports"] > heard)
            await rollout.report(leased, 3, b"d", reward=3.0, versions=7)
            await rollout.report(leased, 0, b"a", reward=0.0, versions=[6, 9])
            await rollout.report(leased, 1, b"b", reward=1.0, versions=8)
            controller.change(lambda: setattr(controller, "silent", False))
    first, second = (batch.rollouts[0] for batch in controller.batches[:2])
    assert (list(first.masks), list(first.lowest_versions), list(first.highest_versions)) == ([4], [4], [5])
    assert list(second.masks) == [0b1011]
    assert list(second.rewards) == [0.0, 1.0, 3.0]
    assert list(second.payloads) == [b"a", b"b", b"d"]
    assert (list(second.lowest_versions), list(second.highest_versions)) == ([6], [9])


async def test_lost_replies_and_lapsed_sessions_apply_once(controller, options):
    controller.offer(*(group(n, completions=70) for n in range(1, 31)))
    controller.no_more = True
    controller.lose_replies.update({"LeasePrompts": 2, "StreamReports": 3, "RegisterWorker": 1})
    async with Rollout.from_env(**options()) as rollout:
        count = 0
        async for leased in rollout.groups(in_flight=4):
            count += 1
            if count == 10:
                controller.lapse()
            if count == 20:
                await asyncio.to_thread(controller.restart)
            for i in leased.pending:
                await rollout.report(leased, i, Handle(f"h{i}"), reward=1.0, versions=0)
    assert masks_of(controller) == dict.fromkeys(range(1, 31), (1 << 70) - 1)
    (process,) = controller.processes.values()
    assert process.registrations >= 2


async def test_discarded_failed_returned(controller, options):
    controller.offer(group(1), group(2), group(3))
    controller.no_more = True
    async with Rollout.from_env(**options()) as rollout:
        async for leased in rollout.groups(in_flight=3):
            if leased.id == 1:
                await rollout.discard(leased, 1, reason="too_long")
                for i in (0, 2, 3):
                    await rollout.report(leased, i, reward=1.0, versions=0)
            elif leased.id == 2:
                await rollout.report(leased, 0, reward=1.0, versions=0)
                await rollout.fail(leased, reason="oom")
            else:
                await rollout.give_back(leased)
                assert not await rollout.give_back(leased)
    rows = set(controller.rows())
    assert {("DISCARDED", 1, 101, 2), ("FAILED", 2, 102, 0b1110), ("RETURNED", 3, 103, 0b1111)} <= rows
    assert masks_of(controller) == {1: 0b1101, 2: 0b0001}


async def test_an_exception_returns_the_leases(controller, options):
    controller.offer(group(1), group(2), group(3))
    with pytest.raises(ZeroDivisionError):
        async with Rollout.from_env(**options()) as rollout:
            async for leased in rollout.groups(in_flight=3):
                await rollout.report(leased, 0, reward=1.0, versions=0)
                await asyncio.to_thread(controller.until, lambda: not controller.groups)
                raise ZeroDivisionError
    assert masks_of(controller) == {1: 1}
    assert masks_of(controller, "RETURNED") == {1: 0b1110, 2: 0b1111, 3: 0b1111}
    assert "ZeroDivisionError" in controller.batches[-1].end.reason


async def test_cancellation_returns_the_leases(controller, options):
    controller.offer(group(1), group(2))

    async def work():
        async with Rollout.from_env(**options()) as rollout:
            async for _ in rollout.groups(in_flight=2):
                pass

    task = asyncio.ensure_future(work())
    await asyncio.to_thread(controller.until, lambda: not controller.groups)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert masks_of(controller, "RETURNED") == {1: 0b1111, 2: 0b1111}
    assert controller.batches[-1].HasField("end")


async def test_stale_is_final_and_has_its_exit_code(controller, options, exits):
    controller.offer(group(1))
    with pytest.raises(StaleExecutionError) as caught:
        async with Rollout.from_env(**options()) as rollout:
            async for leased in rollout.groups():
                controller.change(lambda: setattr(controller, "execution_id", "exec-2"))
                await rollout.report(leased, 0, reward=1.0, versions=0)
                with pytest.raises(StaleExecutionError) as first:
                    await rollout.flush()
                with pytest.raises(StaleExecutionError) as again:
                    await rollout.report(leased, 1, reward=1.0, versions=0)
                assert again.value is first.value
                raise again.value
    assert exit_code_for(caught.value) == 10
    assert controller.batches == []
    assert exits == []


async def test_a_stated_id_is_stale_at_registration(controller, options):
    with pytest.raises(StaleExecutionError):
        async with Rollout.from_env(**options(execution_id="of-another-life")):
            pass
    assert controller.processes == {}


async def test_without_an_id_the_first_registration_pins_it(controller, options, environ):
    del environ["COSMOS_CTRL_EXECUTION_ID"]
    # A terminal error is not forgotten: leaving raises it too, although the body caught it.
    with pytest.raises(StaleExecutionError):
        async with Rollout.from_env(**options()) as rollout:
            assert rollout.execution_id == "exec-1"
            controller.change(lambda: setattr(controller, "execution_id", "exec-2"))
            controller.lapse()
            with pytest.raises(StaleExecutionError):
                async for _ in rollout.groups():
                    pass
            assert rollout.execution_id == "exec-1"
            with pytest.raises(StaleExecutionError):
                rollout.metric("x", 1.0)


async def test_superseded_by_a_newer_process(controller, options):
    with pytest.raises(SupersededError) as caught:
        async with Rollout.from_env(**options()) as old, Rollout.from_env(**options()):
            async for _ in old.groups():
                pass
    assert exit_code_for(caught.value) == 10


async def test_the_stuck_process_is_ended_by_the_clients_thread(controller, options, quick):
    ended = threading.Event()
    codes = []

    def leave(code):
        codes.append(code)
        ended.set()

    import dataclasses

    config = dataclasses.replace(quick, end_grace_s=0.05)
    controller.lease_time_s = 0.15
    with pytest.raises(StaleExecutionError):
        async with Rollout.from_env(**options(config=config, exit_process=leave)):
            controller.change(lambda: setattr(controller, "execution_id", "exec-2"))
            # The main thread is busy and calls nothing; heartbeats learn of it.
            assert ended.wait(10)
    assert codes == [10]


async def test_notices_are_heard_once(controller, options):
    controller.offer(group(1), group(2))
    freed = []
    done = threading.Event()

    def on_free(number, indices):
        freed.append((number, indices))
        if number == 9:
            done.set()

    controller.lease_time_s = 0.15
    async with Rollout.from_env(on_free=on_free, **options()) as rollout:
        groups = rollout.groups(in_flight=2)
        first, second = await anext(groups), await anext(groups)
        (incarnation,) = controller.processes
        controller.notice(incarnation, cancelled=reports_pb2.LeasesCancelled(leases=[first.lease]))
        controller.notice(incarnation, freed=reports_pb2.PayloadsFreed(groups=[7], words=[1], masks=[0b101]))
        controller.lapse()
        controller.notice(incarnation, freed=reports_pb2.PayloadsFreed(groups=[9], masks=[1]))
        assert await asyncio.to_thread(done.wait, 10)
        assert first.cancelled
        assert not second.cancelled
        assert not await rollout.report(first, 0, reward=1.0, versions=0)
        await asyncio.to_thread(controller.until, lambda: not controller.processes[incarnation].notices)
    assert freed == [(7, (64, 66)), (9, (0,))]
    assert masks_of(controller, "RETURNED") == {2: 0b1111}


async def test_a_refused_row_ends_its_lease_only(controller, options):
    controller.offer(group(1), group(2))
    controller.lease_time_s = 0.15
    async with Rollout.from_env(**options()) as rollout:
        groups = rollout.groups(in_flight=2)
        first = await anext(groups)
        second = await anext(groups)
        controller.silent = True
        await rollout.report(first, 0, reward=1.0, versions=0)
        (incarnation,) = controller.processes
        refused = reports_pb2.RowRefused(
            batch=1, block=0, row=0, reason=reports_pb2.REFUSAL_REASON_LEASE_LOST, group=1, mask=1
        )
        controller.notice(incarnation, refused=refused)
        controller.silent = False
        await rollout.flush()
        assert first.cancelled
        assert not second.cancelled


async def test_a_full_window_waits_and_the_wait_has_a_deadline(controller, options, quick):
    import dataclasses

    config = dataclasses.replace(quick, window_completions=2, report_s=0.3)
    controller.offer(group(1, completions=8))
    controller.no_more = True
    async with Rollout.from_env(**options(config=config)) as rollout:
        async for leased in rollout.groups():
            controller.silent = True
            await rollout.report(leased, 0, reward=1.0, versions=0)
            await rollout.report(leased, 1, reward=1.0, versions=0)
            with pytest.raises(DeadlineError):
                await rollout.report(leased, 2, reward=1.0, versions=0)
            assert rollout.statistics().reports.completions == 2
            controller.silent = False
            for i in range(2, 8):
                await rollout.report(leased, i, reward=1.0, versions=0)
    assert masks_of(controller) == {1: 0xFF}


async def test_a_bug_is_raised_in_the_next_call(controller, options):
    controller.offer(group(0))
    with pytest.raises(UnknownWorkError):
        async with Rollout.from_env(**options()) as rollout:
            async for leased in rollout.groups():
                await rollout.report(leased, 0, reward=1.0, versions=0)
                with pytest.raises(UnknownWorkError):
                    await rollout.flush()
                await rollout.report(leased, 1, reward=1.0, versions=0)


async def test_misuse_is_named(controller, options):
    controller.weights_announced = True
    controller.weights = reports_pb2.WeightAnnouncement(version=0, handle="w")
    controller.offer(group(1))
    async with Rollout.from_env(on_weights=lambda *_: None, **options()) as rollout:
        leased = await anext(rollout.groups())
        with pytest.raises(UsageError, match="versions="):
            await rollout.report(leased, 0, reward=1.0)
        await rollout.report(leased, 0, reward=1.0, versions=0)
        with pytest.raises(UsageError, match="reported before"):
            await rollout.report(leased, 0, reward=1.0, versions=0)
        with pytest.raises(UsageError, match="not leased"):
            await rollout.report(leased, 4, reward=1.0, versions=0)
        with pytest.raises(UsageError, match="reason="):
            await rollout.fail(leased, reason="")
    with pytest.raises(UsageError, match="closed"):
        await rollout.report(leased, 1, reward=1.0, versions=0)
    assert masks_of(controller, "RETURNED") == {1: 0b1110}


def test_the_synchronous_face(controller, options):
    controller.weights = reports_pb2.WeightAnnouncement(version=1, handle="w1")
    controller.offer(*(group(n, completions=3) for n in range(1, 6)))
    controller.no_more = True
    main = threading.get_ident()
    loads = []
    with SyncRollout.from_env(
        on_weights=lambda v, h: loads.append((v, h, threading.get_ident())), **options()
    ) as rollout:
        for leased in rollout.groups(in_flight=2):
            rollout.report_group(leased, rewards=[1.0, 2.0, 3.0], payloads=[b"a", b"b", b"c"], versions=1)
    assert loads == [(1, "w1", main)]
    assert masks_of(controller) == dict.fromkeys(range(1, 6), 7)
    assert controller.batches[-1].end.reason == "done"
    assert all(rows.payload_codec == "bytes" for batch in controller.batches for rows in batch.rollouts)


async def test_groups_never_reported_end_the_wait_by_name(controller, options, quick):
    import dataclasses

    controller.offer(group(1))
    controller.no_more = True
    config = dataclasses.replace(quick, unfinished_total_s=0.1)
    with pytest.raises(DeadlineError, match="handed out"):
        async with Rollout.from_env(**options(config=config)) as rollout:
            async for _ in rollout.groups():
                pass
    assert masks_of(controller, "RETURNED") == {1: 0b1111}


async def test_newer_weights_come_before_newer_groups(controller, options):
    events = []
    controller.weights = reports_pb2.WeightAnnouncement(version=1, handle="w1")
    controller.offer(group(1))
    async with Rollout.from_env(on_weights=lambda v, _: events.append(("load", v)), **options()) as rollout:
        async for leased in rollout.groups(in_flight=1):
            events.append(("group", leased.id))
            if leased.id == 1:
                controller.weights = reports_pb2.WeightAnnouncement(version=4, handle="w4")
                controller.offer(group(2))
            else:
                controller.change(lambda: setattr(controller, "no_more", True))
            await rollout.report_group(leased, rewards=[0.0] * 4, versions=1)
    assert events == [("load", 1), ("group", 1), ("load", 4), ("group", 2)]
