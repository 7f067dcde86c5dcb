"""The parity canary: with nothing outstanding at the save, a run that is saved and resumed ends as one that is never interrupted, to the bit.

    python tests/controller_resume_gpu_canary.py both DIR [--device cpu|cuda]

or its two phases, one after the other:

    torchrun --standalone --nproc-per-node=2 tests/controller_resume_gpu_canary.py save DIR [--device cpu|cuda]
    torchrun --standalone --nproc-per-node=2 tests/controller_resume_gpu_canary.py resume DIR [--device cpu|cuda]

*save* trains five batches in one execution, uninterrupted; then two in a run of its own, which it stops with nothing outstanding. *resume*
trains the other three of that run in fresh processes, and compares every rank's model, momentum, scheduler and random states with the
uninterrupted run's, at the save and at the end. Exact replay can be asked for here, since every completion is a function of its prompt; of a
generator that samples it cannot.

On a GPU, use ``--device cuda`` on a machine with two of them: gradients then travel by NCCL, and the random states and kernels are CUDA's. On
one GPU both ranks share it, and gradients travel by gloo. A machine without a GPU says so and exits with 77. It needs the package with its
extra ``worker``, and NumPy.
"""

from __future__ import annotations

import sys

from canary_controller import BATCH, BUDGET
from canary_ranks import Rank, expect, main

from cosmos_ctrl.checkpoints.discovery import list_checkpoints
from cosmos_ctrl.checkpoints.stores.local import LocalStore

STEPS, SAVED_AT = BUDGET // BATCH, 2
_WHOLE, _SPLIT = "whole", "split"


def save(rank: Rank) -> None:
    """The uninterrupted run; and the first batches of the other, with a checkpoint when nothing is outstanding."""
    with rank.execution(_WHOLE) as whole:
        whole.begin()
        if whole.generation:
            whole.generation.report(whole.generation.fetch(BUDGET))
        uninterrupted = whole.train_to_the_end()
        expect("why it ended", whole.end(), "BUDGET_EXHAUSTED")
    state = {"saved": whole.saved[SAVED_AT], "end": whole.learner.state()}
    rank.keep(_WHOLE, {"trained": uninterrupted, **state})
    rank.say(f"uninterrupted: {STEPS} updates in one execution")
    with rank.execution(_SPLIT) as split:
        split.begin()
        if split.generation:
            split.generation.report(split.generation.fetch(SAVED_AT * BATCH))
        trained = split.train_to_the_end(stop_at=SAVED_AT)
        expect("why it ended", split.end(), "STOP_REQUESTED")
    expect("trained", trained, uninterrupted[:SAVED_AT])
    rank.expect_bits("the state at the save", split.learner.state(), state["saved"])
    if rank.rank == 0:
        (found,) = list_checkpoints(LocalStore(split.run))
        expect("W", found.manifest.repeat_bound_completions, 0)
    rank.say(f"saved at step {SAVED_AT}, with nothing outstanding")


def resume(rank: Rank) -> None:
    """The other batches, in fresh processes."""
    uninterrupted = rank.kept(_WHOLE)
    with rank.execution(_SPLIT) as split:
        resumed = split.restore()
        assert resumed.checkpoint is not None, "the checkpoint is gone"
        expect("W", resumed.repeat_bound_completions, 0)
        rank.expect_bits("the restored state", split.learner.state(), uninterrupted["saved"])
        split.confirm()
        if split.generation:
            split.generation.report(split.generation.fetch(BUDGET - SAVED_AT * BATCH))
        trained = split.train_to_the_end()
        expect("why it ended", split.end(), "BUDGET_EXHAUSTED")
    expect("trained", trained, uninterrupted["trained"][SAVED_AT:])
    rank.expect_bits("the state at the end", split.learner.state(), uninterrupted["end"])
    rank.say(f"resumed: after {STEPS} updates both ranks are as without the interruption, to the bit")


if __name__ == "__main__":
    sys.exit(main(__file__, {"save": save, "resume": resume}, account=__doc__ or ""))
