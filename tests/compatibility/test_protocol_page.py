"""docs/protocol.md: its commands run as they stand, and its tables and diagrams are what the code says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from controller_process import serving
from versions import enums_of, newer

from cosmos_ctrl.core.errors import ERRORS_BY_REASON, RetryLaterError
from cosmos_ctrl.service.status import CODES
from cosmos_ctrl.v1 import controller_service_pb2 as pb

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text()
RPCS = {method.name for method in pb.DESCRIPTOR.services_by_name["ControllerService"].methods}

_FILES = re.compile(r"^```\w+ (\S+\.\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMANDS = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_DIAGRAMS = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading."""
    lines = PAGE.partition(f"\n## {heading}\n")[2].splitlines()
    table = [line for line in lines[: _end_of_section(lines)] if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1:]]


def _end_of_section(lines: list[str]) -> int:
    return next((n for n, line in enumerate(lines) if line.startswith("## ")), len(lines))


def test_every_rpc_is_called_by_hand_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the run's directory is relative to where the controller starts
    files = dict(_FILES.findall(PAGE))
    assert files.keys() == {"hand.toml", "prompts.jsonl"}
    for name, text in files.items():
        (tmp_path / name).write_text(text.replace("port = 29700", "port = 0"))
    commands = "".join(_COMMANDS.findall(PAGE))
    assert set(re.findall(r"rpc (\w+)", commands)) == RPCS
    with serving(tmp_path / "hand.toml") as controller:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=tmp_path,
            env={**os.environ, "PATH": path, "COSMOS_CTRL_ADDRESS": controller.address},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        assert controller.exit_code() == 0, controller.log
    for what in (
        '"agreed": true',
        '"train": {',
        '"inline": "dGhyZWU="',
        '"state": "SAVE_STATE_COMMITTED"',
        '"verdict": "VERDICT_CHOSEN"',
        '"role": "ROLE_ROLLOUT"',
        '"phase": "PHASE_ENDED"',
        '"reason": "END_REASON_STOP_REQUESTED"',
        '"trainedCompletions": "2"',
    ):
        assert what in done.stdout, what
    (manifest,) = (tmp_path / "runs" / "hand").glob("checkpoints/*/manifest.json")
    assert (manifest.parent / "state.pt").read_text() == "the model after step 1"


def test_the_table_of_errors_is_the_table_of_the_code() -> None:
    again = {"SEQUENCE_GAP": "from `expected`", "NOT_REGISTERED": "after registering"}
    expected = {}
    for reason, error in ERRORS_BY_REASON.items():
        pause = "after a pause" if issubclass(error, RetryLaterError) else "no"
        expected[f"`{reason}`"] = [CODES[error].name, again.get(reason, pause)]
    table = {reason: rest for reason, *rest in rows("Errors")}
    assert table == {reason: expected[reason] for reason in table}
    assert len(expected) - len(table) == 7, "the page says how many are left out"


def test_the_table_of_what_may_be_added_has_every_enum_that_is_only_answered() -> None:
    of_requests = {"Role", "Outcome", "Disposition", "SamplingOwner"}
    named = {name for cells in rows("Evolution") for name in re.findall(r"^a value of `(\w+)`", cells[0])}
    assert named == {enum.name for enum in enums_of(newer())} - of_requests


def test_the_diagrams_call_what_there_is() -> None:
    diagrams = _DIAGRAMS.findall(PAGE)
    assert len(diagrams) == 3
    for diagram in diagrams:
        assert ";" not in diagram, "it ends a line of Mermaid's"
        opened = len(re.findall(r"^\s*(?:loop|alt|par|opt)\b", diagram, re.MULTILINE))
        assert opened == len(re.findall(r"^\s*end$", diagram, re.MULTILINE))
        assert set(re.findall(r"->>C: (\w+)", diagram)) <= RPCS
        participants = set(re.findall(r"participant (\w+)", diagram))
        for speaker, hearer in re.findall(r"^\s*(\w+)-?-(?:>>|x)(\w+):", diagram, re.MULTILINE):
            assert {speaker, hearer} <= participants
