"""A whole run over the wire, by stubs alone, under whatever protobuf and gRPC the interpreter has. Prints "ok" and versions.

Run as a program, in another environment than the tests' own; see test_stubs.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import sys
from importlib.metadata import version
from pathlib import Path

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from cosmos_ctrl import server
from cosmos_ctrl.config import load_config
from cosmos_ctrl.service.status import from_rpc_error
from cosmos_ctrl.v1 import checkpoint_pb2, reports_pb2
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1.controller_service_pb2_grpc import ControllerServiceStub

_GENERATION = 4


async def main(directory: Path) -> None:
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(6)))
    config = load_config(
        None,
        environment={},
        overrides={
            "run": {"directory": str(directory / "run")},
            "sampling": {"prompts": str(prompts), "epochs": 1},
            "train": {"groups_per_step": 3},
            "rollout": {"n_generation": _GENERATION},
        },
    )
    ready: asyncio.Future[server.Ready] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(server.serve(config, server.prompts_application(config), on_ready=ready.set_result))
    done, _ = await asyncio.wait({serving, ready}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
    if serving in done:
        serving.result()
    async with grpc.aio.insecure_channel(ready.result().address) as channel:
        await asyncio.wait_for(_drive(ControllerServiceStub(channel), ready.result().execution_id), 30)
    assert await asyncio.wait_for(serving, 30) == 0
    print("ok", version("protobuf"), version("grpcio"))


async def _drive(stub: ControllerServiceStub, execution: str) -> None:
    state = await stub.GetResumeState(pb.GetResumeStateRequest())
    trainer = await _register(stub, execution, pb.ROLE_TRAINER, "policy")
    rollout = await _register(stub, execution, pb.ROLE_ROLLOUT, "pool")
    stale = pb.WorkerIdentity(execution_id="of another execution", session_id=trainer.session_id)
    assert await _refusal(stub, pb.SubmitReportsRequest(worker=stale)) == "STALE_EXECUTION"
    confirmed = await stub.ConfirmResume(
        pb.ConfirmResumeRequest(worker=trainer, fresh=pb.FreshStart(), artifact_names=["policy-0/state.pt"])
    )
    assert confirmed.agreed
    said = {trainer.session_id: 0, rollout.session_id: 0}

    async def say(worker: pb.WorkerIdentity, **content: object) -> None:
        said[worker.session_id] += 1
        batch = reports_pb2.ReportBatch(number=said[worker.session_id], **content)
        request = pb.StreamReportsRequest(worker=worker, batch=batch)
        async for response in stub.StreamReports(iter([request])):
            assert response.ack.applied == batch.number

    await say(trainer, weights=[reports_pb2.WeightAnnouncement(version=0, handle="none")])
    leased = await stub.LeasePrompts(
        pb.LeasePromptsRequest(worker=rollout, number=1, max_groups=6, wait=Duration(seconds=5))
    )
    rows = reports_pb2.RolloutRows(
        outcome=reports_pb2.OUTCOME_COMPLETED,
        groups=[group.group for group in leased.groups],
        leases=[group.lease for group in leased.groups],
        masks=[group.masks[0] for group in leased.groups],
        lowest_versions=[0] * 6,
        highest_versions=[0] * 6,
        rewards=[0.5] * (6 * _GENERATION),
        payload_codec="bytes",
        payloads=[b"payload"] * (6 * _GENERATION),
    )
    await say(rollout, rollouts=[rows])
    for number in range(1, 5):
        wait = Duration(seconds=5)
        command = await stub.NextCommand(pb.NextCommandRequest(worker=trainer, number=number, wait=wait))
        kind = command.WhichOneof("command")
        if kind == "train":
            fetched = stub.FetchPayloads(pb.FetchPayloadsRequest(worker=trainer, command=number))
            assert sum([len(group.completions) async for part in fetched for group in part.groups]) == 12
            disposed = reports_pb2.DisposedRows(
                disposition=reports_pb2.DISPOSITION_TRAINED, groups=command.train.groups, masks=command.train.masks
            )
            report = reports_pb2.CompletionReport(
                command=number, completed_training_step=command.train.step, optimizer_updates=1, rows=[disposed]
            )
            await say(trainer, completions=[report])
        elif kind == "save":
            await _save(stub, trainer, number, command.save, Path(state.run_uri))
    assert kind == "end", kind
    for worker in (trainer, rollout):
        await say(worker, end=reports_pb2.EndReport(reason="done"))


async def _refusal(stub: ControllerServiceStub, request: pb.SubmitReportsRequest) -> str:
    try:
        await stub.SubmitReports(request)
    except grpc.aio.AioRpcError as error:
        decoded = from_rpc_error(error)
        return decoded.reason if decoded is not None else str(error)
    return "let in"


async def _save(
    stub: ControllerServiceStub, worker: pb.WorkerIdentity, number: int, save: pb.SaveCommand, run: Path
) -> None:
    shard = run / save.path / "policy-0" / "state.pt"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"state")
    receipt = checkpoint_pb2.ShardReceipt(
        name="policy-0/state.pt",
        size_bytes=5,
        digest="sha256:" + hashlib.sha256(b"state").hexdigest(),
        completed_training_steps=save.completed_training_steps,
        completed_optimizer_updates=save.completed_optimizer_updates,
        execution_number=save.execution_number,
        execution_id=worker.execution_id,
        checkpoint_id=save.checkpoint_id,
    )
    request = pb.ReportShardsRequest(worker=worker, command=number, receipts=pb.ShardReceipts(receipts=[receipt]))
    response = await stub.ReportShards(request)
    assert response.state == pb.SAVE_STATE_COMMITTED


async def _register(
    stub: ControllerServiceStub, execution: str, role: pb.Role.ValueType, group: str
) -> pb.WorkerIdentity:
    request = pb.RegisterWorkerRequest(
        execution_id=execution, role=role, group=group, world_size=1, incarnation=secrets.token_hex(16)
    )
    response = await stub.RegisterWorker(request)
    return pb.WorkerIdentity(execution_id=execution, session_id=response.session_id)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
