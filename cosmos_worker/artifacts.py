"""One rank's artifacts of a checkpoint, verified on the very files that are then read.

* A mapping is handed out only when every artifact of the rank is sound; otherwise everything is closed again. They are verified side by
  side, since hashing releases the interpreter lock.
* Another rank's artifacts are opened, and verified, when they are asked for: what is saved once for all is somebody's.
* What no execution saved (a script published it, or it was imported), and lies in no rank's folder, is no rank's: every rank finds all of
  it, under whole names, and each file is opened, and verified, when it is looked up.
* Damaged, missing and foreign are told apart from unreadable: an I/O error says nothing about the content.
* What is found to be wrong, in this rank's artifacts or another's, at once or later, is told before it is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO

from cosmos_ctrl.checkpoints.artifacts import Artifact, open_verified
from cosmos_ctrl.checkpoints.digests import default_threads
from cosmos_ctrl.checkpoints.manifest import CheckpointManifest
from cosmos_ctrl.checkpoints.stores import Store
from cosmos_ctrl.core.errors import ArtifactMissingError
from cosmos_worker.settings import WorkerPlace, rank_folder, rank_of
from cosmos_worker.stamps import Stamp

Telling = Callable[[], AbstractContextManager[object]]
"""A ``with`` statement that tells the controller of the damage that is raised inside, and raises it."""


class Artifacts(Mapping[str, BinaryIO]):
    """Open files by the names that this rank saved them under; close it, or leave it to the ``with`` statement."""

    def __init__(
        self,
        files: Mapping[str, BinaryIO],
        stamp: Stamp,
        of_rank: Callable[[int], Artifacts],
        check_stamp: Callable[[str, object], None],
    ) -> None:
        """`of_rank` opens another rank's; `check_stamp` compares the stamp in an artifact's content."""
        self._files, self._open_rank, self._check_stamp = dict(files), of_rank, check_stamp
        self.stamp = stamp
        """What the manifest says that these files are of. When resharded, the rank is the one that saved them."""
        self._others: dict[int, Artifacts] = {}

    def of_rank(self, rank: int) -> Artifacts:
        """The artifacts of a rank of the same trainer group, as it was when it saved, verified; closed with these.

        Raises:
            ArtifactMissingError, CheckpointDamagedError, StorageUnavailableError: as for this rank's own.
            ValueError: there is no such rank.
        """
        if rank not in self._others:
            self._others[rank] = self._open_rank(rank)
        return self._others[rank]

    def check_stamp(self, name: str, stamp: object) -> None:
        """Refuse content that another rank, step or execution wrote, though it lies under this name.

        Args:
            name: the artifact that `stamp` was read from.
            stamp: the values of `Save.stamp` when it was saved.

        Raises:
            ArtifactForeignError: it is not that rank's of this checkpoint. The controller is told, as of damage.
        """
        self._check_stamp(name, stamp)

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


class _Unranked(Artifacts):
    """The artifacts of a checkpoint that no execution saved."""

    def __init__(self, names: Iterable[str], stamp: Stamp, open_file: Callable[[str], BinaryIO]) -> None:
        super().__init__({}, stamp, self._no_rank, self._no_stamp)
        self._names, self._open_file = tuple(sorted(names)), open_file
        self._closed = False

    def __getitem__(self, name: str) -> BinaryIO:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._files:
            if self._closed:
                raise ValueError(f"{name} was not looked up before the artifacts were closed")
            self._files[name] = self._open_file(name)
        return self._files[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names  # without opening it

    def close(self) -> None:
        """Close what was looked up. Idempotent."""
        self._closed = True
        super().close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _no_rank(self, rank: int) -> Artifacts:
        raise ValueError(
            f"rank is {rank}, but no rank saved this checkpoint: its artifacts are {', '.join(self._names)}"
        )

    def _no_stamp(self, name: str, stamp: object) -> None:
        raise ValueError(f"{name} has no stamp to check: no rank saved it")


def open_artifacts(
    checkpoint: Store,
    manifest: CheckpointManifest,
    place: WorkerPlace,
    *,
    path: str,
    resharded: bool = False,
    telling: Telling = nullcontext,
) -> Artifacts:
    """Open and verify the artifacts of the rank at `place`.

    Args:
        checkpoint: the store within the checkpoint.
        manifest: read from it.
        place: whose; its folder's name is left off in the mapping's keys.
        path: the checkpoint, for the errors.
        resharded: whether a world of another shape saved it. Its ranks' artifacts are dealt out to the ranks of this one, by their number
            modulo those that saved.
        telling: around whatever may find damage, now and later.

    Raises:
        ArtifactMissingError, CheckpointDamagedError: one is not what was committed, or there is none.
        StorageUnavailableError: one could not be read.
    """
    if not manifest.execution_number and not _saved_ranks(manifest, place.group):
        return _open_unranked(checkpoint, manifest, place.rank, path, telling)
    ranks = _ranks_of(manifest, place.group, path) if resharded else place.world_size
    saved = _Saved(checkpoint, manifest, place.group, ranks, path, resharded, telling)
    return saved.open_rank(place.rank % ranks)


def _open_unranked(
    checkpoint: Store, manifest: CheckpointManifest, rank: int, path: str, telling: Telling
) -> Artifacts:
    def open_file(name: str) -> BinaryIO:
        with telling():
            return open_verified(checkpoint, name, manifest.artifacts[name], path=path)

    return _Unranked(manifest.artifacts, _stamp(manifest, rank, resharded=True), open_file)


def _stamp(manifest: CheckpointManifest, rank: int, *, resharded: bool) -> Stamp:
    metadata = manifest.metadata
    return Stamp(
        rank=rank,
        steps=metadata.completed_training_steps,
        updates=metadata.completed_optimizer_updates,
        execution_id=manifest.execution_id,
        checkpoint_id=metadata.checkpoint_id,
        resharded=resharded,
    )


def _saved_ranks(manifest: CheckpointManifest, group: str) -> list[int]:
    return [rank for name in manifest.artifacts if (rank := rank_of(name, group)) is not None]


def _ranks_of(manifest: CheckpointManifest, group: str, path: str) -> int:
    saved = _saved_ranks(manifest, group)
    if not saved:
        raise ArtifactMissingError(path=path, artifacts=(f"{group}-*",))
    return max(saved) + 1


@dataclass(frozen=True, slots=True)
class _Saved:
    """What the ranks of one trainer group saved in a checkpoint."""

    checkpoint: Store
    manifest: CheckpointManifest
    group: str
    ranks: int
    path: str
    resharded: bool
    telling: Telling

    def open_rank(self, rank: int) -> Artifacts:
        """The artifacts of one of them, verified."""
        folder = rank_folder(self.group, rank)
        stamp = _stamp(self.manifest, rank, resharded=self.resharded)

        def check_stamp(name: str, found: object) -> None:
            with self.telling():
                stamp.check(found, path=self.path, artifact=folder + name)

        with self.telling():
            files = _open_verified(self.checkpoint, self.manifest, folder, self.path)
        return Artifacts(files, stamp, self.open_other, check_stamp)

    def open_other(self, rank: int) -> Artifacts:
        """`open_rank`, for a rank that is asked for."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank is {rank}, but there are {self.ranks}")
        # Asked for in vain, and no damage: a rank may have declared none.
        _entries_of(self.manifest, rank_folder(self.group, rank), self.path)
        return self.open_rank(rank)


def _entries_of(manifest: CheckpointManifest, prefix: str, path: str) -> dict[str, Artifact]:
    entries = {name: entry for name, entry in manifest.artifacts.items() if name.startswith(prefix)}
    if not entries:
        raise ArtifactMissingError(path=path, artifacts=(f"{prefix}*",))
    return entries


def _open_verified(checkpoint: Store, manifest: CheckpointManifest, prefix: str, path: str) -> dict[str, BinaryIO]:
    wanted = _entries_of(manifest, prefix, path)
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
    return files
