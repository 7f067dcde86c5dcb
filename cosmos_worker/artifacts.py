"""One rank's artifacts of a checkpoint, verified on the very files that are then read.

* A mapping is handed out only when every artifact of the rank is sound; otherwise everything is closed again. They are verified side by
  side, since hashing releases the interpreter lock.
* Another rank's artifacts are opened, and verified, when they are asked for: what is saved once for all is somebody's.
* Damaged and missing are told apart from unreadable: an I/O error says nothing about the content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import BinaryIO

from cosmos_ctrl.checkpoints.artifacts import open_verified
from cosmos_ctrl.checkpoints.digests import default_threads
from cosmos_ctrl.checkpoints.manifest import CheckpointManifest
from cosmos_ctrl.checkpoints.stores import Store
from cosmos_ctrl.core.errors import ArtifactMissingError
from cosmos_worker.settings import WorkerPlace
from cosmos_worker.stamps import Stamp


class Artifacts(Mapping[str, BinaryIO]):
    """Open files by the names that this rank saved them under; close it, or leave it to the ``with`` statement."""

    def __init__(self, files: Mapping[str, BinaryIO], stamp: Stamp, of_rank: Callable[[int], Artifacts]) -> None:
        """`of_rank` opens another rank's."""
        self._files, self._open_rank = dict(files), of_rank
        self.stamp = stamp
        """What the manifest says that these files are of."""
        self._others: dict[int, Artifacts] = {}

    def of_rank(self, rank: int) -> Artifacts:
        """The artifacts of a rank of the same trainer group, verified; closed with these.

        Raises:
            ArtifactMissingError, CheckpointDamagedError, StorageUnavailableError: as for this rank's own.
            ValueError: there is no such rank.
        """
        if rank not in self._others:
            self._others[rank] = self._open_rank(rank)
        return self._others[rank]

    def __getitem__(self, name: str) -> BinaryIO:
        return self._files[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __enter__(self) -> Artifacts:  # noqa: PYI034  # final in spirit: nobody derives from it
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every file. Idempotent."""
        for file in self._files.values():
            file.close()
        for other in self._others.values():
            other.close()
        self._others.clear()


def open_artifacts(checkpoint: Store, manifest: CheckpointManifest, place: WorkerPlace, *, path: str) -> Artifacts:
    """Open and verify the artifacts of the rank at `place`.

    Args:
        checkpoint: the store within the checkpoint.
        manifest: read from it.
        place: whose; its folder's name is left off in the mapping's keys.
        path: the checkpoint, for the errors.

    Raises:
        ArtifactMissingError, CheckpointDamagedError: one is not what was committed, or there is none.
        StorageUnavailableError: one could not be read.
    """
    prefix = place.prefix
    wanted = {name: entry for name, entry in manifest.artifacts.items() if name.startswith(prefix)}
    if not wanted:
        raise ArtifactMissingError(path=path, artifacts=(f"{prefix}*",))
    with ThreadPoolExecutor(min(len(wanted), default_threads()), thread_name_prefix="cosmos-verify") as pool:
        verifying = {
            name: pool.submit(open_verified, checkpoint, name, entry, path=path) for name, entry in wanted.items()
        }
    with ExitStack() as opened:
        for future in verifying.values():
            if future.exception() is None:
                opened.callback(future.result().close)
        files = {name.removeprefix(prefix): future.result() for name, future in verifying.items()}
        opened.pop_all()
    stamp = Stamp(
        rank=place.rank,
        steps=manifest.metadata.completed_training_steps,
        updates=manifest.metadata.completed_optimizer_updates,
        execution_id=manifest.execution_id,
        checkpoint_id=manifest.checkpoint_id,
    )
    return Artifacts(
        files, stamp, lambda rank: open_artifacts(checkpoint, manifest, replace(place, rank=rank), path=path)
    )
