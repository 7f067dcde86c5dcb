"""Runs the tasks of the scenarios, records them, and reads what crashes would leave."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoint_helpers import Zygote
from crash_recording import Recording, Step, Synced
from crash_scenarios import SCENARIOS
from crash_states import Reader, Violation, violations

from cosmos_ctrl.checkpoints.names import TEMPORARY_PREFIX

#: Everything that can touch a file or be told.
TRACE = ("-s", "100000", "-e", "trace=%file,%desc")

#: Where link gives this, names are given by renameat2.
NO_LINK = ("-e", "inject=link:error=EPERM")


@dataclass(slots=True)
class Lab:
    """Runs tasks on disks of their own and reads what crashes would leave of those."""

    zygote: Zygote
    where: Path
    readers: dict[str, Reader] = field(default_factory=dict)
    disks: int = 0

    def disk(self, name: str) -> Path:
        """A disk as it is before the task; the one before is gone."""
        template = self.where / f"before {name}"
        if not template.exists():
            template.mkdir()
            SCENARIOS[name].prepare(template)
        shutil.rmtree(self.where / f"disk{self.disks}", ignore_errors=True)
        self.disks += 1
        return shutil.copytree(template, self.where / f"disk{self.disks}")

    def add(self, recording: Recording, task: str, *strace: str, **how: Any) -> dict[str, Any]:
        """Run a task on the recording's disk, and record it."""
        log = self.where / "log"
        outcome = self.zygote.run(task, recording.root, "-o", str(log), *TRACE, *strace, **how)
        recording.process(log)
        return outcome

    def record(self, name: str, *strace: str, **how: Any) -> tuple[Recording, dict[str, Any]]:
        """A recording of the scenario's task on a fresh disk, and its outcome."""
        recording = Recording(self.disk(name))
        return recording, self.add(recording, SCENARIOS[name].task, *strace, **how)

    def reader(self, name: str) -> Reader:
        """The scenario's reader; what it has seen once it knows."""
        if name not in self.readers:
            passes_over = "" if SCENARIOS[name].temporary else TEMPORARY_PREFIX
            self.readers[name] = Reader(self.where / f"read {name}", SCENARIOS[name].see, passes_over)
        return self.readers[name]

    def violation(self, name: str, recording: Recording, steps: list[Step] | None = None) -> Violation | None:
        """The first state that must not be, after a crash of the recording, or of other steps in its place."""
        steps = recording.steps if steps is None else steps
        return next(violations(recording.before, steps, self.reader(name), SCENARIOS[name].allowed), None)


def syncs(recording: Recording) -> list[tuple[int, str]]:
    """Places and paths of the fsyncs."""
    return [(place, step.path) for place, step in enumerate(recording.steps) if isinstance(step, Synced)]


def without(steps: list[Step], places: set[int]) -> list[Step]:
    """The steps but for those at the places."""
    return [step for place, step in enumerate(steps) if place not in places]


def changing_calls(lab: Lab, name: str, calls: Iterable[str], *strace: str) -> list[tuple[str, int]]:
    """These calls of the untampered task, each with its number."""
    disk = lab.disk(name)
    made = lab.zygote.calls(SCENARIOS[name].task, disk, lab.where / "log", *strace)
    return [(call, k) for call in calls for k in range(1, made[call] + 1)]
