"""Retention in real controller processes: what stays after crashes, what the journal says, and that it never fails a run."""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from controller_process import Workers, run_to_the_end, serving, started, write_config

from cosmos_ctrl.audit import audit
from cosmos_ctrl.checkpoints.claims import Pin, read_pin
from cosmos_ctrl.checkpoints.document import tombstone
from cosmos_ctrl.checkpoints.names import parse_save_name
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.cli import main
from cosmos_ctrl.exits import ExitCode
from cosmos_ctrl.journal import journal_path, read_journal


def events(run: Path, number: int, kind: str) -> list[str]:
    return [event["path"] for event in read_journal(journal_path(run, number)) if event["event"] == kind]


def test_what_is_resumed_from_stays_and_what_a_dead_execution_left_is_swept(tmp_path: Path) -> None:
    config = write_config(tmp_path, checkpoints={"every_steps": 1, "keep_last": 1})
    with serving(config) as first:
        workers = Workers(first)
        saves = []
        for _ in range(2):
            workers.step()
            saves.append(workers.save())
        workers.step()
        unfinished = workers.trainers[0].next(workers.number).save
        workers.trainers[0].save(workers.number, unfinished)
        first.process.kill()
        first.process.wait()
    run, store = first.run, LocalStore(first.run)
    assert read_pin(store, 1) == Pin(None)
    # A kill may come before the deletion, and before the claim that comes after it nothing was swept.
    assert (run / saves[1].path / "manifest.json").exists()
    assert (run / unfinished.path / "policy-0.pt").exists()
    with serving(config) as second:
        assert second.state().metadata.checkpoint_path == saves[1].path
        assert read_pin(store, 2) == Pin(saves[1].path)
        again = Workers(second)
        later = []
        for _ in range(2):
            again.step()
            later.append(again.trainers[0].next(again.number).save.path)
            if len(later) == 1:
                again.save()
        assert again.to_the_end().completed_training_steps == 4
        assert second.exit_code() == ExitCode.ENDED
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == sorted(
        Path(path).name for path in (saves[1].path, later[1], unfinished.path)
    )
    assert (run / unfinished.path / "manifest.json").read_bytes() == tombstone(2)
    assert [path.name for path in (run / unfinished.path).iterdir()] == ["manifest.json"]
    assert events(run, 2, "swept") == [unfinished.path]
    assert set(events(run, 1, "retired") + events(run, 2, "retired")) == {saves[0].path, later[0]}
    assert audit(run).skipped == 0
    named = [parse_save_name(Path(path).name) for path in (saves[0].path, later[1])]
    assert [(name.execution, name.steps) for name in named if name] == [(1, 1), (2, 4)]


def test_an_operator_deletes_beside_a_live_controller_in_the_middle_of_a_save(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with serving(config) as controller:
        workers = Workers(controller)
        saves = []
        for _ in range(2):
            workers.step()
            saves.append(workers.save().path)
        workers.step()
        saving = workers.trainers[0].next(workers.number).save
        workers.trainers[0].save(workers.number, saving)
        assert main(["gc", str(controller.run), "--keep-last", "1"]) == ExitCode.ENDED
        assert not (controller.run / saves[0]).exists()
        assert (controller.run / saving.path / "policy-0.pt").exists()
        workers.save()
        workers.step()
        workers.to_the_end()
        assert controller.exit_code() == ExitCode.ENDED
    steps = [manifest["metadata"]["completed_training_steps"] for manifest in controller.manifests()]
    assert steps == [2, 3, 4]


def test_retention_that_cannot_look_at_the_run_is_a_warning_and_loses_nothing(tmp_path: Path) -> None:
    config = write_config(tmp_path, checkpoints={"every_steps": 1, "keep_last": 1})
    with serving(config) as controller:
        (controller.run / "deleting").write_text("where a directory should be")
        workers = Workers(controller)
        for _ in range(3):
            workers.step()
            workers.save()
        workers.step()
        workers.to_the_end()
        assert controller.exit_code() == ExitCode.ENDED
        assert "retention could not look at the run" in controller.log
        assert "Traceback" not in controller.log
        assert len(controller.manifests()) == 4
    # The next start does not guess what is being deleted either.
    with started(config) as again:
        assert again.exit_code() == ExitCode.CANNOT_RESUME


def test_everything_is_kept_unless_a_policy_says_otherwise(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    run_to_the_end(config, 4)
    run = tmp_path / "run"
    assert len(list(run.glob("checkpoints/*/manifest.json"))) == 4
    assert json.loads((run / "executions/00000001.resumed.json").read_text())["resumed_from"] is None
    assert not (run / "deleting").exists()
