"""An application that commits checkpoints in its own format: saved, killed, resumed; no manifest is written."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from cosmos_ctrl import server
from cosmos_ctrl.config import load_config
from cosmos_ctrl.core.resume import ControllerResumeMetadata, ResumeSettings
from cosmos_ctrl.core.samplers import SeekableSampler
from cosmos_ctrl.core.sampling import Prompt
from cosmos_ctrl.exits import ExitCode
from cosmos_worker.rollout import SyncRollout
from cosmos_worker.trainer import Trainer

_PROMPTS, _GENERATION = 8, 2


class OwnFormat:
    """One JSON file is the whole checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.repeat_bound_completions = 0

    def save(self, command: Any) -> None:
        metadata: ControllerResumeMetadata = command.metadata
        values = {
            "info": metadata.to_checkpoint_extra_info(),
            "epoch": metadata.epoch,
            "owner": metadata.sampling_owner,
            "state": metadata.sampler_state,
            "repeats": command.repeat_bound_completions,
        }
        self.path.write_text(json.dumps(values))

    def load_metadata(self, config: ResumeSettings) -> ControllerResumeMetadata | None:
        if not self.path.exists():
            return None
        values = json.loads(self.path.read_text())
        self.repeat_bound_completions = values["repeats"]
        return ControllerResumeMetadata(
            completed_training_steps=values["info"]["step"],
            completed_optimizer_updates=values["info"]["optimizer_updates"],
            remaining_completions=values["info"]["remain_samples_num"],
            epoch=values["epoch"],
            sampling_owner=values["owner"],
            sampler_state=values["state"],
            checkpoint_path=str(self.path),
            checkpoint_id=values["info"]["checkpoint_id"],
        )

    def restore_sampler(self, sampler: Any, metadata: ControllerResumeMetadata) -> None:
        sampler.load_state_dict(metadata.sampler_state)


async def execute(directory: Path, max_steps: int) -> tuple[server.Ready, list[str]]:
    """One execution to its end; returns the keys that were trained, in order."""
    config = load_config(
        None,
        environment={},
        overrides={
            "run": {"directory": str(directory)},
            "train": {"groups_per_step": 2, "max_steps": max_steps},
            "rollout": {"n_generation": _GENERATION, "announces_weights": False},
            "checkpoints": {"owner": "application"},
        },
    )
    adapter = OwnFormat(directory.parent / "mine.json")
    application = server.Application(
        sampler=SeekableSampler(_PROMPTS, seed=3),
        prompt_of=lambda index: Prompt(f"prompt-{index}"),
        budget_completions=_PROMPTS * _GENERATION,
        adapter=adapter,
    )
    ready: asyncio.Future[server.Ready] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(server.serve(config, application, on_ready=ready.set_result))
    await asyncio.wait({serving, ready}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
    environ = {
        "COSMOS_CTRL_ADDRESS": ready.result().address,
        "COSMOS_CTRL_EXECUTION_ID": ready.result().execution_id,
    }
    trained: list[str] = []

    def train() -> None:
        with Trainer.from_env(environ=environ, artifacts=()) as trainer:
            resume = trainer.resume()
            steps = resume.checkpoint.metadata.completed_training_steps if resume.checkpoint else 0
            trainer.confirm(steps=steps, updates=steps)
            for command in trainer.commands():
                if command.is_save:
                    with trainer.save(command) as save:
                        adapter.save(command)
                        save.committed(str(adapter.path))
                    assert save.state == "COMMITTED"
                else:
                    trained.extend(group.prompt_key for group in command.payloads())
                    trainer.complete(command, updates=1)

    def generate() -> None:
        with SyncRollout.from_env(environ=environ) as rollout:
            for group in rollout.groups():
                rollout.report_group(group, rewards=[1.0] * len(group.pending))

    work = asyncio.gather(asyncio.to_thread(train), asyncio.to_thread(generate))
    await asyncio.wait_for(work, 60)
    assert await asyncio.wait_for(serving, 60) == ExitCode.ENDED
    return ready.result(), trained


async def test_g1_a_foreign_format_is_saved_and_resumed_and_no_manifest_is_written(tmp_path: Path) -> None:
    first, before = await execute(tmp_path / "run", max_steps=2)
    second, after = await execute(tmp_path / "run", max_steps=9)
    assert (first.resumed_from, second.resumed_from) == ("", str(tmp_path / "mine.json"))
    assert (first.execution_number, second.execution_number) == (1, 2)
    assert len(before) == 4
    # Nothing was out of order, so nothing repeats: what was trained before and after is every prompt, once.
    assert sorted(before + after) == sorted(f"prompt-{index}" for index in range(_PROMPTS))
    assert json.loads((tmp_path / "mine.json").read_text())["info"]["remain_samples_num"] == 0
    assert not list((tmp_path / "run").rglob("manifest.json"))
