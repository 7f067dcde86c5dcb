"""Which tasks are crashed, what a reader sees afterwards, and what it may see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from checkpoint_helpers import COMPATIBILITY, CONTENT, commit, load
from crash_tasks import NEW, PUT_DATA, PUT_NAME

from cosmos_ctrl.checkpoints.claims import claim_name, newest_claim
from cosmos_ctrl.checkpoints.discovery import discover
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.core.errors import CheckpointError, CheckpointNotFoundError, CheckpointUncommittedError

TornError = AssertionError
"""What a reader says of content that is neither absent nor right."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A task, the disk before it, and its reader."""

    task: str
    prepare: Callable[[Path], None]
    """Makes what is durable before the task."""
    look: Callable[[Path], str]
    """What a reader sees, in one word; a refusal is another word."""
    allowed: Callable[[tuple[str, ...]], set[str]]
    """What it may see, by what had been told."""

    def see(self, disk: Path) -> str:
        """What a reader sees, refusals included."""
        try:
            return self.look(disk)
        except (CheckpointError, AssertionError) as error:
            return f"refused: {type(error).__name__}: {error}"


def _nothing(disk: Path) -> None:
    """An empty disk."""


def _a_run(disk: Path) -> None:
    (disk / "run").mkdir()


def _an_old_checkpoint(disk: Path) -> None:
    commit(disk / "run", "old", step=1)


def _script_reader(disk: Path) -> str:
    try:
        load(disk / "runs" / "one" / NEW)
    except (CheckpointNotFoundError, CheckpointUncommittedError):
        return "nothing"
    return "new"


def _run_reader(disk: Path) -> str:
    """Discovers as a controller does, then verifies as the ranks do."""
    chosen = discover(LocalStore(disk / "run"), compatibility=COMPATIBILITY, on_corrupt="error").chosen
    if chosen is None:
        return "nothing"
    load(disk / "run" / chosen.path)
    return chosen.manifest.checkpoint_id


def _artifact_reader(disk: Path) -> str:
    """Which artifacts are there with every byte right; nobody commits them here."""
    directory = disk / "run" / NEW
    whole = [name for name, data in CONTENT.items() if _is(directory / name, data)]
    return ", ".join(whole) or "nothing"


def _is(path: Path, data: bytes) -> bool:
    return path.is_file() and path.read_bytes() == data


def _claims_reader(disk: Path) -> str:
    store = LocalStore(disk / "runs" / "one")
    newest = newest_claim(store)
    for number in range(1, newest + 1):
        text = store.read(claim_name(number), limit=1000)
        if text is not None and not text.endswith(b"}\n"):
            raise TornError(f"claim {number} is torn: {text!r}")
    return str(newest)


def _put_reader(disk: Path) -> str:
    data = LocalStore(disk / "runs" / "one").read(PUT_NAME, limit=1000)
    if data not in (None, PUT_DATA):
        raise TornError(f"the record is torn: {data!r}")
    return "nothing" if data is None else "new"


def _until_told(before: set[str], after: set[str]) -> Callable[[tuple[str, ...]], set[str]]:
    return lambda told: after if "ok" in told else before


def _receipts_told(told: tuple[str, ...]) -> set[str]:
    subsets = {"nothing", *CONTENT, ", ".join(CONTENT)}
    return {seen for seen in subsets if all(name in seen for name in told if name in CONTENT)}


def _claims_told(told: tuple[str, ...]) -> set[str]:
    # A number that was seen and not told may be there or not.
    newest = max((int(what) for what in told if what.isdecimal()), default=0)
    return {str(number) for number in range(newest, 9)}


SCENARIOS = {
    scenario.task: scenario
    for scenario in (
        Scenario("script", _nothing, _script_reader, _until_told({"nothing", "new"}, {"new"})),
        Scenario("controller", _an_old_checkpoint, _run_reader, _until_told({"old", "new"}, {"new"})),
        Scenario("conflict", _an_old_checkpoint, _run_reader, lambda _: {"old"}),
        Scenario("worker", _a_run, _artifact_reader, _receipts_told),
        Scenario("whole save", _an_old_checkpoint, _run_reader, _until_told({"old", "new"}, {"new"})),
        Scenario("first claim", _nothing, _claims_reader, _claims_told),
        Scenario("claim twice", _nothing, _claims_reader, _claims_told),
        Scenario("put", _nothing, _put_reader, _until_told({"nothing", "new"}, {"new"})),
        Scenario("uncommit", _an_old_checkpoint, _run_reader, _until_told({"old", "nothing"}, {"nothing"})),
    )
}
