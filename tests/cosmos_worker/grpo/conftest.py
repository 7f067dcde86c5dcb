"""Settings small enough for a test."""

from __future__ import annotations

import pytest
import torch

from cosmos_worker.grpo.config import GrpoSettings

torch.set_num_threads(1)


@pytest.fixture
def settings() -> GrpoSettings:
    return GrpoSettings.from_dict(
        {
            "model": {"width": 16, "heads": 2, "layers": 2, "context_tokens": 48},
            "warm_start_max_steps": 20,
            "warm_start_check_every": 10,
            "warm_start_batch": 8,
            "learning_rate": 1e-2,
        }
    )
