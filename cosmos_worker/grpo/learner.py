"""What a trainer rank holds: the model, its optimizer, and one training step of GRPO.

- After every step all ranks hold the same model to the bit, however uneven their shares were.
- A step is complete, or it raised: `steps` and `updates` count completed ones, the same on every rank.
- A completion whose group has equal rewards counts as trained and moves nothing.

The objective is that of DeepSeekMath (arXiv:2402.03300); see `objective`.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cosmos_worker.grpo import warmstart
from cosmos_worker.grpo.batches import collate, completion_log_probs
from cosmos_worker.grpo.collectives import (
    broadcast_parameters,
    gather_from_ranks,
    reduce_gradients,
    sum_over_ranks,
)
from cosmos_worker.grpo.config import GrpoSettings
from cosmos_worker.grpo.groups import RejectedCompletion, Sample, TrainGroup, prepare_share
from cosmos_worker.grpo.model import GrpoModel, parameter_count
from cosmos_worker.grpo.objective import Objective, clipped_objective
from cosmos_worker.grpo.state import TrainingParts, capture_state, restore_state
from cosmos_worker.grpo.tasks import Task
from cosmos_worker.grpo.weights import save_weights


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one training step did. All but the `local` figures are the same on every rank."""

    updates: int
    """Optimizer updates of this step: 0 when no rank had anything to train."""
    loss: float
    """Mean over the step's completions of all ranks."""
    mean_reward: float
    """Over the completions of all ranks; 0.0 when there were none."""
    mean_reward_local: float
    """Over this rank's completions; 0.0 when it had none."""
    n_completions: int
    """Trained by all ranks."""
    n_completions_local: int
    clipped_fraction: float
    """Share of the scored tokens whose ratio the clip held back."""
    learning_rate: float
    rejected: list[RejectedCompletion]
    """Of all ranks, in rank order: the leader reports for everyone."""


class Learner:
    """One data-parallel rank. With a `world_size` above 1, torch.distributed is initialised beforehand."""

    def __init__(
        self,
        settings: GrpoSettings,
        *,
        rank: int = 0,
        world_size: int = 1,
        device: str = "cpu",
        total_steps: int,
    ) -> None:
        """
        Args:
            total_steps: of the whole run, the length of the learning-rate schedule: the same in every execution.
        """
        self._settings = settings
        self._rank = rank
        self._world_size = world_size
        self._device = torch.device(device)
        self._total_steps = total_steps
        torch.manual_seed(settings.seed)
        self._parts = self._new_parts()
        broadcast_parameters(self._parts.model.parameters(), world_size)
        # Weights start equal; what each rank draws from here on is its own.
        torch.manual_seed(settings.seed + 1 + rank)
        random.seed(settings.seed + 1 + rank)

    @property
    def model(self) -> GrpoModel:
        """The policy being trained; another object after `load_state`."""
        return self._parts.model

    @property
    def steps(self) -> int:
        """Completed training steps."""
        return self._parts.steps

    @property
    def updates(self) -> int:
        """Completed optimizer updates; the warm start's are not among them."""
        return self._parts.updates

    @property
    def parameters(self) -> int:
        """Numbers that training changes."""
        return parameter_count(self._parts.model)

    def warm_start(self, tasks: Sequence[Task]) -> warmstart.WarmStartResult:
        """The supervised phase, by all ranks together, before the first step of a fresh run."""
        if self.steps:
            raise RuntimeError(f"the warm start comes before the first step, not after {self.steps}")
        return warmstart.run_warm_start(
            self._parts.model,
            warmstart.choose_examples(tasks),
            self._settings,
            rank=self._rank,
            world_size=self._world_size,
        )

    def train(self, groups: Sequence[TrainGroup]) -> StepResult:
        """One training step on this rank's share, which may be empty; every rank takes part."""
        parts, settings = self._parts, self._settings
        share = prepare_share(groups, context_tokens=settings.model.context_tokens)
        own = len(share.samples)
        completions, rewards, rejections = sum_over_ranks(
            [own, sum(share.rewards), len(share.rejected)], self._world_size
        )
        learning_rate = float(parts.scheduler.get_last_lr()[0])
        order = torch.randperm(own).tolist()
        updates, sums = 0, [0.0] * 4
        for part in range(settings.updates_per_step):
            samples = [share.samples[i] for i in order[part :: settings.updates_per_step]]
            totals = self._update(samples)
            updates += totals[0] > 0
            sums = [a + b for a, b in zip(sums, totals, strict=True)]
        with warnings.catch_warnings():
            # torch takes a first step that has nothing to update for a wrong order of calls.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            parts.scheduler.step()
        parts.steps += 1
        parts.updates += updates
        return StepResult(
            updates=updates,
            loss=sums[1] / max(completions, 1),
            mean_reward=rewards / max(completions, 1),
            mean_reward_local=sum(share.rewards) / max(own, 1),
            n_completions=int(completions),
            n_completions_local=own,
            clipped_fraction=sums[2] / max(sums[3], 1),
            learning_rate=learning_rate,
            rejected=gather_from_ranks(share.rejected, self._world_size) if rejections else [],
        )

    def state(self) -> dict[str, Any]:
        """All that a later process needs to go on exactly from here; `torch.load(weights_only=True)` reads it."""
        return capture_state(self._parts, rank=self._rank, world_size=self._world_size)

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned on this rank; raises `StateError` before anything is changed."""
        self._parts = restore_state(state, self._new_parts, rank=self._rank, world_size=self._world_size)

    def weights(self) -> bytes:
        """The model alone, for the rollout workers."""
        return save_weights(self._parts.model)

    def _update(self, samples: Sequence[Sample]) -> list[float]:
        """One optimizer update, unless no rank has a sample.

        Returns sums over all ranks: samples, loss, clipped tokens, scored tokens.
        """
        parts = self._parts
        parts.optimizer.zero_grad(set_to_none=True)
        totals = [float(len(samples)), 0.0, 0.0, 0.0]
        # Without an advantage a sample's gradient is zero: it is counted, not computed.
        moving = [sample for sample in samples if sample.advantage]
        if moving:
            objective = self._objective(moving)
            torch.autograd.backward(objective.loss)
            totals[1:] = objective.loss.item(), objective.clipped_tokens, objective.tokens
        parameters = list(parts.model.parameters())
        totals = reduce_gradients(parameters, totals, self._world_size)
        if totals[0] > 0:
            torch.nn.utils.clip_grad_norm_(parameters, self._settings.max_grad_norm, error_if_nonfinite=True)
            parts.optimizer.step()
        return totals

    def _objective(self, samples: Sequence[Sample]) -> Objective:
        batch = collate([(s.prompt, s.completion.tokens) for s in samples], self._device)
        behaviour = torch.zeros(batch.targets.shape, device=self._device)
        behaviour[batch.is_completion] = torch.tensor(
            [logprob for sample in samples for logprob in sample.completion.logprobs], device=self._device
        )
        return clipped_objective(
            completion_log_probs(self._parts.model, batch, self._settings.temperature),
            behaviour,
            torch.tensor([sample.advantage for sample in samples], device=self._device),
            batch.is_completion,
            clip_low=self._settings.clip_low,
            clip_high=self._settings.clip_high,
        )

    def _new_parts(self) -> TrainingParts:
        settings = self._settings
        model = GrpoModel(settings.model).to(self._device)
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.learning_rate,
            betas=(0.9, 0.99),
            weight_decay=settings.weight_decay,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._learning_rate_factor)
        return TrainingParts(model, optimizer, scheduler, steps=0, updates=0)

    def _learning_rate_factor(self, step: int) -> float:
        """Share of the peak learning rate for the step after `step` completed ones."""
        warmup, final = self._settings.lr_warmup_steps, self._settings.lr_final_fraction
        if step < warmup:
            return (step + 1) / warmup
        left = max(self._total_steps - step, 0) / max(self._total_steps - warmup, 1)
        return final + (1.0 - final) * left
