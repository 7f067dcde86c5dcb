"""The main job with real processes, killed for real. What it skipped is counted from its journals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from cosmos_ctrl.audit import audit
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1.controller_service_pb2_grpc import ControllerServiceStub

pytestmark = pytest.mark.timeout(400)

REPORT_KEYS = {
    "executions",
    "skipped",
    "repeated",
    "redone",
    "window_at_checkpoint",
    "live_cursor_would_skip",
    "stale_reports_refused",
    "completed_training_steps",
    "completed_optimizer_updates",
    "remaining_completions",
    "reward_first",
    "reward_last",
    "checkpoints",
}


def run_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "cosmos_ctrl.cli", "run", *arguments]


def run(directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        run_command(*arguments),
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def report_of(directory: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((directory / "runs/demo/report.json").read_text())
    return report


def test_g1_g2_g5_killed_in_the_middle_of_a_step_and_resumed(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = report_of(tmp_path)
    assert report.keys() >= REPORT_KEYS
    first, second = report["executions"]
    assert (first["number"], first["resumed_from"], second["number"]) == (1, None, 2)
    assert second["resumed_from"] in [c["id"] for c in report["checkpoints"] if c["execution"] == 1]
    assert report["skipped"] == 0
    assert report["repeated"] <= report["window_at_checkpoint"]
    assert report["live_cursor_would_skip"] > 0
    assert report["stale_reports_refused"] >= 1
    assert report["remaining_completions"] == 0
    assert report["reward_last"] > report["reward_first"]
    assert (tmp_path / "runs/demo/report.png").stat().st_size > 10_000
    assert "ended with code 10: it was refused as stale" in done.stdout

    # A finished run that is started again does nothing, and says so.
    before = sorted((tmp_path / "runs/demo/checkpoints").iterdir())
    again = run(tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "nothing to do" in again.stdout
    assert sorted((tmp_path / "runs/demo/checkpoints").iterdir()) == before
    assert report_of(tmp_path)["completed_training_steps"] == report["completed_training_steps"]


def test_g1_a_trainer_rank_and_then_the_controller_alone_are_killed(tmp_path: Path) -> None:
    port = _free_port()
    environment = {**os.environ, "COSMOS_CTRL__SERVER__PORT": str(port)}
    with (tmp_path / "out").open("w") as out:
        launcher = subprocess.Popen(
            run_command("--no-crash"), cwd=tmp_path, env=environment, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        stub = ControllerServiceStub(channel)
        state = _wait_for(stub, launcher, lambda s: s.execution_number == 1 and s.completed_training_steps >= 6)
        ranks = [w for w in stub.ListWorkers(pb.ListWorkersRequest(), timeout=5).workers if w.role == pb.ROLE_TRAINER]
        os.kill(ranks[1].pid, signal.SIGKILL)
        _wait_for(
            stub,
            launcher,
            lambda s: (
                s.execution_number == 2 and s.completed_training_steps > state.checkpoint.completed_training_steps + 2
            ),
        )
        [controller] = _processes("cosmos_ctrl.cli", "serve", str(port), "--ready-file")
        os.kill(controller, signal.SIGKILL)
        assert launcher.wait(200) == 0, (tmp_path / "out").read_text()
        channel.close()
    finally:
        if launcher.poll() is None:
            launcher.send_signal(signal.SIGTERM)
            launcher.send_signal(signal.SIGTERM)
            launcher.wait(60)
    report = audit(tmp_path / "runs/demo")
    assert [execution.number for execution in report.executions] == [1, 2, 3]
    assert report.skipped == 0
    assert report.remaining_completions == 0
    for execution in report.executions:
        assert execution.repeated <= execution.window


def _wait_for(
    stub: ControllerServiceStub, launcher: subprocess.Popen[bytes], fits: Callable[[pb.RunState], bool]
) -> pb.RunState:
    """Follow the run through restarts of its controller until a state fits."""
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        assert launcher.poll() is None, "the launcher ended"
        try:
            for response in stub.WatchRun(pb.WatchRunRequest(), timeout=10, wait_for_ready=True):
                if fits(response.state):
                    return response.state
        except grpc.RpcError:
            continue
    raise AssertionError("no state fitted in time")


def _processes(*words: str) -> list[int]:
    """Processes whose command line and environment hold all words. Linux."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            text = (directory / "cmdline").read_text() + (directory / "environ").read_text()
        except OSError:
            continue
        if all(word in text for word in words) and "serve" in (directory / "cmdline").read_text():
            found.append(int(directory.name))
    return found


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
