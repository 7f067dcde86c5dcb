"""`torch.distributed.checkpoint` over the files of a save: hashed while they are written, verified before they are read.

* Each rank writes one file, its part, and the coordinator (rank 0) one more, the metadata that says where everything is. Both are
  artifacts that the rank declares (`artifact_names`).
* Loading may read any rank's part, since what is replicated is saved once. Each is verified on the descriptor that is then read, the
  metadata before it is unpickled.
* A part is never empty: a rank that has nothing of its own to save still writes the first line.

Example:
    with Trainer.from_env(artifacts=dcp.artifact_names("model", rank=rank)) as trainer:
        ...
        with trainer.save(command) as save:
            torch.distributed.checkpoint.save(state, storage_writer=dcp.SaveWriter(save, "model"))
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Protocol, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter

from cosmos_worker.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import ReadItem

_FIRST_LINE = b"cosmos-ctrl part of a distributed checkpoint\n"

_PART = re.compile(r"__(\d+)_0\.distcp")


class OpensFiles(Protocol):
    """A `Save`."""

    def open(self, name: str) -> IO[bytes]:
        """A new file for a declared artifact."""


class OpensRanks(Protocol):
    """What `Trainer.artifacts` gives."""

    def of_rank(self, rank: int) -> Mapping[str, BinaryIO]:
        """Another rank's files, verified."""


def artifact_names(name: str = "model", *, rank: int) -> tuple[str, ...]:
    """The artifacts that a rank declares for a distributed checkpoint called `name`."""
    return (f"{name}.distcp", f"{name}.metadata") if rank == 0 else (f"{name}.distcp",)


class SaveWriter(FileSystemWriter):
    """A storage writer for `torch.distributed.checkpoint.save` inside a save's ``with`` statement."""

    def __init__(self, save: OpensFiles, name: str = "model") -> None:
        """Write the checkpoint called `name` into `save`, whose rank declared `artifact_names`."""
        # One thread, so one file a rank. Syncing is the save's.
        super().__init__(Path(name), single_file_per_rank=True, thread_count=1, sync_files=False)
        self.fs = _SaveFiles(save, name)  # type: ignore[assignment]  # torch names the class it makes


class SaveReader(FileSystemReader):
    """A storage reader for `torch.distributed.checkpoint.load`; give it a `PlainLoadPlanner` too."""

    def __init__(self, artifacts: OpensRanks, name: str = "model") -> None:
        """Read the checkpoint called `name` from what `Trainer.artifacts` gave."""
        super().__init__(Path(name))
        self.fs = _ArtifactFiles(artifacts, name)  # type: ignore[assignment]


class PlainLoadPlanner(DefaultLoadPlanner):
    """Refuses what is neither a tensor nor a plain value; torch's own would unpickle anything."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """See torch.

        Raises:
            pickle.UnpicklingError: it holds more than ``torch.load(weights_only=True)`` allows.
        """
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


class _Names(FileSystemBase):
    """Torch's file names, which are this module's artifacts; nothing else of a file system is asked for."""

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> PurePath:
        return PurePath(path) / suffix

    def init_path(self, path: str | os.PathLike[str]) -> PurePath:
        return PurePath(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """A save makes its own directories."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """The metadata's temporary name stands for its own: nobody sees either before the manifest."""

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        raise UsageError(f"{path}: nothing of a save is removed")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class _SaveFiles(_Names):
    def __init__(self, save: OpensFiles, name: str) -> None:
        self._save, self._name = save, name

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        file_name = PurePath(path).name
        if _PART.fullmatch(file_name):
            with self._save.open(f"{self._name}.distcp") as part:
                part.write(_FIRST_LINE)
                yield cast("io.IOBase", part)
        elif file_name == ".metadata.tmp":
            with self._save.open(f"{self._name}.metadata") as metadata:
                yield cast("io.IOBase", metadata)
        else:
            raise UsageError(f"torch writes {file_name}, which is no part of a checkpoint with one file a rank")


class _ArtifactFiles(_Names):
    def __init__(self, artifacts: OpensRanks, name: str) -> None:
        self._artifacts, self._name = artifacts, name

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        file_name = PurePath(path).name
        part = _PART.fullmatch(file_name)
        if part:
            file: Any = self._artifacts.of_rank(int(part[1]))[f"{self._name}.distcp"]
        elif file_name == ".metadata":
            file = self._artifacts.of_rank(0)[f"{self._name}.metadata"]
        else:
            raise UsageError(f"the checkpoint's metadata names {file_name}, which is no part of it")
        file.seek(0)
        yield file
