"""The image's command lines are the real ones, and what is built from the sources is whole."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
_PROGRAMS = {"cosmos-ctrl": "cosmos_ctrl.cli", "cosmos-worker": "cosmos_worker.cli"}


def test_the_images_command_lines_exist() -> None:
    lines = re.findall(r"\b(cosmos-(?:ctrl|worker)) (\w+)((?: --[\w-]+ \S+)*)$", DOCKERFILE, re.MULTILINE)
    command = json.loads(re.findall(r"^CMD (.*)$", DOCKERFILE, re.MULTILINE)[0])
    lines.append((command[0], command[1], " " + " ".join(command[2:])))
    assert {(program, name) for program, name, _ in lines} == {
        ("cosmos-ctrl", "serve"),
        ("cosmos-worker", "trainer"),
        ("cosmos-worker", "rollout"),
    }
    for program, name, options in lines:
        done = subprocess.run(
            [sys.executable, "-m", _PROGRAMS[program], name, "--help"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        for option in re.findall(r"--[\w-]+", options):
            assert option in done.stdout, f"{program} {name} has no {option}"


def test_every_path_that_the_image_copies_is_there() -> None:
    for paths in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE):
        for path in paths.split():
            assert (ROOT / path).exists(), path


def test_a_wheel_holds_types_stubs_and_the_bundled_configuration(tmp_path: Path) -> None:
    # From a copy: the build writes beside the sources.
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for package in ("cosmos_ctrl", "cosmos_worker"):
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                target = source / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, source],
        check=True,
        timeout=110,
    )
    [wheel] = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "cosmos_ctrl/py.typed",
        "cosmos_ctrl/v1/reports_pb2.pyi",
        "cosmos_worker/py.typed",
        "cosmos_worker/local/run.toml",
    ):
        assert name in names
    assert not [name for name in names if name.startswith("tests/")]
