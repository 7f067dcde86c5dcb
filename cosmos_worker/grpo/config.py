"""Every hyper-parameter of the reference application, in one place.

- Values are frozen, strictly typed and checked when they are made; an unknown key is refused.
- Nothing here imports torch: the controller reads the same settings as the workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class GrpoModelConfig(BaseModel):
    """Shape of the decoder-only Transformer."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    width: PositiveInt = 64
    """Size of a token's hidden vector."""
    heads: PositiveInt = 4
    """Attention heads; must divide `width`."""
    layers: PositiveInt = 2
    context_tokens: PositiveInt = 256
    """Longest sequence the model reads: begin mark, prompt, separator and completion together."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        return self


class GrpoSettings(BaseModel):
    """Settings of one training run. Defaults suit the bundled prompts on two CPU cores."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 17
    """Of initial weights, warm-start batches and each rank's shuffling."""
    model: GrpoModelConfig = GrpoModelConfig()

    bundled_prompts: PositiveInt = 640
    """Distinct prompts in the bundled file."""

    max_new_tokens: Annotated[int, Field(ge=2)] = 12
    """Longest completion, its end mark included."""
    temperature: PositiveFloat = 1.0
    """Of sampling; the learner scores under the same temperature."""

    learning_rate: PositiveFloat = 5e-4
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 6
    """Training steps over which the learning rate rises linearly to `learning_rate`."""
    lr_final_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """Share of `learning_rate` that is left, after a linear fall, at the last step."""
    updates_per_step: PositiveInt = 4
    """Optimizer updates in one training step, each on a random part of its completions."""
    clip_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    clip_high: PositiveFloat = 0.28
    """Probability ratios outside [1 - clip_low, 1 + clip_high] earn nothing more."""
    max_grad_norm: PositiveFloat = 1.0
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0

    warm_start_max_steps: Annotated[int, Field(ge=0)] = 1200
    """Supervised steps at most; 0 for no supervised phase."""
    warm_start_batch: PositiveInt = 64
    """Examples of one supervised step, over all ranks."""
    warm_start_learning_rate: PositiveFloat = 3e-3
    warm_start_target: Annotated[float, Field(gt=0.0, le=1.0)] = 0.38
    """The supervised phase ends once sampled answers are right this often: GRPO needs headroom."""
    warm_start_check_every: PositiveInt = 25
    """Supervised steps between two looks at that share."""

    @model_validator(mode="after")
    def _completions_fit(self) -> Self:
        if self.max_prompt_chars < 1:
            raise ValueError(
                f"max_new_tokens {self.max_new_tokens} leaves no room for a prompt in "
                f"context_tokens {self.model.context_tokens}"
            )
        return self

    @property
    def max_prompt_chars(self) -> int:
        """Longest prompt that fits the context beside its two marks and a whole completion."""
        return self.model.context_tokens - 2 - self.max_new_tokens

    @property
    def max_answer_chars(self) -> int:
        """Longest answer that a completion and its end mark have room for."""
        return self.max_new_tokens - 1

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Settings from a parsed configuration table; raises `pydantic.ValidationError` naming each bad key."""
        return cls.model_validate(dict(values))
