"""Processes of a benchmark: each is told by line what to do, and answers by line, in JSON.

* What is measured of a process is its own: CPU time from its clock in the kernel, memory from /proc.
* Times are of the machine's monotonic clock, so they compare between processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import cached_property
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PATIENCE_S = 120.0
"""Longest time for one answer."""
MIB = 1 << 20


class Child:
    """One process, as its parent sees it."""

    def __init__(self, script: str, role: str, **settings: Any) -> None:
        """`script` of this folder, in a `role` of its with `settings`; `ready` waits for it."""
        self.name = f"{script} {role}"
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / f"{script}.py"), role, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"GRPC_VERBOSITY": "NONE"},
        )
        self.pid = self._process.pid

    @cached_property
    def ready(self) -> Any:
        """What it said when it was."""
        return self.answer()

    def start(self, do: str, **arguments: Any) -> None:
        """Tell it to do something; `answer` is due."""
        assert self.ready
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """What it has to say, once it has.

        Raises:
            RuntimeError: it ended, or was too slow.
        """
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], PATIENCE_S)[0]:
            raise RuntimeError(f"{self.name} gave no answer for {PATIENCE_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self._process.wait(5)}")
        return json.loads(line)

    def ask(self, do: str, **arguments: Any) -> Any:
        """`start`, and its answer."""
        self.start(do, **arguments)
        return self.answer()

    @property
    def cpu_s(self) -> float:
        """User and system time of the whole process until now."""
        # What clock_getcpuclockid(3) gives: /proc/PID/stat says the same in steps of 10 ms.
        return time.clock_gettime((~self.pid << 3) | 2)

    @property
    def rss_mib(self) -> float:
        """Resident memory now."""
        return self._status("VmRSS")

    @property
    def peak_rss_mib(self) -> float:
        """Most resident memory since `forget_peak`."""
        return self._status("VmHWM")

    def forget_peak(self) -> None:
        """Let the peak begin anew."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def close(self) -> None:
        """End it now."""
        self._process.kill()
        self._process.communicate()

    def _status(self, key: str) -> float:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) / 1024
        raise KeyError(key)


async def obey(ready: Any, **handlers: Callable[..., Awaitable[Any]]) -> None:
    """The child's side: say `ready`, then do what each line says, until there is none."""
    loop = asyncio.get_running_loop()
    print(json.dumps(ready), flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        print(json.dumps(await handlers[order.pop("do")](**order)), flush=True)
    os._exit(0)  # the parent is gone; nothing here is worth an orderly end


def run_child(roles: dict[str, Callable[..., Awaitable[None]]]) -> None:
    """`main` of a script of children."""
    # A connection is a file.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(roles[sys.argv[1]](**json.loads(sys.argv[2])))  # type: ignore[arg-type]  # roles are coroutine functions


def quantile(values: list[float], share: float) -> float:
    """The value that `share` of them do not pass."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
