"""Settings, patience, payloads, exit codes, and who the other side is."""

# ruff: noqa: PT012  # what is raised comes out of the worker's with statement, body and all
from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys

import grpc
import pytest
from fake_controller import QUICK, FakeController, end, group, train

from cosmos_ctrl.core.errors import (
    ERRORS_BY_REASON,
    ExecutionEndedError,
    MalformedError,
    NotRegisteredError,
    RestoringError,
    StaleExecutionError,
    SupersededError,
)
from cosmos_worker.errors import (
    AgreementTimeoutError,
    ControllerUnreachableError,
    DeadlineError,
    ProtocolError,
    exit_code_for,
)
from cosmos_worker.faults import Fault, Patience, fault_of
from cosmos_worker.payloads import Handle, decode_payload, encode_payload
from cosmos_worker.rollout import Rollout, SyncRollout
from cosmos_worker.settings import ClientConfig, Endpoint, WorkerPlace
from cosmos_worker.trainer import Trainer


def test_arguments_win_over_the_environment():
    environ = {
        "COSMOS_CTRL_ADDRESS": "env:1",
        "COSMOS_CTRL_EXECUTION_ID": "env-id",
        "COSMOS_CTRL_REPLICA": "4",
        "RANK": "3",
        "WORLD_SIZE": "8",
    }
    assert Endpoint.find(environ=environ) == Endpoint(address="env:1", execution_id="env-id")
    assert Endpoint.find(address="a:2", execution_id="", environ=environ) == Endpoint(address="a:2", execution_id="")
    place = Trainer.from_env(environ=environ)._connection.place
    assert place == WorkerPlace(role="trainer", group="policy", replica=0, rank=3, world_size=8, dp_rank=3, dp_size=8)
    place = Trainer.from_env(environ=environ, group="critic", rank=1, dp=(0, 2))._connection.place
    assert place == WorkerPlace(role="trainer", group="critic", rank=1, world_size=8, dp_rank=0, dp_size=2)
    place = SyncRollout.from_env(environ=environ, world_size=4)._connection.place
    assert place == WorkerPlace(role="rollout", group="rollout", replica=4, rank=3, world_size=4)


@pytest.mark.parametrize(
    ("environ", "what"),
    [
        ({}, "COSMOS_CTRL_ADDRESS"),
        ({"COSMOS_CTRL_ADDRESS": "a:1", "RANK": "x"}, "RANK='x'"),
        ({"COSMOS_CTRL_ADDRESS": "a:1", "RANK": "-1"}, "RANK='-1'"),
        ({"COSMOS_CTRL_ADDRESS": "a:1", "RANK": "2", "WORLD_SIZE": "2"}, "rank is 2"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(environ, what):
    with pytest.raises(ValueError, match=what):
        Trainer.from_env(environ=environ)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StaleExecutionError(stated="a", current="b"), 10),
        (SupersededError(place="p", incarnation="i"), 10),
        (ExecutionEndedError(end_reason="FAILURE", message=""), 11),
        (ExecutionEndedError(end_reason="BUDGET_EXHAUSTED", message=""), 0),
        (ControllerUnreachableError("a:1", 60.0), 11),
        (MalformedError(what="x"), 11),
        (ValueError("x"), 11),
    ],
)
def test_exit_codes(error, code):
    assert exit_code_for(error) == code


def test_errors_survive_the_way_to_a_sibling():
    for error in (
        DeadlineError("x", 1.0, "y"),
        AgreementTimeoutError(("a/1",), 2.0),
        ControllerUnreachableError("a:1", 3.0),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize(
    ("value", "kind", "codec"),
    [
        (b"x", "inline", "bytes"),
        ({"a": [1, 2.5, None, "ü"]}, "inline", "json"),
        ([1, 2], "inline", "json"),
        (Handle("s3://x"), "handle", "bytes"),
        (None, "none", ""),
    ],
)
def test_payloads_come_back_as_they_were(value, kind, codec):
    encoded = encode_payload(value)
    assert (encoded.kind, encoded.codec) == (kind, codec)
    if kind == "inline":
        assert decode_payload(encoded.data, encoded.codec) == value


def test_a_codec_of_the_applications_own_is_left_alone():
    assert encode_payload(b"x", "grpo").codec == "grpo"
    assert decode_payload(b"x", "grpo") == b"x"
    with pytest.raises(TypeError, match="grpo"):
        encode_payload([1], "grpo")
    with pytest.raises(ValueError, match="JSON"):
        encode_payload(float("nan"))


class Call(grpc.RpcError):
    """A failed call of the library."""

    def __init__(self, code, details=""):
        self._code, self._details = code, details

    def code(self):
        return self._code

    def details(self):
        return self._details

    def trailing_metadata(self):
        return ()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "unreachable"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "unreachable"),
        (grpc.StatusCode.CANCELLED, "unreachable"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "final"),
        (grpc.StatusCode.UNKNOWN, "final"),
        (grpc.StatusCode.INTERNAL, "final"),
        (grpc.StatusCode.UNIMPLEMENTED, "final"),
        (grpc.StatusCode.FAILED_PRECONDITION, "final"),
    ],
)
def test_the_librarys_own_errors(code, kind):
    fault = fault_of(Call(code, "text"))
    assert fault.kind == kind
    assert isinstance(fault.error, ConnectionError if kind == "unreachable" else ProtocolError)


def test_g9_every_domain_error_is_classified():
    from cosmos_worker.faults import _kind_of

    later = {"RESTORING", "AWAITING_AGREEMENT", "DRAINING", "WINDOW_FULL", "WORKER_LIMIT"}
    for reason, cls in ERRORS_BY_REASON.items():
        expected = "later" if reason in later else "register" if cls is NotRegisteredError else "final"
        assert _kind_of(cls.__new__(cls)) == expected


def test_patience_backs_off_with_jitter_and_ends():
    now = [0.0]
    config = ClientConfig(backoff_first_s=1.0, backoff_max_s=4.0, connect_total_s=10.0, not_ready_total_s=20.0)
    patience = Patience(config, "a:1", clock=lambda: now[0], jitter=lambda: 1.0)
    gone, later = Fault("unreachable", ConnectionError("x")), Fault("later", RestoringError())
    assert [patience.pause(gone) for _ in range(4)] == [1.0, 2.0, 4.0, 4.0]
    now[0] = 9.0
    # An answer of any kind shows that the controller lives.
    assert patience.pause(later) == 4.0
    now[0] = 12.0
    assert patience.pause(gone) == 4.0
    now[0] = 22.0
    with pytest.raises(ControllerUnreachableError, match="a:1"):
        patience.pause(gone)
    patience.reset()
    assert patience.pause(gone) == 1.0
    assert patience.pause(later) == 2.0
    now[0] = 42.0
    with pytest.raises(DeadlineError, match="still finding"):
        patience.pause(later)
    with pytest.raises(MalformedError):
        patience.pause(Fault("final", MalformedError(what="x")))
    floor = Patience(dataclasses.replace(config, backoff_first_s=0.001), "a", jitter=lambda: 0.0)
    assert floor.pause(Fault("later", RestoringError())) == 0.2


def test_another_controller_at_the_same_address_is_noticed_by_its_header(controller, options):
    """GetResumeState is not fenced: only the header tells."""
    with pytest.raises(StaleExecutionError) as caught, Trainer.from_env(**options()) as trainer:
        controller.change(lambda: setattr(controller, "execution_id", "exec-2"))
        trainer.resume()
    assert (caught.value.stated, caught.value.current) == ("exec-1", "exec-2")


def test_g11_a_legacy_controller_takes_any_id():
    controller = FakeController("").start()
    try:
        controller.offer(group(1))
        controller.no_more = True
        environ = {"COSMOS_CTRL_ADDRESS": controller.address, "COSMOS_CTRL_EXECUTION_ID": "saved"}
        with SyncRollout.from_env(environ=environ, config=QUICK) as rollout:
            assert rollout.execution_id == ""
            for leased in rollout.groups():
                rollout.report_group(leased, rewards=[0.0] * 4)
        assert controller.rows() == [("COMPLETED", 1, 101, 0b1111)]
    finally:
        controller.close()


def test_a_controller_that_restores_is_waited_for(controller, options):
    for name in ("RegisterWorker", "GetResumeState", "NextCommand"):
        controller.errors[name].extend([RestoringError(), RestoringError()])
    controller.commands = [end()]
    with Trainer.from_env(**options()) as trainer:
        trainer.resume()
        trainer.confirm(steps=0, updates=0)
        assert list(trainer.commands()) == []


def test_later_is_no_command_yet_and_ends_like_one(controller, options):
    """A rank that is told "later" lets its siblings go on waiting with it, and ends with the wait's own name."""
    controller.errors["NextCommand"].extend([RestoringError()] * 1000)
    config = dataclasses.replace(QUICK, poll_s=0.1, idle_total_s=0.5)
    with pytest.raises(DeadlineError, match="command 1"), Trainer.from_env(**options(config=config)) as trainer:
        trainer.resume()
        trainer.confirm(steps=0, updates=0)
        list(trainer.commands())


def test_an_error_of_the_library_is_no_domain_error(controller, options):
    controller.errors["GetResumeState"].append(grpc.StatusCode.RESOURCE_EXHAUSTED)
    with pytest.raises(ProtocolError, match="RESOURCE_EXHAUSTED"), Trainer.from_env(**options()) as trainer:
        trainer.resume()


def test_heartbeats_keep_an_idle_worker_alive(controller, options):
    controller.lease_time_s = 0.15
    with Trainer.from_env(**options()):
        controller.until(lambda: controller.heartbeats >= 3)
    assert [batch.number for batch in controller.batches] == [1]
    assert controller.batches[0].end.reason == "left"


def test_a_silent_stream_is_opened_anew(controller, options):
    controller.commands = [train(1, {1: 1}), end(steps=1)]
    controller.silent = True
    config = dataclasses.replace(QUICK, silence_s=0.1)
    with Trainer.from_env(**options(config=config)) as trainer:
        trainer.resume()
        trainer.confirm(steps=0, updates=0)
        trainer.announce_weights(0, "w")
        controller.until(lambda: controller.calls["StreamReports"] >= 2)
        controller.silent = False
        for command in trainer.commands():
            trainer.complete(command, updates=1)
    assert [b.number for b in controller.batches] == list(range(1, len(controller.batches) + 1))
    assert [w.version for b in controller.batches for w in b.weights] == [0]


async def test_a_worker_is_entered_once(controller, options):
    rollout = Rollout.from_env(**options())
    async with rollout:
        pass
    with pytest.raises(RuntimeError, match="make a new one"):
        async with rollout:
            pass


_ENDINGS = """
import atexit, os, sys
from cosmos_worker import cli

atexit.register(os.abort)  # as gloo's threads may, once the interpreter goes down


def refuse(code):
    sys.exit(code)


def fail():
    raise ZeroDivisionError("the application's own")


for main in (lambda: 2, lambda: refuse(10), lambda: refuse("no code"), fail):
    if (child := os.fork()) == 0:
        cli.main = main
        print("said")
        cli.run()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


def test_a_worker_process_ends_with_its_code_whatever_the_interpreters_exit_does():
    done = subprocess.run([sys.executable, "-c", _ENDINGS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["said", "2", "said", "10", "said", "1", "said", "1"]
    assert "ZeroDivisionError: the application's own" in done.stderr
