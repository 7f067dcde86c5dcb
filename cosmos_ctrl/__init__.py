"""cosmos-ctrl: the control plane that makes restarts of asynchronous RL post-training consistent."""

from cosmos_ctrl.checkpoints.manifest import CheckpointManifest
from cosmos_ctrl.core.errors import ResumeMetadataMismatch
from cosmos_ctrl.core.ledger import SamplingBoundary, SamplingReplayLedger
from cosmos_ctrl.core.resume import ControllerResumeAdapter, ControllerResumeMetadata

__all__ = [
    "CheckpointManifest",
    "ControllerResumeAdapter",
    "ControllerResumeMetadata",
    "ResumeMetadataMismatch",
    "SamplingBoundary",
    "SamplingReplayLedger",
]
