"""Which tasks are crashed, what a reader sees afterwards, and what it may see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from checkpoint_helpers import COMPATIBILITY, CONTENT, commit, load, write
from crash_tasks import DEAD, KEPT, NEW, PUT_DATA, PUT_NAME, RETIRED

from cosmos_ctrl.checkpoints.claims import claim_execution, claim_name, newest_claim, pin_resume, read_pin
from cosmos_ctrl.checkpoints.discovery import discover, list_checkpoints
from cosmos_ctrl.checkpoints.intents import intended
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointSweptError,
    CheckpointUncommittedError,
)

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
    temporary: bool = True
    """Whether what is left of temporary files is laid out too: with many of them there are too many states, and no listing shows any."""

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


def _a_run_before_the_newest(disk: Path) -> None:
    """A committed checkpoint, a save that was left unfinished, and the artifacts of one that the live execution makes."""
    store = LocalStore(disk / "run")
    for number in (1, 2):
        claim_execution(store, execution_id=f"id-{number}", note={})
    pin_resume(store, 2, execution_id="id-2", checkpoint=None)
    commit(disk / "run", Path(RETIRED).name, step=1, checkpoint_id=RETIRED[-8:])
    for path in (KEPT, DEAD):
        write(disk / "run" / path)


def _an_untidy_run(disk: Path) -> None:
    """The same, and the newest is committed."""
    _a_run_before_the_newest(disk)
    commit(disk / "run", Path(KEPT).name, step=2, number=2, checkpoint_id=KEPT[-8:])


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


def _tidied_reader(disk: Path) -> str:
    """What discovery would choose, now and were the newer ones not there; what is being retired; what is left of the dead save."""
    store = LocalStore(disk / "run")
    chosen = discover(store, compatibility=COMPATIBILITY, on_corrupt="error").chosen
    committed = list_checkpoints(store)
    for found in committed:
        load(disk / "run" / found.path)  # also of one that is being deleted: an operator may lift that
    offered = [found for found in committed if found.path not in intended(store)]
    if chosen != (offered[0] if offered else None):
        raise TornError(f"chosen is {chosen}, offered are {offered}")
    words = [{RETIRED: "retired", KEPT: "kept"}[found.path] for found in offered]
    if (disk / "run" / RETIRED).exists() and "retired" not in words:
        if RETIRED not in intended(store):
            raise TornError(f"{RETIRED} is in pieces, and nothing says that it is being deleted")
        words.append("retiring")
    return f"{' '.join(words)}; {_dead(disk)}"


def _dead(disk: Path) -> str:
    directory = disk / "run" / DEAD
    left = [name for name, data in CONTENT.items() if _is(directory / name, data)]
    try:
        load(directory)
    except CheckpointSweptError:
        return "being swept" if len(LocalStore(directory).scan("")) > 1 else "swept"
    except CheckpointUncommittedError:
        if left != list(CONTENT):
            raise TornError(f"of {DEAD} only {left} are left, and there is no tombstone") from None
        return "unfinished"
    raise TornError(f"{DEAD} is committed")


def _pin_reader(disk: Path) -> str:
    pin = read_pin(LocalStore(disk / "run"), 2)
    if pin is not None and pin.checkpoint != RETIRED:
        raise TornError(f"the pin is another: {pin}")
    return "pinned" if pin else "unpinned"


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


def _tidied_told(
    told: tuple[str, ...], committed: tuple[str, ...] = ("kept retired", "kept retiring", "kept")
) -> set[str]:
    committed = committed[-1:] if RETIRED in told else committed
    dead = ("swept",) if DEAD in told else ("unfinished", "being swept", "swept")
    return {f"{ids}; {left}" for ids in committed for left in dead}


def _published_told(told: tuple[str, ...]) -> set[str]:
    return _tidied_told(told, (*(() if "kept" in told else ("retired",)), "kept retired", "kept retiring", "kept"))


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
        Scenario("tidy", _an_untidy_run, _tidied_reader, _tidied_told, temporary=False),
        Scenario("publish and tidy", _a_run_before_the_newest, _tidied_reader, _published_told, temporary=False),
        Scenario("pin a resume", _a_run, _pin_reader, _until_told({"unpinned", "pinned"}, {"pinned"})),
    )
}
