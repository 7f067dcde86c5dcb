"""Runs checkpoint tasks in forked children, for tests that tamper with system calls (see ``checkpoint_helpers.Zygote``)."""

from __future__ import annotations

import json
import os
import resource
import select
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import checkpoint_helpers as helpers
import crash_tasks

from cosmos_ctrl.checkpoints import claims, damage, digests, discovery, retention
from cosmos_ctrl.checkpoints.manifest import publish_from_receipts
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.core.errors import ControlError

TASKS: dict[str, Callable[[Path], Any]] = {
    "publish": lambda directory: helpers.publish(directory).digest(),
    "receipts": lambda directory: publish_from_receipts(directory, helpers.manifest_of()),
    "load": lambda directory: helpers.load(directory).digest(),
    "discover": lambda directory: _chosen(directory),
    "claim": lambda directory: claims.claim_execution(LocalStore(directory), execution_id="mine", note={"pid": 1}),
    "record": lambda directory: damage.record_damage(LocalStore(directory), "checkpoints/a", "rank0.pt", "flipped"),
    "delete": lambda directory: LocalStore(directory).delete("manifest.json"),
    "retain": lambda directory: asdict(retention.retain(LocalStore(directory), retention.RetentionPolicy(keep_last=1))),
    "pin": lambda directory: claims.pin_resume(
        LocalStore(directory), 1, execution_id="mine", checkpoint="checkpoints/a"
    ),
}
assert not TASKS.keys() & crash_tasks.TASKS.keys()
TASKS |= crash_tasks.TASKS


def _chosen(directory: Path) -> str | None:
    found = discovery.discover(LocalStore(directory), compatibility=None, on_corrupt="previous").chosen
    return found.path if found else None


def outcome(task: str, directory: Path) -> dict[str, Any]:
    try:
        return {"ok": TASKS[task](directory)}
    except ControlError as error:
        return {"error": type(error).__name__, "operation": getattr(error, "operation", ""), "text": str(error)}
    except OSError as error:
        return {"error": type(error).__name__, "errno": error.errno, "text": str(error)}


def prepare(asked: dict[str, Any]) -> None:
    """Make this process what the test wants it to be."""
    if "mutant" in asked:
        crash_tasks.MUTANTS[asked["mutant"]]()
    if "file_limit" in asked:
        resource.setrlimit(resource.RLIMIT_FSIZE, (asked["file_limit"], asked["file_limit"]))
    if "umask" in asked:
        os.umask(asked["umask"])
    if "user" in asked:
        os.setgroups([])
        os.setgid(asked["user"])
        os.setuid(asked["user"])


def until_it_waits(pid: int) -> None:
    """Whoever is traced before it waits would be killed at a call that is not the task's."""
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        assert time.monotonic() < deadline, f"child {pid} does not come to wait"
        os.sched_yield()


def main() -> None:
    # No thread pools, so that counting calls per thread counts them all.
    digests.default_threads = lambda: 1
    with tempfile.TemporaryDirectory() as scratch:
        crash_tasks.warm_up(Path(scratch))
        # Whatever is imported or cached on first use shall be so before the fork.
        run = Path(scratch)
        directory = helpers.write(run / "checkpoints" / "a")
        for task, where in (
            ("publish", directory),
            ("load", directory),
            ("discover", run),
            ("claim", run),
            ("record", run),
            ("retain", run),
        ):
            warmed = outcome(task, where)
            assert "ok" in warmed, warmed
        outcome("publish", run / "absent")
        outcome("discover", run)
    for line in sys.stdin:
        asked = json.loads(line)
        go_read, go_write = os.pipe()
        result_read, result_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            crash_tasks.answers_to(result_write)
            prepare(asked)
            select.select([go_read], [], [])  # a call that no task makes
            result = outcome(asked["task"], Path(asked["directory"]))
            os.write(result_write, json.dumps(result).encode() + b"\n")
            os._exit(0)
        os.close(go_read)
        os.close(result_write)
        until_it_waits(pid)
        print(json.dumps({"pid": pid}), flush=True)
        sys.stdin.readline()
        os.write(go_write, b"g")
        with os.fdopen(result_read) as results:
            said = [json.loads(line) for line in results]
        _, status = os.waitpid(pid, 0)
        os.close(go_write)
        killed = {"killed": os.waitstatus_to_exitcode(status)}
        result = said.pop() if said and "told" not in said[-1] else killed
        print(json.dumps(result | {"told": [message["told"] for message in said]}), flush=True)


if __name__ == "__main__":
    main()
