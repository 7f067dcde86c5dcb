"""Today's Python workers with a newer controller: what they do not know in its answers is ignored, or read as the rules say."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from controller_process import serving, write_config
from newer_controller import NEWER, NewerController, Refused
from versions import ADDED_MEMBER, ADDED_VALUE, enums_of

from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_worker.errors import ProtocolError
from cosmos_worker.local.view import _table
from cosmos_worker.rollout import SyncRollout
from cosmos_worker.settings import ClientConfig
from cosmos_worker.trainer import Trainer
from cosmos_worker.transport import name_of

DEADLINE_S = 40.0
CONFIG = ClientConfig(poll_s=0.5, lease_wait_s=0.3, connect_total_s=5.0, idle_total_s=30.0, report_s=20.0)


class Newness:
    """What the newer controller says beside today's."""

    def __init__(self) -> None:
        self.said: Counter[str] = Counter()

    def on_request(self, rpc: str, message: Any) -> None:
        if rpc == "StreamReports":
            # Today's controller has not sent the notices that are added below.
            self.said["confirmed"] = max(self.said["confirmed"], message.notices_through)
            message.notices_through = 0
        if rpc == "LeasePrompts" and not self.said["later"]:
            self.said["later"] += 1
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "REBALANCING", later=True)

    def on_response(self, rpc: str, message: Any) -> None:
        if rpc == "GetResumeState":
            message.phase = ADDED_VALUE
        if rpc == "StreamReports" and not message.ack.notices:
            refused = {"batch": 1, "reason": ADDED_VALUE, "group": 1, "mask": 1}
            message.ack.notices.add(number=1, refused=refused)
            setattr(message.ack.notices.add(number=2), ADDED_MEMBER[0], b"a kind of notice")
        if rpc == "ReportShards":
            self.said[name_of(pb.SaveState, message.state)] += 1
            message.state = ADDED_VALUE
        if rpc == "NextCommand" and message.WhichOneof("command") == "end":
            message.end.reason = ADDED_VALUE


def train(environ: dict[str, str]) -> tuple[list[int], list[str], str]:
    """Steps, states of saves, and the end."""
    steps, states = [], []
    with Trainer.from_env(group="policy", environ=environ, config=CONFIG) as trainer:
        assert trainer.resume().checkpoint is None
        trainer.confirm(steps=0, updates=0)
        trainer.announce_weights(0, "w0")
        for command in trainer.commands():
            if command.is_save:
                with trainer.save(command) as save:
                    save.open("state.pt").write(b"state")
                states.append(save.state)
                continue
            assert [one.payload for group in command.payloads() for one in group.completions] == [{"n": 1}] * 4
            trainer.complete(command, updates=1)
            steps.append(command.step)
            trainer.announce_weights(command.step, f"w{command.step}")
    assert trainer.end_reason is not None
    return steps, states, trainer.end_reason.name


def generate(environ: dict[str, str]) -> list[str]:
    """Keys of the prompts."""
    keys = []
    with SyncRollout.from_env(environ=environ, config=CONFIG, on_weights=lambda *_: None) as rollout:
        for group in rollout.groups(in_flight=2):
            keys.append(group.prompt_key)
            rollout.report_group(group, rewards=[0.5, 0.5], payloads=[{"n": 1}] * 2, versions=0)
    return keys


def test_workers_of_today_play_a_whole_run_with_a_newer_controller(tmp_path: Path) -> None:
    newness = Newness()
    config = write_config(tmp_path, train={"trainers": {"policy": 1}}, rollout={"announces_weights": True})
    with (
        serving(config) as controller,
        NewerController(controller.address, on_request=newness.on_request, on_response=newness.on_response) as proxy,
        ThreadPoolExecutor(2) as pool,
    ):
        environ = {"COSMOS_CTRL_ADDRESS": proxy.address, "COSMOS_CTRL_EXECUTION_ID": controller.execution_id}
        trainer, rollout = pool.submit(train, environ), pool.submit(generate, environ)
        keys = rollout.result(DEADLINE_S)
        assert len(keys) == len(set(keys)) == 8
        steps, states, end = trainer.result(DEADLINE_S)
        assert controller.exit_code() == 0, controller.log
        last = controller.manifests()[-1]["metadata"]
    assert steps == [1, 2, 3, 4]
    assert set(states) == {f"UNKNOWN_{ADDED_VALUE}"}
    assert newness.said["COMMITTED"] == 4, json.dumps(newness.said)
    assert end == f"UNKNOWN_{ADDED_VALUE}", "an end that is no failure"
    assert last["remaining_completions"] == 0
    # Both added notices were taken and confirmed: the refusal for a reason of its own, and the kind that is not known.
    assert newness.said["confirmed"] == 2
    assert newness.said["later"] == 1


def test_an_unknown_reason_without_retry_info_is_raised(tmp_path: Path) -> None:
    def on_request(rpc: str, _message: Any) -> None:
        if rpc == "ConfirmResume":
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, "QUOTA_SPENT", later=False)

    with (
        serving(write_config(tmp_path, train={"trainers": {"policy": 1}})) as controller,
        NewerController(controller.address, on_request=on_request, on_response=lambda *_: None) as proxy,
        Trainer.from_env(group="policy", environ={"COSMOS_CTRL_ADDRESS": proxy.address}, config=CONFIG) as trainer,
    ):
        trainer.resume()
        with pytest.raises(ProtocolError, match="QUOTA_SPENT"):
            trainer.confirm(steps=0, updates=0)


def test_every_value_of_every_enum_has_a_name_and_an_unknown_one_too() -> None:
    for enum in enums_of(NEWER):
        if not hasattr(pb, enum.name):
            continue
        wrapper = getattr(pb, enum.name)
        names = [name_of(wrapper, value) for value in wrapper.values()]
        assert "UNSPECIFIED" in names
        assert name_of(wrapper, ADDED_VALUE) == f"UNKNOWN_{ADDED_VALUE}"


def test_the_view_of_a_run_shows_a_phase_that_it_does_not_know() -> None:
    from rich.console import Console

    console = Console(record=True, width=120)
    console.print(_table(pb.RunState(phase=ADDED_VALUE), [], []))
    assert f"unknown {ADDED_VALUE}" in console.export_text()
