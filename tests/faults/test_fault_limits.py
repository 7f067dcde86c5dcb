"""What is said has limits in both directions, however little the operator allows."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from controller_process import DEADLINE_S, refused
from fault_scene import Reporter, completed, scene

from cosmos_ctrl.core.errors import MalformedError
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1 import reports_pb2


def test_g10_an_ack_with_more_to_tell_than_a_message_holds_tells_it_in_parts(tmp_path: Path) -> None:
    rollout = {"n_generation": 1, "max_outstanding_groups": 3000}
    with scene(tmp_path, 3000, server={"max_message_bytes": 1 << 16}, rollout=rollout) as house:
        house.model.size = 1
        reporter = Reporter(house)
        groups = []
        while len(groups) < 1500:
            groups += reporter.lease(100)
        for part in (groups[:750], groups[750:]):
            reporter.report(part)
        for part in (groups[:750], groups[750:]):
            ack = reporter.submit(rollouts=[completed(part)])
            house.model.lease_lost += len(part)
        told: list[int] = []
        while ack.notices:
            assert ack.notices[0].number == len(told) + 1
            told += [notice.refused.group for notice in ack.notices]
            request = pb.SubmitReportsRequest(
                worker=reporter.identity, acked_through=reporter.batches, notices_through=len(told)
            )
            ack = reporter.stub.SubmitReports(request, timeout=DEADLINE_S).ack
        assert told == [group.group for group in groups]
        house.model.check(house.controller)


def test_g10_a_name_that_is_kept_and_listed_is_short(tmp_path: Path) -> None:
    with scene(tmp_path, 16) as house:
        reporter = Reporter(house)
        long = reports_pb2.Metric(name="x" * 129)
        assert isinstance(refused(lambda: reporter.submit(metrics=[long])), MalformedError)
        for name in ({"host": "h" * 257}, {"group": "g" * 257}, {"incarnation": "f" * 257}):
            stated = {"group": "pool", "incarnation": "f" * 32} | name
            request = pb.RegisterWorkerRequest(
                execution_id=house.controller.execution_id, role=pb.ROLE_ROLLOUT, replica=3, world_size=1, **stated
            )
            register = house.controller.stub.RegisterWorker
            assert isinstance(refused(partial(register, request, timeout=DEADLINE_S)), MalformedError)
        house.model.check(house.controller)
