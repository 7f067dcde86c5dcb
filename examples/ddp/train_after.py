import torch
import torch.distributed as dist
from app import Policy, digest, train
from torch.nn.parallel import DistributedDataParallel

from cosmos_worker import state
from cosmos_worker.errors import exit_codes
from cosmos_worker.trainer import Trainer

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = DistributedDataParallel(Policy())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}

with exit_codes(), Trainer.from_env(dp=(rank, ranks)) as trainer:
    resume = trainer.resume()
    steps = updates = 0
    if resume.checkpoint:
        with trainer.artifacts(resume) as files:
            saved = state.restore(torch.load(files["state.pt"], weights_only=True), parts, files.stamp)
        steps, updates = saved.steps, saved.updates
    trainer.confirm(steps=steps, updates=updates)

    for command in trainer.commands(process_group=dist.group.WORLD):
        if command.is_save:
            with trainer.save(command) as save:
                torch.save(state.capture(parts, save.stamp), save.open("state.pt"))
        else:
            groups = command.payloads()
            train(model, optimizer, scheduler, [one.payload for group in groups for one in group.completions])
            trainer.complete(command, updates=1)
            steps = command.step

print("steps", steps, "weights", digest(model))
dist.destroy_process_group()
