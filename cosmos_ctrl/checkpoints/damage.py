"""Records of damage that was found while loading: kept beside the checkpoints, read by discovery.

* Only who reads the bytes finds a flipped bit, and discovery reads none; the record carries that from one execution to the next.
* A record is put once, durably, and removed by nobody but the operator, who restores the artifact first.
"""

from __future__ import annotations

import hashlib
from typing import Any

from cosmos_ctrl.checkpoints import canonical
from cosmos_ctrl.checkpoints.stores import Store

DIRECTORY = "damaged"

#: Longest explanation that is kept, in characters, and the largest record that is read, in bytes.
MAX_EXPLANATION = 4096
MAX_RECORD_BYTES = 64 << 10


def record_damage(store: Store, path: str, artifact: str, explanation: str) -> str:
    """Record that an artifact of a checkpoint is damaged. Recording the same again changes nothing.

    Args:
        store: the run's.
        path: the checkpoint, relative to the run.
        artifact: what is damaged in it.
        explanation: what was expected and found, in words.

    Returns:
        The record's name within the run.

    Raises:
        StorageUnavailableError: it could not be made durable.
    """
    path = path.rstrip("/")
    content = {"path": path, "artifact": artifact, "explanation": explanation[:MAX_EXPLANATION]}
    # From outside, so any text may be in it; a record must not fail for a character.
    clean = {key: text.encode(errors="replace").decode() for key, text in content.items()}
    data = canonical.canonical_text(clean, "damage record").encode() + b"\n"
    name = f"{DIRECTORY}/{path.rpartition('/')[2][:200]}-{hashlib.sha256(data).hexdigest()[:16]}.json"
    store.put_if_absent(name, data)
    return name


def damage_records(store: Store) -> dict[str, str]:
    """What is recorded: by the checkpoint's path, an explanation that names the record.

    Raises:
        StorageUnavailableError: the records could not be read.
    """
    found: dict[str, str] = {}
    for name in store.list(DIRECTORY):
        record = f"{DIRECTORY}/{name}"
        data = None if name.endswith("/") else store.read(record, limit=MAX_RECORD_BYTES)
        if data is None:
            continue  # a directory, or removed since it was listed
        path, what = _decode(data, name)
        found.setdefault(path, f"{what} (recorded in {record}; remove the record once it is restored)")
    return found


def _decode(data: bytes, name: str) -> tuple[str, str]:
    try:
        content: Any = canonical.strict_loads(data)
        return str(content["path"]), f"{content['artifact']}: {content['explanation']}"
    except (ValueError, TypeError, KeyError):
        # Somebody wrote it by hand; its name still says which checkpoint it means.
        return f"checkpoints/{name.rpartition('-')[0]}", "somebody marked it as damaged"
