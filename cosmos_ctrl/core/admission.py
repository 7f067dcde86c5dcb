"""Batches of reports: validated whole, then applied whole.

* `check` raises before anything is changed; `apply` cannot fail.
* A group or completion that was never given refuses the batch; a row whose lease is lost, whose group is retired, or whose
  replica has ended is refused by itself, and its payloads stay the producer's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import repeat

from cosmos_ctrl.core.commands import CommandLog, CompletionReport, Train
from cosmos_ctrl.core.errors import MalformedError, MessageTooLargeError, NotAllowedError, WindowFullError
from cosmos_ctrl.core.execution import Incarnation
from cosmos_ctrl.core.groups import Outcome, Refusal, Segment
from cosmos_ctrl.core.policy import RunPolicy
from cosmos_ctrl.core.rollouts import Rollouts

_MAX_METRICS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRows:
    """Rollout reports that share one outcome, in columns: one row per group and word of 64 completions."""

    outcome: Outcome
    groups: Sequence[int]
    leases: Sequence[int]
    masks: Sequence[int]
    words: Sequence[int] = ()
    """Empty: word 0 in every row."""
    reason: str = ""
    lowest_versions: Sequence[int] = ()
    highest_versions: Sequence[int] = ()
    rewards: Sequence[float] = ()
    codec: str = ""
    payloads: Sequence[bytes] = ()
    handles: Sequence[str] = ()

    def check_shape(self) -> int:
        """Completions in all rows; raises MalformedError unless the columns fit each other."""
        rows = len(self.groups)
        completed = self.outcome == "completed"
        for name, column in (("leases", self.leases), ("masks", self.masks), ("words", self.words)):
            if len(column) != rows and not (name == "words" and not column):
                raise MalformedError(what=f"{len(column)} {name} for {rows} groups")
        versions = rows if completed else 0
        if len(self.lowest_versions) != versions or len(self.highest_versions) != versions:
            raise MalformedError(what=f"{len(self.lowest_versions)} versions for {rows} {self.outcome} rows")
        if any(map(int.__gt__, self.lowest_versions, self.highest_versions)):
            raise MalformedError(what="a lowest weight version above the highest")
        if not all(self.masks):
            raise MalformedError(what="a row without completions")
        completions = sum(map(int.bit_count, self.masks))
        if len(self.rewards) != (completions if completed else 0):
            raise MalformedError(what=f"{len(self.rewards)} rewards for {completions} {self.outcome} completions")
        if not all(map(math.isfinite, self.rewards)):
            raise MalformedError(what="a reward that is not a finite number")
        for name, values in (("payloads", self.payloads), ("handles", self.handles)):
            if values and (not completed or len(values) != completions):
                raise MalformedError(what=f"{len(values)} {name} for {completions} {self.outcome} completions")
        if self.payloads and self.handles:
            raise MalformedError(what="both payloads and handles in one block")
        if (self.outcome in ("discarded", "failed")) != bool(self.reason):
            raise MalformedError(what="a reason is due for what is discarded or failed, and only for that")
        return completions

    def segment(self, producer: Incarnation, row: int, reported: int, start: int, end: int) -> Segment:
        """What row `row` brings: the completions of `reported`, which stand in the columns from `start` to `end`."""
        return Segment(
            reported,
            0,
            self.rewards[start:end],
            self.lowest_versions[row],
            self.highest_versions[row],
            producer,
            self.codec,
            self.payloads[start:end] if self.payloads else (),
            self.handles[start:end] if self.handles else (),
        )


@dataclass(frozen=True, slots=True)
class WeightAnnouncement:
    """New weights exist."""

    version: int
    """Completed training steps that they contain."""
    handle: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One numbered batch of an incarnation."""

    number: int
    digest: Hashable
    """Of its content: tells a repeat from a conflict."""
    rollouts: tuple[RolloutRows, ...] = ()
    completions: tuple[CompletionReport, ...] = ()
    end: str | None = None
    """Reason of the worker's end; None when it goes on."""
    weights: tuple[WeightAnnouncement, ...] = ()
    metrics: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RowRefused:
    """Notice: a row was not applied, or not all of it."""

    batch: int
    block: int
    row: int
    reason: Refusal
    group: int
    word: int
    mask: int


class Admission:
    """Checks and applies batches."""

    def __init__(
        self,
        policy: RunPolicy,
        rollouts: Rollouts,
        log: CommandLog,
        *,
        issued: Callable[[], tuple[int, int]],
        versions: Callable[[], tuple[int, int]],
        on_commit: Callable[[Train], None],
        on_weights: Callable[[Incarnation, WeightAnnouncement], None],
        on_end: Callable[[Incarnation, str], None],
    ) -> None:
        """`issued` gives the first group of this execution and the next one, `versions` the oldest and newest weights."""
        self._policy, self._rollouts, self._log = policy, rollouts, log
        self._issued, self._versions = issued, versions
        self._on_commit, self._on_weights, self._on_end = on_commit, on_weights, on_end

    def check(self, worker: Incarnation, batch: Batch) -> None:
        """Raises unless the whole batch may be applied; changes nothing."""
        trainer = worker.place.role == "trainer"
        if not trainer and (batch.completions or batch.weights):
            raise NotAllowedError(what=f"{worker.place} reports what only trainers do")
        if trainer and batch.rollouts:
            raise NotAllowedError(what=f"{worker.place} reports rollouts")
        completions = sum(rows.check_shape() for rows in batch.rollouts)
        limit = self._policy.max_batch_completions
        if completions > limit:
            raise WindowFullError(what="completions in one batch", limit=limit, found=completions)
        largest = self._policy.max_message_bytes // 2
        for rows in batch.rollouts:
            self._check_rows(rows)
            # It has to go out again with its prompt, in one message.
            if (size := max(map(len, rows.payloads), default=0)) > largest:
                raise MessageTooLargeError(limit=largest, found=size)
        seen = set()
        for report in batch.completions:
            if report.command in seen:
                raise MalformedError(what=f"command {report.command} is reported twice in one batch")
            seen.add(report.command)
            self._log.check_report(worker.place, report)
        last = self._log.last
        newest = last.step if isinstance(last, Train) else self._log.steps
        if any(announcement.version > newest for announcement in batch.weights):
            raise MalformedError(what=f"weights of a later step than {newest}, the newest that was given")

    def apply(self, worker: Incarnation, batch: Batch) -> None:
        """Apply a batch that `check` passed."""
        for block, rows in enumerate(batch.rollouts):
            self._apply_rows(worker, batch.number, block, rows)
        for report in batch.completions:
            committed = self._log.record_report(worker.place, report)
            if committed is not None:
                self._on_commit(committed)
        for announcement in batch.weights:
            self._on_weights(worker, announcement)
        for name, value in batch.metrics:
            if name in worker.metrics or len(worker.metrics) < _MAX_METRICS:
                worker.metrics[name] = value
        if batch.end is not None:
            self._on_end(worker, batch.end)

    def _check_rows(self, rows: RolloutRows) -> None:
        first, following = self._issued()
        words = rows.words or repeat(0)
        self._rollouts.check_rows(zip(rows.groups, rows.leases, words, rows.masks), following, first)  # noqa: B905  # no words: zero in every row, without end
        if rows.outcome == "completed" and rows.groups and self._policy.announces_weights:
            oldest, newest = self._versions()
            if min(rows.lowest_versions) < oldest or max(rows.highest_versions) > newest:
                raise MalformedError(
                    what=f"weight versions {min(rows.lowest_versions)} to {max(rows.highest_versions)}, "
                    f"there were {oldest} to {newest}"
                )

    def _apply_rows(self, worker: Incarnation, number: int, block: int, rows: RolloutRows) -> None:
        at = 0
        words = rows.words or (0,) * len(rows.groups)
        for row, (group, lease, word, bits) in enumerate(zip(rows.groups, rows.leases, words, rows.masks, strict=True)):
            end = at + bits.bit_count()
            reason: Refusal | None = self._rollouts.refuses(group, lease, worker)
            accepted = 0
            if reason is None:
                # Only now: the word of a retired group was not checked, and may be anything.
                mask = bits << 64 * word if word else bits
                if rows.outcome == "completed":
                    accepted = self._rollouts.complete(group, mask, rows.segment(worker, row, mask, at, end))
                else:
                    accepted = self._apply_otherwise(rows, group, mask)
                accepted >>= 64 * word
                reason = "ALREADY_REPORTED"
            if accepted != bits:
                worker.log.notify(RowRefused(number, block, row, reason, group, word, bits ^ accepted))
            at = end

    def _apply_otherwise(self, rows: RolloutRows, group: int, mask: int) -> int:
        if rows.outcome == "discarded":
            return self._rollouts.discard(group, mask, rows.reason)
        if rows.outcome == "failed":
            return self._rollouts.fail(group, mask, rows.reason)
        return self._rollouts.give_back(group, mask)
