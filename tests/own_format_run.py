"""A whole execution of an application that commits checkpoints in its own format: controller, trainer and rollout worker in one process.

As a program it runs one execution and kills itself where it is told to.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from own_format import OwnFormat

from cosmos_ctrl import server
from cosmos_ctrl.config import load_config
from cosmos_ctrl.core.samplers import SeekableSampler
from cosmos_ctrl.core.sampling import Prompt
from cosmos_ctrl.exits import ExitCode
from cosmos_worker.commands import SaveWork
from cosmos_worker.rollout import SyncRollout
from cosmos_worker.trainer import Trainer

PROMPTS, GENERATION, GROUPS_PER_STEP = 16, 2, 2

Saving = Callable[[OwnFormat, SaveWork], None]
Training = Callable[[int, list[str]], None]


@dataclass(frozen=True)
class Execution:
    """How one went."""

    ready: server.Ready
    restored_steps: int
    repeat_bound_completions: int
    horizon_training_steps: int
    trained: list[str]
    """Prompt keys, in order."""
    saves: list[str]
    """States of the saves, in order."""


def save_whole(adapter: OwnFormat, command: SaveWork) -> None:
    adapter.save(command)


def train_nothing_else(step: int, keys: list[str]) -> None:
    """What the trainer does with a step's prompts: nothing."""


async def execute(
    directory: Path,
    max_steps: int,
    *,
    form: type[OwnFormat] = OwnFormat,
    saving: Saving = save_whole,
    training: Training = train_nothing_else,
) -> Execution:
    """One execution to its end."""
    config = load_config(
        None,
        environment={},
        overrides={
            "run": {"directory": str(directory)},
            "train": {"groups_per_step": GROUPS_PER_STEP, "max_steps": max_steps},
            "rollout": {"n_generation": GENERATION, "announces_weights": False},
            "checkpoints": {"owner": "application", "every_steps": 2},
        },
    )
    adapter = form(directory.parent)
    application = server.Application(
        sampler=SeekableSampler(PROMPTS, seed=3),
        prompt_of=lambda index: Prompt(f"prompt-{index}"),
        budget_completions=PROMPTS * GENERATION,
        adapter=adapter,
    )
    ready: asyncio.Future[server.Ready] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(server.serve(config, application, on_ready=ready.set_result))
    await asyncio.wait({serving, ready}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    environ = {
        "COSMOS_CTRL_ADDRESS": ready.result().address,
        "COSMOS_CTRL_EXECUTION_ID": ready.result().execution_id,
    }

    def train() -> Execution:
        trained: list[str] = []
        saves: list[str] = []
        with Trainer.from_env(environ=environ, artifacts=()) as trainer:
            resume = trainer.resume()
            steps = resume.checkpoint.metadata.completed_training_steps if resume.checkpoint else 0
            trainer.confirm(steps=steps, updates=steps)
            for command in trainer.commands():
                if command.is_save:
                    save = trainer.save(command)
                    try:
                        with save:
                            saving(adapter, command)
                            save.committed(str(adapter.path))
                    except OSError:
                        """Abandoned; the run goes on."""
                    saves.append(save.state)
                else:
                    keys = [group.prompt_key for group in command.payloads()]
                    training(command.step, keys)
                    trained.extend(keys)
                    trainer.complete(command, updates=1)
        bounds = resume.repeat_bound_completions, resume.horizon_training_steps
        return Execution(ready.result(), steps, *bounds, trained, saves)

    def generate() -> None:
        with SyncRollout.from_env(environ=environ) as rollout:
            for group in rollout.groups():
                rollout.report_group(group, rewards=[1.0] * len(group.pending))

    execution, _ = await asyncio.wait_for(asyncio.gather(asyncio.to_thread(train), asyncio.to_thread(generate)), 60)
    assert await asyncio.wait_for(serving, 60) == ExitCode.ENDED
    return execution


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _tell(step: int, keys: list[str]) -> None:
    print(step, *keys, flush=True)


def _tell_and_die(step: int, keys: list[str]) -> None:
    _tell(step, keys)
    if step == 5:
        _die()


def _die_at_step_4(before: Saving, after: Saving) -> Saving:
    def saving(adapter: OwnFormat, command: SaveWork) -> None:
        if command.step == 4:
            before(adapter, command)
        adapter.save(command)
        if command.step == 4:
            after(adapter, command)

    return saving


def _half(adapter: OwnFormat, command: SaveWork) -> None:
    data = adapter.encode(command)
    adapter.path.with_suffix(".tmp").write_bytes(data[: len(data) // 2])
    _die()


def _at_once(adapter: OwnFormat, command: SaveWork) -> None:
    del adapter, command
    _die()


#: Where it dies: in the training of step 5, or about the save of step 4; and the step of the newest checkpoint then.
DEATHS: dict[str, tuple[Saving, Training, int]] = {
    "while it trains": (save_whole, _tell_and_die, 4),
    "before the save": (_die_at_step_4(_at_once, save_whole), _tell, 2),
    "in the save": (_die_at_step_4(_half, save_whole), _tell, 2),
    "after the save, before it is reported": (_die_at_step_4(save_whole, _at_once), _tell, 4),
}


if __name__ == "__main__":
    _saving, _training, _ = DEATHS[sys.argv[2]]
    asyncio.run(execute(Path(sys.argv[1]), 99, saving=_saving, training=_training))
