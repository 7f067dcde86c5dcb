"""The supervised phase before GRPO: enough skill to earn a reward now and then, with headroom left.

- Examples are of the bundled tasks' kind but none of the prompts themselves, when all prompts are bundled ones;
  for prompts of the user's own there is no other source than the prompts.
- It ends when sampled answers to examples that it does not train on (the user's own prompts apart) are right as
  often as the settings ask, or after a fixed number of steps.
- All ranks draw the same batches and each works on its part; the same seed gives the same weights.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from cosmos_worker.grpo import vocab
from cosmos_worker.grpo.batches import collate, completion_log_probs
from cosmos_worker.grpo.collectives import reduce_gradients, sum_over_ranks
from cosmos_worker.grpo.config import GrpoSettings
from cosmos_worker.grpo.model import GrpoModel
from cosmos_worker.grpo.sampling import generate
from cosmos_worker.grpo.tasks import BUNDLED_SOURCE, Task, bundled_family_examples

Pair = tuple[str, str]
"""A prompt and its answer."""

_BUNDLED_EXAMPLES = 3_000
_CHECKED_EXAMPLES = 256


@dataclass(frozen=True, slots=True)
class WarmStartResult:
    """How the supervised phase ended, the same on every rank."""

    steps: int
    accuracy: float
    """Share of checked examples whose sampled answer was right at the end, at the sampling temperature."""


@dataclass(frozen=True, slots=True)
class Examples:
    """What the supervised phase trains on, and what it is checked on."""

    train: Sequence[Pair]
    check: Sequence[Pair]


def choose_examples(tasks: Sequence[Task]) -> Examples:
    """Examples for these tasks; apart from each other and from the tasks when those are all bundled ones."""
    if all(task.source == BUNDLED_SOURCE for task in tasks):
        pool = bundled_family_examples({task.prompt for task in tasks})
        check = list(islice(pool, _CHECKED_EXAMPLES))
        return Examples(train=list(islice(pool, _BUNDLED_EXAMPLES)), check=check)
    own = [(task.prompt, task.answer) for task in tasks]
    return Examples(train=own, check=own[:_CHECKED_EXAMPLES])


def run_warm_start(
    model: GrpoModel, examples: Examples, settings: GrpoSettings, *, rank: int, world_size: int
) -> WarmStartResult:
    """Train `model` in place."""
    if not settings.warm_start_max_steps:
        return WarmStartResult(0, _accuracy(model, examples.check, settings, rank, world_size))
    draw = random.Random(settings.seed)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=settings.warm_start_learning_rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    accuracy = 0.0
    for step in range(1, settings.warm_start_max_steps + 1):
        batch = draw.choices(examples.train, k=settings.warm_start_batch)
        # Rises, and never falls: weights that were annealed gain little from GRPO in as few steps as a demo has.
        optimizer.param_groups[0]["lr"] = settings.warm_start_learning_rate * min(1.0, step / 50)
        _supervised_update(model, parameters, optimizer, batch[rank::world_size], world_size)
        if step % settings.warm_start_check_every == 0 or step == settings.warm_start_max_steps:
            accuracy = _accuracy(model, examples.check, settings, rank, world_size)
            if accuracy >= settings.warm_start_target:
                break
    return WarmStartResult(step, accuracy)


def _supervised_update(
    model: GrpoModel,
    parameters: list[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    pairs: Sequence[Pair],
    world_size: int,
) -> None:
    """One update on the mean cross-entropy per answer token over all ranks' pairs."""
    optimizer.zero_grad(set_to_none=True)
    tokens = 0.0
    if pairs:
        encoded = [(vocab.encode_prompt(prompt), vocab.encode_answer(answer)) for prompt, answer in pairs]
        batch = collate(encoded, parameters[0].device)
        tokens = float(batch.is_completion.sum())
        torch.autograd.backward(-completion_log_probs(model, batch, 1.0).sum())
    reduce_gradients(parameters, [tokens], world_size)
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()


def _accuracy(model: GrpoModel, pairs: Sequence[Pair], settings: GrpoSettings, rank: int, world_size: int) -> float:
    mine = pairs[rank::world_size]
    generator = torch.Generator(model.embedding.weight.device).manual_seed(settings.seed + rank)
    sampled = generate(
        model,
        [vocab.encode_prompt(prompt) for prompt, _ in mine],
        [1] * len(mine),
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        generator=generator,
    )
    right = sum(
        vocab.decode(completions[0].tokens).strip() == answer.strip()
        for completions, (_, answer) in zip(sampled, mine, strict=True)
    )
    right_of_all, checked = sum_over_ranks([right, len(mine)], world_size)
    return right_of_all / checked
