"""A client of another version plays a whole run with today's controller: every frozen one, and one that is newer than this."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from controller_process import serving, write_config
from versions import FROZEN, SERVICE, filled, newer, older
from whole_run import Client, WholeRun

from cosmos_ctrl.v1 import controller_service_pb2

RPCS = {method.name for method in controller_service_pb2.DESCRIPTOR.services_by_name["ControllerService"].methods}


def play(client: Client, directory: Path) -> WholeRun:
    run = WholeRun(client, directory / "run")
    end = run.play()
    assert end.completed_training_steps == 4
    assert end.reason == controller_service_pb2.END_REASON_BUDGET_EXHAUSTED
    assert len(run.trained) == len(set(run.trained)) == 8, "every prompt is trained, once"
    return run


@pytest.mark.parametrize("frozen", FROZEN, ids=lambda path: path.stem)
def test_a_client_of_a_released_version_plays_a_whole_run(tmp_path: Path, frozen: Path) -> None:
    with serving(write_config(tmp_path)) as controller:
        play(Client(controller.address, older(frozen)), tmp_path)
        assert controller.exit_code() == 0, controller.log
        manifests = controller.manifests()
    assert [manifest["metadata"]["remaining_completions"] for manifest in manifests] == [12, 8, 4, 0]


def test_a_newer_client_plays_a_whole_run_and_its_unknown_fields_change_nothing(tmp_path: Path) -> None:
    sent = []

    def finish(message):
        sent.append(message.DESCRIPTOR.name)
        return filled(message)

    with serving(write_config(tmp_path)) as controller:
        play(Client(controller.address, newer(), finish), tmp_path)
        assert controller.exit_code() == 0, controller.log
        manifest = json.dumps(controller.manifests())
    assert "does not know" not in manifest
    assert {f"{rpc}Request" for rpc in RPCS} <= set(sent)


def test_something_is_frozen_and_has_what_today_has() -> None:
    assert FROZEN
    for frozen in FROZEN:
        assert older(frozen).rpcs.keys() <= RPCS
        assert next(iter(older(frozen).rpcs.values())).containing_service.full_name == SERVICE
