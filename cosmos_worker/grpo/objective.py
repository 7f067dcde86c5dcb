"""The GRPO objective: group-relative advantages and a clipped probability ratio.

Source: DeepSeekMath (arXiv:2402.03300), equation 3, with an upper clip of its own as in DAPO (arXiv:2503.14476) and
without the penalty for leaving a reference model, since rewards here are verified and cannot be gamed.

The ratio is taken against the policy that sampled, whose log-probabilities came with the completion, so samples of
weights that are a few steps behind are corrected for, and clipped.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """How much better each completion of one prompt is than their mean, in standard deviations.

    All zero when all rewards are equal: such a group is trained and teaches nothing.
    """
    spread = statistics.pstdev(rewards)
    if spread < 1e-6:
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    return [(reward - mean) / spread for reward in rewards]


@dataclass(frozen=True, slots=True)
class Objective:
    """Sums over the sequences of a batch."""

    loss: Tensor
    """Scalar, to be divided by the number of sequences."""
    clipped_tokens: float
    tokens: float


def clipped_objective(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    is_completion: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Objective:
    """Sum over sequences of the mean over each one's tokens of the clipped surrogate, negated.

    `logprobs`, `behaviour_logprobs` and `is_completion` are (B, L); `advantages` is (B,).
    """
    # Far outside the clip the exact ratio no longer matters, but an overflow would.
    ratio = (logprobs - behaviour_logprobs).clamp(-20.0, 20.0).exp()
    advantage = advantages[:, None]
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    surrogate = torch.minimum(ratio * advantage, bounded * advantage)
    tokens = is_completion.sum(1)
    per_sequence = surrogate.masked_fill(~is_completion, 0.0).sum(1) / tokens
    clipped = (bounded * advantage < ratio * advantage) & is_completion
    return Objective(-per_sequence.sum(), float(clipped.sum()), float(tokens.sum()))
