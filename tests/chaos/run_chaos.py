"""``make chaos``: kills the reference trainer, and its controller, at every file event of a run, resumes, and judges. Prints a table.

* One ckpt-chaos run for each process that is killed: the only rank, each of two ranks, the controller. A fault-free run numbers the file
  events of that process; for every one of them, in every mode, a run is killed there, and resumed once by the same command.
* Passed: the resumed run ends well, by every bit of every rank's state where the fault-free run ends, and it did not resume from
  anything older than the newest checkpoint that is whole.
* It fails unless every point passed, was reached, and was the event that the fault-free run had there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckpt_chaos.byo import MODES
from ckpt_chaos.runner import Row, rejudge

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

_POINT_S = 120
"""Deadline of one run; the job's own are shorter."""
_SWEEP_S = 1800


@dataclass(frozen=True, slots=True)
class Victim:
    """Which process of which job is killed."""

    name: str
    armed: str
    """As `chaos_job` takes it."""
    ranks: int


VICTIMS = (
    Victim("the only rank", "trainer-0", 1),
    Victim("rank 0 of 2", "trainer-0", 2),
    Victim("rank 1 of 2", "trainer-1", 2),
    Victim("the controller", "controller", 1),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of all points of one victim."""

    victim: Victim
    events: int
    """Of the fault-free run."""
    rows: list[Row]
    """The first is the control: a second fault-free run."""

    def of(self, mode: str) -> list[Row]:
        """The points of a mode."""
        return [row for row in self.rows if row.label.endswith(f"[{mode}]")]

    def failures(self) -> list[str]:
        """What is wrong, a line for each point."""
        return [f"{self.victim.name}: {row.label}: {why}" for row in self.rows if (why := _why(row))]


def _why(row: Row) -> str:
    if row.verdict != "PASS":
        return f"{row.verdict}: {row.outcome}"
    if row.drift:
        return "another event than in the fault-free run"
    # What is asked to end may come to its end.
    if not (row.crashed or row.label.startswith("no crash") or row.label.endswith("[term]")):
        return "the process was not killed"
    return ""


@contextmanager
def nursery(directory: Path) -> Iterator[Path]:
    """Where jobs get their processes; gone at the end, and the processes with their jobs."""
    address, log = directory / "nursery", directory / "nursery.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "chaos_nursery.py"), str(address)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    assert process.stdin
    assert process.stdout
    try:
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the nursery did not start:\n{log.read_text()}")
        yield address
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(30)


def sweep(
    victim: Victim,
    nursery: Path,
    work: Path,
    *,
    modes: Sequence[str] = MODES,
    max_points: int = 10_000,
    jobs: int = 2,
) -> Outcome:
    """Kill one process at every event, or at so many.

    Raises:
        RuntimeError: ckpt-chaos did not come to judge.
    """
    arguments = ["--modes", ",".join(modes), "--max-points", str(max_points), "--jobs", str(jobs)]
    arguments += ["--timeout", str(_POINT_S), "--grace", "30", "--work", str(work)]
    arguments += ["--result-file", "{out}/result", "--step-regex", r"resumed from step (\d+)"]
    arguments += ["--checkpoint-glob", "{out}/steps/step-*"]
    job = [sys.executable, "-I", str(HERE / "chaos_job.py"), "{out}", victim.armed, str(victim.ranks)]
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_chaos", "run", *arguments, "--", *job],
        env={**os.environ, "CHAOS_NURSERY": str(nursery)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_SWEEP_S,
        check=False,
    )
    rows = rejudge(work)
    if not rows or done.returncode not in (0, 1):
        raise RuntimeError(f"ckpt-chaos ended with code {done.returncode}:\n{done.stdout}")
    events = (work / "reference" / "events.log.rank0").read_text().count("\n")
    return Outcome(victim, events, rows)


def table(outcomes: Sequence[Outcome]) -> str:
    """In Markdown."""
    lines = ["| killed | file events | mode | points | PASS | others |", "|---|---:|---|---:|---:|---|"]
    for outcome in outcomes:
        for mode in MODES:
            rows = outcome.of(mode)
            verdicts = Counter(row.verdict for row in rows)
            passed = verdicts.pop("PASS", 0)
            others = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())) or "none"
            lines.append(f"| {outcome.victim.name} | {outcome.events} | {mode} | {len(rows)} | {passed} | {others} |")
    points = sum(len(outcome.rows) - 1 for outcome in outcomes)
    passed = sum(row.verdict == "PASS" for outcome in outcomes for row in outcome.rows[1:])
    return "\n".join([*lines, f"| all | | | {points} | {passed} | |"])


def main() -> int:
    """All victims; 1 unless everything passed."""
    parser = argparse.ArgumentParser(description="Kill at every file event, resume, judge.")
    parser.add_argument("--work", type=Path, help="keep all runs in this new directory")
    parser.add_argument("--jobs", type=int, default=2, help="points at a time")
    options = parser.parse_args()
    work = options.work.resolve() if options.work else Path(tempfile.mkdtemp(prefix="chaos-"))
    work.mkdir(parents=True, exist_ok=True)
    outcomes, failures = [], []
    # The path of a socket is short.
    with tempfile.TemporaryDirectory() as scratch, nursery(Path(scratch)) as address:
        for victim in VICTIMS:
            print(f"{victim.name} ...", file=sys.stderr, flush=True)
            outcome = sweep(victim, address, work / victim.name.replace(" ", "-"), jobs=options.jobs)
            outcomes.append(outcome)
            failures += outcome.failures()
    print(table(outcomes))
    if failures:
        print(*failures, f"the runs are in {work}", sep="\n")
        return 1
    if not options.work:
        shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
