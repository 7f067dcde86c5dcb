"""What stays as it is: prompts, rollouts, and a training step on them."""

import hashlib
import json
from pathlib import Path

import torch

EPOCHS = 6
prompts = [json.loads(line)["prompt"] for line in Path("prompts.jsonl").read_text().splitlines()]


class Policy(torch.nn.Module):
    """Stands for your model. Its dropout draws random numbers in every step, on every rank others."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
        )

    def forward(self, answers):
        codes = [[float(ord(letter)) for letter in f"{answer:>8}"[-8:]] for answer in answers]
        return self.layers(torch.tensor(codes) / 128).squeeze(-1)


def rollout(prompt):
    """Stands for your inference engine and your reward."""
    answer = sum(int(word) for word in prompt.split(" + "))
    return {"answer": str(answer), "reward": float(answer > 20)}


def train(model, optimizer, scheduler, rollouts):
    """One optimizer update on this rank's rollouts."""
    rewards = torch.tensor([one["reward"] for one in rollouts])
    loss = (model([one["answer"] for one in rollouts]) - rewards).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def digest(model):
    """Of all weights, to the bit."""
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())).hexdigest()
