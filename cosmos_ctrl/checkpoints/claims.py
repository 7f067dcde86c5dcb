"""Execution numbers, and who may still publish.

* An execution number belongs to one controller: it is claimed by a put-if-absent file in the run, never reused, never removed.
* The newest claim wins. An older controller that reads a newer one is superseded, for good.
* The number in the file's name decides; what is inside is for people.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cosmos_ctrl.checkpoints import canonical
from cosmos_ctrl.checkpoints.stores import Store
from cosmos_ctrl.core.errors import CheckpointConflictError, StorageUnavailableError

DIRECTORY = "executions"

#: Numbers tried before giving up: as many controllers as can start over one run at once, and more.
MAX_ATTEMPTS = 1000

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
