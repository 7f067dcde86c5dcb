"""A process that has everything imported and forks the processes of a job: controller, store, trainer ranks, rollout worker.

* One connection is one process: the request comes first, then what the process has to say, one JSON object a line; its last line has
  its exit code. A connection that ends without one: the process was killed.
* A process dies with the job that asked for it: the connection ends. All die with the nursery's starter, whose jobs do.
* Nothing is armed here; a process whose environment says so arms ckpt-chaos in itself, before it does anything.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import chaos_points

chaos_points.install()  # before what follows keeps functions of os

import torch  # noqa: E402
from ckpt_chaos.targets.common import arm_from_env  # noqa: E402
from torch._C._distributed_c10d import TCPStore  # noqa: E402

from cosmos_ctrl import server  # noqa: E402
from cosmos_ctrl.config import load_config  # noqa: E402
from cosmos_worker import shard_places  # noqa: E402
from cosmos_worker.grpo.config import GrpoModelConfig, GrpoSettings  # noqa: E402
from cosmos_worker.grpo.payload import CODEC, encode_completion  # noqa: E402
from cosmos_worker.grpo.train import train  # noqa: E402
from cosmos_worker.grpo.vocab import encode_answer  # noqa: E402
from cosmos_worker.lease_book import LeasedGroup  # noqa: E402
from cosmos_worker.rollout import SyncRollout  # noqa: E402

DEADLINE_S = 60.0
_GROUPS = 6

SETTINGS = GrpoSettings(
    model=GrpoModelConfig(width=16, heads=2, layers=1, context_tokens=32),
    max_new_tokens=6,
    lr_warmup_steps=1,
    updates_per_step=2,
    warm_start_max_steps=0,
)


class Line:
    """What a process says to its job."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def say(self, **values: Any) -> None:
        """One object."""
        self._connection.sendall(json.dumps(values).encode() + b"\n")

    def die_with_the_job(self) -> None:
        """Nothing else is ever heard: the end is the job's. One that was killed before it read everything resets the connection."""
        try:
            while self._connection.recv(1):
                pass
        finally:
            os._exit(143)


def controller(line: Line, _: Mapping[str, Any]) -> None:
    """`cosmos-ctrl serve`, configured by the environment."""
    config = load_config(None, environment=os.environ)

    def ready(ready: server.Ready) -> None:
        values = {name: getattr(ready, name) for name in ("address", "execution_id", "resumed_from", "end")}
        line.say(**values)

    line.say(exit=int(asyncio.run(server.serve(config, server.prompts_application(config), on_ready=ready))))


def store(line: Line, _: Mapping[str, Any]) -> None:
    """Where the ranks meet, as torchrun's agent has it, on a port of its own choice. Ends with its job."""
    found = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    line.say(port=found.port)
    threading.Event().wait()


def trainer(line: Line, request: Mapping[str, Any]) -> None:
    """The reference application's trainer, one rank."""
    if int(os.environ["RANK"]):
        _make_directories_after_rank_0()
    line.say(end=train(SETTINGS, Path(request["prompts"])), exit=0)


def _make_directories_after_rank_0() -> None:
    """Which rank makes the directories that they share is a race, and would number the events of a run otherwise than the next one's."""
    name = "make_directories"
    make = getattr(shard_places, name)

    def after(directory: Path, *, top: Path) -> None:
        first, patience = directory.with_name("policy-0"), threading.Event()
        for _ in range(int(DEADLINE_S / 0.01)):
            if first.is_dir():
                make(directory, top=top)
                return
            patience.wait(0.01)
        raise TimeoutError(f"rank 0 did not make {first} in {DEADLINE_S:.0f} s")

    setattr(shard_places, name, after)


def rollout(line: Line, _: Mapping[str, Any]) -> None:
    """Completions that depend on their prompt alone, reported in the order of the draws: the same in every execution.

    All groups are leased, and one completion of every second prompt is discarded, before the first report: so the first checkpoint has a
    record of its window.
    """
    version = 0

    def loaded(newest: int, _: str) -> None:
        nonlocal version
        version = newest

    with SyncRollout.from_env(on_weights=loaded) as worker:
        held = [next(worker.groups(in_flight=_GROUPS), None), *worker.groups(in_flight=_GROUPS, wait_s=0.05)]
        groups = [group for group in held if group is not None]
        discarded = {(group.group_id, 2) for group in groups if _number(group) % 2 and 2 in group.pending}
        for group in groups:
            if (group.group_id, 2) in discarded:
                worker.discard(group, 2, reason="every second prompt's")
        for group in groups:
            number = _number(group)
            for index in group.pending:
                if (group.group_id, index) in discarded:
                    continue
                tokens = encode_answer(f"{number + index}")
                payload = encode_completion(tokens, [-1.0 - number / 10] * len(tokens))
                worker.report(group, index, payload, reward=float(index == number % 2), versions=version, codec=CODEC)
        if more := list(worker.groups(in_flight=_GROUPS)):
            raise RuntimeError(f"{len(more)} groups were leased after {len(groups)}, which should have been all")
    line.say(exit=0)


def _number(group: LeasedGroup) -> int:
    return int(group.prompt()["answer"])


ROLES = {"controller": controller, "store": store, "trainer": trainer, "rollout": rollout}


def main() -> None:
    """Serve jobs at the given socket until standard input ends."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen(64)
    print("ready", flush=True)
    while True:
        readable, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in readable:
            return
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _live(connection)
        connection.close()


def _live(connection: socket.socket) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request = json.loads(connection.makefile("r", encoding="utf-8").readline())
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    line = Line(connection)
    threading.Thread(target=line.die_with_the_job, daemon=True).start()
    try:
        arm_from_env(0, lazy=True)
        ROLES[request["role"]](line, request)
    except BaseException:
        traceback.print_exc()
        line.say(exit=1)
    finally:
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
