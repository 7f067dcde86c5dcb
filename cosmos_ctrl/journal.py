"""The audit journal: what one execution did, an event a line, so that anyone can count what a restart lost.

One JSON object a line with ``event`` and ``t`` (seconds since the epoch). A line is written at once and not fsynced: it
survives the death of the process, which is what it is for. The last line of a killed controller may be torn.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Journal:
    """Appends events to a file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def record(self, event: str, **values: Any) -> None:
        """Note an event."""
        self._file.write(json.dumps({"event": event, "t": round(time.time(), 3), **values}) + "\n")

    def close(self) -> None:
        """No more events."""
        self._file.close()


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a journal, in order; a torn last line is left out."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


def journal_path(run: Path, execution_number: int) -> Path:
    """Where an execution's journal lies."""
    return run / "executions" / f"{execution_number:08d}.jsonl"
