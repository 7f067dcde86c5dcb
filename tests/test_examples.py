"""The example of a plain DDP loop, before and after: both run as they stand, the second one killed and resumed."""

from __future__ import annotations

import difflib
import importlib.util
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from controller_process import ControllerProcess
from script_process import start_script

from cosmos_ctrl.audit import audit
from cosmos_ctrl.checkpoints.discovery import list_checkpoints
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_worker.rollout import SyncRollout

ROOT = Path(__file__).resolve().parent.parent
DDP = ROOT / "examples" / "ddp"
DEADLINE_S = 60


class Job:
    """The example's processes in a copy of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(shutil.copytree(DDP, directory))
        self._scripts: list[tuple[BaseProcess, Path]] = []
        self._controllers: list[ControllerProcess] = []

    def start(self, script: str, **environment: str) -> BaseProcess:
        log = self.directory / f"{len(self._scripts)}.log"
        own = {"GRPC_VERBOSITY": "ERROR", "OMP_NUM_THREADS": "1"}
        process = start_script(self.directory / script, log, own | environment)
        self._scripts.append((process, log))
        return process

    def ranks(self, script: str, **environment: str) -> list[BaseProcess]:
        """Two of them, as torchrun starts them."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
        return [self.start(script, RANK=str(rank), **meeting, **environment) for rank in range(2)]

    def controller(self) -> dict[str, str]:
        """Starts it; what its workers are given."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.directory)
            patch.setenv("COSMOS_CTRL__SERVER__PORT", "0")
            self._controllers.append(ControllerProcess(self.directory / "run.toml"))
        self._controllers[-1].wait_until_ready()
        return {"COSMOS_CTRL_ADDRESS": self._controllers[-1].address}

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.01)

    def last_line(self, process: BaseProcess) -> str:
        """Of what it says until it ends, as it should."""
        process.join(DEADLINE_S)
        assert process.exitcode == 0, self.said()
        lines = next(log for started, log in self._scripts if started is process).read_text().splitlines()
        return lines[-1] if lines else ""

    def said(self) -> str:
        return "\n".join(log.read_text() for _, log in self._scripts)

    def kill(self) -> None:
        """SIGKILL for all that are left."""
        for process, _ in self._scripts:
            process.kill()
            process.join(30)
        for controller in self._controllers:
            controller.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    started = Job(tmp_path / "ddp")
    yield started
    started.kill()


def test_the_loop_is_killed_with_work_outstanding_and_ends_with_the_weights_of_the_one_before(job: Job) -> None:
    before = job.ranks("train_before.py")
    expected = [job.last_line(process) for process in before]
    assert expected[0] == expected[1]
    assert re.fullmatch(r"steps 24 weights [0-9a-f]{64}", expected[0])

    spec = importlib.util.spec_from_file_location("ddp_app", job.directory / "app.py")
    assert spec is not None
    assert spec.loader is not None
    app = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(job.directory)
        spec.loader.exec_module(app)
    place = job.controller()
    job.ranks("train_after.py", **place)
    with SyncRollout.from_env(environ=place) as worker:
        # Five steps of four and two more: the last two are reported and not trained when everything dies.
        for group in islice(worker.groups(in_flight=4), 22):
            one = app.rollout(group.prompt()["prompt"])
            worker.report_group(group, rewards=[one["reward"]], payloads=[one])
    run = LocalStore(job.directory / "runs" / "ddp")
    job.wait_for(lambda: list_checkpoints(run) and list_checkpoints(run)[0].manifest.order == (1, 4))
    job.kill()

    place = job.controller()
    rollout, ranks = job.start("rollout.py", **place), job.ranks("train_after.py", **place)
    assert [job.last_line(process) for process in ranks] == expected, "other weights than without the interruption"
    job.last_line(rollout)
    assert list_checkpoints(run)[0].manifest.order == (2, 24)
    counted = audit(job.directory / "runs" / "ddp")
    assert (counted.skipped, counted.repeated, counted.remaining_completions) == (0, 0, 0)
    assert len(counted.executions) == 2


def test_the_diff_of_the_docs_is_the_diff_of_the_two_loops() -> None:
    page = (ROOT / "docs" / "integrate.md").read_text()
    names = ("train_before.py", "train_after.py")
    texts = [(DDP / name).read_text().splitlines(keepends=True) for name in names]
    assert f"```diff\n{''.join(difflib.unified_diff(*texts, *names))}```\n" in page


def test_both_ends_of_the_example_count_the_same_epochs() -> None:
    epochs = [
        re.search(r"^epochs = (\d+)$", (DDP / name).read_text(), re.MULTILINE | re.IGNORECASE)
        for name in ("run.toml", "app.py")
    ]
    assert len({found and found[1] for found in epochs}) == 1
