from pathlib import Path

import torch
import torch.distributed as dist
from app import EPOCHS, Policy, digest, prompts, rollout, train
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = DistributedDataParallel(Policy())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}

latest, steps, first_epoch = Path("latest.pt"), 0, 0
if latest.exists():
    saved = torch.load(latest, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    steps, first_epoch = saved["steps"], saved["epoch"]

share = prompts[rank::ranks]
for epoch in range(first_epoch, EPOCHS):
    for at in range(0, len(share), 2):
        train(model, optimizer, scheduler, [rollout(prompt) for prompt in share[at : at + 2]])
        steps += 1
        if steps % 2 == 0 and rank == 0:
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save(states | {"steps": steps, "epoch": epoch}, latest)

print("steps", steps, "weights", digest(model))
dist.destroy_process_group()
