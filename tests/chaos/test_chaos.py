"""A small part of ``make chaos``, and that what it does to files is what it says."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from ckpt_chaos.invariants import ResumeOutcome
from ckpt_chaos.runner import Row
from run_chaos import VICTIMS, Outcome, nursery, sweep, table

HERE = Path(__file__).parent

#: Writes a file of 100 bytes by system calls, makes it durable or not, and gives it its name by a link.
_WRITER = """
import os, sys
import chaos_points
chaos_points.install()
from ckpt_chaos.targets.common import arm_from_env
arm_from_env(0, lazy=True)
run, durable = sys.argv[1:]
os.mkdir(run + "/there")
os.open(run + "/read", os.O_RDONLY | os.O_CREAT)
fd = os.open(run + "/tmp-0123456789abcdef", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
os.write(fd, bytes(50))
os.write(fd, bytes(50))
if durable == "durable":
    os.fsync(fd)
os.close(fd)
os.link(run + "/tmp-0123456789abcdef", run + "/named")
os.unlink(run + "/tmp-0123456789abcdef")
os.mkdir(run + "/last")
"""

_EVENTS = [
    "os.mkdir there 0",
    "os.open read 1",
    "os.open tmp- 1",
    "os.link named 0",
    "os.remove tmp- 0",
    "os.mkdir last 0",
]


def killed(run: Path, mode: str, at: int, durable: str) -> Mapping[str, int]:
    """What lies in `run`, with sizes, after a writer was killed at event `at`."""
    run.mkdir()
    log = run.with_suffix(".log")
    environment = {
        "PYTHONPATH": str(HERE),
        "CKPT_CHAOS_WATCH": str(run),
        "CKPT_CHAOS_LOG": str(log),
        "CKPT_CHAOS_TORN_PYTHON": "1",
        "CKPT_CHAOS_MODE": mode,
        "CKPT_CHAOS_CRASH_AT": str(at),
    }
    done = subprocess.run([sys.executable, "-c", _WRITER, str(run), durable], env=os.environ | environment, timeout=30)
    assert done.returncode == 137
    seen = Path(f"{log}.rank0").read_text().splitlines()
    assert [" ".join(line.split("\t")[1:]) for line in seen] == _EVENTS[:at]
    return {path.name: path.stat().st_size for path in run.iterdir() if path.is_file() and path.name != "read"}


@pytest.mark.parametrize("durable", ["durable", "lost"])
def test_killed_before_an_event_leaves_what_was_written(tmp_path: Path, durable: str) -> None:
    temporary = "tmp-0123456789abcdef"
    for at, left in enumerate([{}, {}, {}, {temporary: 100}, {temporary: 100, "named": 100}, {"named": 100}], start=1):
        assert killed(tmp_path / str(at), "before", at, durable) == left


def test_what_was_not_fsynced_is_taken_back_and_a_name_given_to_it_is_empty(tmp_path: Path) -> None:
    temporary = "tmp-0123456789abcdef"
    assert killed(tmp_path / "4", "unsynced", 4, "durable") == {temporary: 100}
    assert killed(tmp_path / "6", "unsynced", 6, "durable") == {"named": 100}
    assert killed(tmp_path / "4l", "unsynced", 4, "lost") == {}
    assert killed(tmp_path / "6l", "unsynced", 6, "lost") == {"named": 0}


@pytest.mark.parametrize("durable", ["durable", "lost"])
def test_a_torn_file_has_half_its_bytes(tmp_path: Path, durable: str) -> None:
    assert killed(tmp_path / "run", "torn", 3, durable) == {"tmp-0123456789abcdef": 50}


def test_a_point_that_was_missed_or_drifted_or_lost_is_a_failure() -> None:
    good = ResumeOutcome(None, 1, 1, 0.0)
    rows = [
        Row("no crash (control)", False, False, good, "PASS"),
        Row("#1 os.open:a [before]", True, False, good, "PASS"),
        Row("#2 os.open:a [before]", False, False, good, "PASS"),
        Row("#1 os.open:a [term]", False, False, good, "PASS"),
        Row("#1 os.open:a [torn]", True, True, good, "PASS"),
        Row("#1 os.open:a [unsynced]", True, False, good, "LOST_WORK"),
    ]
    outcome = Outcome(VICTIMS[0], 2, rows)
    assert [line.split(": ")[1] for line in outcome.failures()] == [
        "#2 os.open:a [before]",
        "#1 os.open:a [torn]",
        "#1 os.open:a [unsynced]",
    ]
    assert "| the only rank | 2 | unsynced | 1 | 0 | 1 LOST_WORK |" in table([outcome])
    assert table([outcome]).endswith("| all | | | 5 | 4 | |")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A nursery's address."""
    with nursery(tmp_path_factory.mktemp("n")) as address:
        yield address


def test_a_process_dies_with_its_job_though_the_job_did_not_hear_it_out(home: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    os.mkfifo(log)
    end = os.open(log, os.O_RDONLY | os.O_NONBLOCK)  # readable once no process has the log open
    try:
        with socket.socket(socket.AF_UNIX) as job:
            job.connect(str(home))
            job.sendall(json.dumps({"role": "store", "log": str(log), "environment": {}}).encode() + b"\n")
            assert select.select([job], [], [], 30)[0]  # it speaks, and nobody reads
        assert select.select([end], [], [], 30)[0]
        assert os.read(end, 1) == b""
    finally:
        os.close(end)


@pytest.mark.parametrize(
    ("victim", "modes", "points"), [("rank 1 of 2", ("torn", "unsynced"), 4), ("the controller", ("before",), 5)]
)
def test_g1_g3_g4_killed_at_a_file_event_and_resumed_a_run_ends_with_the_same_bits(
    home: Path, tmp_path: Path, victim: str, modes: tuple[str, ...], points: int
) -> None:
    (found,) = [one for one in VICTIMS if one.name == victim]
    outcome = sweep(found, home, tmp_path / "work", modes=modes, max_points=points)
    assert outcome.failures() == []
    assert len(outcome.rows) == points + 1
    assert len({row.outcome.resumed_from_step for row in outcome.rows[1:]}) > 1
