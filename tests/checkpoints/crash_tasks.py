"""Tasks whose crashes are enumerated, and the mutants of the code under them (run in the children of ``checkpoint_tasks``).

A task gets the directory that stands for the disk. What it tells, a power loss may not take back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import checkpoint_helpers as helpers

from cosmos_ctrl.checkpoints import claims, durable, retention
from cosmos_ctrl.checkpoints.manifest import publish_from_receipts
from cosmos_ctrl.checkpoints.names import MANIFEST_NAME
from cosmos_ctrl.checkpoints.retention import Decision, RetentionPolicy
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_worker.commands import SaveWork
from cosmos_worker.saves import Save, SavePlace
from cosmos_worker.shards import SystemCalls

#: The committed checkpoint that some tasks find, and the one that they make.
OLD, NEW = "checkpoints/old", "checkpoints/new"
#: In a run that is tidied up: what is to go, what is to stay, and what a dead execution left unfinished.
RETIRED, KEPT = "checkpoints/e0001-s00000001-0000000a", "checkpoints/e0002-s00000002-0000000b"
DEAD = "checkpoints/e0001-s00000003-0000000c"
PUT_NAME, PUT_DATA = "deep/er/record.json", b"all of the record\n"

_answer = -1
_worker_calls = SystemCalls()


def answers_to(descriptor: int) -> None:
    """Where `tell` writes."""
    global _answer
    _answer = descriptor


def tell(what: object) -> None:
    """Somebody outside learns `what`."""
    if _answer >= 0:
        # Not by write, which tests let fail.
        os.writev(_answer, [json.dumps({"told": str(what)}).encode() + b"\n"])


def script(disk: Path) -> str:
    """A script writes files as scripts do, and publishes them."""
    directory = helpers.write(disk / "runs" / "one" / NEW)
    return helpers.publish(directory).digest()


def script_again(disk: Path) -> str:
    """The script's files are there; it is publishing that is repeated."""
    return helpers.publish(disk / "runs" / "one" / NEW).digest()


def controller(disk: Path) -> str:
    """A controller publishes artifacts whose bytes are durable, and no more than those."""
    directory = disk / "run" / NEW
    for name, data in helpers.CONTENT.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.write_file(path, data, mode=0o644)
    tell("receipts")
    return controller_again(disk)


def fresh_directory(disk: Path) -> None:
    """The directory of the new checkpoint, durable, as the ranks' receipts promise."""
    directory = disk / "run"
    for part in NEW.split("/"):
        directory /= part
        durable.ensure_directory(directory)


def controller_again(disk: Path) -> str:
    """The same receipts, once more."""
    return publish_from_receipts(disk / "run" / NEW, helpers.manifest_of(step=4, checkpoint_id="new"))


def conflict(disk: Path) -> str:
    """A controller publishes another manifest over a committed one."""
    return publish_from_receipts(disk / "run" / OLD, helpers.manifest_of(step=9, checkpoint_id="other"))


def worker(disk: Path) -> list[str]:
    """Two ranks save; their receipts are told."""
    return [_save(disk, rank) for rank in range(len(helpers.CONTENT))]


def whole_save(disk: Path) -> str:
    """From the fresh directory through the ranks' receipts to the manifest."""
    for rank in range(len(helpers.CONTENT)):
        _save(disk, rank)
    return controller_again(disk)


def _save(disk: Path, rank: int) -> str:
    name, data = list(helpers.CONTENT.items())[rank]
    folder, _, last = name.rpartition("/")
    command = SaveWork(
        number=1,
        step=4,
        updates=8,
        checkpoint_id="new",
        path=NEW,
        execution_number=1,
        metadata=helpers.metadata(4, "new"),
        final=False,
    )
    place = SavePlace(
        store=LocalStore(disk / "run"),
        prefix=f"{folder}/" if folder else "",
        names=(last,),
        rank=rank,
        execution_id="id-1",
        leader=rank == 0,
    )

    def report(request: pb.ReportShardsRequest) -> pb.ReportShardsResponse:
        if not request.HasField("receipts"):
            return pb.ReportShardsResponse(state=pb.SAVE_STATE_ABANDONED)
        tell(",".join(receipt.name for receipt in request.receipts.receipts))
        return pb.ReportShardsResponse(state=pb.SAVE_STATE_PENDING)

    save = Save(command, place, report, calls=_worker_calls)
    with save:
        file = save.open(last)
        file.write(data)
    return save.state


def first_claim(disk: Path) -> int:
    """A controller claims in a run that is nowhere yet."""
    tell(claims.claim_execution(LocalStore(disk / "runs" / "one"), execution_id="first", note={}))
    return 1


def claim_twice(disk: Path) -> int:
    """Two controllers claim, one after the other."""
    first_claim(disk)
    tell(claims.claim_execution(LocalStore(disk / "runs" / "one"), execution_id="second", note={}))
    return 2


def put(disk: Path) -> bool:
    """A record is put into a run that is nowhere yet."""
    return LocalStore(disk / "runs" / "one").put_if_absent(PUT_NAME, PUT_DATA)


def uncommit(disk: Path) -> bool:
    """A manifest is deleted."""
    return LocalStore(disk / "run").delete(f"{OLD}/{MANIFEST_NAME}")


def tidy(disk: Path) -> dict[str, Any]:
    """One checkpoint is retired, one unfinished save swept; each is told once it is gone."""

    def gone(decision: Decision) -> None:
        tell(decision.holding.path)

    return asdict(retention.retain(LocalStore(disk / "run"), RetentionPolicy(keep_last=1), on_deleted=gone))


def next_tidies(disk: Path) -> dict[str, Any]:
    """The execution after goes on with it."""
    store = LocalStore(disk / "run")
    number = claims.claim_execution(store, execution_id="id-3", note={})
    claims.pin_resume(store, number, execution_id="id-3", checkpoint=KEPT)
    return tidy(disk)


def publish_and_tidy(disk: Path) -> dict[str, Any]:
    """What is to be kept is only committed now."""
    publish_from_receipts(disk / "run" / KEPT, helpers.manifest_of(2, 2, checkpoint_id=KEPT[-8:]))
    tell("kept")
    return tidy(disk)


def pin(disk: Path) -> None:
    """An execution says what it resumes from."""
    claims.pin_resume(LocalStore(disk / "run"), 2, execution_id="id-2", checkpoint=RETIRED)


TASKS: dict[str, Callable[[Path], Any]] = {
    "script": script,
    "script again": script_again,
    "controller": controller,
    "controller again": controller_again,
    "conflict": conflict,
    "worker": worker,
    "whole save": whole_save,
    "first claim": first_claim,
    "claim twice": claim_twice,
    "put": put,
    "uncommit": uncommit,
    "tidy": tidy,
    "the next tidies": next_tidies,
    "publish and tidy": publish_and_tidy,
    "pin a resume": pin,
}


def warm_up(scratch: Path) -> None:
    """Whatever is imported or cached on first use is so afterwards."""
    (scratch / "run").mkdir()
    whole_save(scratch)
    claim_twice(scratch)
    pin(scratch)
    tidy(scratch)


def _nothing(*_: object, **__: object) -> None:
    """In the place of an fsync."""


def _plain_rename(temporary: Path, target: Path) -> bool:
    temporary.rename(target)
    return True


def _in_place(store: LocalStore, name: str, data: bytes) -> bool:
    path = store.path_of(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.fsync_path(path.parent)
    path.unlink(missing_ok=True)
    durable.write_file(path, data, mode=0o644)
    durable.fsync_directory(path.parent)
    return True


def _fsync_of(kind: str) -> Callable[[int], None]:
    def fsync(descriptor: int) -> None:
        if kind == ("directory" if Path(f"/proc/self/fd/{descriptor}").is_dir() else "file"):
            os.fsync(descriptor)

    return fsync


def _worker_with(fsync: Callable[[int], None]) -> None:
    global _worker_calls
    _worker_calls = SystemCalls(fsync=fsync)


def _artifacts_first(deleter: Any, path: str, kept: Any) -> None:
    del kept
    retention.put_intent(deleter.store, path)
    deleter._clear(path)
    for name in (f"{path}/{MANIFEST_NAME}", path, retention.intent_name(path)):
        deleter.store.delete(name)


def _without_a_tombstone(deleter: Any, path: str) -> bool:
    deleter._clear(path)
    return True


def _delete_not_durably(store: LocalStore, name: str) -> bool:
    path = store.path_of(name)
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
    return True


MUTANTS: dict[str, Callable[[], None]] = {
    "files are not fsynced": lambda: setattr(durable, "fsync_file", _nothing),
    "directories are not fsynced": lambda: setattr(durable, "fsync_directory", _nothing),
    "directories of artifacts are not fsynced": lambda: setattr(LocalStore, "sync_names", _nothing),
    "the way to the store is not fsynced": lambda: setattr(durable, "fsync_path", _nothing),
    "a plain rename": lambda: setattr(durable, "name_without_replacing", _plain_rename),
    "written in place": lambda: setattr(LocalStore, "put_if_absent", _in_place),
    "the worker fsyncs no file": lambda: _worker_with(_fsync_of("directory")),
    "the worker fsyncs no directory": lambda: _worker_with(_fsync_of("file")),
    "deletions are not fsynced": lambda: setattr(LocalStore, "delete", _delete_not_durably),
    "artifacts go before the manifest": lambda: setattr(retention._Deleter, "retire", _artifacts_first),
    "there is no intent": lambda: setattr(retention, "put_intent", _nothing),
    "there is no tombstone": lambda: setattr(retention._Deleter, "sweep", _without_a_tombstone),
    "what is found is not made durable": lambda: setattr(LocalStore, "sync", _nothing),
}
