"""What a rank of the resume canaries trains: a small model whose every update uses every source of randomness there is.

* The gradient is the mean over all ranks, so all hold one model; what they draw at random is each rank's own.
* `Learner.state` is everything that later updates depend on, in two parts, as two artifacts are saved.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

PARTS = ("model.pt", "rng.pt")

_FEATURES = 8


class Learner:
    """One data-parallel rank."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._device = device
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(_FEATURES, 16), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
        ).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.9)
        self.steps = self.updates = 0
        # The weights start equal; what each rank draws from here on is its own.
        random.seed(100 + rank)
        np.random.seed(100 + rank)
        torch.manual_seed(100 + rank)

    def train(self, keys: Sequence[str]) -> None:
        """One optimizer update on this rank's prompts; every rank takes part."""
        examples = torch.stack([_features(key) for key in keys])
        noise = random.gauss(0, 0.1) + float(np.random.normal(0, 0.1)) + 0.1 * torch.randn(len(keys), 1)
        target = examples.sum(dim=1, keepdim=True) + noise
        loss = (self.model(examples.to(self._device)) - target.to(self._device)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        self.optimizer.step()
        self.scheduler.step()
        self.steps, self.updates = self.steps + 1, self.updates + 1

    def state(self) -> dict[str, dict[str, Any]]:
        """By artifact; `torch.load(weights_only=True)` reads each."""
        kind, words, *rest = np.random.get_state()
        assert isinstance(words, np.ndarray)
        generators = {
            "python": random.getstate(),
            "numpy": [kind, words.tolist(), *rest],
            "torch": torch.get_rng_state(),
        }
        if self._device.type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state(self._device)
        model = {
            "steps": self.steps,
            "updates": self.updates,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }
        return dict(zip(PARTS, (model, generators), strict=True))

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on from what `state` returned on this rank."""
        model, generators = (state[part] for part in PARTS)
        if model["scheduler"]["last_epoch"] != model["updates"]:
            raise ValueError(
                f"the scheduler stands at {model['scheduler']['last_epoch']} and the model at update {model['updates']}: "
                "they are not of one checkpoint"
            )
        self.model.load_state_dict(model["model"])
        self.optimizer.load_state_dict(model["optimizer"])
        self.scheduler.load_state_dict(model["scheduler"])
        self.steps, self.updates = model["steps"], model["updates"]
        random.setstate(generators["python"])
        np.random.set_state(tuple(generators["numpy"]))
        torch.set_rng_state(generators["torch"])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(generators["cuda"], self._device)


def differences(expected: Any, found: Any, at: str = "state") -> list[str]:
    """Places where two states are not the same to the bit, by name."""
    if type(expected) is not type(found):
        return [f"{at} ({type(found).__name__}, expected {type(expected).__name__})"]
    if isinstance(expected, torch.Tensor):
        same = expected.dtype == found.dtype and expected.shape == found.shape and _bytes(expected) == _bytes(found)
        return [] if same else [at]
    if isinstance(expected, Mapping):
        if expected.keys() != found.keys():
            return [f"{at} (keys {sorted(map(str, found))}, expected {sorted(map(str, expected))})"]
        return [where for key in expected for where in differences(expected[key], found[key], f"{at}.{key}")]
    if isinstance(expected, list | tuple):
        if len(expected) != len(found):
            return [f"{at} (length {len(found)}, expected {len(expected)})"]
        pairs = enumerate(zip(expected, found, strict=True))
        return [where for index, (a, b) in pairs for where in differences(a, b, f"{at}[{index}]")]
    return [] if repr(expected) == repr(found) else [at]


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).tolist())


def _features(key: str) -> torch.Tensor:
    return torch.randn(_FEATURES, generator=torch.Generator().manual_seed(zlib.crc32(key.encode())))
