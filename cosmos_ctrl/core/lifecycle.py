"""Where an execution stands, from its gate to its end.

* The phase is derived, never stored: failed, ended, draining, running or awaiting agreement.
* The first reason to end wins; a failure wins over everything and is final.
* Every change that somebody outside could see raises the revision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from cosmos_ctrl.core.errors import ControlError, ExecutionEndedError

Phase = Literal["AWAITING_AGREEMENT", "RUNNING", "DRAINING", "ENDED", "FAILED"]
EndReason = Literal["BUDGET_EXHAUSTED", "STEP_LIMIT", "STOP_REQUESTED", "FAILURE"]

#: Notes an event for the audit journal: its name, and plain values.
Record = Callable[..., None]


class Lifecycle:
    """The execution's phase, and why it ends."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.revision = 0
        self.gate_open = False
        self.ending: tuple[EndReason, str] | None = None
        """Why no new work is given; None while it is."""
        self.finished = False
        """Whether END is a command."""
        self.failure: ControlError | None = None

    @property
    def phase(self) -> Phase:
        """Where the execution stands."""
        if self.failure is not None:
            return "FAILED"
        if self.finished:
            return "ENDED"
        if self.ending is not None:
            return "DRAINING"
        return "RUNNING" if self.gate_open else "AWAITING_AGREEMENT"

    @property
    def over(self) -> bool:
        """Whether nothing more happens."""
        return self.phase in ("ENDED", "FAILED")

    @property
    def end(self) -> tuple[EndReason, str] | None:
        """Why it ended, once it has."""
        if self.failure is not None:
            return "FAILURE", str(self.failure)
        return self.ending if self.finished else None

    def touch(self) -> None:
        """Something that others wait for has changed."""
        self.revision += 1

    def begin_ending(self, reason: EndReason, message: str) -> None:
        """Give no new work; the first reason wins."""
        if self.ending is None:
            self.ending = (reason, message)
            self.record("ending", reason=reason, message=message)
            self.touch()

    def finish(self) -> None:
        """END is given."""
        self.finished = True
        self.record("end", reason=self.ending[0] if self.ending else "", message=self.ending[1] if self.ending else "")
        self.touch()

    def fail(self, error: ControlError | str) -> None:
        """End at once, for everyone, with `error`. What is over stays as it ended."""
        if not self.over:
            if isinstance(error, str):
                error = ExecutionEndedError(end_reason="FAILURE", message=error)
            self.failure = error
            self.record("failed", reason=error.reason, message=str(error))
            self.touch()
