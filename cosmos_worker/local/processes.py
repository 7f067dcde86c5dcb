"""The processes of one execution: started, named, watched, killed.

* Each has a session of its own, so that a terminal's interrupt reaches only the launcher, which decides.
* A process is killed together with everything it started; torchrun's ranks have sessions of their own, and are found
  through their parent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Child:
    """A running process."""

    name: str
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """Process ID."""
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative when a signal ended it."""
        return self.process.poll()


def start(name: str, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Child:
    """Start ``python -m module arguments``, its output going to `log`."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    return Child(name, process)


def kill(children: Iterable[Child]) -> None:
    """SIGKILL all of them with their descendants, and wait until they are gone."""
    children = list(children)
    victims = {pid for child in children if child.exit_code is None for pid in (child.pid, *_descendants(child.pid))}
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    for child in children:
        child.process.wait()


def terminate(children: Iterable[Child], *, grace_s: float) -> None:
    """SIGTERM all of them, and SIGKILL what is left after `grace_s`."""
    children = list(children)
    for child in children:
        if child.exit_code is None:
            child.process.terminate()
    wait(children, timeout_s=grace_s)
    kill(children)


def wait(children: Iterable[Child], *, timeout_s: float) -> bool:
    """Whether all of them ended in time."""
    deadline = time.monotonic() + timeout_s
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
    return True


def tail(log: Path, lines: int = 15) -> str:
    """The end of a log, for an error message."""
    try:
        return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no log)"


def _descendants(pid: int) -> list[int]:
    """Processes that `pid` started, and theirs. Linux; elsewhere none are found, and each child ends with its parent."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(text) for text in task.read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *_descendants(child)]
    return found
