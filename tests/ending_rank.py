"""A trainer rank that does as it is told until the save of step 2, and then what MODE says: a process for `test_ending.py`.

    python ending_rank.py MODE

What it does is said on standard output, a line each. Torch is not needed, except for a collective.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import IO

from cosmos_ctrl.core.errors import ResumeMetadataMismatch
from cosmos_worker.errors import exit_codes
from cosmos_worker.settings import ClientConfig
from cosmos_worker.trainer import Trainer

CONFIG = ClientConfig(
    call_s=5.0,
    connect_total_s=1.0,
    poll_s=0.5,
    confirm_total_s=30.0,
    idle_total_s=30.0,
    report_s=20.0,
    close_s=3.0,
    end_grace_s=0.3,
)


def say(what: str) -> None:
    print(what, flush=True)


def misbehave(mode: str) -> None:
    """In the middle of writing an artifact."""
    if mode == "full":
        while not Path(os.environ["GO"]).exists():  # when its sibling writes, too
            time.sleep(0.01)
        raise OSError(errno.ENOSPC, "No space left on device")
    if mode in ("hang", "stuck"):
        threading.Event().wait()


def write(file: IO[bytes], state: dict[str, int], mode: str) -> None:
    text = json.dumps(state).encode()
    file.write(text[:4])
    if state["steps"] == 2:
        say("writing")
        misbehave(mode)
    file.write(text[4:])


def lose_children() -> None:
    """Processes that are forked off and terminated, as a data loader's workers may be."""
    codes = set()
    for _ in range(30):
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(1)
        codes.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    say(f"children: {sorted(codes)}")


def hang_in_a_collective() -> None:
    """Rank 1 comes to it never, and lives on as long as rank 0 does."""
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=2)
    say("met")
    if rank == 0:
        dist.barrier()


def run(mode: str) -> None:
    # One that is stuck is not ended by its client for long.
    config = replace(CONFIG, end_grace_s=60.0) if mode == "stuck" else CONFIG
    with Trainer.from_env(config=config) as trainer:
        resume = trainer.resume()
        state = {"steps": 0, "updates": 0}
        if resume.checkpoint:
            with trainer.artifacts(resume) as files:
                state = json.load(files["state.pt"])
        say(f"horizon: {resume.horizon_training_steps}")
        if mode == "fork":
            lose_children()
        if mode == "collective":
            hang_in_a_collective()
        if mode in ("advanced", "collective"):
            state["updates"] += 1
        try:
            trainer.confirm(**state)
        except ResumeMetadataMismatch:
            if mode == "collective":
                threading.Event().wait()
            raise
        say("agreed")
        for command in trainer.commands():
            if command.is_save:
                with trainer.save(command) as save:
                    write(save.open("state.pt"), state, mode)
            else:
                command.payloads()
                state = {"steps": command.step, "updates": state["updates"] + 1}
                trainer.complete(command, updates=1)
                say(f"step {command.step}")
        say(str(trainer.end_reason))


if __name__ == "__main__":
    signal.alarm(60)  # whatever happens, nothing is left behind
    with exit_codes():
        run(sys.argv[1])
