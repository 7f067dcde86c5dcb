"""The operator's commands: what they print, what they exit with, and what they leave alone."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent / "checkpoints"))
from checkpoint_helpers import CONTENT, commit, resealed, write

from cosmos_ctrl.checkpoints import imports
from cosmos_ctrl.checkpoints.claims import claim_execution, pin_resume
from cosmos_ctrl.checkpoints.discovery import discover, explain
from cosmos_ctrl.checkpoints.document import Parent
from cosmos_ctrl.checkpoints.intents import put_intent
from cosmos_ctrl.checkpoints.manifest import CheckpointManifest, read_manifest
from cosmos_ctrl.checkpoints.stores import local
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.cli import main
from cosmos_ctrl.core.errors import ArtifactMissingError, CheckpointDamagedError, StorageUnavailableError
from cosmos_ctrl.exits import ExitCode
from cosmos_ctrl.operations import split_checkpoint


@pytest.fixture(autouse=True)
def nothing_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("COSMOS_CTRL__")]:
        monkeypatch.delenv(name)


class Cli:
    """Runs the command line."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: Any) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        captured = self._capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    def json(self, *arguments: Any, code: int = 0) -> Any:
        found, out, _ = self(*arguments, "--json")
        assert found == code
        return json.loads(out)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


def save_name(number: int, step: int) -> str:
    return f"e{number:04d}-s{step:08d}-{number:04x}{step:04x}"


def path_of(number: int, step: int) -> str:
    return f"checkpoints/{save_name(number, step)}"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three executions: the last resumed from the first's step 2, and has saved steps 3 and 4."""
    run = tmp_path / "run"
    store = LocalStore(run)
    parent = None
    for number, step in ((1, 1), (1, 2), (3, 3), (3, 4)):
        name = save_name(number, step)
        directory = commit(run, name, step=step, number=number, checkpoint_id=name[-8:], parent=parent)
        parent = Parent(name[-8:], read_manifest(directory)[1])
    for number in (1, 2, 3):
        claim_execution(store, execution_id=f"id-{number}", note={})
    pin_resume(store, 3, execution_id="id-3", checkpoint=path_of(1, 2))
    write(run / path_of(2, 3))
    write(run / path_of(3, 5))
    (run / "checkpoints/latest").write_text("x")
    return run


def contents(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


# -- ls


def test_ls_says_what_is_there_and_why_it_stays(cli: Cli, run: Path) -> None:
    put_intent(LocalStore(run), path_of(1, 1))
    (run / path_of(3, 3) / "rank0.pt").unlink()
    before = contents(run)
    listed = cli.json("ls", run)
    assert (listed["run"], listed["live_execution"], listed["resumed_from"]) == (str(run), 3, path_of(1, 2))
    rows = {row["path"]: row for row in listed["checkpoints"]}
    assert {path: row["state"] for path, row in rows.items()} == {
        path_of(3, 4): "newest",
        path_of(3, 3): "damaged",
        path_of(1, 2): "kept",
        path_of(1, 1): "deleting",
        path_of(2, 3): "unfinished",
        path_of(3, 5): "unfinished",
        "checkpoints/latest": "foreign",
    }
    assert rows[path_of(1, 2)]["why"] == "execution 3 resumed from it"
    assert "missing rank0.pt" in rows[path_of(3, 3)]["why"]
    assert (rows[path_of(3, 4)]["execution"], rows[path_of(3, 4)]["step"]) == (3, 4)
    assert rows[path_of(3, 4)]["parent"] == save_name(3, 3)[-8:]
    assert rows[path_of(3, 5)]["size_bytes"] == sum(map(len, CONTENT.values()))
    code, out, _ = cli("ls", run)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == ["PATH", "EXECUTION", "STEP", "SIZE", "PARENT", "STATE", "WHY"]
    assert [line.split()[0] for line in lines[1:]] == list(rows)
    assert contents(run) == before


def test_ls_says_what_a_policy_would_delete(cli: Cli, run: Path) -> None:
    states = {row["path"]: row["state"] for row in cli.json("ls", run, "--keep-last", 1)["checkpoints"]}
    assert states[path_of(3, 3)] == states[path_of(1, 1)] == "due"
    assert states[path_of(1, 2)] == "kept"


@pytest.mark.parametrize("command", ["ls", "explain", "gc", "verify", "inspect"])
def test_what_is_not_there_is_a_clear_error(cli: Cli, tmp_path: Path, command: str) -> None:
    code, out, error = cli(command, tmp_path / "absent")
    assert code == ExitCode.ERROR
    assert out == ""
    assert "absent: no such run" in error
    assert not (tmp_path / "absent").exists()


# -- inspect


# -- explain


def test_explain_names_every_candidate_and_why_it_is_not_the_one(cli: Cli, run: Path) -> None:
    write(run / path_of(3, 9))
    explained = cli.json("explain", run)
    found = explain(LocalStore(run), compatibility=None, on_corrupt="error")
    assert found.chosen
    assert (explained["run"], explained["chosen"], explained["failure"]) == (str(run), found.chosen.path, None)
    assert [(row["path"], row["verdict"], row["why"]) for row in explained["candidates"]] == [
        (candidate.path, candidate.verdict, candidate.explanation) for candidate in found.candidates
    ]
    verdicts = {row["path"]: row["verdict"] for row in explained["candidates"]}
    assert verdicts[found.chosen.path] == "chosen"
    assert verdicts[path_of(3, 9)] == "uncommitted"
    newest = explained["candidates"][0]
    assert newest.keys() == {"path", "verdict", "why", "execution", "step", "checkpoint_id", "manifest_digest"}
    assert newest["manifest_digest"] == found.chosen.manifest_digest
    code, out, _ = cli("explain", run)
    assert code == 0
    assert all(row["path"] in out and row["why"] in out for row in explained["candidates"])
    assert out.splitlines()[-1] == f"An automatic resume takes {found.chosen.path}"


def test_explain_exits_with_1_when_nothing_may_be_chosen(cli: Cli, run: Path, tmp_path: Path) -> None:
    chosen = cli.json("explain", run)["chosen"]
    (run / chosen / "rank0.pt").unlink()
    explained = cli.json("explain", run, code=1)
    assert explained["chosen"] is None
    assert "rank0.pt" in explained["failure"]
    code, out, _ = cli("explain", run)
    assert code == 1
    assert out.splitlines()[-1] == f"An automatic resume takes nothing, and ends: {explained['failure']}"
    passed_over = cli.json("explain", run, "--on-corrupt", "previous")
    assert passed_over["failure"] is None
    assert passed_over["chosen"] not in (None, chosen)
    config = tmp_path / "config.toml"
    config.write_text('[sampling]\nepochs = 1\n[checkpoints]\non_corrupt = "previous"\n')
    assert cli.json("explain", run, "--config", config) == passed_over
    assert cli("explain", run, "--config", config, "--on-corrupt", "error")[0] == 1


def test_explain_of_a_run_without_checkpoints_says_that_it_starts_fresh(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    code, out, _ = cli("explain", tmp_path / "run")
    assert code == 0
    assert out.splitlines()[-1] == "An automatic resume takes a fresh start: nothing was ever committed"
    assert cli.json("explain", tmp_path / "run") == {
        "run": str(tmp_path / "run"),
        "chosen": None,
        "failure": None,
        "candidates": [],
    }


def test_inspect_shows_the_manifest_and_the_lineage(cli: Cli, run: Path) -> None:
    known = cli.json("inspect", run / path_of(3, 4))
    manifest, digest = read_manifest(run / path_of(3, 4))
    assert known["manifest_digest"] == digest
    assert known["checkpoint_id"] == manifest.checkpoint_id
    assert (known["execution"], known["completed_training_steps"], known["completed_optimizer_updates"]) == (3, 4, 8)
    assert known["compatibility"] == manifest.compatibility
    assert known["application_note"] == {"tracker": "run-1"}
    assert {artifact["name"]: artifact["digest"] for artifact in known["artifacts"]} == {
        name: artifact.digest for name, artifact in manifest.artifacts.items()
    }
    assert [ancestor["path"] for ancestor in known["lineage"]] == [path_of(3, 3), path_of(1, 2), path_of(1, 1)]
    assert (known["damage"], known["deleting"], known["foreign"]) == ("", False, "")
    code, out, _ = cli("inspect", run / path_of(1, 1))
    assert code == 0
    assert "rank0.pt" in out
    assert "started fresh" in out


def test_the_lineage_ends_at_what_is_gone(cli: Cli, run: Path) -> None:
    assert cli("gc", run, "--keep-last", 1)[0] == 0
    lineage = cli.json("inspect", run / path_of(3, 4))["lineage"]
    assert lineage == [{"checkpoint_id": save_name(3, 3)[-8:], "path": None, "execution": None, "step": None}]
    assert "not in this run any more" in cli("inspect", run / path_of(3, 4))[1]


def test_what_has_no_manifest_cannot_be_inspected(cli: Cli, run: Path) -> None:
    code, _, error = cli("inspect", run / path_of(2, 3))
    assert code == ExitCode.ERROR
    assert "never committed" in error
    code, _, error = cli("inspect", run)
    assert code == ExitCode.ERROR
    assert "no checkpoint's directory" in error


# -- verify


def test_verify_reads_every_byte_of_a_run(cli: Cli, run: Path) -> None:
    verified = cli.json("verify", run)
    assert [result["path"] for result in verified["checkpoints"]] == [
        path_of(3, 4),
        path_of(3, 3),
        path_of(1, 2),
        path_of(1, 1),
    ]
    assert all(result["sound"] for result in verified["checkpoints"])
    code, out, error = cli("verify", run)
    assert code == 0
    assert out.count("sound") == 4
    assert f"verifying {path_of(1, 1)} (4 of 4)" in error


FLAWS: dict[str, tuple[Any, dict[str, str]]] = {
    "flipped": (
        lambda d: (d / "rank0.pt").write_bytes(b"first sharD" + b"first shard" * 99),
        {"artifact": "rank0.pt", "what": "digest"},
    ),
    "cut off": (
        lambda d: (d / "sub/rank1.pt").write_bytes(b"x"),
        {"artifact": "sub/rank1.pt", "what": "size in bytes"},
    ),
    "gone": (lambda d: (d / "rank0.pt").unlink(), {"artifact": "rank0.pt", "what": "presence", "found": "nothing"}),
    "more": (lambda d: (d / "more").write_bytes(b"x"), {"artifact": "more", "expected": "nothing", "found": "a file"}),
    "a link": (
        lambda d: ((d / "rank0.pt").unlink(), (d / "rank0.pt").symlink_to("sub/rank1.pt")),
        {"artifact": "rank0.pt", "what": "kind"},
    ),
    "torn manifest": (lambda d: (d / "manifest.json").write_bytes(b"{"), {"artifact": "manifest.json"}),
    "unsafe name": (
        lambda d: resealed(d / "manifest.json", b'"rank0.pt"', b'"../x.pt"'),
        {"artifact": "manifest.json", "expected": "safe names"},
    ),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_verify_names_what_is_damaged_and_exits_with_its_own_code(cli: Cli, run: Path, flaw: str) -> None:
    change, expected = FLAWS[flaw]
    directory = run / path_of(3, 4)
    change(directory)
    for what in (run, directory):
        verified = cli.json("verify", what, code=ExitCode.DAMAGE_FOUND)
        unsound = {result["path"]: result["problems"] for result in verified["checkpoints"] if not result["sound"]}
        assert unsound.keys() == {path_of(3, 4)}
        (problem,) = unsound[path_of(3, 4)]
        assert {key: problem[key] for key in expected} == expected
    assert not (run / "damaged").exists()


def test_verify_names_every_damaged_artifact(cli: Cli, run: Path) -> None:
    for name in CONTENT:
        (run / path_of(3, 4) / name).write_bytes(b"x")
    code, out, _ = cli("verify", run / path_of(3, 4), "--threads", 2)
    assert code == ExitCode.DAMAGE_FOUND
    for name, data in CONTENT.items():
        assert f"{name}: size in bytes expected {len(data)}, found 1" in out


def test_what_verify_records_the_next_start_does_not_resume_from(cli: Cli, run: Path) -> None:
    (run / path_of(3, 4) / "rank0.pt").write_bytes(b"first sharD" + b"first shard" * 99)
    store = LocalStore(run)
    assert discover(store, compatibility=None, on_corrupt="error").chosen  # no byte is read
    assert cli("verify", run, "--record")[0] == ExitCode.DAMAGE_FOUND
    with pytest.raises(CheckpointDamagedError, match="by cosmos-ctrl verify"):
        discover(store, compatibility=None, on_corrupt="error")
    assert explain(store, compatibility=None, on_corrupt="previous").candidates[0].verdict == "damaged"


def test_what_cannot_be_read_is_no_damage(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = local.open_beneath

    def refuse(directory: Path, name: str) -> int:
        if name == "rank0.pt":
            raise OSError(5, "Input/output error")
        return real(directory, name)

    monkeypatch.setattr(local, "open_beneath", refuse)
    code, out, _ = cli("verify", run / path_of(3, 4), "--record")
    assert code == ExitCode.ERROR
    assert "EIO" in out
    assert not (run / "damaged").exists()


# -- gc


def test_a_dry_run_says_what_gc_then_does(cli: Cli, run: Path) -> None:
    before = contents(run)
    planned = cli.json("gc", run, "--keep-last", 1, "--dry-run")
    assert contents(run) == before
    actions = {entry["path"]: entry["action"] for entry in planned["plan"]}
    done = cli.json("gc", run, "--keep-last", 1)
    assert done == {
        "dry_run": False,
        "live_execution": 3,
        "retired": [path_of(1, 1), path_of(3, 3)],
        "swept": [path_of(2, 3)],
        "failures": [],
        "superseded": False,
    }
    assert {path for path, action in actions.items() if action == "retire"} == set(done["retired"])
    assert {path for path, action in actions.items() if action == "sweep"} == set(done["swept"])
    assert cli("gc", run, "--keep-last", 1)[1] == "nothing was to be deleted\n"


def test_gc_without_a_policy_deletes_nothing_committed(cli: Cli, run: Path) -> None:
    code, out, _ = cli("gc", run)
    assert code == 0
    assert out.splitlines() == [
        f"{path_of(2, 3)}: is swept: unfinished, and execution 2 is over: 3 has claimed the run"
    ]
    assert len(list(run.glob("checkpoints/*/rank0.pt"))) == 5


def test_the_policy_is_the_configurations_unless_a_flag_says_otherwise(
    cli: Cli, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[checkpoints]\nkeep_last = 1\nkeep_every = 3\n")
    planned = cli.json("gc", run, "--dry-run", "--config", config)["plan"]
    assert [entry["path"] for entry in planned if entry["action"] == "retire"] == [path_of(1, 1)]
    planned = cli.json("gc", run, "--dry-run", "--config", config, "--keep-every", 1)["plan"]
    assert not [entry for entry in planned if entry["action"] == "retire"]
    monkeypatch.setenv("COSMOS_CTRL__CHECKPOINTS__KEEP_LAST", "1")
    planned = cli.json("gc", run, "--dry-run")["plan"]
    assert [entry["path"] for entry in planned if entry["action"] == "retire"] == [path_of(3, 3), path_of(1, 1)]


def test_a_policy_that_means_nothing_exits_with_2(cli: Cli, run: Path) -> None:
    code, _, error = cli("gc", run, "--keep-every", 5)
    assert code == ExitCode.CONFIGURATION
    assert "keep_last" in error


def test_what_gc_cannot_delete_is_said_and_the_rest_goes(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = Path.unlink

    def refuse(path: Path, *arguments: Any, **keywords: Any) -> None:
        if path == run / path_of(1, 1) / "rank0.pt":
            raise PermissionError(13, "Permission denied")
        unlink(path, *arguments, **keywords)

    monkeypatch.setattr(Path, "unlink", refuse)
    code, out, error = cli("gc", run, "--keep-last", 1)
    assert code == ExitCode.ERROR
    assert f"{path_of(1, 1)} is not deleted" in error
    assert "EACCES" in error
    assert f"{path_of(3, 3)}: is deleted" in out
    monkeypatch.setattr(Path, "unlink", unlink)
    assert cli("gc", run)[1] == f"{path_of(1, 1)}: is deleted: its deletion has begun: the manifest is gone\n"


def test_gc_that_is_overtaken_says_so(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, store = LocalStore.sync, LocalStore(run)

    def overtaken(self: LocalStore, prefix: str) -> None:
        make(self, prefix)
        claim_execution(store, execution_id="newer", note={})

    monkeypatch.setattr(LocalStore, "sync", overtaken)
    code, _, error = cli("gc", run, "--keep-last", 1)
    assert code == ExitCode.SUPERSEDED
    assert "run gc again" in error
    assert (run / path_of(1, 1) / "manifest.json").exists()


# -- import


def cosmos_checkpoint(directory: Path, **changes: Any) -> Path:
    """As cosmos-rl's helper leaves it."""
    directory.mkdir(parents=True)
    content = {"model.pt": b"weights" * 100, "rank_0.pt": b"optimizer" * 50}
    for name, data in content.items():
        (directory / name).write_bytes(data)
    manifest: dict[str, Any] = {
        "schema_version": 1,
        "metadata": {
            "schema_version": 1,
            "checkpoint_path": "/somewhere/else",
            "checkpoint_id": "step 20/é",
            "completed_training_steps": 20,
            "completed_optimizer_updates": 40,
            "remaining_completions": 60,
            "epoch": 2,
            "sampling_owner": "batch_sampler",
            "sampler_state": {"epoch": 2, "position": [1, 2.5, None]},
        },
        "compatibility": {"world_size": 2, "dataset": "gsm8k"},
        "artifacts": {name: hashlib.sha256(data).hexdigest() for name, data in content.items()},
    }
    for place, value in changes.items():
        *outer, last = place.split("__")
        table = manifest
        for part in outer:
            table = table[part]
        if value is None:
            del table[last]
        else:
            table[last] = value
    (directory / "manifest.json").write_text(json.dumps(manifest, sort_keys=True))
    return directory


def test_import_commits_an_equivalent_checkpoint_and_leaves_the_original(cli: Cli, run: Path, tmp_path: Path) -> None:
    source = cosmos_checkpoint(tmp_path / "step_20")
    (source / "notes.txt").write_text("extra files are not the manifest's")
    before = contents(source)
    imported = cli.json("import", source, run)
    assert contents(source) == before
    path = run / imported["path"]
    assert path.name.startswith("imported-step-20-")
    manifest = CheckpointManifest.load(
        path, required_artifacts=["model.pt", "rank_0.pt"], compatibility={"world_size": 2, "dataset": "gsm8k"}
    )
    metadata = manifest.metadata
    assert (metadata.checkpoint_id, metadata.epoch, metadata.sampling_owner) == ("step 20/é", 2, "batch_sampler")
    assert (metadata.completed_training_steps, metadata.completed_optimizer_updates) == (20, 40)
    assert (metadata.remaining_completions, metadata.sampler_state) == (60, {"epoch": 2, "position": [1, 2.5, None]})
    assert (manifest.execution_number, manifest.execution_id, manifest.parent) == (0, "", None)
    assert imported["manifest_digest"] == manifest.digest()
    # Every execution's is newer; and nobody deletes what no controller made.
    found = discover(LocalStore(run), compatibility=None, on_corrupt="error")
    assert found.chosen
    assert found.chosen.path == path_of(3, 4)
    assert found.candidates[4].path == imported["path"]
    assert cli("gc", run, "--keep-last", 1)[0] == 0
    assert path.exists()
    assert cli("import", source, run)[0] == 0  # once more is one more


def test_import_makes_the_run_and_it_can_be_resumed_from(cli: Cli, tmp_path: Path) -> None:
    source = cosmos_checkpoint(tmp_path / "c")
    code, out, _ = cli("import", source, tmp_path / "new/run")
    assert code == 0
    assert "step 20, 2 artifacts, 1.1 KiB" in out
    chosen = discover(LocalStore(tmp_path / "new/run"), compatibility=None, on_corrupt="error").chosen
    assert chosen
    assert chosen.manifest.metadata.completed_training_steps == 20


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"schema_version": 2}, "schema version 2"),
        ({"schema_version": None}, "schema_version"),
        ({"execution_number": 1}, "nothing is to be imported"),
        ({"metadata__epoch": True}, "metadata.epoch"),
        ({"metadata__epoch": 0}, "metadata.epoch"),
        ({"metadata__checkpoint_id": ""}, "metadata.checkpoint_id"),
        ({"metadata__sampler_state": [1]}, "metadata.sampler_state"),
        ({"metadata__completed_training_steps": 1.0}, "metadata.completed_training_steps"),
        ({"metadata__sampling_owner": "me"}, "metadata.sampling_owner"),
        ({"metadata__more": 1}, "metadata.more"),
        ({"more": 1}, "more"),
        ({"artifacts": {}}, "artifacts"),
        ({"artifacts": {"../model.pt": "0" * 64}}, "'../model.pt'"),
        ({"artifacts": {"model.pt": "0" * 63}}, "artifacts.model.pt"),
        ({"artifacts": {"model.pt": "0" * 64}}, "model.pt is damaged: digest"),
        ({"artifacts": {"absent.pt": "0" * 64}}, "missing absent.pt"),
    ],
)
def test_what_is_no_such_checkpoint_is_refused_and_nothing_is_committed(
    cli: Cli, tmp_path: Path, changes: dict[str, Any], what: str
) -> None:
    source = cosmos_checkpoint(tmp_path / "c", **changes)
    code, _, error = cli("import", source, tmp_path / "run")
    assert code == ExitCode.ERROR
    assert what in error
    assert not list(tmp_path.glob("run/checkpoints/*/manifest.json"))


def test_our_own_manifest_is_not_imported(cli: Cli, run: Path, tmp_path: Path) -> None:
    assert "nothing is to be imported" in cli("import", run / path_of(3, 4), tmp_path / "new")[2]
    assert "never committed" in cli("import", run / path_of(2, 3), tmp_path / "new")[2]
    assert "no such checkpoint" in cli("import", tmp_path / "absent", tmp_path / "new")[2]


def test_links_and_failing_copies_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = cosmos_checkpoint(tmp_path / "c")
    (source / "model.pt").rename(tmp_path / "elsewhere")
    store = LocalStore(tmp_path / "run")
    with pytest.raises(ArtifactMissingError):
        imports.import_checkpoint(store, source)
    (source / "model.pt").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointDamagedError, match="symbolic link"):
        imports.import_checkpoint(store, source)
    (source / "model.pt").unlink()
    (tmp_path / "elsewhere").rename(source / "model.pt")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(imports.shutil, "copyfile", full)
    with pytest.raises(StorageUnavailableError, match="ENOSPC"):
        imports.import_checkpoint(store, source)
    assert not list(tmp_path.glob("run/checkpoints/*/manifest.json"))


# -- all of them


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "gc", "import"])
def test_each_command_explains_itself(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_a_checkpoint_is_found_by_any_spelling_of_its_path(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run / "checkpoints")
    for spelling in (Path(save_name(3, 4)), run / path_of(3, 4), Path(f"../{path_of(3, 4)}/")):
        found = split_checkpoint(spelling)
        assert found
        assert found[1] == path_of(3, 4)
        assert Path(found[0].uri).resolve() == run.resolve()
    assert split_checkpoint(run) is None
