"""Intents to delete: what retention is about to delete, said durably before the first byte goes.

* A deleter puts the intent, then reads the claims; a controller claims, then reads the intents, then the manifests. So at least one of
  the two sees the other: the deleter stops, or the controller passes the checkpoint over.
* An intent goes only after everything else of its checkpoint is gone. Who finds one while its checkpoint is whole cannot know whether a
  slow deleter goes on with it, so the checkpoint is not resumed from, and any later deleter may finish what was begun.
* All intents for one checkpoint are the same bytes, so deleters do not conflict.
"""

from __future__ import annotations

from cosmos_ctrl.checkpoints import canonical
from cosmos_ctrl.checkpoints.names import CHECKPOINTS
from cosmos_ctrl.checkpoints.stores import Store
from cosmos_ctrl.core.errors import CheckpointConflictError

DIRECTORY = "deleting"


def intent_name(path: str) -> str:
    """Name of the intent to delete the checkpoint at `path`, within the run."""
    return f"{DIRECTORY}/{path.removeprefix(f'{CHECKPOINTS}/')}.json"


def put_intent(store: Store, path: str) -> None:
    """Say that the checkpoint at `path` is going to be deleted. Saying it again changes nothing.

    Raises:
        CheckpointConflictError: there is something else of the intent's name.
        StorageUnavailableError: it could not be made durable; delete nothing.
    """
    data = canonical.canonical_text({"path": path}, "intent").encode() + b"\n"
    try:
        store.put_if_absent(intent_name(path), data)
    except CheckpointConflictError:
        # Another deleter may have been through and removed it just when it was looked at.
        store.put_if_absent(intent_name(path), data)


def intended(store: Store) -> frozenset[str]:
    """Paths of the checkpoints that are being deleted. The names count, not what is inside.

    Raises:
        StorageUnavailableError: they could not be listed.
    """
    names = (name for name in store.list(DIRECTORY) if name.endswith(".json"))
    return frozenset(f"{CHECKPOINTS}/{name.removesuffix('.json')}" for name in names)
