"""A worker process of a run whose model is its step count: ``trainer RANK`` or ``rollout``. Prints what it did, as JSON, at its end."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from cosmos_worker.errors import exit_code_for
from cosmos_worker.rollout import SyncRollout
from cosmos_worker.settings import ClientConfig
from cosmos_worker.trainer import Trainer

CONFIG = ClientConfig(
    poll_s=0.5, lease_wait_s=0.3, connect_total_s=5.0, confirm_total_s=30.0, idle_total_s=40.0, report_s=30.0
)

#: So large that it is not one block.
BALLAST = 3 << 20


def train(rank: int) -> dict[str, Any]:
    steps, resumed = [], None
    with Trainer.from_env(group="policy", rank=rank, world_size=2, config=CONFIG) as trainer:
        resume = trainer.resume()
        assert resume.run_directory is None
        state: dict[str, Any] = {"steps": 0, "updates": 0}
        if resume.checkpoint:
            assert resume.checkpoint.path is None
            with trainer.artifacts(resume) as files:
                state = json.loads(files["state.pt"].readline())
                assert len(files["state.pt"].read()) == BALLAST
            assert state.pop("rank") == rank
            resumed = resume.checkpoint.metadata.checkpoint_path
        trainer.confirm(steps=state["steps"], updates=state["updates"])
        trainer.announce_weights(state["steps"], "weights")
        for command in trainer.commands():
            if command.is_save:
                with trainer.save(command) as save:
                    assert save.directory is None
                    file = save.open("state.pt")
                    file.write(json.dumps(state | {"rank": rank}).encode() + b"\n")
                    file.write(os.urandom(BALLAST))
                continue
            command.payloads()
            trainer.complete(command, updates=2)
            state = {"steps": command.step, "updates": state["updates"] + 2}
            steps.append(command.step)
            trainer.announce_weights(command.step, "weights")
    return {"steps": steps, "end": str(trainer.end_reason and trainer.end_reason.name), "resumed": resumed}


def generate() -> dict[str, Any]:
    count, loaded = 0, [0]
    with SyncRollout.from_env(on_weights=lambda version, _: loaded.append(version), config=CONFIG) as rollout:
        for group in rollout.groups(in_flight=2):
            rewards = [0.5 for _ in group.pending]
            rollout.report_group(group, rewards=rewards, payloads=[{} for _ in group.pending], versions=loaded[-1])
            count += 1
    return {"groups": count}


def main() -> int:
    try:
        print(json.dumps(train(int(sys.argv[2])) if sys.argv[1] == "trainer" else generate()))
    except Exception as error:
        print(json.dumps({"error": type(error).__name__, "text": str(error)}))
        return exit_code_for(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
