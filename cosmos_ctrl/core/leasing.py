"""Groups for rollout workers: what waits is leased first, then the sampler is drawn from.

* Requests are numbered: the same number gets the same answer, so a lost reply draws nothing anew.
* A draw happens only where it has room: budget, window, outstanding groups and buffered payloads all have limits. What was
  drawn is issued, now or when there is room: the sampler has moved past it, so dropping it would skip its prompts.
* A limit never stops everything: buffered payloads hold leasing up only while something that may free them moves. A full
  window waits for its oldest group, or gives it up where the policy says so.
* Where the run announces weights, nothing is leased before the restored version is announced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from cosmos_ctrl.core.admission import WeightAnnouncement
from cosmos_ctrl.core.errors import MalformedError, NotAllowedError, SequenceGapError, WindowFullError
from cosmos_ctrl.core.execution import Incarnation
from cosmos_ctrl.core.groups import Lease
from cosmos_ctrl.core.ledger import SamplingReplayLedger
from cosmos_ctrl.core.lifecycle import Lifecycle
from cosmos_ctrl.core.policy import RunPolicy
from cosmos_ctrl.core.replay import DrawLabel, ReplayedDraw, draw_identity
from cosmos_ctrl.core.rollouts import Rollouts
from cosmos_ctrl.core.sampling import Draw, Sampling

#: Room in a reply for what is not prompts.
_OVERHEAD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class LeaseReply:
    """Answer to a numbered request for groups."""

    leases: tuple[Lease, ...]
    weights: WeightAnnouncement | None
    no_more: bool
    """Nothing more will be leased in this execution."""


class Leasing:
    """Answers requests for groups."""

    def __init__(
        self,
        policy: RunPolicy,
        sampling: Sampling,
        ledger: SamplingReplayLedger,
        rollouts: Rollouts,
        lifecycle: Lifecycle,
        *,
        oldest_version: int,
        on_recorded: Callable[[int, int], None],
    ) -> None:
        """
        Args:
            oldest_version: no group is leased before these weights are announced.
            on_recorded: told of completions of a new group (group, mask) that were settled before this execution.
        """
        self._policy, self._sampling, self._ledger = policy, sampling, ledger
        self._rollouts, self._lifecycle = rollouts, lifecycle
        self._oldest_version = oldest_version
        self._on_recorded = on_recorded
        self._drawn: deque[ReplayedDraw] = deque()
        """Drawn, and waiting for room in the window: its state is larger than the one before."""
        self._told_lease = 0
        """Newest lease number that a worker was told."""
        self.weights: WeightAnnouncement | None = None
        """Newest announced weights."""

    def replay(self, draws: Iterable[ReplayedDraw]) -> None:
        """Issue what an earlier execution had drawn, before anything is drawn anew."""
        self._drawn.extend(draws)
        try:
            for replayed in self._drawn:
                self._require_fit(replayed.draw)
        except ValueError as error:  # the limit was larger then
            self._lifecycle.fail(f"the window cannot be issued again: {error}")
            return
        while self._drawn and self._issue():
            pass

    def announce(self, announcement: WeightAnnouncement) -> None:
        """New weights exist; an older version than the newest changes nothing."""
        if self.weights is None or announcement.version > self.weights.version:
            self.weights = announcement
            self._lifecycle.record("weights", version=announcement.version)
            self._lifecycle.touch()

    def lease(self, worker: Incarnation, number: int, most: int, *, last_call: bool) -> LeaseReply | None:
        """Answer request `number`; None when there is nothing yet and `last_call` is not set.

        Raises:
            SequenceGapError: a number was left out, or an old one came again.
        """
        if worker.place.role != "rollout":
            raise NotAllowedError(what=f"{worker.place} asks for prompts")
        if most < 1:
            raise MalformedError(what="max_groups is zero")
        if number == worker.lease_number and isinstance(worker.lease_reply, LeaseReply):
            return self._without_lost(worker, worker.lease_reply)
        if number != worker.lease_number + 1:
            raise SequenceGapError(what="lease request", expected=worker.lease_number + 1, found=number)
        worker.log.require_notices_confirmed()
        no_more = worker.ended or self._nothing_left()
        leases = () if no_more or not self._may_lease() else tuple(self._take(worker, most))
        if not leases and not no_more and not last_call:
            return None
        reply = LeaseReply(leases, self.weights, no_more)
        worker.lease_number, worker.lease_reply = number, reply
        self._told_lease = self._rollouts.last_lease
        if leases:
            self._lifecycle.touch()
        return reply

    def _without_lost(self, worker: Incarnation, reply: LeaseReply) -> LeaseReply:
        # A reply that is asked for again after the session had lapsed must not set anyone to work in vain.
        held = tuple(lease for lease in reply.leases if self._rollouts.holds(worker, lease.group, lease.number))
        return reply if len(held) == len(reply.leases) else replace(reply, leases=held)

    @property
    def can_give(self) -> bool:
        """Whether the limits let a worker that asks have something: what waits, or a new draw."""
        return not self._rollouts.is_full and (self._rollouts.pending_groups > 0 or self._may_draw())

    def _nothing_left(self) -> bool:
        if self._lifecycle.phase in ("DRAINING", "ENDED"):
            return True
        # What is out with a worker, or in a command, may come back and be leased again: only a settled window is the end.
        exhausted = self._ledger.cursor.remaining_completions == 0
        return self._lifecycle.gate_open and exhausted and not self._rollouts.unsettled_groups

    def _may_lease(self) -> bool:
        if self._lifecycle.phase != "RUNNING" or self._rollouts.is_full:
            return False
        announced = self.weights is not None and self.weights.version >= self._oldest_version
        return announced or not self._policy.announces_weights

    def _take(self, worker: Incarnation, most: int) -> Iterator[Lease]:
        room = self._prompt_room
        while most > 0 and room > 0:
            for lease in self._rollouts.lease(worker, most, room):
                self._lifecycle.record("lease", group=lease.group, lease=lease.number, worker=str(worker.place))
                most -= 1
                room -= lease.prompt.size_bytes
                yield lease
            if self._rollouts.pending_groups or most == 0 or self._rollouts.is_full or not self._draw():
                return

    def _may_draw(self) -> bool:
        full = self._rollouts.outstanding_groups >= self._policy.max_outstanding_groups
        if self._ledger.cursor.remaining_completions == 0 or full:
            return False
        return self._has_room() or self._to_give_up() is not None

    def _draw(self) -> bool:
        if not self._may_draw():
            return False
        if not self._drawn:
            self._make_room()
            self._drawn.append(ReplayedDraw(self._sample()))
        return self._issue() or (self._make_room() and self._issue())  # its state may be larger than the newest was

    def _has_room(self) -> bool:
        return self._ledger.has_room(len(self._drawn[0].draw.after.encoded_state.data) if self._drawn else None)

    def _to_give_up(self) -> int | None:
        if self._policy.on_full_window != "discard":
            return None
        oldest, rollouts = self._ledger.statistics().blocking_token, self._rollouts
        if oldest is None or not rollouts.can_give_up(oldest, told=self._told_lease):
            return None
        # A window of which nothing is done yet is small, and not held up: giving up its oldest would only move the hole.
        done = self._ledger.next_token - oldest > rollouts.unsettled_groups - rollouts.ready_groups
        return oldest if done else None

    def _make_room(self) -> bool:
        while not self._has_room():
            oldest = self._to_give_up()
            if oldest is None:
                return False
            self._rollouts.give_up(oldest, "window_full")
        return True

    def _issue(self) -> bool:
        """Issue the draw that waits first; whether there was room for it."""
        draw, recorded = self._drawn[0].draw, self._drawn[0].settled
        epochs = self._drawn[0].epochs or (draw.after.epoch,) * len(draw.sizes)
        try:
            tokens = self._ledger.issue_draw(draw.after, draw.sizes, self._label(draw, epochs))
        except WindowFullError:
            return False
        self._drawn.popleft()
        self._rollouts.add(tokens, draw, recorded)
        for token, prompt, size, epoch in zip(tokens, draw.prompts, draw.sizes, epochs, strict=True):
            self._lifecycle.record("issue", group=token, key=prompt.key, size=size, epoch=epoch)
        for token, mask in zip(tokens, recorded, strict=False):  # nothing is recorded of a new draw
            if mask:
                self._on_recorded(token, mask)
        return True

    def _label(self, draw: Draw, epochs: tuple[int, ...]) -> DrawLabel | None:
        if self._policy.records_window == "nothing":
            return None
        if self._policy.records_window == "settled":
            return DrawLabel(draw_identity(draw), ())
        return DrawLabel(draw_identity(draw), tuple(prompt.key for prompt in draw.prompts), epochs)

    @property
    def _prompt_room(self) -> int:
        # Half a message, and the last prompt may pass it by its own size, which is half a message at most.
        return self._policy.max_message_bytes // 2

    def _sample(self) -> Draw:
        try:
            draw = self._sampling.draw(self._ledger.cursor.remaining_completions)
            self._require_fit(draw)
            return draw
        except Exception as error:
            # The sampler may have moved: going on would skip what it had taken.
            self._lifecycle.fail(f"the sampler could not be drawn from: {type(error).__name__}: {error}")
            raise

    def _require_fit(self, draw: Draw) -> None:
        limit = self._prompt_room - _OVERHEAD_BYTES
        for prompt in draw.prompts:
            if prompt.size_bytes > limit:
                raise ValueError(f"prompt {prompt.key} takes {prompt.size_bytes} bytes, at most {limit} fit a message")
