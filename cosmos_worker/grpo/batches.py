"""From prompts and completions to one padded batch, and to the log-probabilities of its completions.

Sequences are padded at their end, where causal attention needs no mask. Shapes: B sequences, L their greatest
length less one, since position t predicts token t + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cosmos_worker.grpo.model import GrpoModel, policy_log_probs
from cosmos_worker.grpo.vocab import PAD


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded sequences and where their completions are."""

    inputs: Tensor
    """(B, L) ids."""
    targets: Tensor
    """(B, L) ids, one place ahead of `inputs`."""
    is_completion: Tensor
    """(B, L), true where the target is a token of the completion."""


def collate(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device) -> Batch:
    """One batch of (prompt ids, completion ids) pairs; at least one."""
    longest = max(len(prompt) + len(completion) for prompt, completion in pairs)
    rows = [[*prompt, *completion, *[PAD] * (longest - len(prompt) - len(completion))] for prompt, completion in pairs]
    tokens = torch.tensor(rows, device=device)
    first = torch.tensor([len(prompt) - 1 for prompt, _ in pairs], device=device)[:, None]
    length = torch.tensor([len(completion) for _, completion in pairs], device=device)[:, None]
    places = torch.arange(longest - 1, device=device)
    return Batch(tokens[:, :-1], tokens[:, 1:], (places >= first) & (places < first + length))


def completion_log_probs(model: GrpoModel, batch: Batch, temperature: float) -> Tensor:
    """(B, L) log-probabilities of the targets, in nats; 0 outside the completions."""
    policy = policy_log_probs(model(batch.inputs), temperature)
    # Padding is a mark the policy gives no probability: take another token there, so no gradient is NaN.
    targets = batch.targets.masked_fill(~batch.is_completion, policy.shape[-1] - 1)
    chosen = policy.gather(-1, targets[..., None])[..., 0]
    return chosen.masked_fill(~batch.is_completion, 0.0)
