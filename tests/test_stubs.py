"""The generated stubs are what the protos say, and load at both ends of the declared protobuf and gRPC range."""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STUBS_PYTHON = ROOT / ".venv-stubs" / "bin" / "python"


@pytest.fixture
def stubs_python() -> str:
    """The environment with the lower end of the range, which `make` creates."""
    if not STUBS_PYTHON.exists():
        if os.environ.get("CI") == "true":
            pytest.fail(f"{STUBS_PYTHON} is missing: run `make .venv-stubs/.ready`")
        pytest.skip(f"{STUBS_PYTHON} is missing: `make test` creates it")
    return str(STUBS_PYTHON)


def test_checked_in_stubs_are_what_the_protos_generate(stubs_python: str, tmp_path: Path) -> None:
    subprocess.run([stubs_python, ROOT / "tools" / "generate.py", tmp_path], check=True, timeout=60)
    fresh = sorted(path.name for path in (tmp_path / "cosmos_ctrl" / "v1").iterdir())
    kept = sorted(path.name for path in (ROOT / "cosmos_ctrl" / "v1").glob("*_pb2*"))
    assert fresh == kept
    same, different, errors = filecmp.cmpfiles(
        tmp_path / "cosmos_ctrl" / "v1", ROOT / "cosmos_ctrl" / "v1", fresh, shallow=False
    )
    assert (sorted(same), different, errors) == (fresh, [], []), "run `make generate`"


def test_a_whole_run_at_the_lower_end_of_the_range(stubs_python: str, tmp_path: Path) -> None:
    assert _smoke(stubs_python, tmp_path) == "ok 6.31.1 1.73.1"


def test_a_whole_run_at_the_upper_end_of_the_range(tmp_path: Path) -> None:
    said, protobuf, _ = _smoke(sys.executable, tmp_path).split()
    assert said == "ok"
    assert protobuf.startswith("7.")


def _smoke(python: str, directory: Path) -> str:
    done = subprocess.run(
        [python, ROOT / "tests" / "range_smoke.py", directory],
        env={**os.environ, "PYTHONPATH": str(ROOT), "GRPC_VERBOSITY": "ERROR"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
