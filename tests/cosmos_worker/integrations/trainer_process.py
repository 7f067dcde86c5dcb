"""The process that trainers of Hugging Face run in, a child each."""

from __future__ import annotations

import importlib.util
import json
import os
import selectors
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TASKS = Path(__file__).with_name("trainer_tasks.py")
DEADLINE_S = 110


class Trainers:
    """Runs tasks of `trainer_tasks`, in whose process the libraries are imported once."""

    def __init__(self, directory: Path) -> None:
        self._log = (directory / "trainers.log").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, str(TASKS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        assert self._process.stdout is not None
        self._answers = self._process.stdout

    def ranks(self, directory: Path, ranks: int, **task: Any) -> list[dict[str, Any]]:
        """What came of a task, by rank."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        task |= {"directory": str(directory), "ranks": ranks, "port": port}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            assert selector.select(DEADLINE_S), self._said()
        line = self._answers.readline()
        assert line, self._said()
        outcomes: list[dict[str, Any]] = json.loads(line)
        return outcomes

    def run(self, directory: Path, **task: Any) -> dict[str, Any]:
        """What came of a task of one process."""
        (outcome,) = self.ranks(directory, 1, **task)
        return outcome

    def close(self) -> None:
        with self._process, self._log:
            self._process.kill()

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read()


def require(package: str) -> None:
    """Skip where it is not installed; `make test` installs it."""
    if importlib.util.find_spec(package) is None:
        if os.environ.get("CI") == "true" and sys.version_info >= (3, 11):
            pytest.fail(f"{package} is not installed")
        pytest.skip(f"{package} is not installed: `make test` does that")
