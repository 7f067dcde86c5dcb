"""Core values to messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from google.protobuf import duration_pb2

from cosmos_ctrl.checkpoints.discovery import Candidate
from cosmos_ctrl.checkpoints.manifest import CheckpointManifest
from cosmos_ctrl.core.admission import RowRefused, WeightAnnouncement
from cosmos_ctrl.core.agreement import Resumed
from cosmos_ctrl.core.commands import End, Save, Train
from cosmos_ctrl.core.controller import Acknowledgement, GroupPayloads
from cosmos_ctrl.core.execution import Incarnation, Notice
from cosmos_ctrl.core.groups import CompletionPayload, Lease, LeasesCancelled, PayloadsFreed
from cosmos_ctrl.core.lifecycle import EndReason
from cosmos_ctrl.core.resume import ControllerResumeMetadata, SamplingOwner
from cosmos_ctrl.core.statistics import RunStatistics
from cosmos_ctrl.service import wire
from cosmos_ctrl.service.metadata import metadata_to_message
from cosmos_ctrl.v1 import checkpoint_pb2, controller_service_pb2, reports_pb2

_ROLES = {"trainer": controller_service_pb2.ROLE_TRAINER, "rollout": controller_service_pb2.ROLE_ROLLOUT}

_WORD = (1 << 64) - 1

#: Notices in one ack. All of them with every ack would take a quarter of a second where 65,536 are left unconfirmed.
_MOST_NOTICES = 1024


def to_words(rows: Sequence[tuple[int, int]]) -> tuple[list[int], list[int], list[int]]:
    """Rows of (group, mask) as columns of group, word and 64-bit mask; words are empty when all are 0."""
    groups, masks = [group for group, _ in rows], [mask for _, mask in rows]
    if max(masks, default=0) <= _WORD:
        return groups, [], masks
    split = [(group, word, part) for group, mask in rows for word, part in enumerate(mask_words(mask)) if part]
    return [group for group, _, _ in split], [word for _, word, _ in split], [part for _, _, part in split]


def mask_words(mask: int) -> list[int]:
    """A mask as 64-bit words, low first, without trailing zeros."""
    words = []
    while mask:
        words.append(mask & _WORD)
        mask >>= 64
    return words


def ack_to_message(ack: Acknowledgement, most_bytes: int) -> reports_pb2.ReportAck:
    """The ack with its oldest notices: one at least, and no more than fit; the rest comes once these are confirmed."""
    told: list[reports_pb2.Notice] = []
    left = most_bytes
    for notice in ack.notices[:_MOST_NOTICES]:
        message = _notice_to_message(notice)
        left -= message.ByteSize() + 8
        if left < 0 and told:
            break
        told.append(message)
    return reports_pb2.ReportAck(applied=ack.applied, notices=told)


def _notice_to_message(notice: Notice) -> reports_pb2.Notice:
    content = notice.content
    if isinstance(content, RowRefused):
        reason = reports_pb2.RefusalReason.Value(f"REFUSAL_REASON_{content.reason}")
        refused = reports_pb2.RowRefused(
            batch=content.batch,
            block=content.block,
            row=content.row,
            reason=reason,
            group=content.group,
            word=content.word,
            mask=content.mask,
        )
        return reports_pb2.Notice(number=notice.number, refused=refused)
    if isinstance(content, PayloadsFreed):
        groups, words, masks = to_words(content.rows)
        freed = reports_pb2.PayloadsFreed(groups=groups, words=words, masks=masks)
        return reports_pb2.Notice(number=notice.number, freed=freed)
    assert isinstance(content, LeasesCancelled), content
    return reports_pb2.Notice(number=notice.number, cancelled=reports_pb2.LeasesCancelled(leases=content.leases))


def weights_to_message(weights: WeightAnnouncement) -> reports_pb2.WeightAnnouncement:
    """Newest weights."""
    return reports_pb2.WeightAnnouncement(version=weights.version, handle=weights.handle)


def lease_to_message(lease: Lease) -> controller_service_pb2.LeasedGroup:
    """A group as handed to a worker."""
    return controller_service_pb2.LeasedGroup(
        group=lease.group,
        lease=lease.number,
        prompt_key=lease.prompt.key,
        source=lease.prompt.source,
        completions=lease.size,
        masks=mask_words(lease.mask),
        payload=lease.prompt.payload,
        payload_codec=lease.prompt.codec,
        deadline=None if lease.deadline_s is None else duration(lease.deadline_s),
    )


def train_to_message(command: Train, dp_size: int) -> controller_service_pb2.TrainCommand:
    """A TRAIN command with the share of every row."""
    groups, words, masks = to_words(command.rows)
    dp_ranks = [0] * len(groups)
    if dp_size > 1:
        share = {group: index % dp_size for index, (group, _) in enumerate(command.rows)}
        dp_ranks = list(map(share.__getitem__, groups))
    return controller_service_pb2.TrainCommand(
        step=command.step, groups=groups, words=words, masks=masks, dp_ranks=dp_ranks
    )


def save_metadata(save: Save, owner: SamplingOwner) -> ControllerResumeMetadata:
    """The metadata that a resume from this save has."""
    return ControllerResumeMetadata(
        checkpoint_path=save.path,
        checkpoint_id=save.checkpoint_id,
        completed_training_steps=save.steps,
        completed_optimizer_updates=save.updates,
        remaining_completions=save.boundary.remaining_completions,
        epoch=save.boundary.epoch,
        sampling_owner=owner,
        sampler_state=save.boundary.encoded_state,
    )


def save_to_message(
    save: Save, owner: SamplingOwner, *, execution_number: int, horizon_training_steps: int
) -> controller_service_pb2.SaveCommand:
    """A SAVE command."""
    return controller_service_pb2.SaveCommand(
        checkpoint_id=save.checkpoint_id,
        path=save.path,
        completed_training_steps=save.steps,
        completed_optimizer_updates=save.updates,
        execution_number=execution_number,
        metadata=metadata_to_message(save_metadata(save, owner)),
        final=save.final,
        repeat_bound_completions=save.window_completions,
        horizon_training_steps=horizon_training_steps,
    )


def end_to_message(reason: EndReason, message: str, steps: int) -> controller_service_pb2.EndCommand:
    """Why the execution ends."""
    return controller_service_pb2.EndCommand(
        reason=controller_service_pb2.EndReason.Value(f"END_REASON_{reason}"),
        message=message,
        completed_training_steps=steps,
    )


def end_command_to_message(command: End) -> controller_service_pb2.EndCommand:
    """An END command."""
    return end_to_message(command.reason, command.message, command.steps)


def payload_parts(groups: Sequence[GroupPayloads], most_bytes: int) -> Iterator[list[bytes]]:
    """The groups as encoded parts of responses of about `most_bytes`, without a header; a group that is larger continues in the next.
    One response, if there are none."""
    response: list[bytes] = []
    size = 0
    for group in groups:
        head = controller_service_pb2.GroupPayloads(
            group=group.group,
            prompt_key=group.prompt.key,
            source=group.prompt.source,
            prompt=group.prompt.payload,
            prompt_codec=group.prompt.codec,
        ).SerializeToString()
        parts, some = [head], False
        size += len(head)
        for completion in group.completions:
            encoded = _completion_parts(completion)
            length = sum(map(len, encoded))
            if size + length > most_bytes and (response or some):
                yield response + (
                    wire.field(controller_service_pb2.FetchPayloadsResponse, "groups", parts) if some else []
                )
                response, parts, size = [], [head], len(head)
            parts += encoded
            some = True
            size += length
        response += wire.field(controller_service_pb2.FetchPayloadsResponse, "groups", parts)
    yield response


def _completion_parts(completion: CompletionPayload) -> list[bytes]:
    message = controller_service_pb2.CompletionPayload(
        completion=completion.completion,
        reward=completion.reward,
        lowest_version=completion.lowest_version,
        highest_version=completion.highest_version,
        codec=completion.codec,
    )
    if completion.handle is not None:
        message.handle = completion.handle
    parts = [message.SerializeToString()]
    if completion.payload is not None:
        parts += wire.field(controller_service_pb2.CompletionPayload, "inline", [completion.payload])
    return wire.field(controller_service_pb2.GroupPayloads, "completions", parts)


_VERDICTS: dict[str, checkpoint_pb2.Verdict.ValueType] = {
    "chosen": checkpoint_pb2.VERDICT_CHOSEN,
    "older": checkpoint_pb2.VERDICT_OLDER,
    "uncommitted": checkpoint_pb2.VERDICT_UNCOMMITTED,
    "damaged": checkpoint_pb2.VERDICT_DAMAGED,
    "incompatible": checkpoint_pb2.VERDICT_INCOMPATIBLE,
    "unreadable": checkpoint_pb2.VERDICT_UNREADABLE,
    "deleting": checkpoint_pb2.VERDICT_DELETING,
}


def checkpoint_to_message(path: str, manifest: CheckpointManifest, digest: str) -> checkpoint_pb2.Checkpoint:
    """A committed checkpoint."""
    return checkpoint_pb2.Checkpoint(
        checkpoint_id=manifest.checkpoint_id,
        path=path,
        manifest_digest=digest,
        execution_number=manifest.execution_number,
        completed_training_steps=manifest.metadata.completed_training_steps,
        completed_optimizer_updates=manifest.metadata.completed_optimizer_updates,
        parent_checkpoint_id=manifest.parent.checkpoint_id if manifest.parent else "",
        total_bytes=manifest.total_bytes,
    )


def save_to_checkpoint(save: Save, execution_number: int, resumed: Resumed | None) -> checkpoint_pb2.Checkpoint:
    """A committed save of this execution."""
    parent = save.parent.checkpoint_id if save.parent else resumed.metadata.checkpoint_id if resumed else ""
    return checkpoint_pb2.Checkpoint(
        checkpoint_id=save.checkpoint_id,
        path=save.path,
        manifest_digest=save.manifest_digest,
        execution_number=execution_number,
        completed_training_steps=save.steps,
        completed_optimizer_updates=save.updates,
        parent_checkpoint_id=parent,
        total_bytes=sum(receipt.size_bytes for receipts in save.receipts.values() for receipt in receipts),
    )


def candidate_to_message(candidate: Candidate) -> checkpoint_pb2.Candidate:
    """A candidate and its verdict."""
    message = checkpoint_pb2.Candidate(
        path=candidate.path, verdict=_VERDICTS[candidate.verdict], explanation=candidate.explanation
    )
    if candidate.manifest is not None:
        found = checkpoint_to_message(candidate.path, candidate.manifest, candidate.manifest_digest)
        message.checkpoint.CopyFrom(found)
    return message


def state_to_message(
    state: RunStatistics, execution_number: int, checkpoint: checkpoint_pb2.Checkpoint | None
) -> controller_service_pb2.RunState:
    """The run as it is."""
    message = controller_service_pb2.RunState(
        phase=controller_service_pb2.Phase.Value(f"PHASE_{state.phase}"),
        execution_number=execution_number,
        completed_training_steps=state.completed_training_steps,
        completed_optimizer_updates=state.completed_optimizer_updates,
        remaining_completions=state.remaining_completions,
        safe_remaining_completions=state.safe_remaining_completions,
        epoch=state.epoch,
        window_draws=state.window_draws,
        window_completions=state.window_completions,
        gap_age=None if state.gap_age_s is None else duration(state.gap_age_s),
        blocking_group=state.blocking_group,
        blocking_worker=state.blocking_worker,
        groups_pending=state.groups_pending,
        groups_leased=state.groups_leased,
        groups_ready=state.groups_ready,
        groups_training=state.groups_training,
        trained_completions=state.trained_completions,
        discarded_completions=state.discarded_completions,
        spared_completions=state.spared_completions,
        replay_doubts=state.replay_doubts,
        stale_refused=state.stale_refused,
        lease_lost=state.lease_lost,
        weights_version=state.weights_version,
        mean_reward=state.mean_reward,
        checkpoint=checkpoint,
        saves_pending=state.saves_pending,
    )
    if state.end is not None:
        message.end.CopyFrom(end_to_message(*state.end, state.completed_training_steps))
    return message


def worker_to_message(worker: Incarnation, silent_s: float) -> controller_service_pb2.Worker:
    """One worker, for people."""
    place = worker.place
    return controller_service_pb2.Worker(
        role=_ROLES[place.role],
        group=place.group,
        replica=place.replica,
        rank=place.rank,
        incarnation=worker.info.incarnation,
        host=worker.info.host,
        pid=worker.info.pid,
        connected=bool(worker.session),
        silent=duration(silent_s),
        leases=len(worker.leases),
        applied=worker.log.applied,
        ended=worker.ended,
        metrics=[reports_pb2.Metric(name=name, value=value) for name, value in sorted(worker.metrics.items())],
    )


def duration(seconds: float) -> duration_pb2.Duration:
    """Seconds as a Duration, to the nanosecond."""
    message = duration_pb2.Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message
