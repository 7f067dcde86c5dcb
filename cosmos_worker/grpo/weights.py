"""Model weights as they travel from trainer to rollout workers: a `torch.save` of the model's state alone."""

from __future__ import annotations

import io
from pathlib import Path

import torch

from cosmos_worker.grpo.config import GrpoModelConfig
from cosmos_worker.grpo.model import GrpoModel


def save_weights(model: GrpoModel) -> bytes:
    """Bytes of the model's parameters."""
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    return buffer.getvalue()


def load_weights(source: bytes | str | Path, config: GrpoModelConfig, device: torch.device) -> GrpoModel:
    """A model of shape `config` with the weights from bytes or a file; raises unless every parameter fits."""
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    state = torch.load(file, map_location=device, weights_only=True)
    # Built without values: they are all about to be taken from `state`.
    with torch.device("meta"):
        model = GrpoModel(config)
    model.load_state_dict(state, strict=True, assign=True)
    return model
