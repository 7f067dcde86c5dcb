"""The command line: what it prints, and what it exits with."""

from __future__ import annotations

import json
import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import pytest

from cosmos_ctrl import demo
from cosmos_ctrl.cli import main
from cosmos_ctrl.exits import ExitCode


@pytest.fixture(autouse=True)
def nothing_from_the_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("COSMOS_CTRL__")]:
        monkeypatch.delenv(name)


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def test_an_unreachable_address_is_a_clear_error(capsys):
    code, out, error = run(capsys, "resume-state", "127.0.0.1:1")
    assert code == ExitCode.ERROR
    assert out == ""
    assert error.startswith("cosmos-ctrl: 127.0.0.1:1: UNAVAILABLE: ")


def test_an_address_that_is_none_is_a_clear_error(capsys):
    code, _, error = run(capsys, "resume-state", "no address at all")
    assert code == ExitCode.ERROR
    assert "no address at all" in error


def test_a_bad_configuration_exits_with_2_and_names_the_key(capsys, tmp_path):
    config = tmp_path / "config.toml"
    config.write_text("[server]\nport = 'x'\n")
    code, _, error = run(capsys, "serve", "--config", config)
    assert code == ExitCode.CONFIGURATION == 2
    assert f"cosmos-ctrl: {config}:" in error
    assert "server.port = 'x'" in error


def test_a_configuration_that_is_not_there_exits_with_2(capsys, tmp_path):
    code, _, error = run(capsys, "serve", "--config", tmp_path / "nothing.toml")
    assert code == ExitCode.CONFIGURATION
    assert "cannot be read" in error


@pytest.mark.parametrize(
    ("sampling", "what"),
    [
        ("epochs = 1", "sampling.prompts = ''"),
        ("prompts = 'bad.jsonl'", "sampling.epochs = None, sampling.completions = None"),
        ("prompts = 'bad.jsonl'\nepochs = 1\ncompletions = 1", "sampling.epochs = 1, sampling.completions = 1"),
        ("epochs = 1\nprompts = 'nothing.jsonl'", "nothing.jsonl"),
        ("epochs = 1\nprompts = 'bad.jsonl'", "bad.jsonl:1: not JSON"),
    ],
)
def test_a_run_without_budget_or_prompts_exits_with_2(capsys, tmp_path, monkeypatch, sampling, what):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text("x\n")
    (tmp_path / "config.toml").write_text(f"[sampling]\n{sampling}\n")
    code, _, error = run(capsys, "serve", "--config", "config.toml")
    assert code == ExitCode.CONFIGURATION
    assert what in error
    assert not (tmp_path / "runs").exists()


def test_a_bad_variable_exits_with_2(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COSMOS_CTRL__TRAIN__GROUPS_PER_STEP", "none")
    code, _, error = run(capsys, "serve")
    assert code == ExitCode.CONFIGURATION
    assert "train.groups_per_step (from COSMOS_CTRL__TRAIN__GROUPS_PER_STEP) = 'none'" in error


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["resume-state"], ["serve", "--wrong"]])
def test_wrong_arguments_exit_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    capsys.readouterr()


def test_a_report_is_json(capsys, tmp_path):
    executions = tmp_path / "executions"
    executions.mkdir()
    choice = demo.random.Random(0)
    first = demo._Execution(1, None, choice)
    first.run(lambda core: core.commands.steps >= 4)
    (executions / "00000001.jsonl").write_text("".join(json.dumps(event) + "\n" for event in first.journal))
    code, out, _ = run(capsys, "report", tmp_path)
    assert code == 0
    report = json.loads(out)
    assert report["skipped"] == 0
    assert report["completed_training_steps"] == 4
    assert report["executions"][0]["number"] == 1


def test_a_run_without_journals_is_a_clear_error(capsys, tmp_path):
    code, _, error = run(capsys, "report", tmp_path)
    assert code == ExitCode.ERROR
    assert "has no journals" in error


@pytest.mark.parametrize("content", ["", "{}\n", "nonsense\n", '{"event": "start"}\n', '{"event": "issue"}\n'])
def test_journals_that_are_none_are_a_clear_error(capsys, tmp_path, content):
    executions = tmp_path / "executions"
    executions.mkdir()
    (executions / "00000001.jsonl").write_text(content)
    code, _, error = run(capsys, "report", tmp_path)
    assert code == ExitCode.ERROR
    assert error.startswith("cosmos-ctrl: ")
