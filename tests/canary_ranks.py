"""Two ranks of a resume canary, as torchrun starts them, around a controller that rank 0 starts; and the one command that starts torchrun.

* Rank 0 is the rollout worker too, by the stubs alone: it fetches exactly what it asks for and reports when it is told to, so that what
  is outstanding at a save is not left to chance.
* Whatever hangs ends: each rank after `DEADLINE_S`, with its traces; the controller with rank 0; torchrun with its command.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Before CUDA is initialised: its matrix products are the same in every process only then.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import grpc
import torch
import torch.distributed as dist
from canary_controller import RANKS, Served, serving
from canary_learner import PARTS, Learner, differences

from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1 import reports_pb2
from cosmos_ctrl.v1.controller_service_pb2_grpc import ControllerServiceStub
from cosmos_worker.resuming import Resume
from cosmos_worker.settings import ClientConfig
from cosmos_worker.trainer import SaveWork, Trainer
from cosmos_worker.transport import duration_of

DEADLINE_S = 100.0
"""Of one phase."""
CALL_S = 20.0

SKIPPED = 77
"""Exit code where there is no such device."""

_CONFIG = ClientConfig(confirm_total_s=60.0, idle_total_s=60.0, report_s=30.0)


def expect(what: str, found: object, expected: object) -> None:
    """Raises AssertionError unless they are equal; also under ``python -O``."""
    if found != expected:
        raise AssertionError(f"{what}: expected {expected}, found {found}")


class Generation:
    """A rollout worker by the stubs alone."""

    def __init__(self, served: Served) -> None:
        self._channel = grpc.insecure_channel(served.address)
        self._stub = ControllerServiceStub(self._channel)
        self._requests = self._batches = 0
        registered = self._stub.RegisterWorker(
            pb.RegisterWorkerRequest(
                execution_id=served.execution_id,
                role=pb.ROLE_ROLLOUT,
                group="canary",
                world_size=1,
                incarnation=secrets.token_hex(16),
            ),
            timeout=CALL_S,
        )
        self._identity = pb.WorkerIdentity(execution_id=served.execution_id, session_id=registered.session_id)

    def fetch(self, prompts: int) -> list[pb.LeasedGroup]:
        """Exactly so many prompt groups."""
        self._requests += 1
        request = pb.LeasePromptsRequest(
            worker=self._identity, number=self._requests, max_groups=prompts, wait=duration_of(5.0)
        )
        groups = list(self._stub.LeasePrompts(request, timeout=CALL_S).groups)
        expect("prompts fetched", len(groups), prompts)
        return groups

    def report(self, groups: Sequence[pb.LeasedGroup]) -> None:
        """All completions of these groups."""
        self._say(
            rollouts=[
                reports_pb2.RolloutRows(
                    outcome=reports_pb2.OUTCOME_COMPLETED,
                    groups=[group.group for group in groups],
                    leases=[group.lease for group in groups],
                    masks=[mask for group in groups for mask in group.masks],
                    lowest_versions=[0 for _ in groups],
                    highest_versions=[0 for _ in groups],
                    rewards=[1.0 for group in groups for mask in group.masks for _ in range(mask.bit_count())],
                )
            ]
        )

    def leave(self) -> None:
        """Say that there is nothing more to come."""
        self._say(end=reports_pb2.EndReport(reason="done"))
        self._channel.close()

    def _say(self, **content: Any) -> None:
        self._batches += 1
        batch = reports_pb2.ReportBatch(number=self._batches, **content)
        request = pb.SubmitReportsRequest(worker=self._identity, acked_through=self._batches - 1, batch=batch)
        ack = self._stub.SubmitReports(request, timeout=CALL_S).ack
        expect("batches applied", ack.applied, self._batches)


@dataclass(frozen=True)
class Execution:
    """One execution of a run, as one rank sees it."""

    rank: int
    run: Path
    learner: Learner
    trainer: Trainer
    control: dist.ProcessGroup
    """For commands; gloo, whatever the gradients travel by."""
    generation: Generation | None
    """On rank 0."""
    saved: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The state in each checkpoint of this execution, by its step."""

    def restore(self) -> Resume:
        """Load what the execution resumes from, if anything, with every shard's stamp checked."""
        resume = self.trainer.resume()
        if resume.checkpoint:
            with self.trainer.artifacts(resume) as files:
                state = {name: torch.load(files[name], weights_only=True, map_location="cpu") for name in PARTS}
                for name in PARTS:
                    files.check_stamp(name, state[name].pop("stamp"))
            self.learner.load(state)
        return resume

    def begin(self) -> None:
        """Restore nothing, since there is nothing, and agree on that."""
        expect("what a new directory resumes from", self.restore().checkpoint, None)
        self.confirm()

    def confirm(self) -> None:
        """Say what the model counts itself, and agree."""
        self.trainer.confirm(steps=self.learner.steps, updates=self.learner.updates)

    def train_to_the_end(self, *, stop_at: int | None = None) -> list[tuple[int, list[str]]]:
        """Do what the controller says; returns each step with the prompts of this rank's share.

        Args:
            stop_at: stop after the checkpoint of that step.
        """
        done: list[tuple[int, list[str]]] = []
        for command in self.trainer.commands(process_group=self.control):
            if isinstance(command, SaveWork):
                self._save(command)
                if command.step == stop_at and self.rank == 0:
                    self.trainer.stop(f"the canary stops at step {stop_at}")
                continue
            keys = [group.prompt_key for group in command.payloads()]
            expect("whose shard this rank trains", {key.split("/")[0] for key in keys}, {f"shard{self.rank}"})
            self.learner.train(keys)
            self.trainer.complete(command, updates=1)
            expect("steps, by the model and the controller", self.learner.steps, command.step)
            done.append((command.step, keys))
        return done

    def end(self) -> str:
        """Why it ended."""
        reason = self.trainer.end_reason
        return reason.name if reason else "it has not"

    def _save(self, command: SaveWork) -> None:
        state = self.saved[command.step] = copy.deepcopy(self.learner.state())
        with self.trainer.save(command) as save:
            for name, part in state.items():
                torch.save(part | {"stamp": save.stamp.values()}, save.open(name))


@dataclass(frozen=True)
class Rank:
    """This process, one of torchrun's."""

    directory: Path
    """Of the canary."""
    rank: int
    device: torch.device
    control: dist.ProcessGroup

    @contextmanager
    def execution(self, folder: str) -> Iterator[Execution]:
        """An execution, with a model as it is at first, of the run in `folder`; its controller ends after it, as it should."""
        directory = self.directory / folder
        with contextlib.ExitStack() as closing:
            served = None
            if self.rank == 0:
                directory.mkdir(exist_ok=True)
                served = closing.enter_context(serving(directory))
            told: list[Any] = [(served.address, served.execution_id) if served else None]
            dist.broadcast_object_list(told, src=0, group=self.control)
            address, execution_id = told[0]
            learner = Learner(self.rank, self.device)
            with Trainer.from_env(
                address=address, execution_id=execution_id, artifacts=PARTS, config=_CONFIG
            ) as trainer:
                generation = Generation(served) if served else None
                yield Execution(self.rank, directory / "run", learner, trainer, self.control, generation)
                if generation:
                    generation.leave()
            if served:
                expect("the controller's exit code", served.exit_code(), 0)

    def say(self, text: str) -> None:
        """Print, on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def keep(self, name: str, value: Mapping[str, Any]) -> None:
        """Write `value` beside the runs, for another phase's `kept`."""
        torch.save(value, self.directory / f"{name}-{self.rank}.pt")

    def kept(self, name: str) -> dict[str, Any]:
        """What this rank's `keep` of an earlier phase wrote."""
        path = self.directory / f"{name}-{self.rank}.pt"
        if not path.exists():
            raise AssertionError(f"{path} is not there: run the phase save in this directory first")
        value: dict[str, Any] = torch.load(path, weights_only=True)
        return value

    def expect_bits(self, what: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        """Raises AssertionError unless both states are the same to the bit."""
        if where := differences(expected, found):
            raise AssertionError(f"rank {self.rank}: {what} differs in {', '.join(where[:8])}")


@contextmanager
def joined(directory: Path, device: str) -> Iterator[Rank]:
    """This process in its place among the others."""
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    place, backend = torch.device("cpu"), "gloo"
    if device == "cuda":
        count = torch.cuda.device_count()
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % count)
        torch.cuda.set_device(place)
        # NCCL refuses two ranks on one GPU.
        backend = "nccl" if count >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    try:
        expect("ranks", dist.get_world_size(), RANKS)
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
        yield Rank(directory, dist.get_rank(), place, control)
    finally:
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


Phase = Callable[[Rank], None]


def main(script: str, phases: Mapping[str, Phase], *, account: str) -> int:
    """A canary's command line: a phase, under torchrun; or ``both``, which is all of them, each in fresh processes."""
    parser = argparse.ArgumentParser(description=account)
    parser.add_argument("phase", choices=[*phases, "both"], help="a phase, under torchrun; or all, from first to last")
    parser.add_argument("directory", type=Path, help="of the run; new for the first phase")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("skipped: there is no CUDA device here", file=sys.stderr)
        return SKIPPED
    directory: Path = options.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    if options.phase != "both":
        if "LOCAL_RANK" not in os.environ:
            parser.error(f"phase {options.phase} runs under torchrun: torchrun --standalone --nproc-per-node={RANKS} …")
        with joined(directory, options.device) as rank:
            phases[options.phase](rank)
        return 0
    for name in phases:
        if code := torchrun(script, name, directory, options.device):
            print(f"{Path(script).name}: phase {name} FAILED with exit code {code}", file=sys.stderr)
            return code
    print(f"{Path(script).name}: passed")
    return 0


def torchrun(script: str, phase: str, directory: Path, device: str) -> int:
    """One phase in fresh processes; returns torchrun's exit code."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"),
            *(script, phase, str(directory), "--device", device),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        return process.wait(DEADLINE_S + 20)
    except BaseException:
        # It ends its ranks, which are in sessions of their own, before it ends.
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
