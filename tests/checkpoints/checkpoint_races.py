"""Processes that race for one name, round by round; prints every process's outcomes as JSON (see test_checkpoint_races.py)."""

from __future__ import annotations

import json
import multiprocessing
import sys
from multiprocessing.synchronize import Barrier
from pathlib import Path

from cosmos_ctrl.checkpoints.claims import claim_execution
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.core.errors import CheckpointConflictError


def put(root: str, who: int, rounds: int, identical: bool, barrier: Barrier) -> list[str]:
    store, outcomes = LocalStore(Path(root)), []
    for number in range(rounds):
        data = f"{'all' if identical else who} of round {number}".encode()
        barrier.wait()
        try:
            outcomes.append("created" if store.put_if_absent(f"{number}/manifest.json", data) else "identical")
        except CheckpointConflictError:
            outcomes.append("conflict")
    return outcomes


def claim(root: str, who: int, rounds: int, _: bool, barrier: Barrier) -> list[int]:
    barrier.wait()
    return [claim_execution(LocalStore(Path(root)), execution_id=f"{who}-{n}", note={}) for n in range(rounds)]


def main() -> None:
    root, task, processes, rounds, identical = sys.argv[1:]
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(int(processes))
    results = context.SimpleQueue()

    def work(who: int) -> None:
        results.put({"put": put, "claim": claim}[task](root, who, int(rounds), identical == "identical", barrier))

    workers = [context.Process(target=work, args=(who,)) for who in range(int(processes))]
    for worker in workers:
        worker.start()
    outcomes = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
