"""The controller of the resume canaries, a process of its own: its sampler has one cursor for each trainer rank.

Run as a program it serves a directory until the run ends, or until whoever started it is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from cosmos_ctrl.checkpoints.adapter import ManifestAdapter
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.config import load_config
from cosmos_ctrl.core.samplers import SeekableSampler
from cosmos_ctrl.core.sampling import Prompt
from cosmos_ctrl.server import Application, serve, write_ready_file

DEADLINE_S = 60.0

RANKS = 2
PROMPTS_PER_RANK = 10
"""In each rank's shard."""
DRAWN_PER_RANK = 2
"""In each batch."""
BATCH = RANKS * DRAWN_PER_RANK
"""Prompts of a batch, which is one draw of the sampler and trained in one step; each has one completion."""
BUDGET = RANKS * PROMPTS_PER_RANK


class ShardCursors:
    """A batch sampler over one cursor for each rank, in that rank's own shard; their positions are one state.

    A batch has the ranks' prompts in turn, which is how the rows of a command are shared out.
    """

    def __init__(self, cursors: Sequence[SeekableSampler]) -> None:
        self._cursors = tuple(cursors)

    @property
    def compatibility(self) -> list[dict[str, Any]]:
        """What a resumed run must share."""
        return [cursor.compatibility for cursor in self._cursors]

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` in every shard."""
        for cursor in self._cursors:
            cursor.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        shards = [iter(cursor) for cursor in self._cursors]
        while True:
            drawn = [list(islice(shard, DRAWN_PER_RANK)) for shard in shards]
            if not any(drawn):
                return
            yield [(rank, index) for turn in zip(*drawn, strict=True) for rank, index in enumerate(turn)]

    def state_dict(self) -> dict[str, Any]:
        """Every cursor's position."""
        return {"cursors": [cursor.state_dict() for cursor in self._cursors]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` says, in every shard."""
        for cursor, position in zip(self._cursors, state["cursors"], strict=True):
            cursor.load_state_dict(position)


def key_of(place: tuple[int, int]) -> str:
    """The prompt's key: whose shard it is of, and which it is there."""
    return f"shard{place[0]}/{place[1]}"


async def _serve(directory: Path) -> int:
    run = directory / "run"
    config = load_config(
        None,
        environment={},
        overrides={
            "run": {"name": "canary", "directory": str(run), "journal": True},
            "server": {"linger_s": 10.0},
            "train": {
                "groups_per_step": BATCH,
                "trainers": {"policy": RANKS},
                "gate_timeout_s": DEADLINE_S,
                "step_timeout_s": DEADLINE_S,
                "stop_grace_s": DEADLINE_S,
            },
            "rollout": {"n_generation": 1, "announces_weights": False},
            "checkpoints": {"every_steps": 2, "save_timeout_s": DEADLINE_S},
            # What was trained beyond the boundary comes again: the canary is about the window, not about sparing it.
            "replay": {"skip_settled": False},
            "workers": {"session_ttl_s": 30.0},
        },
    )
    sampler = ShardCursors([SeekableSampler(PROMPTS_PER_RANK, seed=7 + rank) for rank in range(RANKS)])
    compatibility = {"shards": sampler.compatibility}
    application = Application(
        sampler=None,
        batch_sampler=sampler,
        prompt_of=lambda place: Prompt(key=key_of(place), source=f"shard{place[0]}"),
        budget_completions=BUDGET,
        adapter=ManifestAdapter(LocalStore(run), compatibility=compatibility),
        compatibility=compatibility,
    )
    return await serve(config, application, on_ready=lambda ready: write_ready_file(_ready_file(directory), ready))


def _ready_file(directory: Path) -> Path:
    return directory / "ready.json"


def _end_with_who_started_this() -> None:
    sys.stdin.read()
    os._exit(1)


class Served:
    """A controller that is ready."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, ready: dict[str, Any]) -> None:
        self._process, self._log = process, log
        self.address: str = ready["address"]
        self.execution_id: str = ready["execution_id"]

    def exit_code(self) -> int:
        """Of the process, which ends by itself in time."""
        try:
            return self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"the controller does not end:\n{self._log.read_text()}") from error


@contextmanager
def serving(directory: Path) -> Iterator[Served]:
    """A controller process over `directory`, which ends with the ``with`` statement, and with this process."""
    _ready_file(directory).unlink(missing_ok=True)
    log = directory / "controller.log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, __file__, str(directory)],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            env=os.environ | {"GRPC_VERBOSITY": "ERROR"},
        )
    try:
        until = time.monotonic() + DEADLINE_S
        while not _ready_file(directory).exists():
            if process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"the controller does not get ready ({process.poll()}):\n{log.read_text()}")
            time.sleep(0.02)
        yield Served(process, log, json.loads(_ready_file(directory).read_text()))
    finally:
        process.kill()
        process.communicate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    threading.Thread(target=_end_with_who_started_this, daemon=True).start()
    return asyncio.run(_serve(parser.parse_args().directory))


if __name__ == "__main__":
    sys.exit(main())
