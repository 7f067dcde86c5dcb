"""Messages to core values. No policy: what a message cannot mean is MALFORMED, everything else is the core's."""

from __future__ import annotations

import json

from google.protobuf import duration_pb2

from cosmos_ctrl.core.admission import Batch, WeightAnnouncement
from cosmos_ctrl.core.agreement import Restored
from cosmos_ctrl.core.commands import CompletionReport, DisposedRows, ShardReceipt
from cosmos_ctrl.core.errors import MalformedError
from cosmos_ctrl.core.execution import Place, Role, WorkerInfo
from cosmos_ctrl.core.groups import Disposition, Outcome, RolloutRows
from cosmos_ctrl.service.metadata import metadata_from_message
from cosmos_ctrl.v1 import controller_service_pb2, reports_pb2

#: Most words of 64 completions in a group. A word is shifted to where it stands, so without a limit one number in a message
#: would take gigabytes.
_MOST_WORDS = 1 << 16

#: Characters in a metric's name. Names are kept with the worker and listed.
_LONGEST_NAME = 128

_OUTCOMES: dict[int, Outcome] = {
    reports_pb2.OUTCOME_COMPLETED: "completed",
    reports_pb2.OUTCOME_DISCARDED: "discarded",
    reports_pb2.OUTCOME_FAILED: "failed",
    reports_pb2.OUTCOME_RETURNED: "returned",
}
_DISPOSITIONS: dict[int, Disposition] = {
    reports_pb2.DISPOSITION_TRAINED: "trained",
    reports_pb2.DISPOSITION_DISCARDED: "discarded",
    reports_pb2.DISPOSITION_RETURNED: "returned",
    reports_pb2.DISPOSITION_PAYLOAD_LOST: "payload_lost",
}
_ROLES: dict[int, Role] = {
    controller_service_pb2.ROLE_TRAINER: "trainer",
    controller_service_pb2.ROLE_ROLLOUT: "rollout",
}


def restored_from_message(request: controller_service_pb2.ConfirmResumeRequest) -> Restored:
    """What a rank restored; the caller has handled `damaged`."""
    kind = request.WhichOneof("restored")
    if kind not in ("metadata", "fresh"):
        raise MalformedError(what="neither restored metadata nor a fresh start")
    return Restored(
        metadata=metadata_from_message(request.metadata) if kind == "metadata" else None,
        manifest_digest=request.manifest_digest,
        training_steps=request.completed_training_steps,
        optimizer_updates=request.completed_optimizer_updates,
        artifact_names=tuple(request.artifact_names),
    )


# -- workers and reports


def worker_from_message(request: controller_service_pb2.RegisterWorkerRequest) -> WorkerInfo:
    """Raises MalformedError for an unknown role or an impossible rank."""
    role = _ROLES.get(request.role)
    if role is None:
        raise MalformedError(what=f"role {request.role}")
    return WorkerInfo(
        place=Place(role, request.group, request.replica, request.rank),
        incarnation=request.incarnation,
        world_size=request.world_size,
        dp_rank=request.dp_rank,
        dp_size=request.dp_size or 1,
        host=request.host,
        pid=request.pid,
    )


def batch_from_message(message: reports_pb2.ReportBatch) -> Batch:
    """Takes the payloads out of `message`; raises MalformedError for an unknown outcome or disposition."""
    rollouts = tuple(map(_rows_from_message, message.rollouts))
    for rows in message.rollouts:
        del rows.payloads[:]  # hashed as they are, instead of being written into one message with the rest
    # Only compared with others of this process: its keyed 64-bit hash is enough, and five times as fast as one for files.
    payloads = tuple(tuple(map(hash, rows.payloads)) for rows in rollouts)
    return Batch(
        number=message.number,
        digest=hash((message.SerializeToString(deterministic=True), payloads)),
        rollouts=rollouts,
        completions=tuple(map(_report_from_message, message.completions)),
        end=message.end.reason if message.HasField("end") else None,
        weights=tuple(WeightAnnouncement(weights.version, weights.handle) for weights in message.weights),
        metrics=tuple(map(_metric, message.metrics)),
    )


def _metric(metric: reports_pb2.Metric) -> tuple[str, float]:
    if len(metric.name) > _LONGEST_NAME:
        raise MalformedError(what=f"a metric name of {len(metric.name)} characters, at most {_LONGEST_NAME}")
    return metric.name, metric.value


def _rows_from_message(message: reports_pb2.RolloutRows) -> RolloutRows:
    outcome = _OUTCOMES.get(message.outcome)
    if outcome is None:
        raise MalformedError(what=f"outcome {message.outcome}")
    return RolloutRows(
        outcome=outcome,
        reason=message.reason,
        # Tuples: each column is gone through several times, and parts of it are kept. Sliced first: a third cheaper than going through it.
        groups=tuple(message.groups[:]),
        leases=tuple(message.leases[:]),
        words=tuple(message.words[:]),
        masks=tuple(message.masks[:]),
        lowest_versions=tuple(message.lowest_versions[:]),
        highest_versions=tuple(message.highest_versions[:]),
        rewards=tuple(message.rewards[:]),
        codec=message.payload_codec,
        payloads=tuple(message.payloads[:]),
        handles=tuple(message.handles[:]),
    )


def _report_from_message(message: reports_pb2.CompletionReport) -> CompletionReport:
    return CompletionReport(
        command=message.command,
        step=message.completed_training_step,
        optimizer_updates=message.optimizer_updates,
        disposed=tuple(map(_disposed_from_message, message.rows)),
    )


def _disposed_from_message(block: reports_pb2.DisposedRows) -> DisposedRows:
    disposition = _DISPOSITIONS.get(block.disposition)
    if disposition is None:
        raise MalformedError(what=f"disposition {block.disposition}")
    groups, words, masks = block.groups[:], block.words[:], block.masks[:]
    if len(groups) != len(masks) or (words and len(words) != len(groups)):
        raise MalformedError(what=f"{len(words)} words and {len(masks)} masks for {len(groups)} groups")
    if max(words, default=0) >= _MOST_WORDS:
        raise MalformedError(what=f"word {max(words)}, at most {_MOST_WORDS - 1}")
    if words:
        masks = [mask << 64 * word for mask, word in zip(masks, words, strict=True)]
    return DisposedRows(disposition, tuple(zip(groups, masks, strict=True)), block.reason)


# -- commands and saves


def receipts_from_message(message: controller_service_pb2.ShardReceipts) -> tuple[ShardReceipt, ...]:
    """Receipts of one rank."""
    return tuple(
        ShardReceipt(
            name=receipt.name,
            size_bytes=receipt.size_bytes,
            digest=receipt.digest,
            completed_training_steps=receipt.completed_training_steps,
            completed_optimizer_updates=receipt.completed_optimizer_updates,
            rank=receipt.rank,
            execution_number=receipt.execution_number,
            execution_id=receipt.execution_id,
            checkpoint_id=receipt.checkpoint_id,
        )
        for receipt in message.receipts
    )


def note_from_message(message: controller_service_pb2.ShardReceipts) -> str:
    """The application's note; raises MalformedError unless it is a JSON object of at most 64 KiB, or empty."""
    note = message.application_note
    if not note:
        return ""
    if len(note.encode()) > 64 * 1024:
        raise MalformedError(what=f"an application note of {len(note.encode())} bytes, at most 65536")
    try:
        value = json.loads(note)
    except ValueError as error:
        raise MalformedError(what=f"the application note is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise MalformedError(what="the application note is not a JSON object")
    return note


def seconds(message: duration_pb2.Duration) -> float:
    """A Duration as seconds; raises MalformedError when it is negative."""
    value: float = message.ToNanoseconds() / 1e9
    if value < 0:
        raise MalformedError(what=f"a negative duration of {value} s")
    return value
