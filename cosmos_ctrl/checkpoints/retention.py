"""Which checkpoints a run keeps, why, and how the others go.

* A pure plan decides over what a survey found; performing it is a sequence of steps, each harmless to repeat and to die after.
* A committed checkpoint goes: intent, claims read again, manifest, artifacts, directory, intent. It goes only while a newer sound one
  is durable, and never what the newest claim's execution resumed from, nor before that is known.
* A save that an older execution left unfinished is *swept*: a tombstone takes the manifest's name, the claims are read again, then the
  artifacts go. A late publisher meets the tombstone; if it was first, the sweep leaves its checkpoint alone. The tombstone stays.
* The newest claim's execution counts as live, whoever deletes: its unfinished saves are not touched. A deleter that is not of the
  newest claim any more deletes nothing further.
* What fails is reported, stops nothing else, and is tried again in the next round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from cosmos_ctrl.checkpoints.claims import newest_claim
from cosmos_ctrl.checkpoints.discovery import read_committed
from cosmos_ctrl.checkpoints.document import tombstone
from cosmos_ctrl.checkpoints.intents import intent_name, put_intent
from cosmos_ctrl.checkpoints.names import MANIFEST_NAME
from cosmos_ctrl.checkpoints.stores import Store
from cosmos_ctrl.checkpoints.survey import Holding, Survey, survey
from cosmos_ctrl.core.errors import CheckpointConflictError, CheckpointSweptError, ControlError
from cosmos_ctrl.core.resume import require_count

Action = Literal["keep", "retire", "sweep"]


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Which committed checkpoints are kept beside those that must be."""

    keep_last: int = 0
    """So many of the newest sound ones, by execution number, then step; 0: all."""
    keep_every: int = 0
    """And those whose step is a multiple of this, for ever; 0: none."""

    def __post_init__(self) -> None:
        """Check.

        Raises:
            TypeError: a number is no int.
            ValueError: a number is negative, or steps are kept for ever while everything is.
        """
        require_count("keep_last", self.keep_last)
        require_count("keep_every", self.keep_every)
        if self.keep_every and not self.keep_last:
            raise ValueError(f"keep_every is {self.keep_every} and keep_last 0: with all kept, it says nothing")


KEEP_ALL = RetentionPolicy()


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one holding."""

    holding: Holding
    action: Action
    why: str
    """For a person."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Something that could not be deleted."""

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class Round:
    """What one round did."""

    retired: tuple[str, ...] = ()
    """Committed checkpoints that are gone, by path."""
    swept: tuple[str, ...] = ()
    """Unfinished saves whose leftovers are gone, by path."""
    failures: tuple[Failure, ...] = ()
    superseded: bool = False
    """Whether a newer execution was found to have claimed the run, so that nothing more was deleted."""


def plan(run: Survey, policy: RetentionPolicy) -> tuple[Decision, ...]:
    """What becomes of everything that a survey found, in its order. Changes nothing."""
    decisions = []
    newer_sound = 0
    newest = next((holding for holding in run.holdings if holding.kind == "committed"), None)
    for holding in run.holdings:
        if holding.kind == "committed":
            decisions.append(_judge_committed(holding, run, policy, newer_sound, is_newest=holding is newest))
            newer_sound += holding.sound
        else:
            decisions.append(_judge_other(holding, run))
    return tuple(decisions)


def _judge_committed(
    holding: Holding, run: Survey, policy: RetentionPolicy, newer_sound: int, *, is_newest: bool
) -> Decision:
    if holding.intended:
        # That it goes was decided, maybe by another policy: only what is in use, or needed, stops it.
        spared = [(not newer_sound, "no newer one is sound")]
        why = "its deletion has begun"
    else:
        last, every = policy.keep_last, policy.keep_every
        spared = [
            (not last, "all are kept"),
            (newer_sound < last, f"one of the newest {last}"),
            (every > 0 and (holding.steps or 0) % every == 0, f"its step is a multiple of {every}"),
        ]
        why = f"keep_last is {last}, newer sound ones: {newer_sound}"
    reasons = [
        (is_newest, "newest"),
        (run.pin is not None and run.pin.checkpoint == holding.path, f"execution {run.live} resumed from it"),
        *spared,
        (run.pin is None, run.why_unpinned),
    ]
    kept = next((reason for applies, reason in reasons if applies), "")
    return Decision(holding, "keep" if kept else "retire", kept or why)


def _judge_other(holding: Holding, run: Survey) -> Decision:
    if holding.kind == "foreign":
        return Decision(holding, "keep", holding.why)
    if holding.intended:
        return Decision(holding, "retire", "its deletion has begun: the manifest is gone")
    if holding.kind == "swept":
        return Decision(holding, "sweep" if holding.left else "keep", holding.why)
    if holding.execution >= run.live:
        return Decision(holding, "keep", f"unfinished, of execution {run.live}, which counts as live")
    return Decision(
        holding, "sweep", f"unfinished, and execution {holding.execution} is over: {run.live} has claimed the run"
    )


def retain(
    store: Store,
    policy: RetentionPolicy,
    *,
    number: int | None = None,
    may_go_on: Callable[[], bool] = lambda: True,
    on_deleted: Callable[[Decision], None] = lambda _: None,
) -> Round:
    """One round: survey, plan, perform. Any number of them may run at once, in any processes.

    Args:
        store: the run's.
        policy: what is kept.
        number: the controller's execution number; None for an operator, who acts for the newest claim, whichever that is.
        may_go_on: asked before each step; False ends the round early.
        on_deleted: told of each retired checkpoint and swept save, once it is gone.

    Raises:
        StorageUnavailableError: the run could not be looked at; nothing was deleted.
    """
    run = survey(store)
    if number is not None and run.live != number:
        return Round(superseded=True)
    return perform(store, run, plan(run, policy), may_go_on=may_go_on, on_deleted=on_deleted)


def perform(
    store: Store,
    run: Survey,
    decisions: Sequence[Decision],
    *,
    may_go_on: Callable[[], bool] = lambda: True,
    on_deleted: Callable[[Decision], None] = lambda _: None,
) -> Round:
    """Delete what `decisions`, a plan over `run`, says: the oldest first. See `retain`."""
    deleter = _Deleter(store, run.live, may_go_on)
    kept = next((decision.holding for decision in decisions if decision.holding.sound), None)
    retired: list[str] = []
    swept: list[str] = []
    failures: list[Failure] = []
    for decision in reversed(decisions):
        path = decision.holding.path
        try:
            if decision.action == "retire":
                deleter.retire(path, kept)
                retired.append(path)
            elif decision.action == "sweep" and deleter.sweep(path):
                swept.append(path)
            else:
                continue
        except _Superseded:
            return Round(tuple(retired), tuple(swept), tuple(failures), superseded=True)
        except _Stopped:
            break
        except ControlError as error:
            failures.append(Failure(path, str(error)))
        else:
            on_deleted(decision)
    return Round(tuple(retired), tuple(swept), tuple(failures))


class _Superseded(Exception):
    """A newer execution has claimed the run."""


class _Stopped(Exception):
    """The round is to end here."""


@dataclass(frozen=True, slots=True)
class _Deleter:
    """The steps, on behalf of the execution that was live when the run was surveyed."""

    store: Store
    live: int
    may_go_on: Callable[[], bool]

    def retire(self, path: str, kept: Holding | None) -> None:
        """Delete a committed checkpoint, or go on with that."""
        if kept is not None:
            # Its publisher may have died, or be, between making it visible and making it durable.
            self.store.sync(kept.path)
        # Before the intent only to spare a checkpoint an intent that is not followed by its deletion.
        self._require_live()
        put_intent(self.store, path)
        self._require_live()
        self.store.delete(f"{path}/{MANIFEST_NAME}")
        self._clear(path)
        self.store.delete(path)
        self.store.delete(intent_name(path))

    def sweep(self, path: str) -> bool:
        """Clear a save that was never committed; False when it was, by a late publisher, or is not there."""
        self._require_live()
        if self.store.kind(path) != "directory":
            return False  # a put would make it anew
        try:
            self.store.put_if_absent(f"{path}/{MANIFEST_NAME}", tombstone(self.live))
        except CheckpointConflictError:
            if not self._is_swept(path):
                return False
            # Another execution's, which may have died between making it visible and making it durable.
            self.store.sync(path)
        self._require_live()
        self._clear(path)
        return True

    def _require_live(self) -> None:
        if not self.may_go_on():
            raise _Stopped
        if newest_claim(self.store) != self.live:
            raise _Superseded

    def _is_swept(self, path: str) -> bool:
        try:
            read_committed(self.store, path)
        except CheckpointSweptError:
            return True
        except ControlError:
            return False
        return False

    def _clear(self, path: str) -> None:
        """Delete all files and directories in `path` but the manifest's name; a failure stops none of the others."""
        failure: ControlError | None = None
        # Backwards, so that what a directory holds goes before it.
        for entry in reversed(self.store.scan(path)):
            if entry.name == MANIFEST_NAME or entry.kind not in ("file", "directory"):
                continue
            if not self.may_go_on():
                raise _Stopped
            try:
                self.store.delete(f"{path}/{entry.name}")
            except ControlError as error:
                failure = failure or error
        if failure is not None:
            raise failure
