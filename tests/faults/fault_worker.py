"""A rollout worker as a process of its own: does a thing per line on standard input, and says on standard output what it did.

``lease N``, ``report N BYTES`` (without waiting), ``flush``, ``leave``. It ends with the exit code of what ended it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from cosmos_worker.errors import exit_codes
from cosmos_worker.rollout import LeasedGroup, SyncRollout
from cosmos_worker.settings import ClientConfig

#: A group whose payloads have so many bytes is a batch by itself, which waits for the ack of none before it.
FULL_BATCH = 4096

CONFIG = ClientConfig(
    lease_wait_s=0.1,
    backoff_first_s=0.02,
    backoff_max_s=0.1,
    connect_total_s=30.0,
    report_s=60.0,
    silence_s=30.0,
    batch_bytes=FULL_BATCH,
)


def say(what: str, groups: list[LeasedGroup]) -> None:
    print(json.dumps({"did": what, "groups": [group.group_id for group in groups]}), flush=True)


def work(rollout: SyncRollout) -> None:
    leased: list[LeasedGroup] = []
    groups: Any = None
    for line in sys.stdin:
        what, *numbers = line.split()
        count = int(numbers[0]) if numbers else 0
        done: list[LeasedGroup] = []
        if what == "lease":
            groups = groups or rollout.groups(in_flight=count)
            done = [next(groups) for _ in range(count)]
            leased += done
        elif what == "report":
            done, leased = leased[:count], leased[count:]
            for group in done:
                payload = bytes(int(numbers[1]))
                rollout.report_group(
                    group, rewards=[1.0] * len(group.pending), payloads=[payload] * len(group.pending), versions=0
                )
        elif what == "flush":
            rollout.flush()
        elif what == "leave":
            return
        say(what, done)


if __name__ == "__main__":
    with exit_codes(), SyncRollout.from_env(config=CONFIG) as rollout:
        say("ready", [])
        work(rollout)
