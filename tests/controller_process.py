"""A real `cosmos-ctrl serve` process, and workers that speak to it through the synchronous stubs."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from cosmos_ctrl.core.errors import ControlError
from cosmos_ctrl.service.status import from_rpc_error
from cosmos_ctrl.v1 import checkpoint_pb2, reports_pb2
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1.controller_service_pb2_grpc import ControllerServiceStub

DEADLINE_S = 20.0

SETTINGS: dict[str, dict[str, Any]] = {
    "run": {"name": "test", "journal": True},
    "server": {"port": 0, "linger_s": 5.0},
    "train": {"groups_per_step": 2, "trainers": {"policy": 2}, "stop_grace_s": 20.0},
    "rollout": {"n_generation": 2, "announces_weights": False},
    "sampling": {"completions": 16, "seed": 1},
    "checkpoints": {"every_steps": 1},
    "workers": {"session_ttl_s": 30.0},
}


def write_config(directory: Path, **overrides: dict[str, Any]) -> Path:
    """A configuration file for a run in `directory`; None takes a setting out."""
    directory.mkdir(parents=True, exist_ok=True)
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n} + {n}", "answer": str(2 * n)}) + "\n" for n in range(8)))
    sections = {name: dict(values) for name, values in SETTINGS.items()}
    sections["run"]["directory"] = str(directory / "run")
    sections["sampling"]["prompts"] = str(prompts)
    for name, values in overrides.items():
        sections.setdefault(name, {}).update(values)
        sections[name] = {key: value for key, value in sections[name].items() if value is not None}
    lines = []
    for name, values in sections.items():
        lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in values.items()), ""]
    path = directory / "config.toml"
    path.write_text("\n".join(lines))
    return path


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


class ControllerProcess:
    """One `cosmos-ctrl serve`."""

    def __init__(self, config: Path, *, optimized: bool = False) -> None:
        self.run = config.parent / "run"
        self._number = secrets.token_hex(4)
        self.ready_file = config.parent / f"ready-{self._number}.json"
        self._log = (config.parent / f"log-{self._number}.txt").open("w+")
        flags = ["-O"] if optimized else []
        environment = os.environ | {"GRPC_VERBOSITY": "NONE"}
        self.process = subprocess.Popen(
            [
                *(sys.executable, *flags, "-m", "cosmos_ctrl.cli", "serve"),
                *("--config", str(config), "--ready-file", str(self.ready_file)),
            ],
            stdout=self._log,
            stderr=self._log,
            env=environment,
        )
        self.channel: grpc.Channel | None = None
        self.execution_id = ""

    @property
    def log(self) -> str:
        self._log.flush()
        return Path(self._log.name).read_text()

    def wait_until_ready(self) -> dict[str, Any]:
        until = time.monotonic() + DEADLINE_S
        while not self.ready_file.exists():
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < until, self.log
            time.sleep(0.01)
        ready: dict[str, Any] = json.loads(self.ready_file.read_text())
        self.address, self.execution_id = ready["address"], ready["execution_id"]
        self.channel = grpc.insecure_channel(self.address, [("grpc.max_receive_message_length", 64 << 20)])
        self.stub = ControllerServiceStub(self.channel)
        return ready

    def exit_code(self) -> int:
        """Of the process, which ends by itself in time."""
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it does not end:\n{self.log}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def state(self) -> pb.GetResumeStateResponse:
        return self.stub.GetResumeState(pb.GetResumeStateRequest(), timeout=DEADLINE_S)

    def manifests(self) -> list[dict[str, Any]]:
        found = [json.loads(path.read_text()) for path in self.run.glob("checkpoints/*/manifest.json")]
        found = [manifest for manifest in found if "swept_by_execution" not in manifest]
        return sorted(found, key=lambda m: (m["execution_number"], m["metadata"]["completed_training_steps"]))

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._log.close()


@contextmanager
def serving(config: Path, **options: Any) -> Iterator[ControllerProcess]:
    """A controller that is ready; gone at the end."""
    process = ControllerProcess(config, **options)
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.close()


@contextmanager
def started(config: Path, **options: Any) -> Iterator[ControllerProcess]:
    """As `serving`, without waiting for it."""
    process = ControllerProcess(config, **options)
    try:
        yield process
    finally:
        process.close()


def refused(call: Any) -> ControlError:
    """The domain error that `call` is refused with."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error = from_rpc_error(caught.value)
    assert error is not None, caught.value
    return error


class Worker:
    """One process life, by the stubs alone."""

    def __init__(
        self,
        controller: ControllerProcess,
        role: pb.Role.ValueType,
        rank: int = 0,
        world: int = 1,
        *,
        replica: int = 0,
    ) -> None:
        self.controller, self.stub, self.rank, self.role = controller, controller.stub, rank, role
        self.batches = self.requests = 0
        group = "policy" if role == pb.ROLE_TRAINER else "pool"
        response = self.stub.RegisterWorker(
            pb.RegisterWorkerRequest(
                execution_id=controller.execution_id,
                role=role,
                group=group,
                replica=replica,
                rank=rank,
                world_size=world,
                incarnation=secrets.token_hex(16),
            ),
            timeout=DEADLINE_S,
        )
        self.identity = pb.WorkerIdentity(execution_id=response.header.execution_id, session_id=response.session_id)

    def confirmation(self, **overrides: Any) -> pb.ConfirmResumeRequest:
        state = self.controller.state()
        values: dict[str, Any] = {"worker": self.identity, "artifact_names": [f"policy-{self.rank}.pt"]}
        if state.HasField("metadata"):
            values |= {
                "metadata": state.metadata,
                "manifest_digest": state.manifest_digest,
                "completed_training_steps": state.metadata.completed_training_steps,
                "completed_optimizer_updates": state.metadata.completed_optimizer_updates,
            }
        else:
            values["fresh"] = pb.FreshStart()
        return pb.ConfirmResumeRequest(**values | overrides)

    def confirm(self, **overrides: Any) -> pb.ConfirmResumeResponse:
        return self.stub.ConfirmResume(self.confirmation(**overrides), timeout=DEADLINE_S)

    def submit(self, **content: Any) -> reports_pb2.ReportAck:
        self.batches += 1
        request = pb.SubmitReportsRequest(
            worker=self.identity, acked_through=self.batches - 1, batch={"number": self.batches, **content}
        )
        return self.stub.SubmitReports(request, timeout=DEADLINE_S).ack

    def rollout(self, most: int) -> list[str]:
        """Leases groups and completes them; returns the keys of their prompts."""
        self.requests += 1
        request = pb.LeasePromptsRequest(
            worker=self.identity, number=self.requests, max_groups=most, wait={"seconds": 5}
        )
        groups = self.stub.LeasePrompts(request, timeout=DEADLINE_S).groups
        rows = reports_pb2.RolloutRows(
            outcome=reports_pb2.OUTCOME_COMPLETED,
            groups=[group.group for group in groups],
            leases=[group.lease for group in groups],
            masks=[group.masks[0] for group in groups],
            lowest_versions=[self.controller.state().metadata.completed_training_steps] * len(groups),
            highest_versions=[self.controller.state().metadata.completed_training_steps] * len(groups),
            rewards=[0.5] * sum(group.masks[0].bit_count() for group in groups),
        )
        self.submit(rollouts=[rows])
        return [group.prompt_key for group in groups]

    def next(self, number: int) -> pb.NextCommandResponse:
        request = pb.NextCommandRequest(worker=self.identity, number=number, wait={"seconds": 10})
        return self.stub.NextCommand(request, timeout=DEADLINE_S)

    def complete(self, number: int, train: pb.TrainCommand) -> None:
        report = reports_pb2.CompletionReport(command=number, completed_training_step=train.step, optimizer_updates=1)
        if self.rank == 0:
            report.rows.add(
                disposition=reports_pb2.DISPOSITION_TRAINED, groups=train.groups, words=train.words, masks=train.masks
            )
        self.submit(completions=[report])

    def shards(self, number: int, save: pb.SaveCommand) -> pb.ReportShardsRequest:
        """Receipts of this rank's artifact, which is written."""
        path = self.controller.run / save.path / f"policy-{self.rank}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = f"rank {self.rank} at step {save.completed_training_steps}".encode()
        path.write_bytes(content)
        receipt = checkpoint_pb2.ShardReceipt(
            name=path.name,
            size_bytes=len(content),
            digest=f"sha256:{hashlib.sha256(content).hexdigest()}",
            completed_training_steps=save.completed_training_steps,
            completed_optimizer_updates=save.completed_optimizer_updates,
            rank=self.rank,
            execution_number=save.execution_number,
            execution_id=self.identity.execution_id,
            checkpoint_id=save.checkpoint_id,
        )
        return pb.ReportShardsRequest(worker=self.identity, command=number, receipts={"receipts": [receipt]})

    def save(self, number: int, save: pb.SaveCommand) -> pb.ReportShardsResponse:
        return self.stub.ReportShards(self.shards(number, save), timeout=DEADLINE_S)

    def end(self) -> None:
        self.submit(end=reports_pb2.EndReport(reason="done"))


class Workers:
    """Two trainer ranks and a rollout worker of one execution, that do what they are told."""

    def __init__(self, controller: ControllerProcess) -> None:
        self.controller = controller
        self.trainers = [Worker(controller, pb.ROLE_TRAINER, rank, 2) for rank in range(2)]
        self.rollout = Worker(controller, pb.ROLE_ROLLOUT)
        self.number = 1
        self.keys: list[str] = []
        for trainer in self.trainers:
            trainer.confirm()

    def step(self) -> None:
        """Generates what a step needs and trains it."""
        self.keys += self.rollout.rollout(2)
        command = self.trainers[0].next(self.number)
        assert command.WhichOneof("command") == "train", command
        assert self.trainers[1].next(self.number).train.groups == command.train.groups
        for trainer in self.trainers:
            trainer.complete(self.number, command.train)
        self.number += 1

    def save(self) -> pb.SaveCommand:
        """Does the SAVE that is due."""
        command = self.trainers[0].next(self.number)
        assert command.WhichOneof("command") == "save", command
        states = [trainer.save(self.number, command.save).state for trainer in self.trainers]
        assert states == [pb.SAVE_STATE_PENDING, pb.SAVE_STATE_COMMITTED]
        self.number += 1
        return command.save

    def to_the_end(self) -> pb.EndCommand:
        """Whatever is told, until END."""
        while True:
            command = self.trainers[0].next(self.number)
            kind = command.WhichOneof("command")
            if kind == "end":
                self.leave()
                return command.end
            if kind == "save":
                self.save()
            elif kind == "train":
                for trainer in self.trainers:
                    trainer.complete(self.number, command.train)
                self.number += 1
            else:
                raise AssertionError("no command came in time")

    def leave(self) -> None:
        """Everyone says that it has heard of the end."""
        for worker in (*self.trainers, self.rollout):
            worker.end()


def run_to_the_end(config: Path, steps: int) -> Sequence[str]:
    """A whole execution of `steps` steps with a checkpoint after each; returns the prompts' keys."""
    with serving(config) as controller:
        workers = Workers(controller)
        for step in range(steps):
            workers.step()
            if step < steps - 1:
                workers.save()
        workers.to_the_end()
        assert controller.exit_code() == 0, controller.log
        return workers.keys
