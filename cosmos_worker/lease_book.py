"""The leases that one rollout process holds.

* A group is handed to the user once per lease. Each of its pending completions is spoken for once: reported, discarded,
  failed or returned; a second time is the user's mistake and changes nothing.
* A lease is over when all its completions are spoken for, or when the controller cancels or refuses it; then its place
  is free for another. What the user still says about it is not sent.
* Thread-safe: the user's threads speak for completions while the client's loop adds and cancels.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_worker.errors import UsageError
from cosmos_worker.payloads import decode_payload
from cosmos_worker.report_items import bits_of, mask_of_words


class _LeaseState:
    """What is left of a lease; guarded by the book's lock."""

    __slots__ = ("cancelled", "remaining")

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining
        self.cancelled = False


@dataclass(frozen=True, slots=True)
class LeasedGroup:
    """A prompt and the completions of it that this worker is to generate."""

    group_id: int
    """Number of the group."""
    lease: int
    """Lease number."""
    prompt_key: str
    """Stable identity of the prompt."""
    source: str
    """Dataset or task; may be empty."""
    completions: int
    """Completions in the whole group."""
    pending: tuple[int, ...]
    """Indices to generate; the others are there already."""
    payload: bytes | None
    """The prompt, encoded; None when workers hold the data."""
    codec: str
    """Of the payload."""
    deadline_s: float | None
    """Seconds, from the lease, in which to report; None: no limit but the worker's life."""
    _state: _LeaseState = field(repr=False, compare=False)

    @property
    def id(self) -> int:
        """The same as `group_id`."""
        return self.group_id

    @property
    def cancelled(self) -> bool:
        """Whether nobody wants it any more: stop generating, there is nothing to report."""
        return self._state.cancelled

    def prompt(self) -> Any:
        """The prompt, decoded as `payloads.decode_payload` does; None without one."""
        return None if self.payload is None else decode_payload(self.payload, self.codec)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStatistics:
    """Leases of a process."""

    held: int
    """Not over yet, handed to the user or not."""
    waiting: int
    """Not handed to the user yet."""
    leased: int
    """Since the start."""
    cancelled: int
    """Since the start."""


class LeaseBook:
    """See the module."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, LeasedGroup] = {}
        self._waiting: deque[LeasedGroup] = deque()
        self._leased = 0
        self._cancelled = 0
        self.on_change: Callable[[], None] = lambda: None
        """Called, from any thread, when a lease is over."""

    def add(self, groups: Iterable[pb.LeasedGroup]) -> None:
        """Take over what the controller leased."""
        with self._lock:
            for message in groups:
                remaining = mask_of_words(message.masks)
                group = LeasedGroup(
                    group_id=message.group,
                    lease=message.lease,
                    prompt_key=message.prompt_key,
                    source=message.source,
                    completions=message.completions,
                    pending=tuple(bits_of(remaining)),
                    payload=message.payload if message.HasField("payload") else None,
                    codec=message.payload_codec,
                    deadline_s=message.deadline.ToTimedelta().total_seconds() if message.HasField("deadline") else None,
                    _state=_LeaseState(remaining),
                )
                self._held[group.lease] = group
                self._waiting.append(group)
                self._leased += 1

    def pop(self) -> LeasedGroup | None:
        """The next group for the user; None: there is none now."""
        with self._lock:
            while self._waiting:
                group = self._waiting.popleft()
                if not group.cancelled:
                    return group
        return None

    def take(self, group: LeasedGroup, mask: int | None) -> int:
        """Speak for completions of `group`; None: for all that are left.

        Returns:
            The completions, as a mask, that are to be reported; 0: the lease is over, there is nothing to say.

        Raises:
            UsageError: one of them is not pending, or was spoken for before.
        """
        with self._lock:
            state = group._state
            if state.cancelled:
                return 0
            if mask is None:
                mask = state.remaining
            elif wrong := mask & ~state.remaining:
                index = next(bits_of(wrong))
                was_given = index in group.pending
                raise UsageError(
                    f"completion {index} of group {group.group_id} "
                    + ("was reported before" if was_given else f"was not leased; pending were {group.pending}")
                )
            state.remaining &= ~mask
            over = state.remaining == 0 and self._drop(group.lease)
        if over:
            self.on_change()
        return mask

    def undo(self, group: LeasedGroup, mask: int) -> None:
        """What was taken could not be said: it is pending again."""
        with self._lock:
            if not group.cancelled:
                group._state.remaining |= mask
                self._held[group.lease] = group

    def cancel(self, leases: Iterable[int]) -> None:
        """The controller does not want these any more."""
        with self._lock:
            for lease in leases:
                group = self._held.get(lease)
                if group is not None:
                    group._state.cancelled = True
                    self._cancelled += 1
                    self._drop(lease)
        self.on_change()

    def cancel_all(self) -> None:
        """Nobody wants anything of this process any more."""
        with self._lock:
            leases = list(self._held)
        self.cancel(leases)

    def unfinished(self) -> list[LeasedGroup]:
        """Every lease that is not over."""
        with self._lock:
            return list(self._held.values())

    @property
    def held(self) -> int:
        """How many leases are not over."""
        return len(self._held)

    @property
    def has_waiting(self) -> bool:
        """Whether `pop` has something to give, unless it was cancelled."""
        return bool(self._waiting)

    def statistics(self) -> LeaseStatistics:
        """A snapshot."""
        with self._lock:
            return LeaseStatistics(
                held=len(self._held),
                waiting=len(self._waiting),
                leased=self._leased,
                cancelled=self._cancelled,
            )

    def _drop(self, lease: int) -> bool:
        return self._held.pop(lease, None) is not None
