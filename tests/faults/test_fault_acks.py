"""Acks that come twice, late, out of their order, or after the client has given them up: each report is applied once, and heard once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import Proxy
from fault_scene import Reporter, Scene, scene

import cosmos_worker.client as client_module
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_worker.rollout import LeasedGroup, SyncRollout
from cosmos_worker.settings import ClientConfig

CONFIG = ClientConfig(lease_wait_s=0.05, backoff_first_s=0.01, backoff_max_s=0.05, batch_bytes=400)

#: Groups that one worker holds in these tests; there is room for no more, so it leases no more.
HELD = 8


@pytest.fixture
def house(tmp_path: Path) -> Iterator[Scene]:
    with scene(tmp_path, 64, rollout={"max_outstanding_groups": HELD}) as opened:
        yield opened


class StrangeCall:
    """A report stream whose acks come more than once: each twice, and after each one the first of all again."""

    heard = 0

    def __init__(self, call: Any) -> None:
        self._call = call
        self._first: Any = None
        self._again: list[Any] = []

    async def read(self) -> Any:
        if self._again:
            type(self).heard += 1
            return self._again.pop()
        response = await self._call.read()
        if isinstance(response, pb.StreamReportsResponse):
            self._first = self._first or response
            self._again = [self._first, response]
        return response

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


def lease_all(rollout: SyncRollout, house: Scene) -> list[LeasedGroup]:
    groups = rollout.groups(in_flight=HELD)
    held = [next(groups) for _ in range(HELD)]
    house.model.leased(group.group_id for group in held)
    return held


def report(rollout: SyncRollout, group: LeasedGroup, house: Scene) -> None:
    """One completion a report, and a report a batch."""
    for index in group.pending:
        rollout.report(group, index, b"x" * 400, reward=1.0)
    house.expected[group.group_id] = [b"x" * 400] * len(group.pending)


def finish(house: Scene) -> None:
    house.generate_and_train(HELD)
    house.check_audit()
    for group, payloads in house.expected.items():
        assert house.payloads[group] == payloads


def test_g6_acks_that_come_twice_and_late_are_heard_once(house: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    opens = client_module.Connection.open_reports
    monkeypatch.setattr(client_module.Connection, "open_reports", lambda connection: StrangeCall(opens(connection)))
    StrangeCall.heard = 0
    with SyncRollout.from_env(environ=house.environ(), config=CONFIG) as rollout:
        held = lease_all(rollout, house)
        for group in held[:4]:
            report(rollout, group, house)
        rollout.flush()
        house.model.reported(group.group_id for group in held[:4])
        house.model.check(house.controller)
        for group in held[4:]:
            rollout.give_back(group)
        rollout.flush()
        house.model.given_back(group.group_id for group in held[4:])
    house.model.check(house.controller)
    assert StrangeCall.heard > HELD
    finish(house)


def test_g6_acks_held_back_until_the_stream_was_given_up_apply_every_report_once(house: Scene) -> None:
    """The same batches go out on stream after stream, while the controller has answered them all."""
    config = ClientConfig(
        lease_wait_s=0.05, backoff_first_s=0.01, backoff_max_s=0.02, batch_bytes=400, silence_s=0.1, call_s=0.5
    )
    with Proxy(house.controller.address) as proxy:
        with SyncRollout.from_env(environ=house.environ(proxy.address), config=config) as rollout:
            held = lease_all(rollout, house)
            streams = count_streams(rollout)
            proxy.hold("down")
            for group in held:
                report(rollout, group, house)
            assert streams.wait_for(4)
            assert rollout.statistics().reports.acknowledged == 0
            proxy.release("down")
            rollout.flush()
            house.model.reported(group.group_id for group in held)
            house.model.check(house.controller)
        house.model.check(house.controller)
        finish(house)


class Count:
    """How often something happened, on any thread."""

    def __init__(self) -> None:
        self._changed, self._count = threading.Condition(), 0

    def add(self) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait_for(self, count: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._count >= count, 20)


def count_streams(rollout: SyncRollout) -> Count:
    """Counts the report streams that are opened from now on."""
    count, connection = Count(), rollout._connection
    opens = connection.open_reports

    def counted() -> Any:
        count.add()
        return opens()

    connection.open_reports = counted  # type: ignore[method-assign]
    return count


def test_a_reply_to_a_request_for_leases_that_comes_too_late_is_asked_for_again_under_its_number(house: Scene) -> None:
    config = ClientConfig(lease_wait_s=0.05, backoff_first_s=0.01, backoff_max_s=0.02, call_s=0.2)
    reporter = Reporter(house, replica=1)
    others = reporter.lease(HELD)
    with Proxy(house.controller.address) as proxy:
        with SyncRollout.from_env(environ=house.environ(proxy.address), config=config) as rollout:
            calls, stub = Count(), rollout._connection.stub
            leasing = stub.LeasePrompts
            numbers: list[int] = []

            def counted(request: pb.LeasePromptsRequest, timeout: float) -> Any:
                numbers.append(request.number)
                calls.add()
                return leasing(request, timeout=timeout)

            stub.LeasePrompts = counted
            groups = rollout.groups(in_flight=2)
            taken = threading.Thread(target=lambda: found.extend(next(groups) for _ in range(2)), daemon=True)
            found: list[LeasedGroup] = []
            taken.start()
            assert calls.wait_for(2)
            proxy.hold("down")
            reporter.submit(rollouts=[returned(others)])
            house.model.given_back(group.group for group in others)
            sent = len(numbers)
            assert calls.wait_for(sent + 3)
            proxy.release("down")
            taken.join(20)
            assert len(found) == 2
            house.model.leased(group.group_id for group in found)
            house.model.check(house.controller)
            assert len(set(numbers[sent:])) <= 3
            for group in found:
                rollout.give_back(group)
            rollout.flush()
        for group in found:
            house.model.given_back([group.group_id])
        house.model.check(house.controller)
    reporter.end()
    finish(house)


def returned(groups: list[pb.LeasedGroup]) -> dict[str, Any]:
    """Rows that give whole groups back."""
    return {
        "outcome": 4,
        "groups": [group.group for group in groups],
        "leases": [group.lease for group in groups],
        "masks": [group.masks[0] for group in groups],
    }
