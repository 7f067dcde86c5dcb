"""What a rollout worker holds: a version of the weights, and a way to sample from it.

- New weights replace old ones between batches, never within one: `load` may be called from another thread, and
  every completion of a `generate` call is of the one version it carries.
- Weights that cannot be loaded leave the present version in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cosmos_worker.grpo import vocab
from cosmos_worker.grpo.config import GrpoSettings
from cosmos_worker.grpo.model import GrpoModel
from cosmos_worker.grpo.sampling import generate
from cosmos_worker.grpo.weights import load_weights


@dataclass(frozen=True, slots=True)
class Generation:
    """One completion, as its sampler knows it."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log-probability of each token when it was sampled."""
    version: int
    """Weights version that sampled every token."""


class Engine:
    """Samples completions; knows nothing until the first `load`."""

    def __init__(self, settings: GrpoSettings, *, device: str = "cpu") -> None:
        self._settings = settings
        self._device = torch.device(device)
        # One reference, replaced whole, so a reader sees a model and its own version.
        self._current: tuple[int, GrpoModel] | None = None

    @property
    def version(self) -> int | None:
        """Version of the weights that the next `generate` starts with; none before the first `load`."""
        return None if self._current is None else self._current[0]

    def load(self, version: int, handle: str | Path) -> None:
        """Take the weights in the file at `handle` as `version`."""
        self._current = (version, load_weights(handle, self._settings.model, self._device))

    def generate(self, prompts: Sequence[str], n: Sequence[int], seed: int) -> list[list[Generation]]:
        """Sample `n[i]` completions of `prompts[i]`, all in one batch."""
        if self._current is None:
            raise RuntimeError("no weights are loaded: call load() first")
        version, model = self._current
        sampled = generate(
            model,
            [vocab.encode_prompt(prompt) for prompt in prompts],
            n,
            max_new_tokens=self._settings.max_new_tokens,
            temperature=self._settings.temperature,
            generator=torch.Generator(self._device).manual_seed(seed),
        )
        return [
            [
                Generation(vocab.decode(completion.tokens), completion.tokens, completion.logprobs, version)
                for completion in completions
            ]
            for completions in sampled
        ]
