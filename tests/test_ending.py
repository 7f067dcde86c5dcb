"""How a run ends, well and badly: real controllers and trainer ranks, real signals. What else there is of it:

* the core's endings, limits, tails: `core/test_training.py`, `simulation/`; waits: `service/test_waits.py`
* signals to the controller, finished runs that are started again, superseded controllers: `test_server.py`
* killed at every file event of a save: `chaos/`, `checkpoints/test_checkpoint_crashes.py`; in an asynchronous one: `test_sharded_run.py`
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ending_rank
import pytest
from controller_process import ControllerProcess, Worker, refused, serving, write_config

from cosmos_ctrl.checkpoints.discovery import discover
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.core.errors import ResumeMetadataMismatch
from cosmos_ctrl.exits import ExitCode
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_worker.errors import EXIT_ENDED

#: Of every wait: seconds, not minutes.
DEADLINE_S = 20.0

KILLED = -signal.SIGKILL


class Rank:
    """One `ending_rank.py`."""

    def __init__(self, controller: ControllerProcess, rank: int, mode: str, flags: tuple[str, ...] = ()) -> None:
        self.out = controller.run.parent / f"rank-{rank}-{controller.execution_id}"
        environment = os.environ | {
            "COSMOS_CTRL_ADDRESS": controller.address,
            "COSMOS_CTRL_EXECUTION_ID": controller.execution_id,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MEETING": str(controller.run.parent / "meeting"),
            "GO": str(controller.run.parent / "go"),
            "GRPC_VERBOSITY": "NONE",
            "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
        }
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, *flags, ending_rank.__file__, mode], stdout=out, stderr=out, env=environment
            )

    @property
    def said(self) -> str:
        return self.out.read_text()

    def wait_for(self, what: str) -> None:
        """Until it has said so."""
        until(lambda: what in self.said, lambda: f"no {what!r} in:\n{self.said}")

    def exit_code(self, within_s: float = DEADLINE_S) -> int:
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it does not end:\n{self.said}")


def until(holds: Callable[[], object], why: Callable[[], str]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, why()
        time.sleep(0.01)


@contextmanager
def two_ranks(
    controller: ControllerProcess, modes: tuple[str, str] = ("", ""), flags: tuple[str, ...] = ()
) -> Iterator[tuple[Rank, Rank]]:
    ranks = tuple(Rank(controller, rank, mode, flags) for rank, mode in enumerate(modes))
    try:
        yield ranks[0], ranks[1]
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.wait()


def generate(controller: ControllerProcess, ranks: tuple[Rank, Rank], groups: int) -> Worker:
    """The work of so many groups, once the ranks agree: before, there is none."""
    for rank in ranks:
        rank.wait_for("agreed")
    rollout = Worker(controller, pb.ROLE_ROLLOUT)
    assert len(rollout.rollout(groups)) == groups
    return rollout


def steps(run: Path) -> list[int]:
    return [m["metadata"]["completed_training_steps"] for m in _manifests(run)]


def _manifests(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in run.glob("checkpoints/*/manifest.json")]
    return sorted(found, key=lambda m: (m["execution_number"], m["metadata"]["completed_training_steps"]))


def newest(run: Path, compatibility: dict[str, Any]) -> int:
    """Step of what the next execution resumes from."""
    chosen = discover(LocalStore(run), compatibility=compatibility, on_corrupt="error").chosen
    assert chosen is not None
    return chosen.manifest.metadata.completed_training_steps


# -- stopped well


def test_a_signal_to_one_rank_saves_at_the_real_step_zero_too_and_the_first_reason_wins(tmp_path: Path) -> None:
    config = write_config(tmp_path, checkpoints={"every_steps": 0}, train={"max_steps": 3})
    with serving(config) as controller, two_ranks(controller, ("", "fork")) as (leader, other):
        rollout = generate(controller, (leader, other), 1)  # ready, too little for a step, and outstanding
        # What it forked off is terminated, and that is none of the run's business.
        assert f"children: [{-signal.SIGTERM}]" in other.said
        other.process.send_signal(signal.SIGUSR1)
        watch = controller.stub.WatchRun(pb.WatchRunRequest(), timeout=DEADLINE_S)
        assert any(response.state.phase != pb.PHASE_RUNNING for response in watch)
        controller.signal(signal.SIGTERM)
        for rank in (leader, other):
            assert rank.exit_code() == 0, rank.said
            assert "ended after 0 training steps: stop requested (SIGUSR1 to trainer policy/0/1)" in rank.said
        rollout.end()
        assert controller.exit_code() == ExitCode.ENDED
        (manifest,) = controller.manifests()
        metadata = manifest["metadata"]
        assert (metadata["completed_training_steps"], metadata["remaining_completions"]) == (0, 16)
        assert (manifest["repeat_bound_completions"], manifest["horizon_training_steps"]) == (2, 3)
    # The limit is another one now, and the schedule's horizon is not.
    config = write_config(tmp_path, checkpoints={"every_steps": 0}, train={"max_steps": 50})
    with serving(config) as controller, two_ranks(controller) as (leader, other):
        rollout = generate(controller, (leader, other), 3)
        for rank in (leader, other):
            rank.wait_for("step 1")
            assert "horizon: 3" in rank.said
        for number in (signal.SIGTERM, signal.SIGUSR1):  # within a second they are one
            leader.process.send_signal(number)
        for rank in (leader, other):
            assert rank.exit_code() == 0, rank.said
            assert "ended after 1 training steps: stop requested (SIG" in rank.said
            assert "to trainer policy/0/0)" in rank.said
        rollout.end()
        assert controller.exit_code() == ExitCode.ENDED
        assert steps(controller.run) == [0, 1]
        last = controller.manifests()[-1]
        assert (last["metadata"]["remaining_completions"], last["horizon_training_steps"]) == (12, 3)


# -- the last save goes wrong


def kill_one(controller: ControllerProcess, leader: Rank, other: Rank) -> str:
    other.process.kill()
    return "was not heard for"


def kill_the_controller(controller: ControllerProcess, leader: Rank, other: Rank) -> str:
    controller.process.kill()
    other.wait_for("an answer of the controller")
    other.process.send_signal(signal.SIGTERM)  # as torchrun does once a sibling has ended
    other.wait_for("SIGTERM after the end")
    return ""


def end_the_sibling(controller: ControllerProcess, leader: Rank, other: Rank) -> str:
    assert other.exit_code() == 1
    leader.process.send_signal(signal.SIGTERM)
    return nothing_more(controller, leader, other)


def pause_one(controller: ControllerProcess, leader: Rank, other: Rank) -> str:
    other.process.send_signal(signal.SIGSTOP)
    assert leader.exit_code() == EXIT_ENDED, leader.said
    other.process.send_signal(signal.SIGCONT)
    return "was not heard for"


def nothing_more(controller: ControllerProcess, leader: Rank, other: Rank) -> str:
    return "the last save, of step 2, was abandoned: trainer policy/1: OSError: [Errno 28]"


def run_out_of_grace(controller: ControllerProcess, leader: Rank, other: Rank) -> str:
    other.process.send_signal(signal.SIGUSR1)
    return "the stop was not finished within its grace; unfinished saves are abandoned"


def signal_twice(controller: ControllerProcess, leader: Rank, other: Rank) -> str:
    def told_and_gone() -> bool:
        other.process.send_signal(signal.SIGTERM)  # within a second they are one
        return other.process.poll() is not None

    until(told_and_gone, lambda: other.said)
    return "ended before the run did: SIGTERM again"


@pytest.mark.parametrize(
    ("modes", "happens", "codes"),
    [
        (("", "full"), nothing_more, (EXIT_ENDED, 1)),
        (("stuck", "full"), end_the_sibling, (EXIT_ENDED, 1)),
        (("", "hang"), kill_one, (EXIT_ENDED, KILLED)),
        (("", "hang"), pause_one, (EXIT_ENDED, EXIT_ENDED)),
        (("", "stuck"), kill_the_controller, (EXIT_ENDED, EXIT_ENDED)),
        (("", "hang"), run_out_of_grace, (EXIT_ENDED, EXIT_ENDED)),
        (("", "hang"), signal_twice, (EXIT_ENDED, EXIT_ENDED)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_g4_g9_a_last_save_that_fails_publishes_nothing_and_everyone_ends_with_a_cause(
    modes: tuple[str, str],
    happens: Callable[[ControllerProcess, Rank, Rank], str],
    codes: tuple[int, int],
    tmp_path: Path,
) -> None:
    config = write_config(
        tmp_path,
        train={"max_steps": 2, "stop_grace_s": 0.5 if happens is run_out_of_grace else 20.0},
        workers={"session_ttl_s": 1.5},
        server={"linger_s": 0.5},
    )
    with serving(config) as controller, two_ranks(controller, modes) as (leader, other):
        # Two steps' work: the first step's checkpoint is committed when the last save has begun.
        generate(controller, (leader, other), 4)
        for rank in (leader, other):
            rank.wait_for("writing")
        (tmp_path / "go").touch()
        cause = happens(controller, leader, other)
        assert (leader.exit_code(), other.exit_code()) == codes, f"{leader.said}\n{other.said}"
        assert controller.exit_code() == (ExitCode.FAILED if cause else KILLED)
        assert cause in controller.log
        assert "Traceback" not in leader.said
        if happens in (pause_one, run_out_of_grace):
            assert "The main thread did not come back" in other.said
        assert steps(controller.run) == [1]
        compatibility = controller.manifests()[0]["compatibility"]
        assert newest(controller.run, compatibility) == 1


# -- agreement fails


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint of step 1 that these ranks can read."""
    directory = tmp_path_factory.mktemp("saved")
    with serving(write_config(directory, train={"max_steps": 1})) as controller, two_ranks(controller) as ranks:
        generate(controller, ranks, 2)
        assert [rank.exit_code() for rank in ranks] == [0, 0]
    return directory


def run_on(saved: Path, directory: Path) -> Path:
    shutil.copytree(saved / "run", directory / "run")
    # A rank that says nothing hears something every third of it.
    return write_config(directory, workers={"session_ttl_s": 2.0})


def test_g3_a_mismatch_is_answered_first_and_ends_every_rank_in_seconds_also_without_asserts(
    saved: Path, tmp_path: Path
) -> None:
    with (
        serving(run_on(saved, tmp_path), optimized=True) as controller,
        two_ranks(controller, ("", "advanced"), ("-O",)) as ranks,
    ):
        for rank in ranks:
            assert rank.exit_code() == EXIT_ENDED
            # What was answered, and not that nobody answers any more; keys, and no values.
            assert "trainer policy/1 restored something else" in rank.said
            assert "restored_optimizer_updates" in rank.said
            assert "agreed" not in rank.said
        assert controller.exit_code() == ExitCode.RESUME_MISMATCH
        assert steps(controller.run) == [1]


@pytest.mark.parametrize("damage", [False, True])
def test_g3_a_rank_that_comes_after_the_mismatch_hears_of_it_too(damage: bool, saved: Path, tmp_path: Path) -> None:
    with serving(run_on(saved, tmp_path)) as controller:
        early = Worker(controller, pb.ROLE_TRAINER, 1, 2)
        if damage:
            damaged = pb.DamagedArtifact(name="policy-1/state.pt", explanation="sha256 differs")
            request = pb.ConfirmResumeRequest(worker=early.identity, damaged=damaged)
            early.stub.ConfirmResume(request, timeout=DEADLINE_S)
            error = refused(early.confirm)
        else:
            error = refused(lambda: early.confirm(completed_optimizer_updates=2))
        # Everyone who is there has heard: it waits for the other one.
        with pytest.raises(subprocess.TimeoutExpired):
            controller.process.wait(0.7)
        late = refused(lambda: Worker(controller, pb.ROLE_TRAINER, 0, 2))
        assert str(late) == str(error)
        assert ("sha256 differs" in str(error)) if damage else isinstance(error, ResumeMetadataMismatch)
        assert controller.exit_code() == (ExitCode.DAMAGE_FOUND if damage else ExitCode.RESUME_MISMATCH)


def test_g9_a_rank_that_hangs_in_a_collective_is_ended_by_its_clients_own_thread(saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with serving(run_on(saved, tmp_path)) as controller, two_ranks(controller, ("collective", "collective")) as ranks:
        hanging, other = ranks
        for rank in ranks:
            rank.wait_for("met")
        # Its sibling says that it restored something else, and lives on: the connection between them stays.
        assert hanging.exit_code() == EXIT_ENDED, hanging.said
        assert "The main thread did not come back" in hanging.said
        assert "in barrier" in hanging.said
        assert "restored something else" in hanging.said
        other.process.kill()
        assert controller.exit_code() == ExitCode.RESUME_MISMATCH
