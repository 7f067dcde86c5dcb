"""A real controller behind a real gRPC server on loopback, and workers that know nothing but the stubs.

* The core's clock is turned by hand and ticks when a test says so; calls wait on events and deadlines, never on sleeps.
* `House.snapshot` is everything that a refused request must leave as it was.
* Whatever a test provokes: an RPC is refused only with what its comment in the proto says.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest
from documented import Ear, documented
from google.protobuf import duration_pb2

from cosmos_ctrl.checkpoints.claims import claim_execution
from cosmos_ctrl.checkpoints.compatibility import Topology
from cosmos_ctrl.checkpoints.discovery import discover
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.core.agreement import Resumed
from cosmos_ctrl.core.controller import Controller
from cosmos_ctrl.core.errors import ControlError
from cosmos_ctrl.core.execution import ExecutionIdentity
from cosmos_ctrl.core.policy import RunPolicy
from cosmos_ctrl.core.samplers import SeekableSampler
from cosmos_ctrl.core.sampling import Prompt, Sampling
from cosmos_ctrl.service.guard import Guard
from cosmos_ctrl.service.runtime import RunInfo, Runtime
from cosmos_ctrl.service.servicer import ControllerServicer
from cosmos_ctrl.service.status import from_rpc_error
from cosmos_ctrl.v1 import checkpoint_pb2, reports_pb2
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1.controller_service_pb2_grpc import ControllerServiceStub, add_ControllerServiceServicer_to_server

#: Longest any wait of a test may take, in seconds.
DEADLINE_S = 10.0

SERVICE = pb.DESCRIPTOR.services_by_name["ControllerService"].full_name

T = TypeVar("T")


async def soon(awaitable: Awaitable[T]) -> T:
    """The result, within the deadline."""
    return await asyncio.wait_for(awaitable, DEADLINE_S)


async def refusal(awaitable: Awaitable[Any]) -> ControlError:
    """The domain error that the call is refused with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await soon(awaitable)
    error = from_rpc_error(caught.value)
    assert error is not None, caught.value
    return error


async def until(condition: Callable[[], bool]) -> None:
    """Returns once the condition holds, within the deadline."""

    async def poll() -> None:
        while not condition():  # noqa: ASYNC110 - what is looked at has no event
            await asyncio.sleep(0.001)

    await soon(poll())


def seconds(value: float) -> duration_pb2.Duration:
    return duration_pb2.Duration(seconds=int(value), nanos=int(value % 1 * 1e9))


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class LoadState:
    """An adapter over ``load_state_dict``."""

    def load_metadata(self, config: Any) -> None:
        raise NotImplementedError

    def restore_sampler(self, sampler: Any, metadata: Any) -> None:
        sampler.load_state_dict(metadata.sampler_state)


class House:
    """One execution: core, runtime, servicer, server, and a channel to it."""

    def __init__(
        self,
        run: Path,
        *,
        legacy: bool = False,
        prompts: int = 16,
        n_generation: int = 2,
        prompt_bytes: int = 0,
        ranks: int = 2,
        attach: bool = True,
        resume: bool = True,
        **policy: Any,
    ) -> None:
        self.run, self.clock, self.ranks, self._attach = run, Clock(), ranks, attach
        self.journal: list[dict[str, Any]] = []
        self.store = None if legacy else LocalStore(run)
        topology = Topology({"policy": {"world_size": ranks}})
        identity = ExecutionIdentity(0, "")
        resumed: Resumed | None = None
        if self.store is not None:
            execution_id = secrets.token_hex(16)
            identity = ExecutionIdentity(claim_execution(self.store, execution_id=execution_id, note={}), execution_id)
            found = (
                discover(self.store, compatibility={}, on_corrupt="error", topology=topology).chosen if resume else None
            )
            if found is not None:
                resumed = Resumed(
                    metadata=found.manifest.metadata,
                    manifest_digest=found.manifest_digest,
                    repeat_bound_completions=found.manifest.repeat_bound_completions,
                    horizon_training_steps=found.manifest.horizon_training_steps,
                    application_note=found.manifest.application_note,
                )
        payload = b"p" * prompt_bytes if prompt_bytes else None
        sampling = Sampling(
            SeekableSampler(prompts, seed=3),
            prompt_of=lambda index: Prompt(f"prompt-{index}", "test", payload, "raw" if payload else ""),
            completions_per_prompt=n_generation,
        )
        budget = prompts * n_generation
        start = sampling.start(budget) if resumed is None else sampling.restore(LoadState(), resumed.metadata)
        ids = itertools.count(1)
        values: dict[str, Any] = {"trainer_groups": (("policy", ranks),), "groups_per_step": 2}
        self.core = Controller(
            RunPolicy(**values | policy),
            identity,
            sampling,
            start,
            resumed,
            clock=self.clock,
            new_id=lambda: f"{identity.number:04x}{next(ids):028x}",
            record=lambda event, **values: self.journal.append({"event": event, **values}),
        )
        info = RunInfo(
            name="test",
            uri=str(run),
            sampling_owner="sampler",
            compatibility={},
            topology=topology,
            on_corrupt="error",
            max_record_bytes=1 << 20,
        )
        self.runtime = Runtime(self.core, info, self.store)
        self.servicer = ControllerServicer()

    async def open(self) -> None:
        if self._attach:
            self.servicer.attach(self.runtime)
        self.ear = Ear()
        self.server = grpc.aio.server(interceptors=[self.ear, Guard(SERVICE)], options=[("grpc.so_reuseport", 0)])
        add_ControllerServiceServicer_to_server(self.servicer, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(self.address)
        self.stub = ControllerServiceStub(self.channel)

    async def close(self) -> None:
        await self.channel.close()
        await self.server.stop(None)
        await soon(self.runtime.finish_effects())
        undocumented = {(rpc, reason) for rpc, reason in self.ear.heard if reason not in documented()[rpc]}
        assert not undocumented, "the comments of these RPCs do not say that they may answer so"

    # -- what tests turn and read

    def pass_time(self, seconds: float) -> None:
        """The core's clock goes on, and the core sees it."""
        self.clock.now += seconds
        self.runtime.controller.tick()
        self.runtime.settle()

    @property
    def waiting(self) -> int:
        """Calls that wait for a change."""
        return self.runtime.waiting

    async def until_waiting(self, calls: int) -> None:
        """Returns once so many calls wait for a change."""
        await until(lambda: self.waiting >= calls)

    def snapshot(self) -> Any:
        """Everything that a refused request leaves as it was; the refusal counter apart."""
        kept = [event for event in self.journal if event["event"] != "stale_refused"]
        files = {
            str(path.relative_to(self.run)): path.read_bytes() for path in sorted(self.run.rglob("*")) if path.is_file()
        }
        revisions = self.runtime.revisions
        runtime = (revisions.current, len(revisions._waiters), len(self.runtime._tasks), self.runtime.superseded)
        return deep(self.core), deep(kept), files, runtime

    # -- shortcuts through the wire

    async def trainers(self, *, confirm: bool = True) -> list[Worker]:
        """Every trainer rank, registered."""
        workers = [Worker(self, pb.ROLE_TRAINER, rank=rank, world=self.ranks) for rank in range(self.ranks)]
        for worker in workers:
            await worker.register()
        if confirm:
            for worker in workers:
                await worker.confirm()
            await workers[0].announce(self.core.commands.steps)
        return workers

    async def rollout(self, replica: int = 0, **place: Any) -> Worker:
        """A rollout worker, registered."""
        worker = Worker(self, pb.ROLE_ROLLOUT, replica=replica, **place)
        await worker.register()
        return worker

    async def train_one(self, trainers: Sequence[Worker], rollout: Worker, number: int) -> pb.TrainCommand:
        """Two groups through a whole step, as command `number`."""
        groups = (await rollout.lease(2)).groups
        await rollout.submit(completed(groups, version=self.core.commands.steps))
        command = await trainers[0].next(number)
        assert command.WhichOneof("command") == "train", command
        for worker in trainers:
            await worker.complete(number, command.train)
        await trainers[0].announce(command.train.step)
        return command.train

    async def save(self, trainers: Sequence[Worker], number: int) -> pb.SaveCommand:
        """Every rank writes and reports its artifact of SAVE command `number`."""
        command = await trainers[0].next(number)
        assert command.WhichOneof("command") == "save", command
        answers = await asyncio.gather(*(worker.saved(number, command.save) for worker in trainers))
        assert any(answer.state == pb.SAVE_STATE_COMMITTED for answer in answers), answers  # whoever was the last
        return command.save


class Worker:
    """One process life, by the stubs alone."""

    def __init__(
        self, house: House, role: pb.Role.ValueType, *, rank: int = 0, replica: int = 0, world: int = 1, **place: Any
    ) -> None:
        self.house, self.stub = house, house.stub
        self.role, self.rank = role, rank
        group = "policy" if role == pb.ROLE_TRAINER else "pool"
        self.place = {"role": role, "group": group, "replica": replica, "rank": rank, "world_size": world} | place
        self.incarnation = secrets.token_hex(16)
        self.execution_id = house.core.identity.id
        self.session = ""
        self.batches = self.requests = 0

    @property
    def identity(self) -> pb.WorkerIdentity:
        return pb.WorkerIdentity(execution_id=self.execution_id, session_id=self.session)

    async def register(self) -> pb.RegisterWorkerResponse:
        request = pb.RegisterWorkerRequest(
            execution_id=self.execution_id, incarnation=self.incarnation, host="here", pid=7, **self.place
        )
        response = await soon(self.stub.RegisterWorker(request))
        self.session = response.session_id
        return response

    def confirmation(self, **overrides: Any) -> pb.ConfirmResumeRequest:
        resumed = self.house.core.resumed
        values: dict[str, Any] = {"worker": self.identity, "artifact_names": [f"policy-{self.rank}.pt"]}
        if resumed is None:
            values["fresh"] = pb.FreshStart()
        else:
            values |= {
                "metadata": metadata_message(resumed.metadata),
                "manifest_digest": resumed.manifest_digest,
                "completed_training_steps": resumed.metadata.completed_training_steps,
                "completed_optimizer_updates": resumed.metadata.completed_optimizer_updates,
            }
        return pb.ConfirmResumeRequest(**values | overrides)

    async def confirm(self, **overrides: Any) -> pb.ConfirmResumeResponse:
        return await soon(self.stub.ConfirmResume(self.confirmation(**overrides)))

    async def lease(self, most: int = 1, *, number: int | None = None, wait: float = 0.0) -> pb.LeasePromptsResponse:
        number = self.requests + 1 if number is None else number
        request = pb.LeasePromptsRequest(worker=self.identity, number=number, max_groups=most, wait=seconds(wait))
        response = await soon(self.stub.LeasePrompts(request))
        self.requests = max(self.requests, number)
        return response

    def request(
        self, batch: reports_pb2.ReportBatch | None, *, acked: int = 0, notices: int = 0
    ) -> pb.SubmitReportsRequest:
        return pb.SubmitReportsRequest(worker=self.identity, acked_through=acked, notices_through=notices, batch=batch)

    async def submit(
        self,
        batch: reports_pb2.ReportBatch | None = None,
        *,
        number: int | None = None,
        acked: int = 0,
        notices: int = 0,
    ) -> reports_pb2.ReportAck:
        """The next batch, batch `number` again, or a heartbeat."""
        if batch is not None:
            batch.number = self.batches + 1 if number is None else number
        response = await soon(self.stub.SubmitReports(self.request(batch, acked=acked, notices=notices)))
        self.batches = max(self.batches, response.ack.applied)
        return response.ack

    async def announce(self, version: int) -> None:
        weights = reports_pb2.WeightAnnouncement(version=version, handle=f"weights-{version}")
        await self.submit(reports_pb2.ReportBatch(weights=[weights]))

    async def next(self, number: int, *, wait: float = 0.0) -> pb.NextCommandResponse:
        request = pb.NextCommandRequest(worker=self.identity, number=number, wait=seconds(wait))
        return await soon(self.stub.NextCommand(request))

    async def complete(self, number: int, train: pb.TrainCommand, updates: int = 1) -> reports_pb2.ReportAck:
        return await self.submit(reports_pb2.ReportBatch(completions=[self.completion(number, train, updates)]))

    def completion(self, number: int, train: pb.TrainCommand, updates: int = 1) -> reports_pb2.CompletionReport:
        rows = reports_pb2.DisposedRows(
            disposition=reports_pb2.DISPOSITION_TRAINED, groups=train.groups, words=train.words, masks=train.masks
        )
        return reports_pb2.CompletionReport(
            command=number,
            completed_training_step=train.step,
            optimizer_updates=updates,
            rows=[rows] if self.rank == 0 else [],
        )

    def shards(self, number: int, save: pb.SaveCommand, **overrides: Any) -> pb.ReportShardsRequest:
        """Receipts of this rank's artifact, which is written."""
        path = self.house.run / save.path / f"policy-{self.rank}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = f"rank {self.rank}, step {save.completed_training_steps}".encode()
        path.write_bytes(content)
        values: dict[str, Any] = {
            "name": path.name,
            "size_bytes": len(content),
            "digest": f"sha256:{hashlib.sha256(content).hexdigest()}",
            "completed_training_steps": save.completed_training_steps,
            "completed_optimizer_updates": save.completed_optimizer_updates,
            "rank": self.rank,
            "execution_number": save.execution_number,
            "execution_id": self.execution_id,
            "checkpoint_id": save.checkpoint_id,
        }
        receipts = pb.ShardReceipts(receipts=[checkpoint_pb2.ShardReceipt(**values | overrides)])
        return pb.ReportShardsRequest(worker=self.identity, command=number, receipts=receipts)

    async def saved(self, number: int, save: pb.SaveCommand) -> pb.ReportShardsResponse:
        return await soon(self.stub.ReportShards(self.shards(number, save)))

    async def end(self) -> reports_pb2.ReportAck:
        return await self.submit(reports_pb2.ReportBatch(end=reports_pb2.EndReport(reason="done")))


def completed(groups: Sequence[pb.LeasedGroup], *, version: int = 0, **columns: Any) -> reports_pb2.ReportBatch:
    """A batch that completes whole groups of at most 64 completions."""
    masks = [group.masks[0] for group in groups]
    rows = reports_pb2.RolloutRows(
        outcome=reports_pb2.OUTCOME_COMPLETED,
        groups=[group.group for group in groups],
        leases=[group.lease for group in groups],
        masks=masks,
        lowest_versions=[version] * len(groups),
        highest_versions=[version] * len(groups),
        rewards=[0.5] * sum(map(int.bit_count, masks)),
        **columns,
    )
    return reports_pb2.ReportBatch(rollouts=[rows])


def disposed(groups: Sequence[pb.LeasedGroup], outcome: reports_pb2.Outcome.ValueType, reason: str = "") -> Any:
    """A batch that discards, fails or returns whole groups."""
    rows = reports_pb2.RolloutRows(
        outcome=outcome,
        reason=reason,
        groups=[group.group for group in groups],
        leases=[group.lease for group in groups],
        masks=[group.masks[0] for group in groups],
    )
    return reports_pb2.ReportBatch(rollouts=[rows])


def metadata_message(metadata: Any) -> checkpoint_pb2.ResumeMetadata:
    """Metadata as a client that was told it by GetResumeState sends it back; written here without the service's converter."""
    return checkpoint_pb2.ResumeMetadata(
        schema_version=1,
        checkpoint_path=metadata.checkpoint_path,
        checkpoint_id=metadata.checkpoint_id,
        completed_training_steps=metadata.completed_training_steps,
        completed_optimizer_updates=metadata.completed_optimizer_updates,
        remaining_completions=metadata.remaining_completions,
        epoch=metadata.epoch,
        sampling_owner=checkpoint_pb2.SAMPLING_OWNER_SAMPLER,
        sampler_state=checkpoint_pb2.SamplerState(data=metadata.encoded_state.data, codec=metadata.encoded_state.codec),
    )


_PLAIN = (type(None), bool, int, float, str, bytes, Enum)
_OPAQUE = (FunctionType, MethodType, BuiltinFunctionType, GeneratorType, type)


def deep(root: Any) -> Any:
    """Everything reachable from `root` as nested plain values, by attributes and slots. The fence's counter is left out."""
    seen: dict[int, int] = {}
    keep: list[Any] = []

    def walk(item: Any) -> Any:
        if isinstance(item, _PLAIN):
            return item
        if isinstance(item, _OPAQUE):
            return type(item).__name__
        if id(item) in seen:
            return "again", seen[id(item)]
        seen[id(item)] = len(seen)
        keep.append(item)  # or an ID might be given to another object meanwhile
        if isinstance(item, Mapping):
            return [(walk(key), walk(value)) for key, value in item.items()]
        if isinstance(item, set | frozenset):
            return sorted(repr(walk(value)) for value in item)
        if isinstance(item, list | tuple | deque | range):
            return [walk(value) for value in item]
        if type(item).__module__.startswith("cosmos_ctrl.") or is_dataclass(item):
            names = [f.name for f in fields(item)] if is_dataclass(item) else sorted(vars(item))
            pairs = [(name, walk(getattr(item, name))) for name in names]
            return type(item).__name__, [(n, v) for n, v in pairs if (type(item).__name__, n) != ("Fence", "refused")]
        return repr(item)

    return walk(root)
