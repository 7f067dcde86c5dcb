from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cosmos_worker.grpo.groups import TrainCompletion, TrainGroup, prepare_share
from cosmos_worker.grpo.objective import clipped_objective, group_advantages
from cosmos_worker.grpo.payload import encode_completion


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=16))
def test_advantages_have_no_mean_and_unit_spread_or_none(rewards: list[float]) -> None:
    advantages = group_advantages(rewards)

    assert sum(advantages) == pytest.approx(0.0, abs=1e-9)
    if len(set(rewards)) > 1:
        assert sum(a * a for a in advantages) / len(rewards) == pytest.approx(1.0)
    else:
        assert advantages == [0.0] * len(rewards)


def objective(ratio: float, advantage: float) -> tuple[float, float, float]:
    """Loss, its slope in the log-probability, and clipped tokens, for one token sampled at log-probability -2."""
    logprobs = torch.tensor([[-2.0 + torch.tensor(ratio).log().item(), 0.0]], requires_grad=True)
    result = clipped_objective(
        logprobs,
        torch.tensor([[-2.0, 0.0]]),
        torch.tensor([advantage]),
        torch.tensor([[True, False]]),
        clip_low=0.2,
        clip_high=0.3,
    )
    torch.autograd.backward(result.loss)
    assert logprobs.grad is not None
    return result.loss.item(), logprobs.grad[0, 0].item(), result.clipped_tokens


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0),
        (1.2, 1.0, -1.2, -1.2, 0),
        (1.5, 1.0, -1.3, 0.0, 1),
        (0.5, 1.0, -0.5, -0.5, 0),
        (0.5, -1.0, 0.8, 0.0, 1),
        (1.5, -1.0, 1.5, 1.5, 0),
    ],
)
def test_the_surrogate_is_clipped_only_where_it_would_gain(
    ratio: float, advantage: float, loss: float, slope: float, clipped: int
) -> None:
    assert objective(ratio, advantage) == pytest.approx((loss, slope, clipped), abs=1e-5)


def test_each_completion_counts_once_whatever_its_length() -> None:
    masks = torch.tensor([[True, True, True], [True, False, False]])
    zeros = torch.zeros(2, 3)

    result = clipped_objective(zeros, zeros, torch.tensor([1.0, -1.0]), masks, clip_low=0.2, clip_high=0.2)

    assert result.loss.item() == pytest.approx(0.0)
    assert result.tokens == 4


def test_what_cannot_be_trained_is_rejected_by_name_and_the_rest_is_kept() -> None:
    good = encode_completion([70, 71], [-1.0, -1.0])
    group = TrainGroup(
        7,
        "1 + 1 =",
        [
            TrainCompletion(0, good, 1.0),
            TrainCompletion(2, b"nonsense", 1.0),
            TrainCompletion(3, good, float("nan")),
            TrainCompletion(4, encode_completion([70] * 9, [-1.0] * 9), 1.0),
            TrainCompletion(5, good, 0.0),
        ],
    )

    share = prepare_share([group], context_tokens=17)

    assert [(each.group_id, each.index) for each in share.rejected] == [(7, 2), (7, 3), (7, 4)]
    assert "the context has left" in share.rejected[2].reason
    assert [sample.advantage for sample in share.samples] == [1.0, -1.0]
    assert share.rewards == [1.0, 0.0]
