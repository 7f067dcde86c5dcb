"""Execution numbers, who may still publish, and what each execution resumed from.

* An execution number belongs to one controller: it is claimed by a put-if-absent file in the run, never reused, never removed.
* The newest claim wins. An older controller that reads a newer one is superseded, for good.
* The number in the file's name decides; what is inside is for people.
* An execution *pins* what it resumes from, durably, beside its claim, before anything is loaded. While its claim is the newest, that is
  not deleted; and before it has pinned, nothing committed is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cosmos_ctrl.checkpoints import canonical
from cosmos_ctrl.checkpoints.stores import Store
from cosmos_ctrl.core.errors import CheckpointConflictError, CheckpointDamagedError, StorageUnavailableError

DIRECTORY = "executions"

#: Numbers tried before giving up: as many controllers as can start over one run at once, and more.
MAX_ATTEMPTS = 1000

#: Largest pin that is read, in bytes.
MAX_PIN_BYTES = 64 << 10

_NAME = re.compile(r"([0-9]{8,})\.json")


def claim_execution(store: Store, *, execution_id: str, note: Mapping[str, Any]) -> int:
    """Claim the next free execution number of the run, durably; a lost race goes on to the next.

    Args:
        store: the run's.
        execution_id: random; tells this controller's claim from another's.
        note: host, process ID, start time: plain JSON values for people.

    Returns:
        The number, from 1.

    Raises:
        StorageUnavailableError: the claims could not be read, or this one not be made durable.
        ValueError: `execution_id` is empty, or `note` has a key ``number`` or ``execution_id``.
    """
    if not execution_id:
        raise ValueError("execution_id is empty")
    if taken := sorted({"number", "execution_id"} & note.keys()):
        raise ValueError(f"note has the key {taken[0]!r}, which the claim itself has")
    number = 0
    for _ in range(MAX_ATTEMPTS):
        # Not simply the next: others may have gone ahead by more than one.
        number = max(number, newest_claim(store)) + 1
        content = {"number": number, "execution_id": execution_id, **note}
        name = claim_name(number)
        try:
            # Identical bytes there already carry this very ID: an earlier try of this call whose reply was lost.
            store.put_if_absent(name, canonical.canonical_text(content, "note").encode() + b"\n")
        except CheckpointConflictError:
            continue
        return number
    cause = f"lost {MAX_ATTEMPTS} races for an execution number in a row"
    raise StorageUnavailableError(path=store.location(DIRECTORY), operation="claim", cause=cause)


def claim_name(number: int) -> str:
    """Name of the claim of that number, within the run."""
    return f"{DIRECTORY}/{number:08d}.json"


def newest_claim(store: Store) -> int:
    """The highest number that is claimed; 0 when none is.

    Raises:
        StorageUnavailableError: the claims could not be listed.
    """
    matches = (_NAME.fullmatch(name) for name in store.list(DIRECTORY))
    return max((int(match[1]) for match in matches if match), default=0)


def is_superseded(store: Store, number: int) -> bool:
    """Whether a newer execution than `number` has claimed the run. Once true, always true.

    Raises:
        StorageUnavailableError: the claims could not be listed; whoever asks must neither acknowledge nor delete.
    """
    return newest_claim(store) > number


@dataclass(frozen=True, slots=True)
class Pin:
    """What an execution resumed from."""

    checkpoint: str | None
    """Path relative to the run, or an application's own; None: it started fresh."""


def pin_resume(store: Store, number: int, *, execution_id: str, checkpoint: str | None) -> None:
    """Record what an execution resumes from, durably: after it was chosen, before any of it is loaded.

    Args:
        store: the run's.
        number: the execution's, which is claimed.
        execution_id: of that claim.
        checkpoint: relative to the run; None: it starts fresh.

    Raises:
        CheckpointConflictError: something else is recorded for that execution.
        StorageUnavailableError: it could not be made durable; load nothing.
    """
    content = {"number": number, "execution_id": execution_id, "resumed_from": checkpoint}
    store.put_if_absent(pin_name(number), canonical.canonical_text(content, "pin").encode() + b"\n")


def pin_name(number: int) -> str:
    """Name of that execution's pin, within the run."""
    return f"{DIRECTORY}/{number:08d}.resumed.json"


def read_pin(store: Store, number: int) -> Pin | None:
    """What that execution resumed from; None when it has not recorded it (yet).

    Raises:
        CheckpointDamagedError: the record is none, so what is in use is unknown.
        StorageUnavailableError: it could not be read.
    """
    name = pin_name(number)
    data = store.read(name, limit=MAX_PIN_BYTES)
    if data is None:
        return None
    try:
        checkpoint = canonical.strict_loads(data)["resumed_from"]
        if checkpoint is not None and type(checkpoint) is not str:
            raise TypeError("resumed_from is neither a path nor null")
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointDamagedError(
            path=DIRECTORY, artifact=name, what="content", expected="what the execution resumed from", found=str(error)
        ) from error
    return Pin(checkpoint)
