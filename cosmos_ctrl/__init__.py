"""cosmos-ctrl: the control plane that makes restarts of asynchronous RL post-training consistent.

The names here are what a driver without a server needs; samplers and loaders are in `cosmos_ctrl.samplers`.
"""

from cosmos_ctrl.checkpoints.adapter import ManifestAdapter
from cosmos_ctrl.checkpoints.manifest import CheckpointManifest
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.checkpoints.stores.opening import open_store
from cosmos_ctrl.core.errors import ResumeMetadataMismatch
from cosmos_ctrl.core.ledger import SamplingBoundary, SamplingReplayLedger, Settlement
from cosmos_ctrl.core.resume import ControllerResumeAdapter, ControllerResumeMetadata
from cosmos_ctrl.core.sampling import Draw, Prompt, ResumeRequest, Sampling, TrainRequest, load_resume_metadata

__all__ = [
    "CheckpointManifest",
    "ControllerResumeAdapter",
    "ControllerResumeMetadata",
    "Draw",
    "LocalStore",
    "ManifestAdapter",
    "Prompt",
    "ResumeMetadataMismatch",
    "ResumeRequest",
    "Sampling",
    "SamplingBoundary",
    "SamplingReplayLedger",
    "Settlement",
    "TrainRequest",
    "load_resume_metadata",
    "open_store",
]
