"""What a run holds below ``checkpoints/``: every directory and file, what it is, and whether it is ours to delete.

* Ours is a directory that a controller named, of an execution that is claimed, with nothing in it but regular files and directories,
  and with a manifest, if any, that says the same. All else is *foreign*: shown with the reason, never deleted.
* What cannot be read is foreign too: it might be anything.
* Nothing is changed, and no artifact is opened: names, kinds, sizes and manifests are looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from cosmos_ctrl.checkpoints.artifacts import check_closed_set
from cosmos_ctrl.checkpoints.claims import Pin, newest_claim, read_pin
from cosmos_ctrl.checkpoints.damage import damage_records
from cosmos_ctrl.checkpoints.discovery import Found, newest_first, read_committed, recorded_damage
from cosmos_ctrl.checkpoints.intents import intended
from cosmos_ctrl.checkpoints.names import CHECKPOINTS, MANIFEST_NAME, SaveName, parents_of, parse_save_name
from cosmos_ctrl.checkpoints.stores import Entry, EntryKind, Store
from cosmos_ctrl.core.errors import CheckpointError, CheckpointSweptError, CheckpointUncommittedError

Kind = Literal["committed", "unfinished", "swept", "gone", "foreign"]


@dataclass(frozen=True, slots=True)
class Holding:
    """One thing below ``checkpoints/``."""

    path: str
    """Relative to the run."""
    kind: Kind
    """gone: nothing is there but the intent to delete it."""
    execution: int = 0
    """Execution number: the manifest's, or else the name's; 0 when neither says one."""
    steps: int | None = None
    """Completed training steps: the manifest's, or else the name's."""
    found: Found | None = None
    """The manifest, if there is one that can be read; also of a foreign one."""
    intended: bool = False
    """Whether it is being deleted."""
    damage: str = ""
    """Why it cannot be resumed from, as far as names, sizes and the records of damage tell; empty when it is sound."""
    why: str = ""
    """Why it is foreign, or who swept it."""
    left: tuple[str, ...] = ()
    """What lies in it, without the manifest's name: files and directories."""
    size_bytes: int = 0
    """Bytes that lie in it."""

    @property
    def sound(self) -> bool:
        """Whether a run can be resumed from it, and may count on it."""
        return self.kind == "committed" and not self.damage and not self.intended


@dataclass(frozen=True, slots=True)
class Survey:
    """A run, looked at."""

    live: int
    """The newest execution number that is claimed; its execution counts as live. 0: none."""
    pin: Pin | None
    """What that execution resumed from; None when that is not known."""
    why_unpinned: str
    """Why it is not known; empty when it is."""
    holdings: tuple[Holding, ...]
    """The committed ones in discovery's order, newest first, then all others by path."""


def survey(store: Store) -> Survey:
    """Look at a run.

    Raises:
        StorageUnavailableError: claims, intents, records of damage or checkpoints could not be listed.
    """
    # The claim first: whatever is seen of an older execution's saves afterwards was seen after that execution was superseded.
    live = newest_claim(store)
    pin, why_unpinned = _pin(store, live)
    damage = damage_records(store)
    listed = [name.rstrip("/") for name in store.list(CHECKPOINTS)]
    looked = [_look(store, f"{CHECKPOINTS}/{name}", live, damage) for name in listed]
    # Last: whose manifest was seen to be gone has its intent still, or is gone as a whole by now.
    deleting = intended(store)
    holdings = [replace(holding, intended=holding.path in deleting) for holding in looked if holding is not None]
    for path in sorted(deleting - {holding.path for holding in holdings}):
        name = parse_save_name(path.rpartition("/")[2])
        if name is not None:
            holdings.append(Holding(path, "gone", name.execution, name.steps, intended=True))
    return Survey(live, pin, why_unpinned, _ordered(holdings))


def _pin(store: Store, live: int) -> tuple[Pin | None, str]:
    try:
        pin = read_pin(store, live) if live else None
    except CheckpointError as error:
        return None, f"what execution {live} resumed from cannot be told: {error}"
    if pin is not None:
        return pin, ""
    return None, f"execution {live} has not recorded yet what it resumes from" if live else "no execution is claimed"


def _ordered(holdings: Iterable[Holding]) -> tuple[Holding, ...]:
    committed = {holding.path: holding for holding in holdings if holding.kind == "committed"}
    others = sorted((holding for holding in holdings if holding.kind != "committed"), key=lambda holding: holding.path)
    order = newest_first(holding.found for holding in committed.values() if holding.found)
    return (*(committed[found.path] for found in order), *others)


def _look(store: Store, path: str, live: int, damage: Mapping[str, str]) -> Holding | None:
    try:
        kind = store.kind(path)
        if kind is None:
            return None  # gone since it was listed
        if kind != "directory":
            return Holding(path, "foreign", why=f"it is no directory but a {_said(kind)}")
        # The manifest before what it names: a save that is committed meanwhile is unfinished, never damaged.
        holding = _read(store, path)
        entries = store.scan(path)
    except CheckpointError as error:
        return Holding(path, "foreign", why=str(error))
    why = _foreign(holding, entries, live)
    return replace(
        holding,
        kind="foreign" if why else holding.kind,
        damage=_damage(holding.found, entries, damage) if holding.found else "",
        why=why or holding.why,
        left=tuple(entry.name for entry in entries if entry.name != MANIFEST_NAME),
        size_bytes=sum(entry.size_bytes for entry in entries),
    )


def _read(store: Store, path: str) -> Holding:
    """What the manifest's name holds."""
    named = parse_save_name(path.rpartition("/")[2])
    execution, steps = (named.execution, named.steps) if named else (0, None)
    try:
        found = read_committed(store, path)
    except CheckpointSweptError as error:
        return Holding(path, "swept", execution, steps, why=f"swept by execution {error.execution}")
    except CheckpointUncommittedError:
        return Holding(path, "unfinished", execution, steps)
    except CheckpointError as error:
        return Holding(path, "foreign", execution, steps, why=str(error))
    return Holding(path, "committed", *found.manifest.order, found)


def _damage(found: Found, entries: tuple[Entry, ...], damage: Mapping[str, str]) -> str:
    if found.path in damage:
        return str(recorded_damage(found.path, damage[found.path]))
    sizes = {name: artifact.size_bytes for name, artifact in found.manifest.artifacts.items()}
    try:
        check_closed_set(entries, sizes, path=found.path)
    except CheckpointError as error:
        return str(error)
    return ""


def _foreign(holding: Holding, entries: tuple[Entry, ...], live: int) -> str:
    """Why a directory is none of ours; empty when it is one."""
    named = parse_save_name(holding.path.rpartition("/")[2])
    if named is None:
        return "its name is not one that a controller gives"
    if named.execution > live:
        return f"execution {named.execution} has not claimed this run"
    for entry in entries:
        if entry.kind not in ("file", "directory"):
            return f"{entry.name} in it is a {_said(entry.kind)}, which no save makes"
    if holding.found is None:
        return holding.why if holding.kind == "foreign" else ""
    manifest = holding.found.manifest
    said = SaveName(*manifest.order, manifest.checkpoint_id[:8])
    if said != named:
        return (
            f"its manifest is of execution {said.execution}, step {said.steps}, checkpoint {said.id_prefix}…: "
            "it was copied or renamed"
        )
    known = {parent for name in manifest.artifacts for parent in parents_of(name)} | manifest.artifacts.keys()
    extra = [entry.name for entry in entries if entry.name not in known and entry.name != MANIFEST_NAME]
    return f"{extra[0]} in it is not one of its artifacts" if extra else ""


def _said(kind: EntryKind) -> str:
    return "special file" if kind == "other" else kind
