"""Concurrent publishers and claimants: one winner, the others told the truth."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from checkpoint_helpers import REPOSITORY, load, publish, write

from cosmos_ctrl.checkpoints.claims import claim_execution, is_superseded, newest_claim
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.core.errors import CheckpointConflictError

PROCESSES, ROUNDS = 6, 200


def race(root: Path, task: str, rounds: int, how: str) -> Any:
    script = Path(__file__).with_name("checkpoint_races.py")
    arguments = [sys.executable, str(script), str(root), task, str(PROCESSES), str(rounds), how]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, env=environment, check=True)
    return json.loads(done.stdout)


def test_g4_of_racing_processes_exactly_one_publishes(tmp_path: Path) -> None:
    outcomes = race(tmp_path, "put", ROUNDS, "different")
    for number, told in enumerate(zip(*outcomes, strict=True)):
        assert Counter(told) == {"created": 1, "conflict": PROCESSES - 1}, number
        winner = told.index("created")
        text = (tmp_path / str(number) / "manifest.json").read_text()
        assert text.endswith(f"of round {number}"), winner
    assert not list(tmp_path.rglob(".cosmos*"))


def test_of_racing_processes_with_the_same_content_all_succeed_and_one_created_it(tmp_path: Path) -> None:
    outcomes = race(tmp_path, "put", ROUNDS, "identical")
    for told in zip(*outcomes, strict=True):
        assert Counter(told) == {"created": 1, "identical": PROCESSES - 1}


def test_racing_claims_are_unique_and_leave_no_gap(tmp_path: Path) -> None:
    outcomes = race(tmp_path, "claim", 20, "different")
    assert sorted(number for numbers in outcomes for number in numbers) == list(range(1, 20 * PROCESSES + 1))
    assert all(numbers == sorted(numbers) for numbers in outcomes)
    for path in (tmp_path / "executions").iterdir():
        assert int(path.stem) == json.loads(path.read_text())["number"]


@pytest.mark.parametrize("identical", [True, False])
def test_racing_threads_publish_one_checkpoint(identical: bool, tmp_path: Path) -> None:
    for number in range(10):
        directory = write(tmp_path / str(number))
        barrier = threading.Barrier(4)

        def attempt(who: int, directory: Path = directory, barrier: threading.Barrier = barrier) -> int | None:
            barrier.wait()
            try:
                return publish(directory, step=1 if identical else who).metadata.completed_training_steps
            except CheckpointConflictError:
                return None

        with ThreadPoolExecutor(4) as pool:
            told = [step for step in pool.map(attempt, range(1, 5)) if step is not None]
        assert len(told) == (4 if identical else 1)
        assert set(told) == {load(directory).metadata.completed_training_steps}


def test_claims_count_from_one_and_supersede(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    assert newest_claim(store) == 0
    assert (
        claim_execution(store, execution_id="a", note={"host": "h", "pid": 1, "started_at": "2026-11-29T19:00:00Z"})
        == 1
    )
    assert not is_superseded(store, 1)
    assert claim_execution(store, execution_id="b", note={}) == 2
    assert is_superseded(store, 1)
    assert not is_superseded(store, 2)
    (tmp_path / "run/executions/notes.txt").write_text("not a claim")
    (tmp_path / "run/executions/00000041.json").write_text("only the name counts")
    assert claim_execution(store, execution_id="c", note={}) == 42
    claim = json.loads((tmp_path / "run/executions/00000001.json").read_text())
    assert claim == {"number": 1, "execution_id": "a", "host": "h", "pid": 1, "started_at": "2026-11-29T19:00:00Z"}


def test_a_claim_whose_reply_was_lost_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def link(source: Path, target: Path) -> None:
        real(source, target)
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(os, "link", link)
    assert claim_execution(LocalStore(tmp_path), execution_id="a", note={}) == 1
    assert newest_claim(LocalStore(tmp_path)) == 1


def test_a_claim_needs_an_id_and_keeps_its_own_keys(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="empty"):
        claim_execution(LocalStore(tmp_path), execution_id="", note={})
    with pytest.raises(ValueError, match="number"):
        claim_execution(LocalStore(tmp_path), execution_id="a", note={"number": 3})
    assert newest_claim(LocalStore(tmp_path)) == 0
