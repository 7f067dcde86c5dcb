"""The main job with real processes, killed for real. What it skipped is counted from its journals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from cosmos_ctrl.audit import audit
from cosmos_ctrl.v1 import checkpoint_pb2, reports_pb2
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
    assert report["remaining_completions"] == 0
    assert report["reward_last"] > report["reward_first"]
    assert (tmp_path / "runs/demo/report.png").stat().st_size > 10_000
    # Of its requests, whichever came first: a report, which is counted, or one for more work.
    assert "ended with code 10: it was refused as stale" in done.stdout

    # A finished run that is started again does nothing, and says so.
    before = sorted((tmp_path / "runs/demo/checkpoints").iterdir())
    again = run(tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "nothing to do" in again.stdout
    assert sorted((tmp_path / "runs/demo/checkpoints").iterdir()) == before
    assert report_of(tmp_path)["completed_training_steps"] == report["completed_training_steps"]


def test_g1_killed_ranks_a_killed_controller_and_a_requested_stop_skip_nothing(tmp_path: Path) -> None:
    port = _free_port()
    environment = {**os.environ, "COSMOS_CTRL__SERVER__PORT": str(port)}
    with (tmp_path / "out").open("w") as out:
        launcher = subprocess.Popen(
            run_command("--no-crash"), cwd=tmp_path, env=environment, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        stub = ControllerServiceStub(channel)
        state = _wait_for(stub, launcher, lambda s: s.execution_number == 1 and s.completed_training_steps >= 12)
        assert state.checkpoint.completed_training_steps == 8
        ranks = [w for w in stub.ListWorkers(pb.ListWorkersRequest(), timeout=5).workers if w.role == pb.ROLE_TRAINER]
        os.kill(ranks[1].pid, signal.SIGKILL)

        second = _wait_for(stub, launcher, lambda s: s.execution_number == 2 and s.completed_training_steps >= 20)
        assert second.checkpoint.completed_training_steps >= 16
        [controller] = _controllers(tmp_path)
        os.kill(controller, signal.SIGKILL)

        third = _wait_for(stub, launcher, lambda s: s.execution_number == 3 and s.completed_training_steps >= 26)
        _ask_everything(stub, third)
        assert launcher.wait(120) == 0, (tmp_path / "out").read_text()
        channel.close()
    finally:
        if launcher.poll() is None:
            launcher.send_signal(signal.SIGTERM)
            launcher.send_signal(signal.SIGTERM)
            launcher.wait(60)
    report = audit(tmp_path / "runs/demo")
    assert [execution.number for execution in report.executions] == [1, 2, 3]
    assert report.skipped == 0
    assert report.remaining_completions > 0
    # It was stopped in the middle, at a step that no interval had saved, and saved that very step.
    assert report.checkpoints[-1].step == report.completed_training_steps
    for execution in report.executions:
        assert execution.repeated <= execution.window


def _ask_everything(stub: ControllerServiceStub, state: pb.RunState) -> None:
    """The RPCs that nobody else calls in the main job, and last a stop."""
    resumed = stub.GetResumeState(pb.GetResumeStateRequest(), timeout=5)
    assert resumed.execution_number == 3
    assert resumed.metadata.completed_training_steps >= 16
    listed = stub.ListCheckpoints(pb.ListCheckpointsRequest(), timeout=5).checkpoints
    assert {found.execution_number for found in listed} >= {1, 2}
    explained = stub.ExplainResume(pb.ExplainResumeRequest(), timeout=5).candidates
    assert [c.checkpoint.checkpoint_id for c in explained if c.verdict == checkpoint_pb2.VERDICT_CHOSEN] == [
        listed[0].checkpoint_id
    ]
    # A worker of its own, that only lives and ends: unary reports.
    execution = resumed.header.execution_id
    registered = stub.RegisterWorker(
        pb.RegisterWorkerRequest(
            execution_id=execution,
            role=pb.ROLE_ROLLOUT,
            group="visitors",
            world_size=1,
            incarnation="0" * 32,
        ),
        timeout=5,
    )
    worker = pb.WorkerIdentity(execution_id=execution, session_id=registered.session_id)
    assert stub.SubmitReports(pb.SubmitReportsRequest(worker=worker), timeout=5).ack.applied == 0
    batch = reports_pb2.ReportBatch(number=1, end=reports_pb2.EndReport(reason="seen enough"))
    assert stub.SubmitReports(pb.SubmitReportsRequest(worker=worker, batch=batch), timeout=5).ack.applied == 1
    operator = pb.WorkerIdentity(execution_id=execution)
    stopped = stub.RequestStop(pb.RequestStopRequest(worker=operator, reason="enough for a test"), timeout=5)
    assert stopped.phase in (pb.PHASE_DRAINING, pb.PHASE_ENDED)
    assert stopped.reason == "enough for a test"


def test_it_learns_from_a_prompts_file_of_the_users_own(tmp_path: Path) -> None:
    tasks = [{"prompt": f"{a} + {b} =", "answer": str(a + b), "level": "easy"} for a in range(10) for b in range(10)]
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    done = run(
        tmp_path,
        "--no-crash",
        "--prompts",
        str(prompts),
        COSMOS_CTRL__SAMPLING__EPOCHS="2",
        COSMOS_CTRL__APPLICATION__WARM_START_MAX_STEPS="25",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = report_of(tmp_path)
    assert len(report["executions"]) == 1
    assert (report["skipped"], report["remaining_completions"]) == (0, 0)
    issued = [
        json.loads(line)
        for line in (tmp_path / "runs/demo/executions/00000001.jsonl").read_text().splitlines()
        if '"issue"' in line
    ]
    assert len({(event["epoch"], event["key"]) for event in issued}) == 2 * len(tasks)


def test_a_prompts_file_that_cannot_be_used_is_refused_by_line_and_nothing_is_removed(tmp_path: Path) -> None:
    prompts = tmp_path / "mine.jsonl"
    kept = tmp_path / "runs/demo/checkpoints/kept"
    kept.mkdir(parents=True)
    prompts.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n{"prompt": "1 + 2 ="}\n')
    done = run(tmp_path, "--fresh", "--prompts", str(prompts))
    assert done.returncode == 2
    assert kept.exists()
    assert f"{prompts}:2" in done.stderr
    assert "answer" in done.stderr


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


def _controllers(directory: Path) -> list[int]:
    """Controllers that run in `directory`. Linux."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text().split("\0")
            here = (process / "cwd").readlink() == directory
        except OSError:
            continue
        if here and "serve" in words:
            found.append(int(process.name))
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_fresh_removes_what_runs_wrote_and_nothing_else(tmp_path: Path) -> None:
    directory = tmp_path / "runs/demo"
    for name in ("executions/00000001.json", "checkpoints/old/manifest.json", "notes/mine.txt"):
        (directory / name).parent.mkdir(parents=True)
        (directory / name).write_text("{}")
    # A step limit of zero: there is nothing to do, so nothing is trained.
    done = run(tmp_path, "--fresh", COSMOS_CTRL__TRAIN__MAX_STEPS="0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing to do: at step 0, the limit is 0" in done.stdout
    assert not (directory / "checkpoints").exists()
    written = {path.name for path in (directory / "executions").glob("*.json")}
    assert written == {"00000001.json", "00000001.resumed.json"}
    assert (directory / "notes/mine.txt").exists()


def test_the_launcher_ends_with_the_controllers_code(tmp_path: Path) -> None:
    done = run(tmp_path, COSMOS_CTRL__TRAIN__RESUME='"checkpoints/none"')
    assert done.returncode == 13, done.stdout + done.stderr
    assert "no such checkpoint" in done.stdout
