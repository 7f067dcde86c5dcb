"""What can go wrong on a worker beside the controller's own errors, and the exit code of each.

* A controller's error keeps its class from `cosmos_ctrl.core.errors`; the classes here are about the worker itself.
* Every end of a worker process has one exit code, the same whether the main thread or the client's thread ends it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from cosmos_ctrl.core.errors import ControlError, ExecutionEndedError, StaleExecutionError, SupersededError

#: Exit code of a worker whose execution is over for it (stale or superseded): final, never retried.
EXIT_STALE = 10

#: Exit code after any other error that ends a worker: the execution failed, or the controller is gone.
EXIT_ENDED = 11


class WorkerError(Exception):
    """Base of the errors that arise on this side of the wire."""


class UsageError(WorkerError, RuntimeError):
    """A call that does not fit what was called before, such as completing a command twice. A bug in the loop."""


class ProtocolError(WorkerError, RuntimeError):
    """The other side is no controller of this version: an answer that the contract does not allow."""


class DeadlineError(WorkerError, TimeoutError):
    """A wait reached its deadline."""

    def __init__(self, what: str, waited_s: float, cause: str = "") -> None:
        self.what = what
        """What was waited for."""
        self.waited_s = waited_s
        """Seconds waited."""
        self.cause = cause
        """The last thing heard, in words; may be empty."""
        super().__init__(f"{what} did not come within {waited_s:.1f} s{f' ({cause})' if cause else ''}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.what, self.waited_s, self.cause)


class SaveFailedError(WorkerError, RuntimeError):
    """A save that was finished in the background failed; nothing of it is published. ``__cause__`` is what it met.

    The call that raises this has done nothing, and may be made again: training may go on.
    """

    def __init__(self, step: int, checkpoint_id: str, why: str) -> None:
        self.step = step
        """Completed training steps that were to be saved."""
        self.checkpoint_id = checkpoint_id
        self.why = why
        """What it met, in words."""
        super().__init__(f"the asynchronous save of step {step} (checkpoint {checkpoint_id}) is abandoned: {why}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.step, self.checkpoint_id, self.why)


class AgreementTimeoutError(DeadlineError):
    """Not every trainer rank confirmed in time what it restored."""

    def __init__(self, missing: tuple[str, ...], waited_s: float) -> None:
        self.missing = missing
        """``group/rank`` of each rank that has not confirmed."""
        super().__init__(f"agreement of all trainer ranks (missing: {', '.join(missing) or 'unknown'})", waited_s)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.missing, self.waited_s)


class ControllerUnreachableError(DeadlineError, ConnectionError):
    """The controller could not be reached for the whole of the configured time."""

    def __init__(self, address: str, waited_s: float, cause: str = "") -> None:
        self.address = address
        """Where it was looked for."""
        super().__init__(f"an answer of the controller at {address}", waited_s, cause)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.address, self.waited_s, self.cause)


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Around a worker's main: what ends it is said on standard error, and the process exits with `exit_code_for` it."""
    try:
        yield
    except (ControlError, DeadlineError) as error:
        print(error, file=sys.stderr)
        sys.exit(exit_code_for(error))


def exit_code_for(error: BaseException) -> int:
    """Exit code of a worker that ends with `error`.

    Returns:
        10: the execution is over for this process (stale or superseded); start no retry with the same execution ID.
        0: the execution ended as it should.
        11: it failed, or any other error.
    """
    if isinstance(error, StaleExecutionError | SupersededError):
        return EXIT_STALE
    if isinstance(error, ExecutionEndedError) and not is_failure(error):
        return 0
    return EXIT_ENDED


def is_failure(error: ExecutionEndedError) -> bool:
    """Whether the execution ended by an error, and not by its budget, its limit or a stop."""
    return error.end_reason.upper().removeprefix("END_REASON_") == "FAILURE"
