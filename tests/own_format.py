"""Checkpoint formats as an application may have them: one file that is replaced, and a directory of files."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from cosmos_ctrl.core.resume import ControllerResumeMetadata, ResumeSettings
from cosmos_ctrl.core.state import EncodedState
from cosmos_worker.commands import SaveWork


class OwnFormat:
    """One file is the whole checkpoint: a digest, and JSON."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "mine.json"

    def save(self, command: SaveWork) -> None:
        """All of it under another name, durably, and then in the place of the one before."""
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            file.write(self.encode(command))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)
        directory = os.open(self.path.parent, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)

    def load_metadata(self, config: ResumeSettings) -> ControllerResumeMetadata | None:
        if not self.path.exists() or config.train.resume not in (True, str(self.path)):
            return None
        return self.decode(self.path.read_bytes())

    def restore_sampler(self, sampler: Any, metadata: ControllerResumeMetadata) -> None:
        sampler.load_state_dict(metadata.sampler_state)

    def encode(self, command: SaveWork) -> bytes:
        metadata = command.metadata
        values = {
            "info": metadata.to_checkpoint_extra_info(),
            "epoch": metadata.epoch,
            "owner": metadata.sampling_owner,
            "codec": metadata.encoded_state.codec,
            "state": base64.b64encode(metadata.encoded_state.data).decode(),
            "repeats": command.repeat_bound_completions,
            "horizon": command.horizon_training_steps,
        }
        text = json.dumps(values).encode()
        return hashlib.sha256(text).hexdigest().encode() + b"\n" + text

    def decode(self, data: bytes) -> ControllerResumeMetadata:
        digest, _, text = data.partition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != digest:
            raise ValueError(f"{self.path} is damaged: its digest is another than it says; restore it from a copy")
        values = json.loads(text)
        self.repeat_bound_completions, self.horizon_training_steps = values["repeats"], values["horizon"]
        return ControllerResumeMetadata(
            completed_training_steps=values["info"]["step"],
            completed_optimizer_updates=values["info"]["optimizer_updates"],
            remaining_completions=values["info"]["remain_samples_num"],
            epoch=values["epoch"],
            sampling_owner=values["owner"],
            sampler_state=EncodedState(base64.b64decode(values["state"]), values["codec"]),
            checkpoint_path=str(self.path),
            checkpoint_id=values["info"]["checkpoint_id"],
        )


class ManyFiles(OwnFormat):
    """A file for each checkpoint; the newest is that of the newest execution, then step, then the one saved last."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory

    def name(self, command: SaveWork) -> str:
        return f"{command.execution_number}-{command.step}-{command.number}"

    def order(self, path: Path) -> Any:
        return [int(part) for part in path.stem.split("-")]

    def committed(self) -> list[Path]:
        return list(self.directory.glob("*.json"))

    def save(self, command: SaveWork) -> None:
        self.path = self.directory / f"{self.name(command)}.json"
        super().save(command)

    def load_metadata(self, config: ResumeSettings) -> ControllerResumeMetadata | None:
        resume = config.train.resume
        if isinstance(resume, str):
            self.path = Path(resume)
            return super().load_metadata(config)
        paths = self.committed()
        if not paths:
            return None
        self.path = max(paths, key=self.order)
        return super().load_metadata(config)
