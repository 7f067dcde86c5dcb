"""The audit journal: what one execution did, an event a line, so that anyone can count what a restart lost.

One JSON object a line with ``event`` and ``t`` (seconds since the epoch). A line is written at once and not fsynced: it
survives the death of the process, which is what it is for. The last line of a killed controller may be torn.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)


class Journal:
    """Appends events to a file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._broken = False

    def record(self, event: str, **values: Any) -> None:
        """Note an event. Never fails: who records is in the middle of a change. After a failed write nothing more is written, so
        an audit misses what followed, and refuses the run, rather than counting with a hole."""
        if self._broken:
            return
        try:
            self._file.write(json.dumps({"event": event, "t": round(time.time(), 3), **values}) + "\n")
        except OSError as error:
            self._broken = True
            _log.error("the journal cannot be written any more, and the run cannot be audited: %s", error)

    def close(self) -> None:
        """No more events."""
        with contextlib.suppress(OSError):  # what was not written was said when it happened
            self._file.close()


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a journal, in order; a torn last line is left out."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


class JournalTail:
    """Follows some events of a journal while it is written."""

    def __init__(self, path: Path, events: Iterable[str]) -> None:
        """`path` need not exist yet."""
        self._path = path
        # What is not asked for, which is nearly everything, is not parsed.
        self._beginnings = tuple(f'{{"event": {json.dumps(event)}'.encode() for event in events)
        self._read = 0

    def take(self) -> list[dict[str, Any]]:
        """The events that were written since the last call.

        Raises:
            OSError: the journal is there and cannot be read.
        """
        try:
            with self._path.open("rb") as journal:
                journal.seek(self._read)
                whole = journal.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        self._read += len(whole) + 1 if whole else 0
        return [json.loads(line) for line in whole.split(b"\n") if line.startswith(self._beginnings)]


def journal_path(run: Path, execution_number: int) -> Path:
    """Where an execution's journal lies."""
    return run / "executions" / f"{execution_number:08d}.jsonl"
