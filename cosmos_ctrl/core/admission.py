"""Batches of reports: validated whole, then applied whole.

* `check` raises before anything is changed; `apply` cannot fail.
* A group or completion that was never given refuses the batch; a row whose lease is lost, whose group is retired, or whose
  replica has ended is refused by itself, and its payloads stay the producer's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import repeat

from cosmos_ctrl.core.commands import CommandLog, CompletionReport, Train
from cosmos_ctrl.core.errors import MalformedError, MessageTooLargeError, NotAllowedError
from cosmos_ctrl.core.execution import Incarnation
from cosmos_ctrl.core.groups import Refusal, RolloutRows
from cosmos_ctrl.core.policy import RunPolicy
from cosmos_ctrl.core.rollouts import Rollouts

_MAX_METRICS = 64


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
            raise MessageTooLargeError(limit=limit, found=completions, unit="completions")
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
        for row, reason, bits in self._rollouts.apply(worker, rows):
            word = rows.words[row] if rows.words else 0
            worker.log.notify(RowRefused(number, block, row, reason, rows.groups[row], word, bits))
