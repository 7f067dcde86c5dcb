"""Whole runs in a bucket: a real controller, real worker processes, killed and started again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from checkpoint_helpers import REPOSITORY
from object_faults import faulty
from object_servers import Moto, s3_environment, s3_store

from cosmos_ctrl.audit import audit
from cosmos_ctrl.checkpoints.damage import damage_records
from cosmos_ctrl.checkpoints.discovery import list_checkpoints
from cosmos_ctrl.checkpoints.stores import Store
from cosmos_ctrl.checkpoints.window import RECORD_NAME

DEADLINE_S = 60.0
STEPS = 6


class Execution:
    """One controller over ``s3://BUCKET/run`` and its workers, all processes."""

    def __init__(self, directory: Path, address: str, bucket: str, **environment: str) -> None:
        self.directory = directory
        self.environment = (
            {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
            | s3_environment(address)
            | {"PYTHONPATH": str(REPOSITORY), "GRPC_VERBOSITY": "NONE"}
            | environment
        )
        prompts = directory / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"p{number}"}) + "\n" for number in range(3 * STEPS)))
        config = directory / "run.toml"
        config.write_text(
            f"""
[run]
name = "test"
directory = "s3://{bucket}/run"
journal = true
[server]
linger_s = 3.0
[train]
groups_per_step = 3
trainers = {{ policy = 2 }}
[rollout]
n_generation = 4
max_outstanding_groups = 6
[sampling]
prompts = {str(prompts)!r}
epochs = 1
[replay]
reissue_recorded = true
[checkpoints]
every_steps = 1
"""
        )
        self.ready_file = directory / f"ready-{os.urandom(4).hex()}.json"
        self.processes: list[subprocess.Popen[str]] = []
        self.controller = self.start(
            "-m", "cosmos_ctrl.cli", "serve", "--config", str(config), "--ready-file", str(self.ready_file)
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.directory,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.processes.append(process)
        return process

    def workers(self) -> list[subprocess.Popen[str]]:
        """Two trainer ranks and a rollout worker, once the controller is there."""
        until = time.monotonic() + DEADLINE_S
        while not self.ready_file.exists():
            if self.controller.poll() is not None:
                pytest.fail(self.controller.communicate()[1])
            assert time.monotonic() < until
            time.sleep(0.02)
        ready = json.loads(self.ready_file.read_text())
        self.environment["COSMOS_CTRL_ADDRESS"] = ready["address"]
        self.environment["COSMOS_CTRL_EXECUTION_ID"] = ready["execution_id"]
        script = str(Path(__file__).with_name("object_workers.py"))
        return [self.start(script, *role) for role in (("trainer", "0"), ("trainer", "1"), ("rollout",))]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@contextmanager
def execution(directory: Path, address: str, bucket: str, **environment: str) -> Iterator[Execution]:
    one = Execution(directory, address, bucket, **environment)
    try:
        yield one
    finally:
        one.end()


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, errors = process.communicate(timeout=DEADLINE_S)
    assert out, errors
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    return answer


def wait_until(holds: Callable[[], bool], one: Execution) -> None:
    until = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < until
        assert one.controller.poll() is None, one.controller.communicate()[1]
        time.sleep(0.02)


def steps_of(run: Store) -> list[tuple[int, int]]:
    """Execution and step of every committed checkpoint, oldest first."""
    return sorted(found.manifest.order for found in list_checkpoints(run))


def killed_after_two_checkpoints(directory: Path, address: str, bucket: str, run: Store) -> list[tuple[int, int]]:
    """What an execution had committed when all its processes were killed."""
    with execution(directory, address, bucket) as first:
        first.workers()
        wait_until(lambda: len(steps_of(run)) >= 2, first)
    return steps_of(run)


def test_g1_g4_a_run_in_a_bucket_is_killed_and_resumed(s3: Moto, tmp_path: Path) -> None:
    bucket = s3.bucket()
    run = s3_store(s3.address, bucket)
    saved = killed_after_two_checkpoints(tmp_path, s3.address, bucket, run)
    newest = list_checkpoints(run)[0]
    todo = list(range(saved[-1][1] + 1, STEPS + 1))
    with execution(tmp_path, s3.address, bucket) as second:
        *trainers, rollout = second.workers()
        for answer in map(told, trainers):
            assert answer == {"steps": todo, "end": "BUDGET_EXHAUSTED", "resumed": newest.path}
        assert "groups" in told(rollout)
        assert second.controller.wait(DEADLINE_S) == 0
    assert steps_of(run) == saved + [(2, step) for step in todo]
    assert set(list_checkpoints(run)[0].manifest.artifacts) >= {"policy-0/state.pt", "policy-1/state.pt"}
    assert any(RECORD_NAME in found.manifest.artifacts for found in list_checkpoints(run))
    first_of_second = next(found.manifest for found in list_checkpoints(run) if found.manifest.order == (2, todo[0]))
    assert first_of_second.parent
    assert first_of_second.parent.manifest_digest == newest.manifest_digest
    assert run.list("executions") == tuple(f"0000000{n}{what}.json" for n in (1, 2) for what in ("", ".resumed"))
    assert run.list("") == ("checkpoints/", "executions/")
    # Only the journals are here.
    here = sorted(path.relative_to(tmp_path) for path in (tmp_path / "runs").rglob("*") if path.is_file())
    assert here == [Path(f"runs/test/executions/0000000{number}.jsonl") for number in (1, 2)]
    assert audit(tmp_path / "runs/test").skipped == 0


def test_damage_in_a_bucket_is_told_recorded_and_passed_over_only_if_chosen(s3: Moto, tmp_path: Path) -> None:
    bucket = s3.bucket()
    run = s3_store(s3.address, bucket)
    killed_after_two_checkpoints(tmp_path, s3.address, bucket, run)
    newest, previous = list_checkpoints(run)[:2]
    name = f"{newest.path}/policy-1/state.pt"
    run.delete(name)
    run.put_if_absent(name, bytes(newest.manifest.artifacts["policy-1/state.pt"].size_bytes))
    with execution(tmp_path, s3.address, bucket) as second:
        answer = told(second.workers()[1])
        assert answer["error"] == "CheckpointDamagedError", answer
        assert "policy-1/state.pt" in answer["text"]
        assert second.controller.wait(DEADLINE_S) == 15
    assert list(damage_records(run)) == [newest.path]
    with execution(tmp_path, s3.address, bucket) as third:
        assert third.controller.wait(DEADLINE_S) == 13
        assert "policy-1/state.pt" in third.controller.communicate()[1]
    with execution(tmp_path, s3.address, bucket, COSMOS_CTRL__CHECKPOINTS__ON_CORRUPT="previous") as fourth:
        *trainers, _ = fourth.workers()
        assert {told(trainer)["resumed"] for trainer in trainers} == {previous.path}


def test_a_controller_refuses_a_bucket_that_would_replace_and_claims_nothing(s3: Moto, tmp_path: Path) -> None:
    bucket = s3.bucket()
    with faulty(s3.address) as proxy:
        proxy.add("hide the condition", times=100)
        with execution(tmp_path, proxy.address, bucket) as one:
            assert one.controller.wait(DEADLINE_S) == 13
            assert "honours If-None-Match" in one.controller.communicate()[1]
    assert s3_store(s3.address, bucket, prefix="").scan("") == ()


def test_a_controller_says_that_its_bucket_is_not_there(s3: Moto, tmp_path: Path) -> None:
    with execution(tmp_path, s3.address, "no-such-bucket") as one:
        assert one.controller.wait(DEADLINE_S) == 13
        assert "no bucket or container no-such-bucket" in one.controller.communicate()[1]


def test_a_location_that_cannot_be_is_refused_with_its_key(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "COSMOS_CTRL__RUN__DIRECTORY": "ftp://host/run"}
    done = subprocess.run(
        [sys.executable, "-m", "cosmos_ctrl.cli", "serve"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2
    assert "run.directory" in done.stderr
    assert "unknown scheme ftp://" in done.stderr
