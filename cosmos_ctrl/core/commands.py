"""The log of commands, and what the ranks said about each.

* Commands are numbered from 1 and fixed for every rank once they are formed. Command n + 1 may be formed only when n is a
  SAVE or is committed.
* A step commits when every required rank has reported it, with equal update counts.
* A save is complete when every required rank has sent receipts of exactly the artifacts it declared, for the same step,
  updates, execution and checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from cosmos_ctrl.core.errors import (
    ArtifactForeignError,
    ArtifactMissingError,
    ArtifactUnexpectedError,
    ConflictingRetryError,
    MalformedError,
    NotAllowedError,
    UnknownWorkError,
    WrongStepError,
)
from cosmos_ctrl.core.execution import ExecutionIdentity, Place
from cosmos_ctrl.core.groups import Disposition
from cosmos_ctrl.core.ledger import LedgerWindow, SamplingBoundary
from cosmos_ctrl.core.lifecycle import EndReason

#: Commands kept for ranks that ask again. A rank is never more than one TRAIN behind, with a SAVE between.
_KEPT_COMMANDS = 8

#: Saves kept for ranks that speak of them late: an asynchronous save that another rank abandoned long ago is still being written. A rank
#: begins its next save after that, so it is two saves behind at most, where a final one follows the next at once.
_KEPT_SAVES = 3

SaveState = Literal["PENDING", "PUBLISHING", "COMMITTED", "ABANDONED"]


@dataclass(frozen=True, slots=True)
class DisposedRows:
    """What the leader says a command did with some of its completions."""

    disposition: Disposition
    rows: Sequence[tuple[int, int]]
    """Each a group and a mask of its completions."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionReport:
    """A TRAIN command is complete on one rank."""

    command: int
    step: int
    optimizer_updates: int
    disposed: tuple[DisposedRows, ...] = ()
    """From the leader only: every completion of the command, once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReceipt:
    """One artifact that a rank made durable."""

    name: str
    size_bytes: int
    digest: str
    completed_training_steps: int
    completed_optimizer_updates: int
    rank: int
    execution_number: int
    execution_id: str
    checkpoint_id: str


@dataclass(slots=True)
class Train:
    """Train one step. Mutable: collects the ranks' reports."""

    number: int
    step: int
    rows: tuple[tuple[int, int], ...]
    """(group, mask of completions), in the order of the shares."""
    deadline: float
    reports: dict[Place, CompletionReport] = field(default_factory=dict)
    committed: bool = False


@dataclass(slots=True)
class Save:
    """Save a checkpoint. Mutable: collects the ranks' receipts."""

    number: int
    checkpoint_id: str
    path: str
    steps: int
    updates: int
    boundary: SamplingBoundary
    window_completions: int
    final: bool
    deadline: float
    state: SaveState = "PENDING"
    receipts: dict[Place, tuple[ShardReceipt, ...]] = field(default_factory=dict)
    application_note: str = ""
    window: LedgerWindow | None = None
    """What lay beyond the boundary at the cut, for the record of it; None: nothing is recorded, or the save is over."""
    parent: Save | None = None
    """The newest save of this execution that was committed at the cut; None: what the execution resumed from."""
    manifest_digest: str = ""
    why_abandoned: str = ""


@dataclass(frozen=True, slots=True)
class End:
    """Stop."""

    number: int
    reason: EndReason
    message: str
    steps: int


Command = Train | Save | End


class CommandLog:
    """The sequence of commands and what the ranks said about them."""

    def __init__(self, ranks: tuple[Place, ...], leader: Place, *, steps: int, updates: int) -> None:
        self.ranks, self.leader = ranks, leader
        self.steps, self.updates = steps, updates
        self._commands: dict[int, Command] = {}
        self._last = 0

    @property
    def last(self) -> Command | None:
        """The newest command."""
        return self._commands.get(self._last)

    @property
    def next_number(self) -> int:
        """The number that the next command gets."""
        return self._last + 1

    @property
    def may_form(self) -> bool:
        """Whether the next command may be formed."""
        last = self.last
        return not isinstance(last, End) and not (isinstance(last, Train) and not last.committed)

    @property
    def saves(self) -> list[Save]:
        """Saves that are neither committed nor abandoned."""
        return [
            command
            for command in self._commands.values()
            if isinstance(command, Save) and command.state in ("PENDING", "PUBLISHING")
        ]

    def add(self, command: Command) -> None:
        """Fix the next command."""
        self._last = command.number
        self._commands[command.number] = command
        saves = [number for number, each in self._commands.items() if isinstance(each, Save)]
        open_saves = {save.number for save in self.saves}
        for number in [n for n in self._commands if n <= self._last - _KEPT_COMMANDS]:
            if number not in open_saves and number not in saves[-_KEPT_SAVES:]:
                del self._commands[number]

    def get(self, number: int, place: Place) -> Command | None:
        """Command `number` for a rank; None when it is not formed yet.

        Raises:
            UnknownWorkError: the number lies further ahead, or is forgotten.
            NotAllowedError: the rank has not completed the one before.
        """
        last = self.last
        if number == self._last + 1 and not isinstance(last, End):
            if isinstance(last, Train) and place not in last.reports:
                raise NotAllowedError(what=f"{place} asks for command {number} and has not completed {last.number}")
            return None
        command = self._commands.get(number)
        if command is None:
            raise UnknownWorkError(what=f"command {number}")
        return command

    def train(self, number: int) -> Train:
        """The TRAIN command of that number; raises UnknownWorkError when there is none."""
        command = self._commands.get(number)
        if not isinstance(command, Train):
            raise UnknownWorkError(what=f"TRAIN command {number}")
        return command

    def save(self, number: int) -> Save:
        """The SAVE command of that number; raises UnknownWorkError when there is none."""
        command = self._commands.get(number)
        if not isinstance(command, Save):
            raise UnknownWorkError(what=f"SAVE command {number}")
        return command

    # -- steps

    def check_report(self, place: Place, report: CompletionReport) -> None:
        """Raises unless `place` may report this; nothing is changed.

        Raises:
            WrongStepError: a command never given, another step than its own, or another update count than its group's other ranks.
            ConflictingRetryError: the rank reported the command before, otherwise.
            MalformedError: the leader's rows do not name every completion exactly once, or another rank names any.
        """
        if place not in self.ranks:
            raise NotAllowedError(what=f"{place} is not a required trainer rank")
        command = self._commands.get(report.command)
        if not isinstance(command, Train):
            what = f"command {report.command}, which is no TRAIN command it was given, at step"
            raise WrongStepError(place=str(place), what=what, expected=self.steps, found=report.step)
        if report.step != command.step:
            raise WrongStepError(place=str(place), what="step", expected=command.step, found=report.step)
        before = command.reports.get(place)
        if before is not None and before != report:
            raise ConflictingRetryError(what="completion report of command", number=report.command)
        for theirs in command.reports.values():
            if theirs.optimizer_updates != report.optimizer_updates:
                raise WrongStepError(
                    place=str(place),
                    what="optimizer updates",
                    expected=theirs.optimizer_updates,
                    found=report.optimizer_updates,
                )
        if place == self.leader:
            _check_cover(command, report)
        elif report.disposed:
            raise MalformedError(what=f"{place} is not the leader and names completions of command {report.command}")

    def record_report(self, place: Place, report: CompletionReport) -> Train | None:
        """Note the report; returns the command when this was the last rank, and thereby commits it."""
        command = self.train(report.command)
        if command.committed:
            return None
        command.reports[place] = report
        if any(rank not in command.reports for rank in self.ranks):
            return None
        command.committed = True
        self.steps = command.step
        self.updates += command.reports[self.leader].optimizer_updates
        return command

    # -- saves

    def check_receipts(
        self,
        save: Save,
        place: Place,
        receipts: tuple[ShardReceipt, ...],
        declared: frozenset[str],
        execution: ExecutionIdentity,
    ) -> None:
        """Raises unless these are exactly the artifacts of `place`, of this save; nothing is changed."""
        names = [receipt.name for receipt in receipts]
        if len(set(names)) != len(names):
            raise MalformedError(what=f"{place} sent two receipts of one name")
        if missing := declared - set(names):
            raise ArtifactMissingError(path=save.path, artifacts=tuple(sorted(missing)))
        if unexpected := set(names) - declared:
            raise ArtifactUnexpectedError(path=save.path, artifacts=tuple(sorted(unexpected)))
        for receipt in receipts:
            for what, expected, found in (
                ("checkpoint", save.checkpoint_id, receipt.checkpoint_id),
                ("execution", execution.id, receipt.execution_id),
                ("execution number", str(execution.number), str(receipt.execution_number)),
                ("training step", str(save.steps), str(receipt.completed_training_steps)),
                ("optimizer updates", str(save.updates), str(receipt.completed_optimizer_updates)),
                ("rank", str(place.rank), str(receipt.rank)),
            ):
                if expected != found:
                    raise ArtifactForeignError(
                        path=save.path, artifact=receipt.name, what=what, expected=expected, found=found
                    )
            if receipt.size_bytes < 1:
                raise MalformedError(what=f"artifact {receipt.name} is empty")
        before = save.receipts.get(place)
        if before is not None and before != receipts:
            raise ConflictingRetryError(what="receipts of command", number=save.number)

    def record_receipts(self, save: Save, place: Place, receipts: tuple[ShardReceipt, ...], note: str) -> bool:
        """Note the receipts; True when this was the last rank and the save is to be published."""
        if save.state != "PENDING":
            return False
        save.receipts[place] = receipts
        if note and place == self.leader:
            save.application_note = note
        if any(rank not in save.receipts for rank in self.ranks):
            return False
        save.state = "PUBLISHING"
        return True


def _check_cover(command: Train, report: CompletionReport) -> None:
    due = dict(command.rows)
    for block in report.disposed:
        if block.rows and (block.disposition == "discarded") != bool(block.reason):
            raise MalformedError(what="a reason is due for what is discarded, and only for that")
        for group, mask in block.rows:
            left = due.get(group, 0)
            if mask <= 0 or mask & ~left:
                raise MalformedError(
                    what=f"completions {mask:#x} of group {group} are named twice or are not in command {command.number}"
                )
            due[group] = left ^ mask
    missing = [group for group, mask in due.items() if mask]
    if missing:
        raise MalformedError(
            what=f"the leader's report of command {command.number} leaves out completions of groups {missing[:8]}"
        )
