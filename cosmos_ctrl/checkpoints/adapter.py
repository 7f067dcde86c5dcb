"""The resume adapter over this package's own checkpoints.

* An explicit checkpoint is that one or an error; automatic discovery returns None only when nothing was ever committed.
* No shard is read: the ranks verify what they load.
* The sampler is touched once, with a fresh copy of the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cosmos_ctrl.checkpoints.compatibility import Topology
from cosmos_ctrl.checkpoints.discovery import Found, OnCorrupt, discover, open_checkpoint
from cosmos_ctrl.checkpoints.stores import Store
from cosmos_ctrl.core.resume import ControllerResumeMetadata, ResumeSettings


class ManifestAdapter:
    """A `ControllerResumeAdapter` for runs whose checkpoints are committed by a manifest.

    The effective sampler has ``load_state_dict``; for another kind override `restore_sampler`.
    """

    def __init__(
        self, store: Store, *, compatibility: Mapping[str, Any] | None = None, on_corrupt: OnCorrupt = "error"
    ) -> None:
        """Find checkpoints in `store`, the run's.

        Args:
            store: the run's.
            compatibility: what this run has, compared with the checkpoint's; None: not compared.
            on_corrupt: "previous" lets automatic discovery pass over damage at the newest end.
        """
        self.store = store
        self.compatibility = compatibility
        self.on_corrupt: OnCorrupt = on_corrupt
        self.topology: Topology | None = None
        """How this run's trainers are laid out: a controller says so before it asks. None: compared with the rest."""
        self.found: Found | None = None
        """What `load_metadata` chose; None before it, and when the run is fresh."""

    def load_metadata(self, config: ResumeSettings) -> ControllerResumeMetadata | None:
        """The metadata of the checkpoint to resume from; None when there is none and none was named.

        Args:
            config: ``train.resume`` is True (discover) or a path, relative to the run or absolute inside it.

        Raises:
            CheckpointError: by case; see `discover` and `open_checkpoint`.
            ValueError: resume is off, or an empty path.
        """
        resume = config.train.resume
        self.found = None
        if resume is True:
            self.found = discover(
                self.store, compatibility=self.compatibility, on_corrupt=self.on_corrupt, topology=self.topology
            ).chosen
        elif isinstance(resume, str) and resume:
            self.found = open_checkpoint(self.store, resume, compatibility=self.compatibility, topology=self.topology)
        else:
            raise ValueError(f"train.resume is {resume!r}: an adapter is asked only for True or a checkpoint's path")
        return self.found.manifest.metadata if self.found else None

    def restore_sampler(self, sampler: Any, metadata: ControllerResumeMetadata) -> None:
        """Hand `sampler` the saved state; what its ``load_state_dict`` raises propagates as it is."""
        sampler.load_state_dict(metadata.sampler_state)
