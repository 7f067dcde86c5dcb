"""A rank's files of a checkpoint: verified side by side, whole or not at all; and torch's distributed checkpoints over them."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from cosmos_ctrl.checkpoints.artifacts import Artifact
from cosmos_ctrl.checkpoints.digests import digest_bytes
from cosmos_ctrl.checkpoints.manifest import CheckpointManifest
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.core.errors import ArtifactForeignError, ArtifactMissingError, CheckpointDamagedError
from cosmos_ctrl.core.resume import ControllerResumeMetadata
from cosmos_worker import artifacts as worker_artifacts
from cosmos_worker import dcp
from cosmos_worker.artifacts import open_artifacts
from cosmos_worker.errors import UsageError
from cosmos_worker.settings import WorkerPlace, rank_folder
from cosmos_worker.shards import HashingFile
from cosmos_worker.stamps import Stamp

DEADLINE_S = 30
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def place(rank: int) -> WorkerPlace:
    return WorkerPlace(role="trainer", group="policy", rank=rank, world_size=2)


def manifest_of(directory: Path, *, execution: int = 1) -> CheckpointManifest:
    """Of everything that lies there."""
    files = {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    metadata = ControllerResumeMetadata(
        completed_training_steps=1,
        completed_optimizer_updates=1,
        remaining_completions=1,
        epoch=1,
        sampling_owner="sampler",
        sampler_state={},
        checkpoint_path="c",
        checkpoint_id="c",
    )
    artifacts = {name: Artifact(len(data), digest_bytes(data), 0, "policy") for name, data in files.items()}
    return CheckpointManifest(
        metadata=metadata,
        artifacts=artifacts,
        compatibility={},
        execution_number=execution,
        execution_id="this" if execution else "",
    )


class Folder:
    """One rank's folder, as a save fills it."""

    def __init__(self, top: Path, rank: int) -> None:
        self.directory = top / rank_folder("policy", rank)
        self.directory.mkdir(parents=True)
        self.opened: list[str] = []

    def open(self, name: str) -> Any:
        self.opened.append(name)
        return HashingFile(self.directory / name)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    for rank in range(2):
        folder = Folder(tmp_path, rank)
        for number in range(5):
            with folder.open(f"part{number}.pt") as file:
                file.write(b"%d-%d" % (rank, number) * 100)
    return tmp_path


def test_a_ranks_artifacts_are_its_own_and_anothers_when_they_are_asked_for(two: Path) -> None:
    manifest, store = manifest_of(two), LocalStore(two)
    with open_artifacts(store, manifest, place(0), path="c") as files:
        assert sorted(files) == [f"part{number}.pt" for number in range(5)]
        assert files["part3.pt"].read() == b"0-3" * 100
        other = files.of_rank(1)
        assert other["part3.pt"].read() == b"1-3" * 100
        assert files.of_rank(1) is other
        with pytest.raises(ValueError, match="rank is 2"):
            files.of_rank(2)
        every = [*files.values(), *other.values()]
        assert not any(file.closed for file in every)
    assert all(file.closed for file in every)


@pytest.mark.parametrize("resharded", [False, True])
def test_what_no_execution_saved_is_every_ranks_and_verified_when_it_is_looked_up(
    tmp_path: Path, resharded: bool
) -> None:
    names = ["rank0.pth", "rank1.pth", "policy-0.pth", "tokenizer/vocab.json"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    manifest, store = manifest_of(tmp_path, execution=0), LocalStore(tmp_path)
    told: list[BaseException] = []

    @contextmanager
    def telling() -> Iterator[None]:
        try:
            yield
        except CheckpointDamagedError as error:
            told.append(error)
            raise

    (tmp_path / "rank1.pth").write_text("rank2.pth")
    for rank in range(2):
        with open_artifacts(store, manifest, place(rank), path="c", resharded=resharded, telling=telling) as files:
            assert sorted(files) == sorted(names)
            file = files["rank0.pth"]
            assert file.read() == b"rank0.pth"
            assert files["rank0.pth"] is file
            assert "state.pt" not in files
            assert "rank1.pth" in files
            for use in (lambda: files.of_rank(1), lambda: files.check_stamp("rank0.pth", {})):
                with pytest.raises(ValueError, match="no rank saved"):
                    use()
            with pytest.raises(CheckpointDamagedError, match=r"rank1\.pth"):
                _ = files["rank1.pth"]
            assert len(told) == rank + 1
        assert file.closed
        with pytest.raises(ValueError, match="closed"):
            _ = files["policy-0.pth"]


def test_a_script_may_publish_what_is_each_ranks(two: Path) -> None:
    with open_artifacts(LocalStore(two), manifest_of(two, execution=0), place(1), path="c") as files:
        assert files["part3.pt"].read() == b"1-3" * 100


def test_artifacts_are_verified_side_by_side(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_artifacts, "default_threads", lambda: 5)
    together = threading.Barrier(5)
    verify = worker_artifacts.open_verified

    def waits(*arguments: Any, **named: Any) -> Any:
        together.wait(DEADLINE_S)
        return verify(*arguments, **named)

    monkeypatch.setattr(worker_artifacts, "open_verified", waits)
    open_artifacts(LocalStore(two), manifest_of(two), place(1), path="c").close()


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda path: path.write_bytes(b"X" + path.read_bytes()[1:]), CheckpointDamagedError),
        (lambda path: path.unlink(), ArtifactMissingError),
    ],
)
def test_one_that_is_not_sound_closes_all(
    damage: Callable[[Path], object], error: type[Exception], two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, opened = manifest_of(two), []
    verify = worker_artifacts.open_verified
    monkeypatch.setattr(worker_artifacts, "open_verified", lambda *a, **n: opened.append(verify(*a, **n)) or opened[-1])
    damage(two / "policy-1/part2.pt")
    with pytest.raises(error, match=r"policy-1/part2\.pt"):
        open_artifacts(LocalStore(two), manifest, place(1), path="c")
    assert len(opened) == 4
    assert all(file.closed for file in opened)
    # Another rank's damage is found when it is read, by whoever reads it.
    with open_artifacts(LocalStore(two), manifest, place(0), path="c") as files, pytest.raises(error):
        files.of_rank(1)


STAMP = {"rank": 1, "steps": 1, "updates": 1, "execution_id": "this", "checkpoint_id": "c"}


def test_a_saves_stamp_is_known_again(two: Path) -> None:
    manifest = manifest_of(two)
    # As any format brings it back.
    loaded = json.loads(json.dumps(Stamp(rank=1, steps=1, updates=1, execution_id="this", checkpoint_id="c").values()))
    assert loaded == STAMP
    with open_artifacts(LocalStore(two), manifest, place(1), path="c") as files:
        assert files.stamp.values() == STAMP
        files.check_stamp("part0.pt", loaded)
    with open_artifacts(LocalStore(two), manifest, place(0), path="c") as files:
        files.of_rank(1).check_stamp("part0.pt", loaded)


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("rank", STAMP | {"rank": 0}),
        ("rank", STAMP | {"rank": True}),
        ("execution_id", STAMP | {"execution_id": "other"}),
        ("checkpoint_id", STAMP | {"checkpoint_id": "d"}),
        ("steps", STAMP | {"steps": 2}),
        ("updates", STAMP | {"updates": 0}),
        ("stamp", STAMP | {"world_size": 2}),
        ("stamp", {"rank": 1}),
        ("stamp", {}),
        ("stamp", None),
        ("stamp", sorted(STAMP)),
    ],
)
def test_a_foreign_stamp_is_refused_by_its_field_and_told_before_it_is_raised(
    what: str, found: object, two: Path
) -> None:
    told: list[BaseException] = []

    @contextmanager
    def telling() -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            told.append(error)
            raise

    store, manifest, of_three = LocalStore(two), manifest_of(two), replace(place(1), world_size=3)
    with open_artifacts(store, manifest, of_three, path="c", telling=telling) as files:
        with pytest.raises(ArtifactForeignError, match=r"policy-1/part0\.pt") as caught:
            files.check_stamp("part0.pt", found)
        assert caught.value.what == what
        assert told == [caught.value]
        with pytest.raises(ArtifactMissingError):
            files.of_rank(2)
        assert told == [caught.value], "a rank that declared none is no damage"
        (two / "policy-0/part1.pt").unlink()
        with pytest.raises(ArtifactMissingError) as missing:
            files.of_rank(0)
        assert told == [caught.value, missing.value]


# -- another world


def saved_by(top: Path, ranks: int) -> CheckpointManifest:
    """A checkpoint of so many ranks, each file with the number of who saved it."""
    for rank in range(ranks):
        with Folder(top, rank).open("state.pt") as file:
            file.write(b"%d" % rank)
    # Of groups with names that begin alike.
    for name in ("policy-0-9", "critic-8", "policy"):
        (top / name).mkdir()
        (top / name / "7").write_bytes(b"x")
    return manifest_of(top)


@pytest.mark.parametrize("saved", [1, 2, 3, 5])
@pytest.mark.parametrize("world", [1, 2, 4, 7])
def test_the_ranks_of_another_world_are_dealt_what_was_saved_and_may_ask_for_all_of_it(
    saved: int, world: int, tmp_path: Path
) -> None:
    manifest, store = saved_by(tmp_path, saved), LocalStore(tmp_path)
    for rank in range(world):
        present = WorkerPlace(role="trainer", group="policy", rank=rank, world_size=world)
        with open_artifacts(store, manifest, present, path="c", resharded=True) as files:
            assert files["state.pt"].read() == b"%d" % (rank % saved)
            assert files.stamp.values() == STAMP | {"rank": rank % saved}
            assert files.stamp.resharded
            for other in range(saved):
                assert files.of_rank(other)["state.pt"].read() == b"%d" % other
                files.of_rank(other).check_stamp("state.pt", STAMP | {"rank": other})
            for none in (-1, saved):
                with pytest.raises(ValueError, match=f"rank is {none}, but there are {saved}"):
                    files.of_rank(none)


@pytest.mark.parametrize(
    ("field", "foreign"), [("rank", 3), ("steps", 2), ("updates", 0), ("execution_id", "e"), ("checkpoint_id", "d")]
)
def test_g3_resharding_lets_no_other_step_execution_checkpoint_or_file_in(
    field: str, foreign: Any, tmp_path: Path
) -> None:
    present = WorkerPlace(role="trainer", group="policy", rank=3, world_size=4)
    manifest = saved_by(tmp_path, 2)
    with open_artifacts(LocalStore(tmp_path), manifest, present, path="c", resharded=True) as files:
        with pytest.raises(ArtifactForeignError, match=r"policy-1/state\.pt") as caught:
            files.check_stamp("state.pt", STAMP | {field: foreign})
        assert caught.value.what == field
        (tmp_path / "policy-0/state.pt").write_bytes(b"X")
        with pytest.raises(CheckpointDamagedError, match=r"policy-0/state\.pt"):
            files.of_rank(0)


def test_a_group_that_saved_nothing_is_no_damage(tmp_path: Path) -> None:
    told: list[str] = []

    @contextmanager
    def telling() -> Iterator[None]:
        told.append("asked")
        yield

    critic = WorkerPlace(role="trainer", group="critic-8")
    manifest = saved_by(tmp_path, 2)
    with pytest.raises(ArtifactMissingError, match="critic-8-"):
        open_artifacts(LocalStore(tmp_path), manifest, critic, path="c", resharded=True, telling=telling)
    assert told == []


# -- torch.distributed.checkpoint


def state() -> dict[str, Any]:
    torch.manual_seed(7)
    return {
        "model": {"weight": torch.randn(64, 64), "bias": torch.randn(64), "big": torch.randn(1 << 19)},
        "step": 5,
        "names": ["a", "b"],
        "betas": (0.9, 0.95),
    }


def blank() -> dict[str, Any]:
    return {
        "model": {"weight": torch.zeros(64, 64), "bias": torch.zeros(64), "big": torch.zeros(1 << 19)},
        "step": 0,
        "names": [],
        "betas": None,
    }


def test_a_distributed_checkpoint_comes_back_hashed_once_and_verified(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 0)
    torch_dcp.save(state(), storage_writer=dcp.SaveWriter(folder, "model"))
    assert sorted(folder.opened) == sorted(dcp.artifact_names("model", rank=0)) == ["model.distcp", "model.metadata"]
    with open_artifacts(LocalStore(tmp_path), manifest_of(tmp_path), place(0), path="c") as files:
        found = blank()
        torch_dcp.load(found, storage_reader=dcp.SaveReader(files, "model"), planner=dcp.PlainLoadPlanner())
    want = state()
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in want["model"].items())
    assert [found[name] for name in ("step", "names", "betas")] == [5, ["a", "b"], (0.9, 0.95)]


@pytest.mark.parametrize("name", ["model.distcp", "model.metadata"])
def test_a_damaged_distributed_checkpoint_is_refused_before_anything_of_it_is_unpickled(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_dcp.save(state(), storage_writer=dcp.SaveWriter(Folder(tmp_path, 0), "model"))
    manifest, path = manifest_of(tmp_path), tmp_path / "policy-0" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    monkeypatch.setattr(pickle, "load", lambda *_: pytest.fail("unpickled"))
    with pytest.raises(CheckpointDamagedError, match=name):
        open_artifacts(LocalStore(tmp_path), manifest, place(0), path="c")


class Evil:
    """Runs something when it is unpickled."""

    ran = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Evil, "ran", True)


def test_what_is_no_plain_value_is_not_unpickled(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 0)
    torch_dcp.save({"thing": Evil()}, storage_writer=dcp.SaveWriter(folder, "model"))
    with open_artifacts(LocalStore(tmp_path), manifest_of(tmp_path), place(0), path="c") as files:
        Evil.ran = False
        with pytest.raises(BaseException, match=r"weights_only|Weights only"):
            torch_dcp.load(
                {"thing": None}, storage_reader=dcp.SaveReader(files, "model"), planner=dcp.PlainLoadPlanner()
            )
    assert not Evil.ran


def test_other_layouts_of_files_are_refused(tmp_path: Path) -> None:
    writer = dcp.SaveWriter(Folder(tmp_path, 0), "model")
    writer.single_file_per_rank = False
    with pytest.raises(BaseException, match="no part of a checkpoint with one file a rank"):
        torch_dcp.save(state(), storage_writer=writer)
    with pytest.raises(UsageError), dcp.SaveReader({}, "model").fs.create_stream("elsewhere", "rb"):  # type: ignore[arg-type]
        pass


RANK = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist, torch.distributed.checkpoint as torch_dcp
sys.path.insert(0, sys.argv[4])
import test_worker_artifacts as here
from cosmos_worker import dcp
rank, top = int(sys.argv[1]), Path(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard
mesh = init_device_mesh("cpu", (2,))
whole, own = here.state(), torch.full((3,), float(rank))
sharded = distribute_tensor(whole["model"]["weight"], mesh, [Shard(0)])
# Sharded over both; replicated, so saved once; and one of each rank's own.
folder = here.Folder(top, rank)
torch_dcp.save({"w": sharded, "b": whole["model"]["bias"], f"own{rank}": own}, storage_writer=dcp.SaveWriter(folder, "m"))
assert tuple(sorted(folder.opened)) == tuple(sorted(dcp.artifact_names("m", rank=rank))), folder.opened
# What is replicated is saved by one of them; the other's part says so and is not empty.
torch_dcp.save({"b": whole["model"]["bias"]}, storage_writer=dcp.SaveWriter(folder, "replicated"))
assert (folder.directory / "replicated.distcp").stat().st_size > 0
dist.barrier()
found = {"w": distribute_tensor(torch.zeros(64, 64), mesh, [Shard(0)]), "b": torch.zeros(64), f"own{1 - rank}": torch.zeros(3)}
with here.open_artifacts(here.LocalStore(top), here.manifest_of(top), here.place(rank), path="c") as files:
    torch_dcp.load(found, storage_reader=dcp.SaveReader(files, "m"), planner=dcp.PlainLoadPlanner())
assert torch.equal(found["w"].full_tensor(), whole["model"]["weight"])
assert torch.equal(found["b"], whole["model"]["bias"])
assert torch.equal(found[f"own{1 - rank}"], torch.full((3,), float(1 - rank)))
dist.barrier()
dist.destroy_process_group()
print("sound", flush=True)
# Everything is said. At the interpreter's exit gloo may still abort the process: a thread of its own is not joined.
os._exit(0)
"""


def test_two_ranks_save_and_load_their_shards_and_each_others(tmp_path: Path) -> None:
    with together(tmp_path) as ranks:
        for rank in ranks:
            said, complaint = rank.communicate(timeout=120)
            assert (rank.returncode, said.strip()) == (0, "sound"), complaint


class together:  # noqa: N801  # used as a function
    """Two processes that end with the test."""

    def __init__(self, tmp_path: Path) -> None:
        (tmp_path / "save").mkdir()
        arguments = [str(tmp_path / "meet"), str(tmp_path / "save"), str(Path(__file__).parent)]
        self._ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(rank), *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]

    def __enter__(self) -> list[subprocess.Popen[str]]:
        return self._ranks

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.communicate()


# -- other writers, other digests


def test_safetensors_go_out_and_come_in_as_the_page_on_saves_says(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = state()["model"]
    with Folder(tmp_path, 0).open("model.safetensors") as file:
        file.write(safetensors.save(tensors))
    with open_artifacts(LocalStore(tmp_path), manifest_of(tmp_path), place(0), path="c") as files:
        loaded = safetensors.load(files["model.safetensors"].read())
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("algorithm", ["sha256", "blake3"])
def test_what_torch_saves_is_hashed_by_the_algorithm_that_was_chosen(algorithm: str, tmp_path: Path) -> None:
    pytest.importorskip(algorithm if algorithm == "blake3" else "hashlib")
    with HashingFile(tmp_path / "a", algorithm=algorithm) as file:
        torch.save(state(), file)
    data = (tmp_path / "a").read_bytes()
    assert file.result.digest == digest_bytes(data, algorithm)
    assert file.result.digest.startswith(f"{algorithm}:")
    assert torch.equal(torch.load(io.BytesIO(data), weights_only=True)["model"]["bias"], state()["model"]["bias"])
