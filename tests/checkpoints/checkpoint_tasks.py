"""Runs checkpoint tasks in forked children, for tests that tamper with system calls (see ``checkpoint_helpers.Zygote``)."""

from __future__ import annotations

import json
import os
import select
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import checkpoint_helpers as helpers

from cosmos_ctrl.checkpoints import claims, damage, discovery, retention
from cosmos_ctrl.checkpoints.manifest import publish_from_receipts
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.core.errors import ControlError

TASKS = {
    "publish": lambda directory: helpers.publish(directory).digest(),
    "receipts": lambda directory: publish_from_receipts(directory, helpers.manifest_of()),
    "load": lambda directory: helpers.load(directory).digest(),
    "discover": lambda directory: _chosen(directory),
    "claim": lambda directory: claims.claim_execution(LocalStore(directory), execution_id="mine", note={"pid": 1}),
    "record": lambda directory: damage.record_damage(LocalStore(directory), "checkpoints/a", "rank0.pt", "flipped"),
    "fresh": lambda directory: LocalStore(directory).make_directory("checkpoints/new"),
    "delete": lambda directory: LocalStore(directory).delete("manifest.json"),
    "retain": lambda directory: asdict(retention.retain(LocalStore(directory), retention.RetentionPolicy(keep_last=1))),
    "pin": lambda directory: claims.pin_resume(
        LocalStore(directory), 1, execution_id="mine", checkpoint="checkpoints/a"
    ),
}


def _chosen(directory: Path) -> str | None:
    found = discovery.discover(LocalStore(directory), compatibility=None, on_corrupt="previous").chosen
    return found and found.path


def outcome(task: str, directory: Path) -> dict[str, Any]:
    try:
        return {"ok": TASKS[task](directory)}
    except ControlError as error:
        return {"error": type(error).__name__, "operation": getattr(error, "operation", ""), "text": str(error)}


def until_it_waits(pid: int) -> None:
    """Whoever is traced before it waits would be killed at a call that is not the task's."""
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        assert time.monotonic() < deadline, f"child {pid} does not come to wait"
        os.sched_yield()


def main() -> None:
    # One CPU: no thread pools, so that counting calls per thread counts them all.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as scratch:
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
            select.select([go_read], [], [])  # a call that no task makes
            result = outcome(asked["task"], Path(asked["directory"]))
            os.write(result_write, json.dumps(result).encode())
            os._exit(0)
        os.close(go_read)
        os.close(result_write)
        until_it_waits(pid)
        print(json.dumps({"pid": pid}), flush=True)
        sys.stdin.readline()
        os.write(go_write, b"g")
        data = os.read(result_read, 1 << 20)
        _, status = os.waitpid(pid, 0)
        os.close(go_write)
        os.close(result_read)
        killed = {"killed": os.waitstatus_to_exitcode(status)}
        print(data.decode() or json.dumps(killed), flush=True)


if __name__ == "__main__":
    main()
