"""The runner as its users start it: exit codes, the report, the results as JSON, and formats that are read strictly."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import conformance_scenarios
import pytest
import runner

WORKER = [sys.executable, str(Path(__file__).with_name("mutant_worker.py"))]
ONE = ["--only", "no_address", "--"]


def test_a_client_that_passes_is_certified(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main([*ONE, *WORKER]) == 0
    assert "1 passed, 0 failed" in capsys.readouterr().out


def test_a_client_that_fails_is_told_the_rule_and_what_it_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "found.json"
    assert runner.main(["--json", str(found), *ONE, *WORKER, "no_address_is_an_error"]) == 1
    said = capsys.readouterr().out
    assert "rule exit_code: expected 2\n        by 11" in said
    assert "COSMOS_CTRL_ADDRESS is not set" in said
    (result,) = json.loads(found.read_text())
    assert (result["scenario"], result["passed"], result["exit"]) == ("no_address", False, 11)


def test_a_scenario_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        runner.main(["--only", "nothing", "--", *WORKER])
    assert caught.value.code == 2
    assert "no scenario is called nothing" in capsys.readouterr().err


@pytest.mark.parametrize("program", ["no-such-program", "./no-such-program", __file__])
def test_a_program_that_cannot_be_started_is_an_error(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        runner.main([*ONE, program])
    assert caught.value.code == 2
    assert f"{program!r} is no program" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"expects": {}}, "unknown expects"),
        ({"run": {"n_generations": 3}}, "unknown n_generations"),
        ({"script": [{"when": {"message": "ack"}, "do": ["hang"]}]}, "'ack' is none of"),
        ({"script": [{"when": {"message": "lease"}, "do": ["lose_replies"]}]}, "'lose_replies' is none of"),
        ({"script": [{"when": {"message": "lease"}, "do": [{"status": {"codes": "X"}}]}]}, "unknown codes"),
    ],
)
def test_a_typing_error_in_a_scenario_is_refused(
    change: dict[str, object], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = {"name": "x", "why": "y.", "expect": {"exit": 0}} | change
    (tmp_path / "x.json").write_text(json.dumps({"about": "", "scenarios": [scenario]}))
    monkeypatch.setattr(conformance_scenarios, "DIRECTORY", tmp_path)
    with pytest.raises(ValueError, match=complaint):
        conformance_scenarios.load()
