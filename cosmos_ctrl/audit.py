"""What the executions of a run skipped, repeated and redid, counted from their journals.

Nothing here asks the ledger: it compares what the sampler issued with what was settled, event by event.

* A completion is (epoch, prompt key, index). The *lineage* of the newest committed checkpoint is a chain of segments: each
  execution it descends from, up to the cut of the checkpoint that the next one resumed from.
* *Skipped*: issued by any execution of that lineage or beside it, settled in no segment of the lineage, and not beyond the newest checkpoint's boundary
  (from where it would be issued again). Places in the stream are compared by the budget that remained after the draw.
* *Repeated*: trained in one segment, so that the restored model contains it, and trained again in a later one.
* *Spared*: settled in an earlier segment, as the checkpoint's record said, and not generated again in a later one.
* *Redone*: trained only after the cut, so that the work was lost, and trained again in the lineage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cosmos_ctrl.journal import read_journal

Completion = tuple[int, str, int]

_TRAINED = ("trained",)
#: What an execution settled itself. What its checkpoint's record says was settled before counts only where that is found.
_SETTLED = ("trained", "discarded")


@dataclass(frozen=True, slots=True)
class ExecutionReport:
    """One execution in the report."""

    number: int
    id: str
    resumed_from: str | None
    """Checkpoint ID; None for a fresh start."""
    window: int
    """Completions beyond the boundary it resumed from: at most so many repeat."""
    repeated: int
    redone: int
    spared: int


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """One committed checkpoint in the report."""

    id: str
    step: int
    execution: int


@dataclass(frozen=True, slots=True)
class StepReport:
    """One committed step, for plots: also of steps that were lost."""

    execution: int
    t: float
    """Seconds since the epoch."""
    step: int
    mean_reward: float | None
    cursor: int
    """Budget that remained at the fetched cursor, in completions."""
    safe: int
    """Budget that remained at the safe boundary, in completions."""
    in_lineage: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The report of a run. Counts are completions, except where the name says otherwise."""

    executions: tuple[ExecutionReport, ...]
    skipped: int
    repeated: int
    redone: int
    spared: int
    window_at_checkpoint: int
    """Sum over the resumes of what lay beyond the boundary that was resumed from."""
    live_cursor_would_skip: int
    """Prompts that a checkpoint of the fetched cursor, cut at the same moments, would have lost."""
    stale_reports_refused: int
    """Batches of reports from other executions' workers; heartbeats and what they asked for are not among them."""
    completed_training_steps: int
    completed_optimizer_updates: int
    remaining_completions: int
    reward_first: float | None
    """Mean reward over the first fifth of the lineage's steps."""
    reward_last: float | None
    """Mean reward over the last fifth."""
    checkpoints: tuple[CheckpointReport, ...]
    steps: tuple[StepReport, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(slots=True)
class _Issue:
    epoch: int
    key: str
    size: int
    remaining_after: int

    def completions(self, mask: int) -> Iterator[Completion]:
        return ((self.epoch, self.key, index) for index in range(self.size) if mask >> index & 1)

    def all(self) -> Iterator[Completion]:
        return self.completions((1 << self.size) - 1)


@dataclass(slots=True)
class _Execution:
    """One journal, read."""

    number: int
    id: str
    resumed_from: str | None
    step: int
    updates: int
    remaining: int
    events: list[dict[str, Any]]
    issues: dict[int, _Issue] = field(default_factory=dict)
    cuts: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)
    """Committed checkpoints: position of the cut among the events, and its values."""
    stale: int = 0

    @classmethod
    def read(cls, listed: list[dict[str, Any]], resumed: set[Any]) -> _Execution:
        """`resumed` are the checkpoints that an execution resumed from: committed, though the controller may have died
        before it noted so."""
        if listed[0].get("event") != "start":
            raise ValueError("a journal does not begin with its start")
        start = listed[0]
        own = cls(
            start["number"],
            start["id"],
            start["resumed_from"],
            start["step"],
            start["updates"],
            start["remaining"],
            listed,
        )
        cuts: dict[str, tuple[int, dict[str, Any]]] = {}
        remaining = own.remaining
        for position, event in enumerate(listed):
            kind = event["event"]
            if kind == "issue":
                remaining -= event["size"]
                own.issues[event["group"]] = _Issue(event["epoch"], event["key"], event["size"], remaining)
            elif kind == "cut":
                cuts[event["checkpoint"]] = (position, event)
                if event["checkpoint"] in resumed:
                    own.cuts[event["checkpoint"]] = cuts[event["checkpoint"]]
            elif kind == "published" and event["checkpoint"] in cuts:
                own.cuts[event["checkpoint"]] = cuts[event["checkpoint"]]
            elif kind == "stale_refused" and event["what"] == "report":
                own.stale += 1
        return own

    def settled(self, outcomes: tuple[str, ...], start: int, end: int) -> Iterator[Completion]:
        """Completions settled between two positions with one of `outcomes`."""
        for event in self.events[start:end]:
            if event["event"] == "settle" and event["outcome"] in outcomes:
                for group, mask in event["rows"]:
                    yield from self.issues[group].completions(mask)


def audit(run: Path) -> RunReport:
    """Read a run's journals and count.

    Raises:
        OSError: they cannot be read.
        ValueError: there are none, or they do not fit together.
    """
    paths = sorted((run / "executions").glob("*.jsonl"))
    if not paths:
        raise ValueError(f"{run} has no journals; set run.journal = true before the run")
    try:
        return audit_journals([read_journal(path) for path in paths])
    except KeyError as error:
        raise ValueError(f"the journals of {run} do not fit together: there is no {error}") from error


def audit_journals(journals: Sequence[Iterable[dict[str, Any]]]) -> RunReport:
    """As `audit`, over events that are at hand; one journal an execution, oldest first. An empty one is of an execution that died
    before its start was noted: it did nothing."""
    listed = [events for events in map(list, journals) if events]
    if not listed:
        raise ValueError("the journals are empty: no execution began")
    resumed = {events[0].get("resumed_from") for events in listed} - {None}
    executions = [_Execution.read(events, resumed) for events in listed]
    by_checkpoint = {checkpoint: own for own in executions for checkpoint in own.cuts}
    newest = max(
        (
            (own.number, cut["step"], -cut["remaining"], checkpoint)
            for own in executions
            for checkpoint, (_, cut) in own.cuts.items()
        ),
        default=None,
    )
    lineage = _segments(newest[-1] if newest else None, by_checkpoint)
    boundary = -newest[2] if newest else executions[-1].remaining

    settled: set[Completion] = set()
    for own, end in lineage:
        settled.update(own.settled(_SETTLED, 0, end))
    skipped = {
        completion
        for own in _relatives(executions, lineage)
        for issue in own.issues.values()
        if issue.remaining_after >= boundary
        for completion in issue.all()
    } - settled
    reports = [_report(own, executions[:index], by_checkpoint) for index, own in enumerate(executions)]
    steps = list(_steps(executions, lineage))
    rewards = [step.mean_reward for step in steps if step.in_lineage and step.mean_reward is not None]
    fifth = max(1, len(rewards) // 5)
    last = executions[-1]
    commits = [event for event in last.events if event["event"] == "commit"]
    return RunReport(
        executions=tuple(report for report, _ in reports),
        skipped=len(skipped),
        repeated=sum(report.repeated for report, _ in reports),
        redone=sum(report.redone for report, _ in reports),
        spared=sum(report.spared for report, _ in reports),
        window_at_checkpoint=sum(report.window for report, _ in reports),
        live_cursor_would_skip=sum(lost for _, lost in reports),
        stale_reports_refused=sum(own.stale for own in executions),
        completed_training_steps=commits[-1]["step"] if commits else last.step,
        completed_optimizer_updates=commits[-1]["updates"] if commits else last.updates,
        remaining_completions=boundary,
        reward_first=sum(rewards[:fifth]) / fifth if rewards else None,
        reward_last=sum(rewards[-fifth:]) / fifth if rewards else None,
        checkpoints=tuple(
            CheckpointReport(checkpoint, cut["step"], own.number)
            for own in executions
            for checkpoint, (_, cut) in own.cuts.items()
        ),
        steps=tuple(steps),
    )


def _relatives(executions: Sequence[_Execution], lineage: Sequence[tuple[_Execution, int]]) -> list[_Execution]:
    """Executions whose work the lineage answers for: its own, those that resumed from a checkpoint of it, and those that began fresh
    as it did and left no checkpoint. One with checkpoints outside of it is another lineage's."""
    own = {id(execution) for execution, _ in lineage}
    checkpoints = {checkpoint for execution, _ in lineage for checkpoint in execution.cuts}
    return [
        execution
        for execution in executions
        if id(execution) in own
        or execution.resumed_from in checkpoints
        or (execution.resumed_from is None and not execution.cuts)
    ]


def _segments(checkpoint: str | None, by_checkpoint: dict[str, _Execution]) -> list[tuple[_Execution, int]]:
    """The lineage of a checkpoint: executions, oldest first, each with the position of the cut that counts."""
    chain: list[tuple[_Execution, int]] = []
    while checkpoint is not None:
        if checkpoint not in by_checkpoint:
            raise ValueError(f"checkpoint {checkpoint} was resumed from, and no journal published it")
        own = by_checkpoint[checkpoint]
        chain.append((own, own.cuts[checkpoint][0]))
        checkpoint = own.resumed_from
    return chain[::-1]


def _report(
    own: _Execution, earlier: Sequence[_Execution], by_checkpoint: dict[str, _Execution]
) -> tuple[ExecutionReport, int]:
    """An execution's report, and the prompts that a live cursor, cut where it resumed, would have lost."""
    before = _segments(own.resumed_from, by_checkpoint)
    trained = set(own.settled(_TRAINED, 0, len(own.events)))
    contained: set[Completion] = set()
    for segment, end in before:
        contained.update(segment.settled(_TRAINED, 0, end))
    lost: set[Completion] = set()
    for other in earlier:
        lost.update(other.settled(_TRAINED, 0, len(other.events)))
    live = window = 0
    if before:
        parent, end = before[-1]
        window = parent.events[end]["window"]
        done = set(parent.settled((*_SETTLED, "recorded"), 0, end))
        issued = (parent.issues[event["group"]] for event in parent.events[:end] if event["event"] == "issue")
        live = sum(not done.issuperset(issue.all()) for issue in issued)
    report = ExecutionReport(
        number=own.number,
        id=own.id,
        resumed_from=own.resumed_from,
        window=window,
        repeated=len(trained & contained),
        redone=len((trained & lost) - contained),
        spared=sum(1 for _ in own.settled(("recorded",), 0, len(own.events))),
    )
    return report, live


def _steps(executions: list[_Execution], lineage: list[tuple[_Execution, int]]) -> Iterator[StepReport]:
    ends = {own.number: end for own, end in lineage}
    for own in executions:
        for position, event in enumerate(own.events):
            if event["event"] == "commit":
                yield StepReport(
                    execution=own.number,
                    t=event["t"],
                    step=event["step"],
                    mean_reward=event["mean_reward"],
                    cursor=event["cursor"],
                    safe=event["safe"],
                    in_lineage=position < ends.get(own.number, 0),
                )
