"""What a controller's counters have to be, from a dumb list of what a test knows was accepted.

Nothing here asks the controller for anything but its state, and nothing is shared with its code: groups are numbers in sets,
completions are counted by adding.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from controller_process import DEADLINE_S, ControllerProcess

from cosmos_ctrl.audit import audit
from cosmos_ctrl.v1 import controller_service_pb2 as pb


def state_of(controller: ControllerProcess) -> pb.RunState:
    """The run as the controller says it is."""
    watch = controller.stub.WatchRun(pb.WatchRunRequest(), timeout=DEADLINE_S)
    state = next(iter(watch)).state
    watch.cancel()
    return state


class Model:
    """Whole groups of `size` completions; every method says what was accepted."""

    def __init__(self, budget: int, size: int = 2) -> None:
        self.budget, self.size = budget, size
        self.issued: set[int] = set()
        self.where: dict[int, str] = {}
        self.trained = self.discarded = self.steps = 0
        self.lease_lost = self.stale_refused = 0

    def leased(self, groups: Iterable[int]) -> None:
        for group in groups:
            self.issued.add(group)
            assert self.where.get(group, "pending") == "pending", group
            self.where[group] = "leased"

    def reported(self, groups: Iterable[int]) -> None:
        for group in groups:
            assert self.where[group] == "leased", group
            self.where[group] = "ready"

    def given_back(self, groups: Iterable[int]) -> None:
        for group in groups:
            assert self.where[group] == "leased", group
            self.where[group] = "pending"

    def gone(self, groups: Iterable[int]) -> None:
        for group in groups:
            assert self.where.pop(group) == "leased", group
            self.discarded += self.size

    def commanded(self, groups: Iterable[int]) -> None:
        for group in groups:
            assert self.where[group] == "ready", group
            self.where[group] = "training"

    def committed(self, groups: Iterable[int]) -> None:
        for group in groups:
            assert self.where.pop(group) == "training", group
            self.trained += self.size
        self.steps += 1

    @property
    def counters(self) -> dict[str, int]:
        places = Counter(self.where.values())
        return {
            "remaining_completions": self.budget - len(self.issued) * self.size,
            "groups_pending": places["pending"],
            "groups_leased": places["leased"],
            "groups_ready": places["ready"],
            "groups_training": places["training"],
            "trained_completions": self.trained,
            "discarded_completions": self.discarded,
            "completed_training_steps": self.steps,
            "lease_lost": self.lease_lost,
            "stale_refused": self.stale_refused,
        }

    def check(self, controller: ControllerProcess) -> None:
        """The controller's counters are the model's."""
        state = state_of(controller)
        wrong = {
            name: (getattr(state, name), expected)
            for name, expected in self.counters.items()
            if getattr(state, name) != expected
        }
        assert not wrong, f"found and expected: {wrong}"


def settled_by_journal(run: Path, execution: int = 1) -> list[tuple[int, int, str]]:
    """(group, mask, outcome) of every settlement that the journal of an execution has, in order."""
    found = []
    for event in events_of(run, execution):
        if event["event"] == "settle":
            found += [(group, mask, event["outcome"]) for group, mask in event["rows"]]
    return found


def events_of(run: Path, execution: int = 1) -> list[dict[str, Any]]:
    """The journal of an execution."""
    text = (run / "executions" / f"{execution:08d}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def check_audit(run: Path, model: Model, trained: Sequence[int]) -> None:
    """One execution, by its journal: each of `trained` was trained once and wholly, and nothing else was, nor was anything skipped."""
    whole = (1 << model.size) - 1
    settled = [(group, mask) for group, mask, outcome in settled_by_journal(run) if outcome == "trained"]
    assert sorted(settled) == sorted((group, whole) for group in trained)
    report = audit(run)
    assert (report.skipped, report.repeated, report.redone) == (0, 0, 0)
    assert report.completed_training_steps == model.steps
    assert report.stale_reports_refused == model.stale_refused
