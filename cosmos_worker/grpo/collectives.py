"""What trainer ranks exchange: initial weights, gradients with their weights, and rejections.

- Gradients are sums, not means, and are divided by what all ranks summed over: a rank with a larger share counts
  for more, and one with an empty share for nothing.
- Every rank ends with the same bits; a world of one exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@torch.no_grad()
def broadcast_parameters(parameters: Iterable[Tensor], world_size: int) -> None:
    """Overwrite every rank's parameters with those of rank 0."""
    if world_size > 1:
        for parameter in parameters:
            dist.broadcast(parameter, src=0)


@torch.no_grad()
def reduce_gradients(parameters: Sequence[Tensor], totals: Sequence[float], world_size: int) -> list[float]:
    """Sum gradients and `totals` over all ranks, then divide the gradients by the first total.

    `totals[0]` is what this rank's gradients are a sum over (sequences, tokens); a parameter without a gradient
    counts as zero. Returns the summed totals. Where `totals[0]` is zero everywhere the gradients are zero.
    """
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    counts = gradients[0].new_tensor(totals)
    buffer = torch.cat([counts, *(gradient.flatten() for gradient in gradients)])
    if world_size > 1:
        dist.all_reduce(buffer)
    summed: list[float] = buffer[: len(totals)].tolist()
    place = len(totals)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        part = buffer[place : place + gradient.numel()].view_as(gradient)
        parameter.grad = part / max(summed[0], 1.0)
        place += gradient.numel()
    return summed


def sum_over_ranks(values: Sequence[float], world_size: int) -> list[float]:
    """Element-wise sums over all ranks, in double precision."""
    if world_size == 1:
        return list(values)
    buffer = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(buffer)
    summed: list[float] = buffer.tolist()
    return summed


def gather_from_ranks(items: Sequence[T], world_size: int) -> list[T]:
    """All ranks' items, in rank order, the same list on every rank."""
    if world_size == 1:
        return list(items)
    gathered: list[list[T]] = [[] for _ in range(world_size)]
    dist.all_gather_object(gathered, list(items))
    return [item for of_rank in gathered for item in of_rank]
