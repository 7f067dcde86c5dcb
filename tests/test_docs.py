"""The documentation's code runs: the quickstart's files, as they stand, killed and resumed."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cosmos_ctrl.checkpoints.discovery import list_checkpoints
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_worker.rollout import SyncRollout

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(r"^```\w+ (\S+\.\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_EPOCHS = 60
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@pytest.fixture
def quickstart(tmp_path: Path) -> Path:
    """A directory with the quickstart's files, on a port that is free."""
    files = dict(_BLOCK.findall((ROOT / "docs" / "quickstart.md").read_text()))
    assert files.keys() == {"prompts.jsonl", "run.toml", "trainer.py", "rollout.py"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def kill(processes: list[subprocess.Popen[bytes]]) -> None:
    """SIGKILL them; torchrun's ranks have sessions of their own and are found through it."""
    for process in processes:
        if process.poll() is None:
            for children in Path(f"/proc/{process.pid}/task").glob("*/children"):
                for pid in map(int, children.read_text().split()):
                    os.kill(pid, signal.SIGKILL)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    kill(started)


def test_the_quickstart_as_it_stands_is_killed_and_resumed(
    quickstart: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "COSMOS_CTRL__SERVER__PORT": str(port),
        "COSMOS_CTRL__SAMPLING__EPOCHS": str(_EPOCHS),
        "COSMOS_CTRL_ADDRESS": f"127.0.0.1:{port}",
        "GRPC_VERBOSITY": "ERROR",
        "OMP_NUM_THREADS": "1",
    }
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "trainer.py"]

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        log = (quickstart / f"{len(processes)}.log").open("wb")
        with log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=quickstart,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        processes.append(process)
        return process

    def logs() -> str:
        return "\n".join(path.read_text() for path in sorted(quickstart.glob("*.log")))

    serve = ("-m", "cosmos_ctrl.cli", "serve", "--config", "run.toml")
    first = [start(*serve), start(*torchrun), start("rollout.py")]
    deadline = time.monotonic() + 60
    while not list(quickstart.glob("runs/quickstart/checkpoints/*/manifest.json")):
        assert time.monotonic() < deadline, logs()
        with pytest.raises(subprocess.TimeoutExpired):
            first[0].wait(0.01)
    kill(first)

    controller, trainers, rollout = start(*serve), start(*torchrun), start("rollout.py")
    for process in (controller, trainers, rollout):
        assert process.wait(110) == 0, logs()
    assert "BUDGET_EXHAUSTED" in logs()
    checkpoints = list_checkpoints(LocalStore(quickstart / "runs" / "quickstart"))
    numbers = {found.manifest.execution_number for found in checkpoints}
    assert numbers == {1, 2}
    newest = checkpoints[0].manifest
    assert newest.metadata.remaining_completions == 0
    # Nothing skipped: four prompts an epoch, one step each, replayed steps counted once in the lineage.
    assert newest.metadata.completed_training_steps >= _EPOCHS


def test_the_trainer_of_the_page_on_saves_saves_while_it_trains_and_resumes(
    quickstart: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    page = (ROOT / "docs" / "saves.md").read_text()
    (quickstart / "trainer.py").write_text(dict(_BLOCK.findall(page))["trainer.py"])
    config = (quickstart / "run.toml").read_text().replace("policy = 2", "policy = 1")
    environment = {**os.environ, "GRPC_VERBOSITY": "ERROR", "OMP_NUM_THREADS": "1", "COSMOS_CTRL__SERVER__PORT": "0"}
    said = []
    for number, limit in enumerate(("max_steps = 3", "")):
        (quickstart / "run.toml").write_text(config.replace("[train]", f"[train]\n{limit}"))
        ready = quickstart / f"ready-{number}.json"
        serve = ["-m", "cosmos_ctrl.cli", "serve", "--config", "run.toml", "--ready-file", str(ready)]
        began = len(processes)
        for arguments in (serve, ["trainer.py"], ["rollout.py"]):
            log = quickstart / f"{len(processes)}.log"
            with log.open("wb") as file:
                process = subprocess.Popen(
                    [sys.executable, *arguments],
                    cwd=quickstart,
                    env=environment | {"PYTHONPATH": str(ROOT)},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            processes.append(process)
            deadline = time.monotonic() + 60
            while not ready.exists():
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()  # noqa: PT018
                time.sleep(0.01)
            environment["COSMOS_CTRL_ADDRESS"] = json.loads(ready.read_text())["address"]
        for process in processes[began:]:
            logs = "\n".join(path.read_text() for path in sorted(quickstart.glob("*.log")))
            assert process.wait(60) == 0, logs
        said.append((quickstart / f"{began + 1}.log").read_text())
    assert re.search(r"step limit.*from step 0 at rate \[0\.00097", said[0])
    # The schedule went on: six epochs, a step each.
    assert re.search(rf"budget exhausted.*from step 3 at rate \[{0.001 * 0.99**6:.8f}", said[1]), said
    steps = {
        (found.manifest.execution_number, found.manifest.metadata.completed_training_steps)
        for found in list_checkpoints(LocalStore(quickstart / "runs" / "quickstart"))
    }
    assert {(1, 3), (2, 6)} <= steps


def test_the_lines_of_the_page_on_saves_about_sharded_models_are_what_the_tests_run() -> None:
    page, trainer = (ROOT / "docs" / "saves.md").read_text(), (ROOT / "tests" / "sharded_trainer.py").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    ran = {line.strip() for line in trainer.replace("save.stamp), write)", "save.stamp))").splitlines()}
    assert {line.strip() for block in blocks for line in block.splitlines()} - {"..."} <= ran


def test_the_samplers_of_the_docs_draw(tmp_path: Path) -> None:
    files = dict(_BLOCK.findall((ROOT / "docs" / "samplers.md").read_text()))
    command = [sys.executable, "-W", "ignore", "-c", files["samplers.py"]]
    drawn = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert drawn.returncode == 0, drawn.stderr
    *draws, compatibility = map(ast.literal_eval, drawn.stdout.splitlines())
    assert [[len(draw) for draw in two] for two in draws] == [[1, 1], [4, 4], [4, 4]]
    assert {"num_workers", "batch_size", "drop_last", "length", "fingerprint", "sampler"} <= set(compatibility)


def _dies_at_the_50th(write):  # type: ignore[no-untyped-def]  # its source runs in the driver's process
    import os
    import signal

    written = []

    def print_or_die(*texts, **options):  # type: ignore[no-untyped-def]
        write(*texts, **options)
        written.append(texts)
        if len(written) == 50:
            os.kill(os.getpid(), signal.SIGKILL)

    return print_or_die


def test_a_driver_without_a_server_is_killed_and_resumed(tmp_path: Path) -> None:
    files = dict(_BLOCK.findall((ROOT / "docs" / "embed.md").read_text()))
    assert len(files["driver.py"].splitlines()) <= 25
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    dying = (
        f"import builtins, runpy\n{inspect.getsource(_dies_at_the_50th)}\nbuiltins.print = _dies_at_the_50th(print)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", "import runpy; runpy.run_path('driver.py')"]
    killed = [*command[:-1], dying + command[-1]]
    first = subprocess.run(killed, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert first.returncode == -signal.SIGKILL, first.stderr
    lost = first.stdout.splitlines()
    assert len(lost) == 50
    boundary = list_checkpoints(LocalStore(tmp_path / "runs/embedded"))[0].manifest.metadata
    assert 0 < boundary.remaining_completions < 120
    second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert second.returncode == 0, second.stderr
    again = second.stdout.splitlines()
    assert len(again) == boundary.remaining_completions
    # Nothing skipped: three epochs of forty prompts, counted from what both printed.
    counts = Counter(lost) + Counter(again)
    assert len(counts) == 40
    assert min(counts.values()) >= 3


def test_the_adapter_of_the_docs_resumes_what_its_own_format_holds(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    files = dict(_BLOCK.findall((ROOT / "docs" / "controller_resume_adapter.md").read_text()))
    assert files.keys() == {"controller.py", "trainer.py"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    def execute(max_steps: int) -> list[str]:
        def start(name: str, environment: dict[str, str], *arguments: str) -> subprocess.Popen[bytes]:
            with (tmp_path / f"{name}-{max_steps}.log").open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, name, *arguments],
                    cwd=tmp_path,
                    env={**os.environ, "PYTHONPATH": str(ROOT), "GRPC_VERBOSITY": "ERROR", **environment},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            processes.append(process)
            return process

        ready = tmp_path / "ready.json"
        ready.unlink(missing_ok=True)
        controller = start("controller.py", {}, str(max_steps))
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert time.monotonic() < deadline
            with pytest.raises(subprocess.TimeoutExpired):
                controller.wait(0.01)
        told = json.loads(ready.read_text())
        place = {"COSMOS_CTRL_ADDRESS": told["address"], "COSMOS_CTRL_EXECUTION_ID": told["execution_id"]}
        trainer = start("trainer.py", place)
        with SyncRollout.from_env(environ=place) as rollout:
            for group in rollout.groups(in_flight=2):
                rollout.report_group(group, rewards=[1.0] * len(group.pending))
        said = [tmp_path / f"{name}-{max_steps}.log" for name in ("trainer.py", "controller.py")]
        for process, log in zip((trainer, controller), said, strict=True):
            assert process.wait(60) == 0, log.read_text()
        return said[0].read_text().splitlines()

    first, second = execute(3), execute(6)
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        "step-2",
        "step-3",
        "step-4",
        "step-6",
    ]
    assert not list(tmp_path.rglob("manifest.json"))
    assert second[0] == "resumed from step 3"
    trained = Counter(word for line in first + second for word in line.split() if word.startswith("prompt-"))
    assert len(trained) == 12, "nothing is skipped"


def test_links_between_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in _LINK.findall(document.read_text()):
            assert (document.parent / target).exists(), f"{document}: {target}"


def test_every_configuration_key_of_the_docs_exists() -> None:
    from cosmos_ctrl.config import Config

    known = {
        f"{section}.{key}"
        for section, field in Config.model_fields.items()
        if hasattr(field.annotation, "model_fields")
        for key in field.annotation.model_fields
    }
    sections = {name.split(".")[0] for name in known}
    for document in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for name in re.findall(r"`(\w+\.\w+)`", document.read_text()):
            if name.split(".")[0] in sections and not name.endswith((".md", ".py", ".proto", ".toml")):
                assert name in known, f"{document}: {name}"
