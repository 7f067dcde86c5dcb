"""A small decoder-only Transformer in plain PyTorch, and the policy it defines.

- Pre-norm blocks, learned positions, output tied to the input embedding.
- With a cache, a forward pass over new tokens gives what a pass over the whole sequence would, up to rounding.
- `policy_log_probs` is the one definition of the policy: sampling, learning and the warm start all use it, so
  the ratio of learner to sampler is 1 when their weights are equal.

Shapes: B sequences, T new tokens, S tokens seen so far (T included), H heads, D = width / H, V = vocabulary.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from cosmos_worker.grpo.config import GrpoModelConfig
from cosmos_worker.grpo.vocab import NEVER_SAMPLED, VOCAB_SIZE


class KeyValueCache:
    """Keys and values of the tokens seen so far, per layer, in buffers of a fixed capacity."""

    def __init__(self, config: GrpoModelConfig, *, rows: int, capacity: int, device: torch.device) -> None:
        shape = (config.layers, rows, config.heads, capacity, config.width // config.heads)
        self._keys = torch.zeros(shape, device=device)
        self._values = torch.zeros(shape, device=device)
        self.length = 0
        """Tokens seen, the same for every row."""

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append (B, H, T, D) keys and values; returns all (B, H, S, D) of this layer."""
        end = self.length + keys.shape[2]
        self._keys[layer, :, :, self.length : end] = keys
        self._values[layer, :, :, self.length : end] = values
        return self._keys[layer, :, :, :end], self._values[layer, :, :, :end]

    def advance(self, tokens: int) -> None:
        """Count `tokens` as seen, once every layer has been extended by them."""
        self.length += tokens

    def repeat_rows(self, counts: Tensor) -> None:
        """Let row i stand `counts[i]` times: the completions of one prompt share its prefix."""
        self._keys = self._keys.repeat_interleave(counts, dim=1)
        self._values = self._values.repeat_interleave(counts, dim=1)


class Block(nn.Module):
    """Self-attention and a feed-forward layer, each added to its normalised input."""

    def __init__(self, config: GrpoModelConfig) -> None:
        super().__init__()
        self._heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.attention_out = nn.Linear(config.width, config.width, bias=False)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.feed_forward_in = nn.Linear(config.width, 4 * config.width)
        self.feed_forward_out = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor, layer: int, cache: KeyValueCache | None, mask: Tensor | None) -> Tensor:
        """(B, T, width) to (B, T, width)."""
        rows, tokens, width = x.shape
        packed = self.query_key_value(self.attention_norm(x))
        # (B, T, 3 * width) -> three of (B, H, T, D)
        query, key, value = packed.view(rows, tokens, 3, self._heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        if cache is not None:
            key, value = cache.extend(layer, key, value)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        hidden = functional.gelu(self.feed_forward_in(self.feed_forward_norm(x)))
        return cast(Tensor, x + self.feed_forward_out(hidden))


class GrpoModel(nn.Module):
    """Token ids in, next-token logits out."""

    def __init__(self, config: GrpoModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCAB_SIZE, config.width)
        self.positions = nn.Embedding(config.context_tokens, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=_initial_spread(name, config))

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """(B, T) ids to (B, T, V) logits.

        Without a mask attention is causal over the T tokens, which is right for sequences padded at their end.
        `mask` is (B, 1, T, S), true where a token may look; `positions` is (B, T), 0 up to T - 1 when absent.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(positions)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, cache, mask)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return functional.linear(self.final_norm(x), self.embedding.weight)


def _initial_spread(name: str, config: GrpoModelConfig) -> float:
    """Standard deviation of a matrix's first values: less for those that add to the residual stream, and more for
    what they add to, so that the supervised phase is shorter."""
    if name.startswith(("embedding", "positions")):
        return 0.1
    return 0.02 / math.sqrt(2 * config.layers) if "_out" in name else 0.02


def policy_log_probs(logits: Tensor, temperature: float) -> Tensor:
    """(…, V) logits to (…, V) log-probabilities, in nats; marks that are never sampled have none."""
    never = torch.tensor(NEVER_SAMPLED, device=logits.device)
    return (logits / temperature).index_fill(-1, never, -torch.inf).log_softmax(-1)


def parameter_count(model: nn.Module) -> int:
    """Numbers that training changes."""
    return sum(parameter.numel() for parameter in model.parameters())
