"""Ranks of a model sharded by FSDP2, saved asynchronously by torch.distributed.checkpoint: a process that forks them.

    python sharded_trainer.py DIRECTORY RANKS

Every rank writes a line for each step into DIRECTORY: the loss and digests of the whole weights and momentum; and one, in a file of its own,
for what it restored. While DIRECTORY holds a file called ``hold-STEP``, rank 1 does not finish writing the save of that step.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cosmos_ctrl.checkpoints.digests import digest_bytes
from cosmos_worker import dcp, state
from cosmos_worker.errors import exit_codes
from cosmos_worker.settings import ClientConfig
from cosmos_worker.trainer import Trainer, TrainGroup

CONFIG = ClientConfig(
    poll_s=0.5, connect_total_s=10.0, confirm_total_s=60.0, idle_total_s=60.0, report_s=30.0, save_total_s=60.0
)


class Drawn:
    """Counts what it gave; a part of the application's own."""

    def __init__(self) -> None:
        self.count = 0

    def draw(self) -> float:
        """From all three generators of the process."""
        self.count += 1
        return random.random() + float(np.random.random()) + torch.rand(()).item()

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.count = state_dict["count"]


def seed(number: int) -> None:
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(number)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def digests(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Of the whole tensors; all ranks call it."""
    parameters = list(model.parameters())
    moments = [optimizer.state[each][name] for each in parameters for name in ("step", "exp_avg", "exp_avg_sq")]
    found = {"weights": [*model.state_dict().values()], "momentum": moments}
    flat = {name: torch.cat([whole(tensor).flatten() for tensor in tensors]) for name, tensors in found.items()}
    return {name: digest_bytes(tensor.detach().numpy().tobytes()) for name, tensor in flat.items()}


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, groups: list[TrainGroup], noise: float) -> float:
    """One step on this rank's share; the loss."""
    texts = [[float(ord(letter)) for letter in f"{g.prompt_key:>8}"[-8:]] for g in groups]
    rewards = [sum(one.reward for one in g.completions) + noise for g in groups]
    found = model(torch.tensor(texts) / 128.0).squeeze(-1)
    loss = ((found - torch.tensor(rewards)) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def run(rank: int, ranks: int, directory: Path) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{directory}/meet-{os.getppid()}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    # Saving has collectives of its own, which must not get between those of training.
    saving = dist.new_group(backend="gloo")
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Dropout(0.25), torch.nn.Linear(32, 1))
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    drawn = Drawn()
    rest: dict[str, Any] = {"scheduler": scheduler, "drawn": drawn}
    seed(100 + rank)
    lines = (directory / f"steps-{os.getppid()}-{rank}.jsonl").open("w", buffering=1)

    def write(content: Any, file: IO[bytes]) -> None:
        torch.save(content, file)
        while rank == 1 and (directory / f"hold-{content['stamp']['steps']}").exists():
            time.sleep(0.02)

    artifacts = (*dcp.artifact_names("model", rank=rank), "rest.pt")
    with Trainer.from_env(rank=rank, world_size=ranks, artifacts=artifacts, config=CONFIG) as trainer:
        resume = trainer.resume()
        steps = updates = 0
        if resume.checkpoint:
            with trainer.artifacts(resume) as files:
                state.load_sharded(files, "model", model, optimizer)
                found = state.restore(torch.load(files["rest.pt"], weights_only=True), rest, files.stamp)
                steps, updates = found.steps, found.updates
            if resume.checkpoint.resharded:
                seed(1000 * steps + rank)
            restored = {"step": steps, "n": drawn.count, "resharded": resume.checkpoint.resharded}
            restored |= digests(model, optimizer)
            (directory / f"restored-{os.getppid()}-{rank}.json").write_text(json.dumps(restored))
        trainer.confirm(steps=steps, updates=updates)
        for command in trainer.commands(process_group=dist.group.WORLD):
            if command.is_save:
                with trainer.save(command) as save:
                    writer = dcp.SaveWriter(save, "model")
                    sharded = state.sharded(model, optimizer)
                    save.finish_after(async_save(sharded, storage_writer=writer, process_group=saving))
                    save.write_later("rest.pt", state.capture(rest, save.stamp), write)
                continue
            noise = drawn.draw()
            loss = train(model, optimizer, command.payloads(), noise)
            scheduler.step()
            line = {
                "step": command.step,
                "loss": loss,
                "rate": scheduler.get_last_lr(),
                "n": drawn.count,
                "noise": noise,
            }
            line |= digests(model, optimizer)
            trainer.complete(command, updates=1)
            lines.write(json.dumps(line) + "\n")
    dist.destroy_process_group()


def end(rank: int, ranks: int, directory: Path) -> NoReturn:
    """`run`, and end the process as it ended: an interpreter that is forked takes seconds to be taken down."""
    code: Any = 1
    try:
        with exit_codes():
            run(rank, ranks, directory)
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> int:
    directory, ranks = Path(sys.argv[1]), int(sys.argv[2])
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            end(rank, ranks, directory)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return max(codes, key=abs)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    signal.alarm(100)  # whatever happens, nothing is left behind
    sys.exit(main())
