"""One rank's part of a checkpoint, from SAVE to its receipts.

* Exactly the declared artifacts are written, each once, into this rank's own folder of the command's fresh directory.
* Receipts are sent when every file and every directory name is durable, and not before; they list the rank's whole set.
* An application that commits checkpoints in its own format says so instead (`Save.committed`), on one rank.
* What is still being written when the ``with`` statement ends (`Save.write_later`, `Save.finish_after`) goes on in the background, and so
  does all that follows from it; the last save of a run is waited for there.
* A file is let go of only when nobody can be writing to it any more: the number of its descriptor may be another file's next.
* Whatever goes wrong before that abandons the save at the controller, and comes to the user as it was: nothing is published.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from cosmos_ctrl.checkpoints.digests import DEFAULT_ALGORITHM
from cosmos_ctrl.checkpoints.stores import Store
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.v1 import checkpoint_pb2
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_worker.commands import SaveWork
from cosmos_worker.errors import DeadlineError, UsageError
from cosmos_worker.shard_places import ShardFile, shards_in
from cosmos_worker.shards import SystemCalls
from cosmos_worker.stamps import Stamp
from cosmos_worker.transport import name_of

if TYPE_CHECKING:
    from typing_extensions import Self

    from cosmos_worker.background import Background

_log = logging.getLogger(__name__)

#: Largest application note, in bytes of JSON.
MAX_NOTE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlace:
    """Where this rank saves, and who it is."""

    store: Store
    """The run's."""
    prefix: str
    """Folder of this rank, with its slash."""
    names: tuple[str, ...]
    """Declared artifacts, without the prefix."""
    rank: int
    execution_id: str
    leader: bool
    digest: str = DEFAULT_ALGORITHM
    """Algorithm that the artifacts are hashed with."""
    background: Background | None = None
    """Where an asynchronous save goes on; None: there is none."""
    total_s: float = 1800.0
    """Longest that what is written in the background is waited for."""


Report = Callable[[pb.ReportShardsRequest], pb.ReportShardsResponse]
"""Sends an outcome (the request without its identity) until it is answered."""


class Uploads(Protocol):
    """Torch's AsyncSaveResponse, from a stager that copies in the background. The state may change once that has copied it."""

    upload_completion: Future[None]


class Save:
    """See the module. Made by `Trainer.save`; use it with ``with``."""

    def __init__(
        self, command: SaveWork, place: SavePlace, report: Report, *, calls: SystemCalls | None = None
    ) -> None:
        self.command = command
        self._shards = shards_in(place.store, f"{command.path}/{place.prefix}", algorithm=place.digest, calls=calls)
        self.directory = place.store.root / command.path if isinstance(place.store, LocalStore) else None
        """The checkpoint's directory, on this machine; None in an object store."""
        self.rank_directory = self.directory / place.prefix if self.directory else None
        """This rank's own folder in it."""
        self.state = ""
        """Once it is over on this rank: PENDING, PUBLISHING, COMMITTED or ABANDONED (or UNKNOWN_n, of a newer controller); empty before."""
        self.manifest_digest = ""
        """Once it is over and was committed: ``algorithm:hex``."""
        self.stamp = Stamp(
            rank=place.rank,
            steps=command.step,
            updates=command.updates,
            execution_id=place.execution_id,
            checkpoint_id=command.checkpoint_id,
        )
        """What this rank's training state is to be stamped with (`state.capture`)."""
        self._place = place
        self._report = report
        self._files: dict[str, ShardFile] = {}
        self._note = ""
        self._committed_at = ""
        self._open = False
        self._inside = False
        self.left = False
        """Whether the ``with`` statement has ended."""
        self._later: list[Callable[[], object]] = []
        self._futures: list[Future[Any]] = []

    def open(self, name: str) -> IO[bytes]:
        """A new file for the declared artifact `name`; it is closed, at the latest, when the save ends.

        Raises:
            UsageError: it was not declared, or was opened before.
            OSError: as the system said it.
            StorageUnavailableError: the object store failed.
        """
        if not self._open:
            raise UsageError("files are opened inside the save's with statement")
        if name not in self._place.names:
            raise UsageError(f"artifact {name!r} was not declared; declared are {', '.join(self._place.names)}")
        if name in self._files:
            raise UsageError(f"artifact {name!r} was opened before in this save")
        file = self._files[name] = self._shards.create(name)
        # Nominal only for type checkers: it has what writers of bytes call.
        return cast("IO[bytes]", file)

    def write_later(self, name: str, state: Any, write: Callable[[Any, IO[bytes]], object] | None = None) -> None:
        """Copy `state` now, and write the copy to the artifact `name` in the background, once the ``with`` statement has ended.

        Args:
            name: a declared artifact.
            state: see `snapshots.snapshot` for what is copied, and how.
            write: called with the copy and the file, on another thread; None: `torch.save`.

        Raises:
            UsageError: as `open`; or the state cannot be copied into one rank's file.
        """
        import torch

        from cosmos_worker.snapshots import snapshot

        self._require_inside()
        file = self.open(name)
        self._later.append(partial(write or torch.save, snapshot(state), file))

    def finish_after(self, *writes: Future[Any] | Uploads) -> None:
        """Keep the save open until these are done: what they stand for is written meanwhile, to files opened by `open`.

        Args:
            writes: futures, or what `torch.distributed.checkpoint.async_save` returned.

        Raises:
            UsageError: there is nothing to wait for.
        """
        self._require_inside()
        for each in writes:
            future = getattr(each, "upload_completion", each)
            if not isinstance(future, Future):
                raise UsageError(f"finish_after() takes futures of concurrent.futures, not {type(each).__name__}")
            self._futures.append(future)

    def note(self, value: dict[str, Any]) -> None:
        """Keep `value`, a JSON object of the application's own, with the checkpoint. Ignored on all ranks but the leader.

        Raises:
            UsageError: it is no object, or larger than 64 KiB.
        """
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        if not isinstance(value, dict):
            raise UsageError(f"an application note is a JSON object, not a {type(value).__name__}")
        if len(text.encode()) > MAX_NOTE_BYTES:
            raise UsageError(f"an application note has at most {MAX_NOTE_BYTES} bytes, not {len(text.encode())}")
        self._note = text if self._place.leader else ""

    def committed(self, checkpoint_path: str) -> None:
        """The application has committed this checkpoint in its own format (``checkpoints.owner = "application"``).

        Args:
            checkpoint_path: where it lies, for the adapter's ``load_metadata`` to find. `command.metadata` is what to keep with it.

        Raises:
            UsageError: it is empty, or this rank has declared artifacts of its own.
        """
        if not checkpoint_path:
            raise UsageError("committed() needs the checkpoint's path")
        if self._place.names:
            raise UsageError("a rank that commits in the application's own format declares no artifacts (artifacts=())")
        self._committed_at = checkpoint_path

    def __enter__(self) -> Self:
        if self.left or self._inside:
            raise UsageError(f"the save of command {self.command.number} was entered before: each is done once")
        self._open = self._inside = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside, self.left = False, True
        background = self._place.background
        if error is not None:
            self._abandon(error)
            self._release_soon()
        elif background is None or not (self._later or self._futures):
            try:
                self._finish()
            finally:
                self._release_soon()
        else:
            background.start(self.command, self._finish, self._release)
            if self.command.final:
                # Nothing comes after it that could go on meanwhile.
                background.wait_finished(self._place.total_s)

    def _finish(self) -> None:
        try:
            self._write_rest()
            self._open = False
            receipts = self._make_durable()
        except BaseException as failure:
            self._abandon(failure)
            raise
        request = pb.ReportShardsRequest(command=self.command.number)
        if self._committed_at:
            request.committed.checkpoint_path = self._committed_at
        else:
            request.receipts.CopyFrom(pb.ShardReceipts(receipts=receipts, application_note=self._note))
        response = self._report(request)
        self.manifest_digest = response.manifest_digest
        self.state = name_of(pb.SaveState, response.state)
        if response.state == pb.SAVE_STATE_ABANDONED:
            _log.warning("checkpoint %s was abandoned by another rank", self.command.checkpoint_id)

    def _write_rest(self) -> None:
        deadline = time.monotonic() + self._place.total_s
        while self._later:
            self._later.pop(0)()  # and the copy is let go of
        if concurrent.futures.wait(self._futures, max(0.0, deadline - time.monotonic())).not_done:
            raise DeadlineError(f"what is written for the checkpoint of step {self.command.step}", self._place.total_s)
        for future in self._futures:
            future.result()

    def _make_durable(self) -> list[checkpoint_pb2.ShardReceipt]:
        missing = [name for name in self._place.names if name not in self._files]
        if missing:
            raise UsageError(f"declared artifacts were not saved: {', '.join(missing)}")
        receipts = []
        for name, file in self._files.items():
            file.close()
            if not file.result.size_bytes:
                raise UsageError(f"artifact {name!r} is empty; a checkpoint has no empty artifacts")
            receipts.append(
                checkpoint_pb2.ShardReceipt(
                    name=self._place.prefix + name,
                    size_bytes=file.result.size_bytes,
                    digest=file.result.digest,
                    completed_training_steps=self.command.step,
                    completed_optimizer_updates=self.command.updates,
                    rank=self._place.rank,
                    execution_number=self.command.execution_number,
                    execution_id=self._place.execution_id,
                    checkpoint_id=self.command.checkpoint_id,
                )
            )
        self._shards.sync_names(self._files)
        return receipts

    def _require_inside(self) -> None:
        if not self._inside:
            raise UsageError("what is written later is said inside the save's with statement")

    def _release_soon(self) -> None:
        """`_release`, without waiting for who still writes."""
        if self._place.background is None or all(future.done() for future in self._futures):
            self._release()
        else:
            self._place.background.start(self.command, lambda: None, self._release)

    def _release(self) -> None:
        concurrent.futures.wait(self._futures)
        self._futures.clear()
        for file in self._files.values():
            file.abandon()

    def _abandon(self, error: BaseException) -> None:
        self._open = False
        self._later.clear()
        self.state = "ABANDONED"
        request = pb.ReportShardsRequest(
            command=self.command.number, abandoned=pb.SaveAbandoned(reason=f"{type(error).__name__}: {error}"[:1000])
        )
        # What the user's code met is the news; that the controller could not be told is not.
        with contextlib.suppress(Exception):
            self._report(request)
