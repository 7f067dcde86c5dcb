"""What a worker promises beside its loops: its identity, its deadlines, its end, and that it never holds up the user's loop."""

# ruff: noqa: PT012  # what is raised comes out of the worker's with statement, body and all
from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import threading
from typing import Any

import grpc.aio
import pytest
from fake_controller import QUICK, FakeController, end, group, payloads, save, train

import cosmos_worker.client as client_module
from cosmos_ctrl.core.errors import MessageTooLargeError, StaleExecutionError, SupersededError
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1 import reports_pb2
from cosmos_worker.client import Connection
from cosmos_worker.errors import DeadlineError, exit_code_for
from cosmos_worker.report_items import RolloutItem
from cosmos_worker.reports import _Owed
from cosmos_worker.rollout import Rollout, SyncRollout
from cosmos_worker.settings import Endpoint, WorkerPlace
from cosmos_worker.trainer import Trainer
from cosmos_worker.training_calls import TrainingCalls
from cosmos_worker.window import ReportWindow, WindowLimits

# -- identity


def test_the_pinned_identity_is_stamped_over_the_callers_and_the_callers_object_stays_as_it_was(controller, environ):
    place = WorkerPlace(role="trainer", group="policy")
    connection = Connection(Endpoint.find(environ=environ), place, config=QUICK)
    connection.start().result(10)
    try:
        mine = pb.ReportShardsRequest(worker={"execution_id": "of another run", "session_id": "of another life"})
        mine.command = 7
        mine.abandoned.reason = "why"
        before = mine.SerializeToString()
        TrainingCalls(connection).report_shards(mine)
        assert mine.SerializeToString() == before
        (sent,) = controller.shards
        assert sent.worker.execution_id == "exec-1"
        assert controller.sessions[sent.worker.session_id] == connection.incarnation
        assert (sent.command, sent.abandoned.reason) == (7, "why")
        # An identity is made anew each time: whoever changes one changes no other.
        connection.identity().execution_id = "changed"
        assert connection.identity().execution_id == "exec-1"
    finally:
        TrainingCalls(connection).leave("done")
        connection.stop()


@pytest.mark.parametrize("other", ["exec-2", ""], ids=["another execution", "a legacy controller"])
@pytest.mark.parametrize("given", ["by the launcher", "by the first registration"])
def test_an_id_once_pinned_is_never_refreshed_whatever_happens(controller, options, environ, given, other):
    """Lapses, reconnects and restarts of the same execution keep it; another execution at the address is not joined, nor a
    controller that would take anyone."""
    if given == "by the first registration":
        del environ["COSMOS_CTRL_EXECUTION_ID"]
    controller.offer(group(1), group(2))
    with pytest.raises(StaleExecutionError) as caught, SyncRollout.from_env(**options()) as rollout:
        stated = []
        register = rollout._connection.stub.RegisterWorker

        def noting(request: Any, timeout: float) -> Any:
            stated.append(request.execution_id)
            return register(request, timeout=timeout)

        rollout._connection.stub.RegisterWorker = noting
        groups = rollout.groups(in_flight=1)
        rollout.report_group(next(groups), rewards=[0.0] * 4)
        # While it holds a group it asks for none: what it says next is its report.
        held = next(groups)
        controller.lapse()
        controller.restart()
        rollout.report(held, 0, reward=0.0)
        rollout.flush()
        assert rollout.execution_id == "exec-1"
        controller.change(lambda: (setattr(controller, "execution_id", other), controller.sessions.clear()))
        rollout.report(held, 1, reward=0.0)
        rollout.flush()
    assert exit_code_for(caught.value) == 10
    assert rollout.execution_id == "exec-1"
    assert set(stated) == {"exec-1"}
    assert len(controller.processes) == 1


@pytest.mark.parametrize("error", ["stale", "superseded"])
async def test_a_worker_that_is_over_stops_generating_and_lets_go_of_its_buffers(controller, options, error):
    controller.offer(*(group(n) for n in range(1, 5)))
    with pytest.raises((StaleExecutionError, SupersededError)) as caught:
        async with Rollout.from_env(**options()) as rollout:
            groups = rollout.groups(in_flight=4)
            held = [await anext(groups) for _ in range(4)]
            controller.silent = True
            for index in range(4):
                await rollout.report(held[0], index, b"x" * 1000, reward=1.0, versions=0)
            assert rollout.statistics().reports.bytes > 4000
            assert not held[1].cancelled
            if error == "stale":
                controller.change(lambda: setattr(controller, "execution_id", "exec-2"))
            else:
                replaced = SupersededError(place="p", incarnation="i")
                controller.change(lambda: controller.errors["LeasePrompts"].append(replaced))
            controller.silent = False
            with pytest.raises((StaleExecutionError, SupersededError)) as heard:
                await anext(groups)
            # Whoever still generates sees that nobody wants it.
            assert all(one.cancelled for one in held[1:])
            reports = rollout.statistics().reports
            assert (reports.bytes, reports.completions, reports.pending_items, reports.batches) == (0, 0, 0, 0)
            assert rollout.statistics().leases.held == 0
            raise heard.value
    assert exit_code_for(caught.value) == 10
    assert not [batch for batch in controller.batches if batch.HasField("end")]


# -- deadlines and the transport


def unary_methods() -> list[str]:
    service = pb.DESCRIPTOR.services_by_name["ControllerService"]
    return [method.name for method in service.methods if not method.client_streaming]


def test_every_call_but_the_report_stream_has_a_deadline(controller, options, monkeypatch, tmp_path):
    """The stream is opened by itself and has its own: an answer that is owed for too long ends it (`test_a_silent_stream_is_opened_anew`)."""
    stub_class = client_module.ControllerServiceStub
    timeouts: dict[str, set[Any]] = {}

    class Watching:
        def __init__(self, channel: Any) -> None:
            self._stub = stub_class(channel)

        def __getattr__(self, name: str) -> Any:
            method = getattr(self._stub, name)

            def called(*arguments: Any, **named: Any) -> Any:
                timeouts.setdefault(name, set()).add(named.get("timeout"))
                return method(*arguments, **named)

            return called

    monkeypatch.setattr(client_module, "ControllerServiceStub", Watching)
    controller.offer(group(1, completions=1))
    controller.no_more = True
    controller.payloads[1] = [payloads({1: 1})]
    controller.resume_state.run_uri = str(tmp_path)
    controller.commands = [train(1, {1: 1}), save(1), end(steps=1)]
    with (
        Trainer.from_env(**options(), run_directory=str(tmp_path)) as trainer,
        SyncRollout.from_env(**options()) as rollout,
    ):
        for leased in rollout.groups():
            rollout.report(leased, 0, b"p", reward=1.0, versions=0)
        trainer.resume()
        trainer.confirm(steps=0, updates=0)
        for command in trainer.commands():
            if command.is_save:
                with trainer.save(command) as saving:
                    saving.open("state.pt").write(b"state")
            else:
                trainer.complete(command, updates=len(command.payloads()))
        trainer.stop("enough")
    used = {"GetResumeState", "RegisterWorker", "LeasePrompts", "ConfirmResume", "NextCommand", "FetchPayloads"}
    assert timeouts.keys() == used | {"ReportShards", "RequestStop"}
    assert timeouts.keys() <= set(unary_methods())
    for name, found in timeouts.items():
        assert all(isinstance(timeout, float) and 0 < timeout <= 120 for timeout in found), name


def test_the_channel_pings_limits_messages_and_leaves_retries_to_the_client(controller, options, monkeypatch):
    opened = []
    channel = grpc.aio.insecure_channel

    def noting(address: str, options: Any) -> Any:
        opened.append(dict(options))
        return channel(address, options=options)

    monkeypatch.setattr(grpc.aio, "insecure_channel", noting)
    with SyncRollout.from_env(**options()):
        pass
    (found,) = opened
    assert 0 < found["grpc.keepalive_time_ms"] <= 60_000
    assert 0 < found["grpc.keepalive_timeout_ms"] <= 10_000
    # Without it a dead peer was found after a minute, whatever the keepalive timeout says.
    assert 0 < found["grpc.http2.ping_timeout_ms"] <= 10_000
    assert found["grpc.max_send_message_length"] == found["grpc.max_receive_message_length"] == QUICK.max_message_bytes
    assert found["grpc.enable_retries"] == 0


async def test_an_ack_that_comes_twice_leaves_no_answer_owed_too_early():
    owed = _Owed()
    owed.sent()
    owed.answered()
    owed.answered()
    assert owed._messages == 0
    owed.sent()
    assert (owed._messages, owed._some.is_set()) == (1, True)
    owed.answered()
    assert not owed._some.is_set()


def test_an_ack_that_comes_late_takes_nothing_back():
    window = ReportWindow(WindowLimits(batch_completions=1))
    for _ in range(3):
        window.append(RolloutItem(outcome=reports_pb2.OUTCOME_RETURNED, group=1, lease=1, mask=1))
        window.next_batch()
    window.on_ack(2)
    before = window.statistics()
    for late in (0, 1, 2):
        assert window.on_ack(late) == []
        assert window.statistics() == before
    assert window.applied == 2


def test_a_payload_that_could_not_go_out_again_is_refused_before_it_is_queued():
    """The controller would refuse the whole batch, and with it end the connection."""

    def item(*payloads: bytes) -> RolloutItem:
        return RolloutItem(
            outcome=reports_pb2.OUTCOME_COMPLETED,
            group=1,
            lease=1,
            mask=(1 << len(payloads)) - 1,
            rewards=(0.0,) * len(payloads),
            payload_kind="inline",
            payloads=payloads,
        )

    window = ReportWindow(WindowLimits(message_bytes=1 << 16))
    half = 1 << 15
    with pytest.raises(MessageTooLargeError) as caught:
        window.append(item(bytes(half + 1)))
    assert (caught.value.limit, caught.value.found) == (half, half + 1)
    assert window.statistics().appended == window.statistics().bytes == 0
    window.append(item(bytes(half)))
    window.append(item(bytes(20_000), bytes(20_000)))
    assert window.statistics().appended == 2


def test_g9_work_that_never_comes_ends_the_wait_however_often_the_controller_says_so(controller, options):
    config = dataclasses.replace(QUICK, idle_total_s=0.3, lease_wait_s=0.02)
    with (
        pytest.raises(DeadlineError, match="work from the controller"),
        SyncRollout.from_env(**options(config=config)) as rollout,
    ):
        next(rollout.groups())
    assert controller.calls["LeasePrompts"] > 3


# -- the user's loop


@pytest.fixture
def no_blocking(monkeypatch):
    """Waiting for another thread on this thread is an error, while it is armed."""
    here = threading.get_ident()
    armed = threading.Event()

    def guard(owner: Any, name: str) -> None:
        wait = getattr(owner, name)

        def guarded(self: Any, *arguments: Any, **named: Any) -> Any:
            if armed.is_set() and threading.get_ident() == here:
                done = getattr(self, "done", lambda: False)
                assert done(), f"{owner.__name__}.{name} on the user's loop"
            return wait(self, *arguments, **named)

        monkeypatch.setattr(owner, name, guarded)

    guard(concurrent.futures.Future, "result")
    guard(concurrent.futures.Future, "exception")
    guard(threading.Thread, "join")
    yield armed
    armed.clear()


async def test_the_asynchronous_face_never_waits_on_the_users_loop(controller, options, no_blocking):
    """From opening over a full window, a callback that blocks, and a silent controller to leaving: others on the loop go on."""
    config = dataclasses.replace(QUICK, window_completions=4)
    controller.weights_announced = True
    controller.weights = reports_pb2.WeightAnnouncement(version=0, handle="w")
    controller.offer(*(group(n) for n in range(1, 5)))
    loading, go_on = threading.Event(), threading.Event()

    def load(_version: int, _handle: str) -> None:
        loading.set()
        assert go_on.wait(10)

    async def turns(count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    loop.slow_callback_duration = 0.2  # information, in the log, for whoever looks
    no_blocking.set()
    async with Rollout.from_env(on_weights=load, **options(config=config)) as rollout:
        groups = rollout.groups(in_flight=4)
        first = asyncio.ensure_future(anext(groups))
        assert await asyncio.to_thread(loading.wait, 10)
        await turns(100)
        assert not first.done()
        go_on.set()
        leased = await first
        controller.silent = True
        for index in range(4):
            await rollout.report(leased, index, b"x", reward=1.0, versions=0)
        other = await anext(groups)
        waiting = asyncio.ensure_future(rollout.report(other, 0, b"x", reward=1.0, versions=0))
        await turns(100)
        assert not waiting.done()
        flushing = asyncio.ensure_future(rollout.flush())
        await turns(100)
        assert not flushing.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        controller.silent = False
        await flushing
        assert await rollout.report(other, 0, b"x", reward=1.0, versions=0)
    no_blocking.clear()
    loop.set_debug(False)


async def test_one_asynchronous_worker_holds_many_leases_at_once(controller, options):
    controller.offer(*(group(n, completions=2) for n in range(1, 301)))
    controller.no_more = True
    together = 0
    gathered = asyncio.Event()

    async def generate(rollout: Rollout, leased: Any) -> None:
        nonlocal together
        together += 1
        if together == 256:
            gathered.set()
        await gathered.wait()
        for index in reversed(leased.pending):
            await rollout.report(leased, index, b"x", reward=1.0, versions=0)

    async with Rollout.from_env(**options()) as rollout:
        tasks = [asyncio.ensure_future(generate(rollout, one)) async for one in rollout.groups(in_flight=256)]
        await asyncio.gather(*tasks)
    done: dict[int, int] = {}
    for outcome, number, _, mask in controller.rows():
        assert outcome == "COMPLETED"
        assert not done.get(number, 0) & mask
        done[number] = done.get(number, 0) | mask
    assert done == dict.fromkeys(range(1, 301), 3)


# -- leaving


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_an_exception_in_a_synchronous_loop_returns_the_leases(controller, options, error):
    controller.offer(group(1), group(2), group(3))
    with pytest.raises(error), SyncRollout.from_env(**options()) as rollout:
        groups = rollout.groups(in_flight=3)
        held = [next(groups) for _ in range(3)]
        rollout.report(held[0], 1, reward=1.0, versions=0)
        raise error
    returned = {number: mask for outcome, number, _, mask in controller.rows() if outcome == "RETURNED"}
    assert returned == {1: 0b1101, 2: 0b1111, 3: 0b1111}
    assert error.__name__ in controller.batches[-1].end.reason


async def test_a_generation_task_that_fails_or_is_cancelled_leaves_its_lease_to_the_loop_that_returns_it(
    controller, options
):
    controller.offer(group(1), group(2), group(3))

    async def generate(rollout: Rollout, leased: Any) -> None:
        await rollout.report(leased, 0, reward=1.0, versions=0)
        if leased.id == 1:
            raise ZeroDivisionError
        await asyncio.Event().wait()

    async with Rollout.from_env(**options()) as rollout:
        groups = rollout.groups(in_flight=3)
        tasks = [asyncio.ensure_future(generate(rollout, await anext(groups))) for _ in range(3)]
        with pytest.raises(ZeroDivisionError):
            await tasks[0]
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    rows = {(outcome, number): mask for outcome, number, _, mask in controller.rows()}
    assert rows == {("COMPLETED", n): 1 for n in (1, 2, 3)} | {("RETURNED", n): 0b1110 for n in (1, 2, 3)}


# -- one number


def test_a_request_for_leases_whose_deadline_passed_is_sent_again_under_its_number(controller: FakeController, options):
    config = dataclasses.replace(QUICK, call_s=0.1, lease_wait_s=0.05)
    numbers: list[int] = []
    lease = controller.LeasePrompts
    hold = threading.Event()

    async def slow(request: Any, context: Any) -> Any:
        numbers.append(request.number)
        response = await lease(request, context)
        if len(numbers) <= 2:
            # The answer is made, and comes too late.
            await asyncio.to_thread(hold.wait, 5)
        return response

    controller.stop()
    controller.LeasePrompts = slow  # type: ignore[method-assign]
    controller.start()
    controller.offer(group(1), group(2))
    controller.no_more = True
    try:
        with SyncRollout.from_env(**options(config=config)) as rollout:
            found = []
            for leased in rollout.groups(in_flight=2):
                found.append(leased.id)
                rollout.report_group(leased, rewards=[0.0] * 4)
    finally:
        hold.set()
    assert found == [1, 2]
    assert numbers[:3] == [1, 1, 1]
    assert sorted(number for _, number, _, _ in controller.rows()) == [1, 2]
