"""`fault_worker` as a process in a test's hands."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from controller_process import DEADLINE_S


class WorkerProcess:
    """See the module. Killed when the test leaves."""

    def __init__(self, environ: dict[str, str], *, expect_ready: bool = True) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fault_worker.py"))],
            env=os.environ | environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        if expect_ready:
            self.answer()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def answer(self) -> list[int]:
        """The groups of what it did last."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
        line = self.process.stdout.readline() if readable else b""
        assert line, (self.process.poll(), line)
        groups: list[int] = json.loads(line)["groups"]
        return groups

    def do(self, line: str) -> list[int]:
        self.tell(line)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(DEADLINE_S)

    def exit_code(self) -> tuple[int, str]:
        """Of a process that ends by itself, and what it said then."""
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, errors.decode()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)
