"""The trainer's loop: resume, agree, train, save. One process per rank, started by torchrun."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from cosmos_worker.commands import TrainGroup as CommandGroup
from cosmos_worker.grpo.config import GrpoSettings
from cosmos_worker.grpo.groups import TrainCompletion, TrainGroup
from cosmos_worker.grpo.learner import Learner
from cosmos_worker.grpo.tasks import load_prompts
from cosmos_worker.grpo.weight_files import WeightFiles
from cosmos_worker.trainer import Trainer

#: A rank that waits longer for its siblings is alone.
_COLLECTIVE_TIMEOUT = timedelta(seconds=120)


def train(settings: GrpoSettings, prompts: Path) -> str:
    """Run this rank to the end of the execution; returns why it ended."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_COLLECTIVE_TIMEOUT)
    try:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        with Trainer.from_env(group="policy", dp=(rank, world_size)) as trainer:
            resume = trainer.resume()
            horizon = resume.horizon_training_steps
            learner = Learner(settings, rank=rank, world_size=world_size, total_steps=horizon)
            # Weights stay on this machine, whose workers read them, wherever the checkpoints go.
            weights = WeightFiles(resume.run_directory or Path("runs", resume.run).resolve(), resume.execution_number)
            if resume.checkpoint:
                with trainer.artifacts(resume) as artifacts:
                    learner.load_state(torch.load(artifacts["state.pt"], weights_only=True))
            else:
                learner.warm_start(load_prompts(prompts))
            trainer.confirm(steps=learner.steps, updates=learner.updates)

            def push() -> str:
                # One rank writes; the others' announcements are not sent.
                return weights.write(learner.steps, learner.weights()) if trainer.leader else ""

            trainer.announce_weights(learner.steps, push())
            for command in trainer.commands(process_group=dist.group.WORLD):
                if command.is_save:
                    with trainer.save(command) as save:
                        torch.save(learner.state(), save.open("state.pt"))
                    continue
                result = learner.train([_group(group) for group in command.payloads()])
                trainer.complete(command, updates=result.updates, discarded=result.rejected)
                trainer.metric("loss", result.loss)
                trainer.announce_weights(command.step, push())
        return str(trainer.end_reason)
    finally:
        dist.destroy_process_group()


def _group(group: CommandGroup) -> TrainGroup:
    completions = [TrainCompletion(each.index, each.payload, each.reward) for each in group.completions]
    return TrainGroup(group.group_id, group.decoded_prompt()["prompt"], completions)
