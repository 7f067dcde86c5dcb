from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from cosmos_worker.grpo.config import GrpoSettings


def test_every_setting_has_a_default() -> None:
    assert GrpoSettings.from_dict({}) == GrpoSettings()


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"learningrate": 1.0}, "learningrate"),
        ({"model": {"depth": 2}}, "model.depth"),
        ({"updates_per_step": "4"}, "updates_per_step"),
        ({"updates_per_step": True}, "updates_per_step"),
        ({"updates_per_step": 0}, "updates_per_step"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"model": {"width": 30, "heads": 4}}, "not a multiple of heads"),
        ({"max_new_tokens": 254}, "leaves no room for a prompt"),
    ],
)
def test_a_bad_setting_is_refused_by_name(values: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError, match=key):
        GrpoSettings.from_dict(values)


def test_the_longest_prompt_and_completion_fill_the_context() -> None:
    settings = GrpoSettings()

    assert settings.max_prompt_chars + 2 + settings.max_new_tokens == settings.model.context_tokens
