"""Metadata v1 on the wire: the one translation, for the controller and for the worker library."""

from __future__ import annotations

from cosmos_ctrl.core.errors import MalformedError
from cosmos_ctrl.core.resume import ControllerResumeMetadata, SamplingOwner
from cosmos_ctrl.core.state import EncodedState
from cosmos_ctrl.v1 import checkpoint_pb2

_OWNERS: dict[SamplingOwner, checkpoint_pb2.SamplingOwner.ValueType] = {
    "sampler": checkpoint_pb2.SAMPLING_OWNER_SAMPLER,
    "batch_sampler": checkpoint_pb2.SAMPLING_OWNER_BATCH_SAMPLER,
}
_OWNERS_BACK = {number: owner for owner, number in _OWNERS.items()}


def metadata_to_message(metadata: ControllerResumeMetadata) -> checkpoint_pb2.ResumeMetadata:
    """The value as it travels."""
    return checkpoint_pb2.ResumeMetadata(
        schema_version=metadata.schema_version,
        checkpoint_path=metadata.checkpoint_path,
        checkpoint_id=metadata.checkpoint_id,
        completed_training_steps=metadata.completed_training_steps,
        completed_optimizer_updates=metadata.completed_optimizer_updates,
        remaining_completions=metadata.remaining_completions,
        epoch=metadata.epoch,
        sampling_owner=_OWNERS[metadata.sampling_owner],
        sampler_state=checkpoint_pb2.SamplerState(data=metadata.encoded_state.data, codec=metadata.encoded_state.codec),
    )


def metadata_from_message(message: checkpoint_pb2.ResumeMetadata) -> ControllerResumeMetadata:
    """Raises MalformedError for what is not metadata v1."""
    owner = _OWNERS_BACK.get(message.sampling_owner)
    if owner is None:
        raise MalformedError(what=f"sampling owner {message.sampling_owner}")
    state = EncodedState(message.sampler_state.data, message.sampler_state.codec)
    if not state.codec:
        raise MalformedError(what="no sampler state, or one without a codec")
    try:
        if state.codec == "json":
            state.decode()
        return ControllerResumeMetadata(
            schema_version=message.schema_version,
            checkpoint_path=message.checkpoint_path,
            checkpoint_id=message.checkpoint_id,
            completed_training_steps=message.completed_training_steps,
            completed_optimizer_updates=message.completed_optimizer_updates,
            remaining_completions=message.remaining_completions,
            epoch=message.epoch,
            sampling_owner=owner,
            sampler_state=state,
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedError(what=str(error)) from error
