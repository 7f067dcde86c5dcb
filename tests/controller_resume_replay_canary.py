"""The replay canary: two ranks save while a batch is outstanding, and go on from there in fresh processes.

    python tests/controller_resume_replay_canary.py both DIR [--device cpu|cuda]

or its two phases, one after the other:

    torchrun --standalone --nproc-per-node=2 tests/controller_resume_replay_canary.py save DIR [--device cpu|cuda]
    torchrun --standalone --nproc-per-node=2 tests/controller_resume_replay_canary.py resume DIR [--device cpu|cuda]

*save* fetches three batches, each with prompts of both ranks' shards, trains the first and the third, and saves while the second is
outstanding. The safe boundary is therefore after the first batch: the checkpoint's model contains the third, its sampler state does not.
*resume* restores both ranks to the bit (model, momentum, scheduler, and the random states of Python, NumPy, torch and CUDA), generates the
second batch again, repeats the third, and does two updates on what is new. Everything is asserted; it exits with 0 only if all of it holds.

With ``--device cuda`` gradients travel by NCCL where there is a GPU for each rank, and by gloo where two ranks share one. A machine without
a GPU says so and exits with 77. It needs the package with its extra ``worker``, and NumPy.
"""

from __future__ import annotations

import sys
from typing import Any

from canary_controller import BATCH, BUDGET, DRAWN_PER_RANK, RANKS
from canary_ranks import Rank, expect, main

from cosmos_ctrl.audit import audit
from cosmos_ctrl.checkpoints.discovery import list_checkpoints
from cosmos_ctrl.checkpoints.stores.local import LocalStore

_RUN = "replay"

WINDOW = 2 * BATCH
"""Completions issued beyond the safe boundary: the second batch and the third."""


def save(rank: Rank) -> None:
    """Train the first batch and the third, and save while the second is outstanding."""
    fetched: list[str] = []
    with rank.execution(_RUN) as execution:
        execution.begin()
        if execution.generation:
            groups = execution.generation.fetch(3 * BATCH)
            execution.generation.report(groups[:BATCH])
            execution.generation.report(groups[2 * BATCH :])
            fetched = _keys(groups)
        trained = execution.train_to_the_end(stop_at=2)
        expect("why it ended", execution.end(), "STOP_REQUESTED")
    expect("steps", [step for step, _ in trained], [1, 2])
    if rank.rank == 0:
        expect("step 1", trained[0][1], _own(rank, fetched[:BATCH]))
        expect("step 2", trained[1][1], _own(rank, fetched[2 * BATCH :]))
        (found,) = list_checkpoints(LocalStore(execution.run))
        expect("W", found.manifest.repeat_bound_completions, WINDOW)
        expect("completions left", found.manifest.metadata.remaining_completions, BUDGET - BATCH)
        expect_cursors(found.manifest.metadata.sampler_state)
    # Beside the checkpoint: what is restored is compared with what was there, and not with itself.
    rank.keep("saved", {"state": execution.learner.state(), "fetched": fetched, "third": trained[1][1]})
    rank.say(
        f"saved at step 2: batches 1 and 3 of {BATCH} prompts are trained, batch 2 is outstanding; boundary after batch 1"
    )


def expect_cursors(state: dict[str, Any]) -> None:
    """Both ranks' cursors are in the one state, each after the first batch."""
    positions = [(cursor["position"], cursor["seed"]) for cursor in state["cursors"]]
    expect("the cursors' positions", positions, [(DRAWN_PER_RANK, 7 + rank) for rank in range(RANKS)])


def resume(rank: Rank) -> None:
    """Go on from there to the end of the budget."""
    before = rank.kept("saved")
    keys: list[str] = []
    with rank.execution(_RUN) as execution:
        resumed = execution.restore()
        assert resumed.checkpoint is not None, "the checkpoint is gone"
        expect("W", resumed.repeat_bound_completions, WINDOW)
        metadata = resumed.checkpoint.metadata
        expect("steps, updates", (metadata.completed_training_steps, metadata.completed_optimizer_updates), (2, 2))
        expect_cursors(metadata.sampler_state)
        rank.expect_bits("the restored state", execution.learner.state(), before["state"])
        execution.confirm()
        if execution.generation:
            groups = execution.generation.fetch(BUDGET - BATCH)
            execution.generation.report(groups)
            keys, fetched = _keys(groups), before["fetched"]
            expect("the second batch, regenerated", keys[:BATCH], fetched[BATCH : 2 * BATCH])
            expect("the third batch, repeated", keys[BATCH : 2 * BATCH], fetched[2 * BATCH :])
            expect("prompts that are new", len(set(keys[2 * BATCH :]) - set(fetched)), 2 * BATCH)
        trained = execution.train_to_the_end()
        expect("why it ended", execution.end(), "BUDGET_EXHAUSTED")
    expect("steps", [step for step, _ in trained], [3, 4, 5, 6])
    expect("the repeated third batch", trained[1][1], before["third"])
    expect("updates", execution.learner.updates, 6)
    if rank.rank == 0:
        for place, (step, share) in enumerate(trained):
            expect(f"step {step}", share, _own(rank, keys[place * BATCH : (place + 1) * BATCH]))
        newest = list_checkpoints(LocalStore(execution.run))[0].manifest.metadata
        expect("the last checkpoint's step", newest.completed_training_steps, 6)
        expect("completions left", newest.remaining_completions, 0)
        report = audit(execution.run)
        counts = (report.skipped, report.repeated, report.redone, report.window_at_checkpoint)
        expect("skipped, repeated, redone, W", counts, (0, BATCH, 0, WINDOW))
    rank.say(
        "resumed: both ranks restored to the bit; batch 2 regenerated, batch 3 repeated, two updates on new prompts; "
        f"skipped 0, repeated {BATCH} of at most {WINDOW} completions"
    )


def _keys(groups: Any) -> list[str]:
    return [group.prompt_key for group in groups]


def _own(rank: Rank, keys: list[str]) -> list[str]:
    return [key for key in keys if key.startswith(f"shard{rank.rank}/")]


if __name__ == "__main__":
    sys.exit(main(__file__, {"save": save, "resume": resume}, account=__doc__ or ""))
