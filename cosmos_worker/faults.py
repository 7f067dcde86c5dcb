"""What a failed call means for the client, and how patient it is.

* Only what the controller's contract calls retryable is tried again: an unreachable controller, an elapsed deadline (the
  same request under the same number), a "later" with our ErrorInfo, a lapsed session. Everything else is final.
* UNAVAILABLE and RESOURCE_EXHAUSTED with our ErrorInfo are the controller's; without it they are the library's. A newer controller's
  reason that is not known here is "later" if it carries RetryInfo.
* Patience ends: a controller that gives no answer, or only "later", for the configured time is an error with that name.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import grpc

from cosmos_ctrl.core.errors import (
    ControlError,
    ExecutionEndedError,
    NotRegisteredError,
    ResumeMetadataMismatch,
    RetryLaterError,
    StaleExecutionError,
    SupersededError,
    WrongStepError,
)
from cosmos_ctrl.service import status
from cosmos_worker.errors import ControllerUnreachableError, DeadlineError, ProtocolError
from cosmos_worker.settings import ClientConfig

#: Errors after which nothing this process says is wanted: they end the whole connection.
TERMINAL = (StaleExecutionError, SupersededError, WrongStepError, ResumeMetadataMismatch, ExecutionEndedError)

#: Codes of the library after which the same request is sent again. CANCELLED is a server that is going down.
_AGAIN = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})

#: What grpc.aio calls a write that met a connection going down, in place of the connection's own status.
_LOST_WRITE = (grpc.StatusCode.INTERNAL, "Internal error from Core")

#: In the text of what the library calls INTERNAL when a stream was reset without a status, as a server that goes down may do.
_RESET = "RST_STREAM"


@dataclass(frozen=True, slots=True)
class Fault:
    """A failed call, classified."""

    kind: Literal["unreachable", "later", "register", "final"]
    """What the client does: send again; wait, then send again; register, then send again; raise."""
    error: Exception
    """What is raised if it comes to that."""
    delay_s: float = status.RETRY_DELAY_S
    """Of "later": seconds to wait at least, as the controller said."""


def fault_of(error: grpc.RpcError) -> Fault:
    """Classify a failed call."""
    known, delay_s = status.from_rpc_error(error), status.retry_delay_s(error)
    if known is not None:
        return Fault(_kind_of(known), known, delay_s or 0.0)
    code = error.code()
    text = f"{code.name}: {error.details()}"
    if delay_s is not None:  # a reason that this version does not know
        return Fault("later", ConnectionError(text), delay_s)
    if code in _AGAIN or (code, error.details()) == _LOST_WRITE or _is_reset(code, error.details()):
        return Fault("unreachable", ConnectionError(text))
    return Fault("final", ProtocolError(f"the call failed with {text}"))


def _is_reset(code: grpc.StatusCode, details: str | None) -> bool:
    return code is grpc.StatusCode.INTERNAL and _RESET in (details or "")


def _kind_of(error: ControlError) -> Literal["later", "register", "final"]:
    if isinstance(error, NotRegisteredError):
        return "register"
    return "later" if isinstance(error, RetryLaterError) else "final"


class Patience:
    """Pauses between attempts, and the moment when there are no more. One per call, or per stream."""

    def __init__(
        self,
        config: ClientConfig,
        address: str,
        *,
        later_total_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._config = config
        self._address = address
        self._later_total_s = config.not_ready_total_s if later_total_s is None else later_total_s
        self.connect_total_s = config.connect_total_s
        """No answer for so long: the controller is gone. May be shortened at any time."""
        self._clock = clock
        self._jitter = jitter
        self.reset()

    def reset(self) -> None:
        """An answer came: begin anew."""
        self.attempts = 0
        """Failures since the last answer."""
        self._unreachable_since: float | None = None
        self._later_since: float | None = None

    def pause(self, fault: Fault) -> float:
        """Seconds to wait before the next attempt.

        Raises:
            ControllerUnreachableError: there was no answer for the configured time.
            DeadlineError: there was only "later" for the configured time; its cause is what the controller said.
            Exception: the fault is final, and is raised as it is.
        """
        if fault.kind == "final":
            raise fault.error
        now = self._clock()
        if fault.kind == "unreachable":
            since = self._unreachable_since = now if self._unreachable_since is None else self._unreachable_since
            if now - since >= self.connect_total_s:
                raise ControllerUnreachableError(self._address, now - since, str(fault.error)) from fault.error
        else:
            # The controller lives; how long it was silent before no longer counts.
            self._unreachable_since = None
            since = self._later_since = now if self._later_since is None else self._later_since
            if now - since >= self._later_total_s:
                raise DeadlineError("an answer other than 'later'", now - since, str(fault.error)) from fault.error
        longest = min(self._config.backoff_max_s, self._config.backoff_first_s * 2.0 ** min(self.attempts, 30))
        self.attempts += 1
        delay = longest * (0.5 + 0.5 * self._jitter())
        if fault.kind != "later":
            return delay
        # What the controller asks for, but not beyond what is left.
        return min(max(delay, fault.delay_s), max(delay, self._later_total_s - (now - since)))
