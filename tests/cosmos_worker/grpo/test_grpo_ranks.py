"""Two processes over gloo, as torchrun would start them; run as a program, this file is one of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from grpo_data import make_groups

from cosmos_worker.grpo.config import GrpoSettings
from cosmos_worker.grpo.groups import TrainCompletion, TrainGroup
from cosmos_worker.grpo.learner import Learner
from cosmos_worker.grpo.tasks import Task

SETTINGS = GrpoSettings.from_dict(
    {
        "model": {"width": 16, "heads": 2, "layers": 1, "context_tokens": 48},
        "warm_start_max_steps": 5,
        "warm_start_check_every": 5,
        "warm_start_batch": 5,
        "updates_per_step": 1,
        "max_grad_norm": 1e9,
    }
)
TASKS = [Task(key=str(i), prompt=f"{i} =", answer=str(i)) for i in range(7)]

GROUPS = 4
FIRST_SHARES = [2, 3, 4, 0]
"""Groups of each step that rank 0 trains; rank 1 trains the others: even, uneven and empty shares."""
BROKEN = TrainGroup(50, "1 =", [TrainCompletion(2, b"broken", 1.0)])


def train_as(rank: int, world_size: int) -> dict[str, Any]:
    """The same six steps on one rank or on two."""
    learner = Learner(SETTINGS, rank=rank, world_size=world_size, total_steps=6)
    warm = learner.warm_start(TASKS)
    records = []

    def step(shares: list[list[TrainGroup]]) -> None:
        mine = shares[rank] if world_size == 2 else shares[0] + shares[1]
        result = learner.train(mine)
        rejected = [(each.group_id, each.index) for each in result.rejected]
        common = (learner.steps, learner.updates, result.n_completions, result.mean_reward, rejected)
        parameters = torch.nn.utils.parameters_to_vector(learner.model.parameters()).detach()
        records.append((common, result.loss, parameters))

    for seed, first in enumerate(FIRST_SHARES):
        groups = make_groups(GROUPS, seed)
        step([groups[:first], groups[first:]])
    step([[], []])
    step([make_groups(1, 9), [BROKEN]])
    return {"warm": (warm.steps, warm.accuracy), "records": records, "state": learner.state()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    programs = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder), str(rank)], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        errors = [program.communicate(timeout=60)[1] for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert [program.returncode for program in programs] == [0, 0], errors
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_both_ranks_hold_the_same_model_after_every_step(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks

    assert first["warm"] == second["warm"]
    for (common, loss, parameters), (common_2, loss_2, parameters_2) in zip(
        first["records"], second["records"], strict=True
    ):
        assert common == common_2
        assert loss == loss_2
        assert torch.equal(parameters, parameters_2)


def test_shares_of_any_size_train_what_one_rank_would_alone(ranks: list[dict[str, Any]]) -> None:
    alone = train_as(0, 1)

    for (common, loss, parameters), (common_1, loss_1, parameters_1) in zip(
        ranks[0]["records"], alone["records"], strict=True
    ):
        assert common == common_1
        assert loss == pytest.approx(loss_1, abs=1e-6)
        torch.testing.assert_close(parameters, parameters_1, atol=1e-6, rtol=0.0)


def test_a_step_empty_everywhere_changes_no_rank(ranks: list[dict[str, Any]]) -> None:
    (before, _, parameters_before), (after, _, parameters_after) = ranks[0]["records"][3:5]

    assert torch.equal(parameters_before, parameters_after)
    assert (after[0], after[1], after[2]) == (before[0] + 1, before[1], 0)


def test_the_leader_learns_what_another_rank_rejected(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["records"][-1][0][-1] == [(50, 2)]


def test_a_rank_refuses_another_ranks_state(ranks: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="is of rank 1 of 2, and this is rank 0 of 1"):
        Learner(SETTINGS, total_steps=6).load_state(ranks[1]["state"])


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save(train_as(rank, 2), folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
