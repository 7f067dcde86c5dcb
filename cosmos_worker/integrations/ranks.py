"""Something done on every rank of a process group, that succeeds on all of them or fails on all of them.

* Every rank gets every rank's result; a failure on one rank is raised on all, there as it is, elsewhere with that rank's name.
* A rank that is gone ends the wait of the others with the process group's own timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from cosmos_worker.errors import WorkerError

T = TypeVar("T")


class RankFailedError(WorkerError, RuntimeError):
    """Another rank failed in something that all ranks do together."""

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        """What each rank met that failed, in words, by rank."""
        super().__init__("; ".join(f"rank {rank}: {what}" for rank, what in failures.items()))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.failures,)


def together(call: Callable[[], T]) -> list[T]:
    """What `call` returns on each rank of the default process group, by rank; of this process alone where there is no group.

    Args:
        call: returns something that can be pickled.

    Raises:
        RankFailedError: it raised on another rank. On that rank, its own error.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [call()]
    result: T | None = None
    error: Exception | None = None
    try:
        result = call()
    except Exception as caught:
        error = caught
    outcomes: list[tuple[T, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (result, f"{type(error).__name__}: {error}" if error else ""))
    if error is not None:
        raise error
    gathered = [outcome for outcome in outcomes if outcome is not None]
    if failures := {rank: what for rank, (_, what) in enumerate(gathered) if what}:
        raise RankFailedError(failures)
    return [value for value, _ in gathered]


def on_first(call: Callable[[], T]) -> T:
    """What `call`, which only rank 0 makes, returns; on every rank.

    Raises:
        RankFailedError: it raised on rank 0. There, its own error.
    """
    first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
    return cast("T", together(lambda: call() if first else None)[0])
