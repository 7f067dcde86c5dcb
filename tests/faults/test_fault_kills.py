"""Processes killed, stopped and replaced in the middle of what they say."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from controller_process import DEADLINE_S
from controller_process import refused as refusal
from fault_model import Model, settled_by_journal, state_of
from fault_process import WorkerProcess
from fault_proxy import Proxy
from fault_scene import Reporter, scene
from fault_worker import FULL_BATCH

from cosmos_ctrl.audit import audit
from cosmos_ctrl.core.errors import StaleExecutionError
from cosmos_ctrl.v1 import controller_service_pb2 as pb

MIB = 1 << 20

#: Groups that may be out or ready at once: so many, and a worker leases none beyond those that a test knows of.
FOUR = {"rollout": {"max_outstanding_groups": 4}}


def until(condition: Callable[[], bool]) -> None:
    """Returns once the condition holds, within the deadline."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_g6_a_worker_killed_in_the_middle_of_a_batch_has_said_nothing_of_it(tmp_path: Path) -> None:
    with scene(tmp_path, 24, **FOUR) as house, Proxy(house.controller.address) as proxy:
        environ = house.environ(proxy.address)
        with WorkerProcess(environ) as worker:
            house.model.leased(worker.do("lease 4"))
            house.model.reported(worker.do("report 1 10"))
            worker.do("flush")
            house.model.check(house.controller)
            proxy.stall("up", MIB)
            worker.do(f"report 2 {MIB}")
            proxy.until(lambda: proxy.stalled)
            house.model.check(house.controller)
            worker.kill()
        proxy.drop()
        proxy.release("up")
        # Dead or not, its leases are its own until it is replaced, or was silent for too long.
        house.model.check(house.controller)
        lost = [group for group, where in house.model.where.items() if where == "leased"]
        assert len(lost) == 3
        with WorkerProcess(environ) as again:
            house.model.given_back(lost)
            house.model.check(house.controller)
            leased = again.do("lease 3")
            assert leased == lost
            house.model.leased(leased)
            house.model.reported(again.do(f"report 3 {MIB}"))
            again.do("flush")
            house.model.check(house.controller)
            again.tell("leave")
            assert again.exit_code() == (0, "")
        house.generate_and_train(4)
        house.check_audit()


def test_g6_a_worker_killed_before_its_ack_has_said_it_and_its_successor_does_not_say_it_again(tmp_path: Path) -> None:
    with scene(tmp_path, 24, **FOUR) as house, Proxy(house.controller.address) as proxy:
        environ = house.environ(proxy.address)
        with WorkerProcess(environ) as worker:
            house.model.leased(worker.do("lease 4"))
            proxy.hold("down")
            house.model.reported(worker.do(f"report 3 {FULL_BATCH}"))
            until(lambda: state_of(house.controller).groups_ready == 3)
            house.model.check(house.controller)
            worker.kill()
        proxy.drop()
        proxy.release("down")
        (lost,) = [group for group, where in house.model.where.items() if where == "leased"]
        with WorkerProcess(environ) as again:
            house.model.given_back([lost])
            leased = again.do("lease 1")
            assert leased == [lost]
            house.model.leased(leased)
            house.model.reported(again.do("report 1 100"))
            again.tell("leave")
            assert again.exit_code() == (0, "")
        house.model.check(house.controller)
        house.generate_and_train(4)
        house.check_audit()


def test_g5_a_stopped_worker_that_wakes_after_it_was_replaced_ends_with_code_10_and_evicts_nobody(
    tmp_path: Path,
) -> None:
    sections = {"rollout": {"max_outstanding_groups": 3}, "train": {"groups_per_step": 2}}
    with scene(tmp_path, 24, **sections) as house, WorkerProcess(house.environ()) as old:
        house.model.leased(held := old.do("lease 3"))
        house.model.reported(old.do("report 1 10"))
        old.do("flush")
        old.signal(signal.SIGSTOP)
        with WorkerProcess(house.environ()) as new:
            house.model.given_back(held[1:])
            leased = new.do("lease 2")
            assert leased == held[1:]
            house.model.leased(leased)
            house.model.check(house.controller)
            # It has the result ready when it wakes, under a lease that it takes for its own.
            old.tell("report 2 10")
            old.tell("flush")
            old.signal(signal.SIGCONT)
            code, said = old.exit_code()
            assert code == 10, said
            assert "taken over by a newer process" in said
            house.model.check(house.controller)
            house.model.reported(new.do("report 2 10"))
            new.do("flush")
            house.model.check(house.controller)
            new.tell("leave")
            assert new.exit_code() == (0, "")
        house.generate_and_train(3)
        house.check_audit()


def test_g1_g5_a_controller_killed_with_reports_unacknowledged_loses_nothing_and_refuses_its_old_worker(
    tmp_path: Path,
) -> None:
    sections = {
        "checkpoints": {"every_steps": 1},
        "train": {"groups_per_step": 2},
        "rollout": {"max_outstanding_groups": 3},
    }
    with scene(tmp_path, 24, **sections) as first, Proxy(first.controller.address) as proxy:
        reporter = Reporter(first)
        reporter.report(reporter.lease(2))
        assert [first.step(), first.step()] == ["train", "save"]
        reporter.end()
        with WorkerProcess(first.environ(proxy.address)) as worker:
            first.model.leased(worker.do("lease 3"))
            proxy.hold("down")
            first.model.reported(worker.do(f"report 3 {FULL_BATCH}"))
            until(lambda: state_of(first.controller).groups_ready == 3)
            first.model.check(first.controller)
            first.controller.signal(signal.SIGKILL)
            first.controller.exit_code()
            with scene(tmp_path, 24, **sections) as second:
                second.model = Model(24 - first.model.trained)
                second.model.steps = 1
                second.command = 1
                second.model.check(second.controller)
                proxy.retarget(second.controller.address)
                proxy.drop()
                proxy.release("down")
                code, said = worker.exit_code()
                assert code == 10, said
                # By its report or by its request for leases, whichever came first; and this is a report in any case.
                late = pb.SubmitReportsRequest(worker=reporter.identity, batch={"number": 3})
                refused = state_of(second.controller).stale_refused
                assert refused >= 1
                error = refusal(lambda: second.controller.stub.SubmitReports(late, timeout=DEADLINE_S))
                assert isinstance(error, StaleExecutionError)
                second.model.stale_refused = refused + 1
                second.model.check(second.controller)
                second.generate_and_train(3)
        whole = [(group, 3, "trained") for group in first.trained]
        assert sorted(settled_by_journal(tmp_path / "run", 1)) == sorted(whole)
        whole = [(group, 3, "trained") for group in second.trained]
        assert sorted(settled_by_journal(tmp_path / "run", 2)) == sorted(whole)
        assert first.model.trained + second.model.trained == 24
        report = audit(tmp_path / "run")
        assert (report.skipped, report.repeated, report.redone) == (0, 0, 0)
        assert report.remaining_completions == 0
        assert 1 <= report.stale_reports_refused <= second.model.stale_refused
