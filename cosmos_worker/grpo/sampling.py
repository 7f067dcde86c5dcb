"""Sample completions in batches, with the log-probabilities of the policy that sampled them.

- All completions of all prompts advance together; each prompt is read once, however many completions it has.
- A completion ends with the end mark or after `max_new_tokens`; nothing sampled after the mark is returned.
- The same model, arguments and generator state give the same completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cosmos_worker.grpo.model import GrpoModel, KeyValueCache, policy_log_probs
from cosmos_worker.grpo.vocab import END, PAD


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One completion."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log-probability of each token under the sampling policy, at the sampling temperature."""


@torch.inference_mode()
def generate(
    model: GrpoModel,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> list[list[SampledTokens]]:
    """Sample `counts[i]` completions of `prompts[i]`, which are ids as `encode_prompt` makes them."""
    if len(prompts) != len(counts):
        raise ValueError(f"{len(prompts)} prompts but {len(counts)} counts")
    if sum(counts) == 0:
        return [[] for _ in prompts]
    device = model.embedding.weight.device
    longest = max(len(prompt) for prompt in prompts)
    if longest + max_new_tokens > model.config.context_tokens:
        raise ValueError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed the context of "
            f"{model.config.context_tokens}"
        )
    cache = KeyValueCache(model.config, rows=len(prompts), capacity=longest + max_new_tokens, device=device)
    # Padded in front, so that the next token stands in the same column of every row.
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    tokens = torch.tensor([[PAD] * (longest - len(p)) + list(p) for p in prompts], device=device)
    logits = _read_prompts(model, tokens, padding, cache)
    repeats = torch.tensor(counts, device=device)
    cache.repeat_rows(repeats)
    sampled, logprobs = _decode(
        model,
        logits.repeat_interleave(repeats, dim=0),
        padding.repeat_interleave(repeats),
        cache,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        generator=generator,
    )
    rows = iter(zip(sampled.tolist(), logprobs.tolist(), strict=True))
    return [[_until_end(*next(rows)) for _ in range(count)] for count in counts]


def _read_prompts(model: GrpoModel, tokens: Tensor, padding: Tensor, cache: KeyValueCache) -> Tensor:
    """Fill the cache with (B, T) prompts; returns the (B, V) logits after their last tokens."""
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    is_token = columns >= padding[:, None]
    causal = columns[:, None] >= columns
    # A padding column looks at itself: attention over nothing would be NaN.
    looks = (causal & is_token[:, None, :]) | torch.eye(len(columns), dtype=torch.bool, device=tokens.device)
    positions = (columns - padding[:, None]).clamp(min=0)
    logits: Tensor = model(tokens, positions=positions, cache=cache, mask=looks[:, None])
    return logits[:, -1]


def _decode(
    model: GrpoModel,
    logits: Tensor,
    padding: Tensor,
    cache: KeyValueCache,
    *,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Continue every row from its (B, V) logits; returns (B, N) ids and (B, N) log-probabilities."""
    tokens: list[Tensor] = []
    logprobs: list[Tensor] = []
    ended = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    for place in range(max_new_tokens):
        policy = policy_log_probs(logits, temperature)
        token = torch.multinomial(policy.exp(), 1, generator=generator)
        tokens.append(token)
        logprobs.append(policy.gather(1, token))
        ended |= token[:, 0] == END
        if place + 1 == max_new_tokens or bool(ended.all()):
            break
        columns = torch.arange(cache.length + 1, device=logits.device)
        mask = (columns >= padding[:, None])[:, None, None]
        positions = (cache.length - padding)[:, None]
        logits = model(token, positions=positions, cache=cache, mask=mask)[:, -1]
    return torch.cat(tokens, 1), torch.cat(logprobs, 1)


def _until_end(tokens: list[int], logprobs: list[float]) -> SampledTokens:
    length = tokens.index(END) + 1 if END in tokens else len(tokens)
    return SampledTokens(tuple(tokens[:length]), tuple(logprobs[:length]))
