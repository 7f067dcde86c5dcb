"""Every reason that an RPC's comment names is provoked, and carries what the comment promises of it.

That nothing else comes is checked by every test of this folder: see `service_harness.House.close`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from documented import comments_of_rpcs, documented
from google.protobuf import duration_pb2
from service_harness import SERVICE, House, Worker, completed, soon

from cosmos_ctrl.core.errors import ERRORS_BY_REASON, ResumeMetadataMismatch, RetryLaterError, WrongStepError
from cosmos_ctrl.core.groups import LeasesCancelled
from cosmos_ctrl.server import _check_declared_names
from cosmos_ctrl.service.status import CODES, asks_to_retry, from_rpc_error
from cosmos_ctrl.v1 import checkpoint_pb2, reports_pb2
from cosmos_ctrl.v1 import controller_service_pb2 as pb

UNFENCED = {"GetResumeState", "WatchRun", "ListCheckpoints", "ExplainResume", "ListWorkers"}
REPORTS = ("SubmitReports", "StreamReports")
PAIRS = sorted((rpc, reason) for rpc, reasons in documented().items() for reason in reasons)

#: What to do before the same is sent again, where it is not only to wait.
FIRST = {"NOT_REGISTERED", "SEQUENCE_GAP"}


class Scene:
    """A controller, its trainer rank and a rollout worker."""

    def __init__(self, houses: Callable[..., Awaitable[House]], rpc: str) -> None:
        self.houses, self.rpc = houses, rpc

    async def open(self, *, confirm: bool = True, **options: Any) -> House:
        self.house = await self.houses(ranks=1, **options)
        if options.get("attach", True):
            (self.trainer,) = await self.house.trainers(confirm=confirm)
            self.rollout = await self.house.rollout()
        return self.house

    @property
    def worker(self) -> Worker:
        """Whose call it is."""
        return self.rollout if self.rpc in ("LeasePrompts", *REPORTS) else self.trainer

    def request(self, worker: Worker | None = None, **fields: Any) -> Any:
        """A request that would be answered, but for `fields`."""
        message = getattr(pb, f"{self.rpc}Request")()
        by = worker or self.worker
        if self.rpc == "RegisterWorker":
            message = pb.RegisterWorkerRequest(
                execution_id=by.execution_id, incarnation=by.incarnation, host="here", pid=7, **by.place
            )
        elif self.rpc not in UNFENCED:
            message.worker.CopyFrom(by.identity)
        defaults = {
            "ConfirmResume": {"fresh": pb.FreshStart(), "artifact_names": ["policy-0.pt"]},
            "LeasePrompts": {"number": 1, "max_groups": 1},
            "NextCommand": {"number": 1},
            "FetchPayloads": {"command": 1},
            "ReportShards": {"command": 1, "receipts": pb.ShardReceipts()},
        }.get(self.rpc, {})
        message.MergeFrom(type(message)(**defaults | fields))
        return message

    async def call(self, request: Any) -> None:
        """The RPC, to its end."""
        method = getattr(self.house.stub, self.rpc)
        if self.rpc == "StreamReports":
            stream = method()
            await stream.write(request)
            await soon(stream.read())
            await stream.done_writing()
            await soon(stream.read())
        elif self.rpc in ("FetchPayloads", "WatchRun"):
            async for _ in method(request):
                if self.rpc == "WatchRun":
                    break
        else:
            await soon(method(request))

    async def call_with_bytes(self, data: bytes) -> None:
        path, channel = f"/{SERVICE}/{self.rpc}", self.house.channel
        if self.rpc == "StreamReports":
            stream = channel.stream_stream(path)()
            await stream.write(data)
            await soon(stream.read())
        elif self.rpc in ("FetchPayloads", "WatchRun"):
            async for _ in channel.unary_stream(path)(data):
                pass
        else:
            await soon(channel.unary_unary(path)(data))

    def batch(self, **content: Any) -> Any:
        return self.request(batch=reports_pb2.ReportBatch(**{"number": 1} | content))


Provocation = Callable[[Scene], Awaitable[None]]
PROVOCATIONS: dict[tuple[str, str], Provocation] = {}


def provokes(reason: str, *rpcs: str) -> Callable[[Provocation], Provocation]:
    """The function makes one of `rpcs` answer with `reason`; without RPCs every one that names it and has no provocation of its own."""

    def register(provocation: Provocation) -> Provocation:
        named = rpcs or [rpc for rpc, reasons in documented().items() if reason in reasons]
        for rpc in named:
            PROVOCATIONS.setdefault((rpc, reason), provocation)
        return provocation

    return register


@provokes("RESTORING")
async def _the_sampler_is_not_restored(scene: Scene) -> None:
    house = await scene.open(attach=False)
    worker = Worker(house, pb.ROLE_TRAINER)
    await scene.call(scene.request(worker))


@provokes("MALFORMED")
async def _bytes_that_are_no_message(scene: Scene) -> None:
    await scene.open()
    await scene.call_with_bytes(b"\xff\xff\xff")


@provokes("INTERNAL")
async def _a_bug(scene: Scene) -> None:
    house = await scene.open()
    house.servicer._attached = object()
    await scene.call(scene.request())


@provokes("STALE_EXECUTION")
async def _another_execution(scene: Scene) -> None:
    await scene.open()
    scene.worker.execution_id = "0" * 32
    await scene.call(scene.request())


@provokes("NOT_REGISTERED")
async def _an_unknown_session(scene: Scene) -> None:
    await scene.open()
    scene.worker.session = "unknown"
    await scene.call(scene.request())


@provokes("EXECUTION_ENDED")
async def _it_has_failed(scene: Scene) -> None:
    house = await scene.open()
    house.core.fail("the disk is gone")
    await scene.call(scene.request())


@provokes("WRONG_STEP", *REPORTS)
async def _a_step_that_was_never_given(scene: Scene) -> None:
    await scene.open()
    report = reports_pb2.CompletionReport(command=7, completed_training_step=7)
    message = scene.request(scene.trainer, batch=reports_pb2.ReportBatch(number=2, completions=[report]))
    await scene.call(message)


@provokes("WRONG_STEP")
async def _ended_by_a_wrong_step(scene: Scene) -> None:
    house = await scene.open()
    house.core.lifecycle.fail(WrongStepError(place="trainer policy/0", what="step", expected=1, found=2))
    await scene.call(scene.request())


@provokes("RESUME_MISMATCH", "ConfirmResume")
async def _a_rank_that_counts_steps_of_its_own(scene: Scene) -> None:
    await scene.open(confirm=False)
    await scene.call(scene.request(completed_training_steps=3))


@provokes("RESUME_MISMATCH")
async def _ended_by_a_mismatch(scene: Scene) -> None:
    house = await scene.open()
    house.core.lifecycle.fail(ResumeMetadataMismatch(place="trainer policy/0", changed=("epoch",)))
    await scene.call(scene.request())


@provokes("WORKER_LIMIT")
async def _too_many_workers(scene: Scene) -> None:
    house = await scene.open(max_workers=2)
    await scene.call(scene.request(Worker(house, pb.ROLE_ROLLOUT, replica=1)))


@provokes("SUPERSEDED")
async def _an_older_incarnation(scene: Scene) -> None:
    house = await scene.open()
    await house.rollout()
    await scene.call(scene.request(scene.rollout))


@provokes("NOT_ALLOWED", "RegisterWorker")
async def _a_rank_that_the_run_does_not_have(scene: Scene) -> None:
    house = await scene.open()
    await scene.call(scene.request(Worker(house, pb.ROLE_TRAINER, rank=1, world=2)))


@provokes("NOT_ALLOWED", "LeasePrompts")
async def _a_trainer_asks_for_prompts(scene: Scene) -> None:
    await scene.open()
    await scene.call(scene.request(scene.trainer))


@provokes("NOT_ALLOWED", *REPORTS)
async def _a_rollout_worker_announces_weights(scene: Scene) -> None:
    await scene.open()
    await scene.call(scene.batch(weights=[reports_pb2.WeightAnnouncement(version=0)]))


@provokes("NOT_ALLOWED")
async def _a_rollout_worker_does_a_trainers_part(scene: Scene) -> None:
    await scene.open()
    await scene.call(scene.request(scene.rollout))


@provokes("CONFLICTING_RETRY", "ConfirmResume")
async def _another_confirmation(scene: Scene) -> None:
    await scene.open()
    await scene.call(scene.request(artifact_names=["other.pt"]))


@provokes("UNSAFE_NAME")
async def _a_name_that_leads_out(scene: Scene) -> None:
    house = await scene.open(confirm=False)
    house.core.agreement._check_publishable = _check_declared_names
    await scene.call(scene.request(artifact_names=["../policy-0.pt"]))


@provokes("SEQUENCE_GAP", "LeasePrompts")
async def _a_request_left_out(scene: Scene) -> None:
    await scene.open()
    await scene.call(scene.request(number=5))


@provokes("SEQUENCE_GAP", *REPORTS)
async def _a_batch_left_out(scene: Scene) -> None:
    await scene.open()
    await scene.call(scene.batch(number=5))


@provokes("WINDOW_FULL", "LeasePrompts")
async def _notices_left_unconfirmed(scene: Scene) -> None:
    house = await scene.open()
    log = house.core.workers.of(scene.rollout.session).log
    for lease in range(1 << 16):
        log.notify(LeasesCancelled((lease,)))
    await scene.call(scene.request())


@provokes("WINDOW_FULL", *REPORTS)
async def _batches_left_unconfirmed(scene: Scene) -> None:
    await scene.open(max_unacknowledged_batches=1)
    await scene.rollout.submit(reports_pb2.ReportBatch())
    await scene.call(scene.batch(number=2))


@provokes("UNKNOWN_WORK", *REPORTS)
async def _a_group_that_was_never_given(scene: Scene) -> None:
    await scene.open()
    rows = completed([pb.LeasedGroup(group=1, lease=1, masks=[1])]).rollouts
    await scene.call(scene.batch(rollouts=rows))


@provokes("UNKNOWN_WORK")
async def _a_command_that_was_never_given(scene: Scene) -> None:
    await scene.open()
    field = "number" if scene.rpc == "NextCommand" else "command"
    await scene.call(scene.request(**{field: 9}))


@provokes("CONFLICTING_RETRY", *REPORTS)
async def _a_number_with_other_content(scene: Scene) -> None:
    await scene.open()
    await scene.rollout.submit(reports_pb2.ReportBatch())
    await scene.call(scene.batch(metrics=[reports_pb2.Metric(name="tokens", value=1.0)]))


@provokes("MESSAGE_TOO_LARGE", *REPORTS)
async def _a_payload_of_more_than_half_a_message(scene: Scene) -> None:
    await scene.open(max_message_bytes=1 << 16)
    groups = (await scene.rollout.lease(1)).groups
    rows = completed(groups, payload_codec="bytes", payloads=[b"x" * 40_000] * 2).rollouts
    await scene.call(scene.batch(rollouts=rows))


@provokes("AWAITING_AGREEMENT")
async def _nobody_has_confirmed(scene: Scene) -> None:
    await scene.open(confirm=False)
    await scene.call(scene.request())


async def _save(scene: Scene, change: Callable[[pb.ShardReceipts], Any]) -> None:
    house = await scene.open(save_every_steps=1)
    await house.train_one([scene.trainer], scene.rollout, 1)
    save = (await scene.trainer.next(2)).save
    request = scene.trainer.shards(2, save)
    change(request.receipts)
    await scene.call(request)


@provokes("ARTIFACT_MISSING")
async def _a_receipt_left_out(scene: Scene) -> None:
    await _save(scene, lambda receipts: receipts.receipts.pop())


@provokes("ARTIFACT_UNEXPECTED")
async def _a_receipt_that_was_not_declared(scene: Scene) -> None:
    await _save(scene, lambda receipts: receipts.receipts.append(checkpoint_pb2.ShardReceipt(name="other.pt")))


@provokes("ARTIFACT_FOREIGN")
async def _a_receipt_of_another_step(scene: Scene) -> None:
    await _save(scene, lambda receipts: setattr(receipts.receipts[0], "completed_training_steps", 7))


@provokes("CONFLICTING_RETRY", "ReportShards")
async def _other_receipts(scene: Scene) -> None:
    house = await scene.open(save_every_steps=1)
    await house.train_one([scene.trainer], scene.rollout, 1)
    save = await house.save([scene.trainer], 2)
    await scene.call(scene.trainer.shards(2, save, size_bytes=1))


@provokes("STORAGE_UNAVAILABLE")
async def _a_file_where_the_checkpoints_lie(scene: Scene) -> None:
    house = await scene.open()
    (house.run / "checkpoints").write_text("in the way")
    await scene.call(scene.request())


@provokes("CHECKPOINT_NOT_FOUND")
async def _a_run_without_a_store(scene: Scene) -> None:
    await scene.open(legacy=True)
    await scene.call(scene.request())


@pytest.mark.parametrize(("rpc", "reason"), PAIRS, ids=[f"{rpc}-{reason}" for rpc, reason in PAIRS])
async def test_what_a_comment_says_an_rpc_answers_with_is_what_it_answers_with(houses, rpc, reason):
    scene = Scene(houses, rpc)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await PROVOCATIONS[rpc, reason](scene)
    error = from_rpc_error(caught.value)
    assert error is not None, caught.value
    assert error.reason == reason, error
    assert (rpc, reason) in scene.house.ear.heard
    # A client that reads the status alone does what the comment says.
    retried = documented()[rpc][reason] == "Retry"
    assert retried == (asks_to_retry(caught.value) or reason in FIRST)


def test_every_rpc_names_its_errors_once_and_by_what_a_client_does():
    for rpc, text in comments_of_rpcs().items():
        assert [line.partition(":")[0] for line in text.split("\n\n")[1:]] == ["Retry", "Final"], rpc
        named = re.findall(r"[A-Z]+_[A-Z_]+|RESTORING|MALFORMED|SUPERSEDED|INTERNAL", text.partition("Retry: ")[2])
        assert sorted(named) == sorted(documented()[rpc]), f"{rpc}: one is named twice, or not read"
        assert set(named) <= ERRORS_BY_REASON.keys()


def test_every_reason_is_of_an_rpc_or_says_that_it_is_of_none():
    from reference import Comments, descriptors

    answered = {reason for reasons in documented().values() for reason in reasons}
    (file,) = [file for file in descriptors().file if file.service and file.package == "cosmos_ctrl.v1"]
    (index,) = [n for n, enum in enumerate(file.enum_type) if enum.name == "ErrorReason"]
    comments = Comments(file)
    for n, value in enumerate(file.enum_type[index].value[1:], start=1):
        comment, reason = comments[(5, index, 2, n)], value.name.removeprefix("ERROR_REASON_")
        assert ("No RPC answers with it." in comment) != (reason in answered), reason
        assert comment.startswith(f"{CODES[ERRORS_BY_REASON[reason]].name}. "), reason


def test_what_is_retried_is_what_the_errors_say():
    for reasons in documented().values():
        for reason, kind in reasons.items():
            later = issubclass(ERRORS_BY_REASON[reason], RetryLaterError) or reason in FIRST
            assert (kind == "Retry") == later, reason


@pytest.mark.parametrize("rpc", ["ConfirmResume", "LeasePrompts", "NextCommand"])
async def test_a_negative_wait_is_malformed_as_the_file_says(houses, rpc):
    scene = Scene(houses, rpc)
    await scene.open()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await scene.call(scene.request(wait=duration_pb2.Duration(seconds=-1)))
    error = from_rpc_error(caught.value)
    assert error is not None
    assert error.reason == "MALFORMED"
