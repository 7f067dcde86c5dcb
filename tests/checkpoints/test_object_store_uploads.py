"""Shards on their way into a bucket: hashed once, in parts, several at once, and gone without a trace when something fails."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_helpers import manifest_of, metadata
from object_faults import Faults, faulty
from object_servers import Moto, s3_store

from cosmos_ctrl.checkpoints.artifacts import Artifact
from cosmos_ctrl.checkpoints.digests import digest_bytes
from cosmos_ctrl.checkpoints.discovery import discover, open_checkpoint
from cosmos_ctrl.checkpoints.manifest import CheckpointManifest, publish_from_receipts, read_manifest
from cosmos_ctrl.checkpoints.stores import objects
from cosmos_ctrl.checkpoints.stores.objects import ObjectStore
from cosmos_ctrl.core.errors import (
    ArtifactMissingError,
    ArtifactUnexpectedError,
    CheckpointConflictError,
    CheckpointDamagedError,
    CheckpointNotFoundError,
    CheckpointUncommittedError,
    StorageUnavailableError,
)
from cosmos_worker import object_shards
from cosmos_worker.artifacts import open_artifacts
from cosmos_worker.errors import UsageError
from cosmos_worker.object_shards import UploadingFile
from cosmos_worker.settings import WorkerPlace
from cosmos_worker.shards import HashingFile

MIB = 1 << 20
DEADLINE_S = 20.0

#: S3 takes no smaller part but the last one.
PART = 5 * MIB


def place(rank: int) -> WorkerPlace:
    return WorkerPlace(role="trainer", group="policy", rank=rank, world_size=2)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "PART_BYTES", PART)
    monkeypatch.setattr(object_shards, "WHOLE_BYTES", PART)
    monkeypatch.setattr(object_shards, "BLOCK_BYTES", MIB)


@pytest.fixture
def store(s3: Moto) -> ObjectStore:
    return s3_store(s3.address, s3.bucket())


@pytest.fixture
def proxy(s3: Moto) -> Iterator[Faults]:
    with faulty(s3.address) as faults:
        yield faults


def left_over(s3: Moto, store: ObjectStore) -> bool:
    """Whether the bucket has objects, or parts of uploads."""
    uploads = s3.ask("GET", f"/{store.where.bucket}?uploads")
    return b"<Upload>" in uploads or bool(store.scan(""))


def content(size: int) -> bytes:
    return os.urandom(1 << 16) * (size >> 16) + os.urandom(size & 0xFFFF)


@pytest.mark.parametrize("size", [1, 1000, PART - 1, PART, PART + 1, 3 * PART + 17])
def test_an_object_has_the_bytes_and_the_digest_that_a_file_would_have(
    size: int, store: ObjectStore, tmp_path: Path
) -> None:
    data = content(size)
    local, remote = HashingFile(tmp_path / "a"), UploadingFile(store, "policy-0/state.pt")
    cut = size // 3
    for file in (local, remote):
        assert file.write(memoryview(data)[:cut]) == cut
        assert file.write(bytearray(data[cut:])) == size - cut
        assert file.tell() == size
        file.close()
        file.close()
    assert remote.result == local.result
    assert store.read("policy-0/state.pt", limit=size) == data
    with pytest.raises(ValueError, match="closed"):
        remote.write(b"x")


def test_a_writer_may_use_its_buffer_again_at_once(store: ObjectStore) -> None:
    data, buffer = content(4 * PART), bytearray(MIB)
    with UploadingFile(store, "a") as file:
        for start in range(0, len(data), MIB):
            buffer[:] = data[start : start + MIB]
            file.write(buffer)
        buffer[:] = bytes(MIB)
    assert store.read("a", limit=len(data)) == data


def test_parts_travel_together(proxy: Faults, s3: Moto) -> None:
    proxy.add("meet", path="partNumber=[12]", times=2)
    with UploadingFile(s3_store(proxy.address, s3.bucket()), "a") as file:
        file.write(content(3 * PART))
    assert not proxy.meeting.broken


def test_a_writer_that_is_faster_than_the_network_waits(proxy: Faults, s3: Moto) -> None:
    store = s3_store(proxy.address, s3.bucket())
    proxy.add("hang", path="partNumber", times=objects.PARTS_AT_ONCE)
    file = UploadingFile(store, "a")
    data = content(MIB)
    wanted = 2 * (objects.PARTS_AT_ONCE + 4) * PART

    def write() -> None:
        while file.tell() < wanted:
            file.write(data)

    writer = threading.Thread(target=write)
    writer.start()
    until = time.monotonic() + DEADLINE_S
    while proxy.count("PUT", "partNumber") < objects.PARTS_AT_ONCE:
        assert time.monotonic() < until
        time.sleep(0.01)
    writer.join(0.5)
    assert writer.is_alive()
    assert file.tell() <= (objects.PARTS_AT_ONCE + 4) * PART
    proxy.release.set()
    writer.join(DEADLINE_S)
    file.close()
    assert store.head("a") == wanted
    assert file.result.digest == digest_bytes(data * (wanted // MIB))


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_part_is_tried_again(status: int, proxy: Faults, s3: Moto) -> None:
    store, data = s3_store(proxy.address, s3.bucket()), content(3 * PART)
    proxy.add("answer", path="partNumber=2", status=status, times=2)
    with UploadingFile(store, "a") as file:
        file.write(data)
    assert store.read("a", limit=len(data)) == data


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize("then", ["tried again", "no such upload"])
def test_a_lost_reply_of_an_upload_is_resolved_by_the_digest(then: str, method: str, proxy: Faults, s3: Moto) -> None:
    store, data = s3_store(proxy.address, s3.bucket()), content(2 * PART)
    proxy.add("lose the reply", method=method, path="uploadId")
    if then == "no such upload":
        proxy.add("answer", method="POST", path="uploadId", status=404, times=int(method == "POST"))
    with UploadingFile(store, "a") as file:
        file.write(data)
    assert file.result.digest == digest_bytes(data)
    assert store.read("a", limit=len(data)) == data


def test_an_upload_that_cannot_be_completed_says_why(proxy: Faults, s3: Moto) -> None:
    store = s3_store(proxy.address, s3.bucket())
    proxy.add("answer", method="POST", path="uploadId", status=403, times=100)
    file = UploadingFile(store, "a")
    file.write(content(2 * PART))
    with pytest.raises(StorageUnavailableError, match=r"upload failed.*403"):
        file.close()
    assert not left_over(s3, store)


def test_another_object_that_came_meanwhile_is_not_taken_for_ones_own(proxy: Faults, s3: Moto) -> None:
    store = s3_store(proxy.address, s3.bucket())
    proxy.add("answer", method="POST", path="uploadId", status=403, times=100)
    file = UploadingFile(store, "a")
    file.write(content(2 * PART))
    s3_store(s3.address, store.where.bucket).put_if_absent("a", content(2 * PART))
    with pytest.raises(StorageUnavailableError, match="upload failed"):
        file.close()


def test_a_part_that_fails_poisons_the_file_and_leaves_nothing(proxy: Faults, s3: Moto) -> None:
    store = s3_store(proxy.address, s3.bucket())
    proxy.add("answer", path="partNumber=2", status=403, times=100)
    file = UploadingFile(store, "a")
    data = content(PART)

    def write() -> None:
        for _ in range(20):
            file.write(data)
        file.close()

    with pytest.raises(StorageUnavailableError, match=r"upload failed.*403") as first:
        write()
    for again in (lambda: file.write(b"x"), file.close, lambda: file.result):
        with pytest.raises(StorageUnavailableError) as caught:
            again()
        assert caught.value is first.value
    assert not left_over(s3, store)


def test_a_server_that_keeps_nothing_is_caught_before_anyone_is_told(proxy: Faults, s3: Moto) -> None:
    file = UploadingFile(s3_store(proxy.address, s3.bucket()), "a")
    proxy.add("answer", status=200, times=1)
    file.write(b"bytes")
    with pytest.raises(StorageUnavailableError, match="wrote 5 bytes, the object has None"):
        file.close()


@pytest.mark.parametrize("size", [1000, 3 * PART])
@pytest.mark.parametrize("how", ["abandoned", "forgotten"])
def test_what_is_not_closed_leaves_nothing(how: str, size: int, store: ObjectStore, s3: Moto) -> None:
    file = UploadingFile(store, "a")
    file.write(content(size))
    if how == "abandoned":
        file.abandon()
        with pytest.raises(UsageError, match="abandoned"):
            _ = file.result
    del file
    assert not left_over(s3, store)
    assert not [thread for thread in threading.enumerate() if thread.name == "cosmos-upload"]


@pytest.mark.parametrize("size", [1000, 3 * PART])
def test_a_taken_name_is_not_replaced(size: int, store: ObjectStore) -> None:
    store.put_if_absent("a", b"there")
    with pytest.raises(CheckpointConflictError), UploadingFile(store, "a") as file:
        file.write(content(size))
    assert store.read("a", limit=9) == b"there"


def test_torch_and_text_fit(store: ObjectStore) -> None:
    torch = pytest.importorskip("torch")
    state = {"w": torch.arange(3_000_000), "step": 3}
    with UploadingFile(store, "a") as file:
        torch.save(state, file)
    data = store.read("a", limit=100 * MIB)
    assert data is not None
    assert file.result.digest == digest_bytes(data)
    assert torch.equal(torch.load(io.BytesIO(data), weights_only=True)["w"], state["w"])
    text: Any = io.TextIOWrapper(UploadingFile(store, "b"), encoding="utf-8")
    json.dump({"ü": 1}, text, ensure_ascii=False)
    text.close()
    assert store.read("b", limit=99) == '{"ü": 1}'.encode()


# -- checkpoints in a bucket

CONTENT = {"policy-0/state.pt": b"first" * 1000, "policy-1/state.pt": b"second" * 1000}


def receipts() -> dict[str, Artifact]:
    return {
        name: Artifact(len(data), digest_bytes(data), rank, "policy")
        for rank, (name, data) in enumerate(CONTENT.items())
    }


def saved(run: ObjectStore, name: str = "c") -> ObjectStore:
    checkpoint = run.within(f"checkpoints/{name}")
    for artifact, data in CONTENT.items():
        checkpoint.put_if_absent(artifact, data)
    return checkpoint


def test_g4_a_checkpoint_in_a_bucket_is_committed_found_and_loaded(store: ObjectStore) -> None:
    for number in (1, 2):
        checkpoint = saved(store, f"c{number}")
        manifest = manifest_of(3, number, checkpoint_id=f"c{number}", artifacts=receipts())
        with pytest.raises(CheckpointUncommittedError):
            read_manifest(checkpoint)
        digest = publish_from_receipts(checkpoint, manifest)
        assert publish_from_receipts(checkpoint, manifest) == digest
        with pytest.raises(CheckpointConflictError):
            publish_from_receipts(checkpoint, manifest_of(4, number, artifacts=receipts()))
    found = discover(store, compatibility=manifest.compatibility, on_corrupt="error").chosen
    assert found is not None
    assert (found.path, found.manifest_digest) == ("checkpoints/c2", digest)
    for path in ("checkpoints/c1", f"{store.uri}/checkpoints/c1"):
        assert open_checkpoint(store, path, compatibility=None).manifest.checkpoint_id == "c1"
    with pytest.raises(CheckpointNotFoundError):
        open_checkpoint(store, "checkpoints/none", compatibility=None)
    loaded = CheckpointManifest.load(checkpoint, required_artifacts=CONTENT, compatibility=manifest.compatibility)
    assert loaded.metadata.checkpoint_path == checkpoint.uri
    with open_artifacts(checkpoint, manifest, place(1), path="c2") as files:
        file = files["state.pt"]
        assert file.read(6) == b"second"
        file.seek(0)
        assert file.read() == CONTENT["policy-1/state.pt"]
        assert Path(f"/proc/self/fd/{file.fileno()}").readlink().name.endswith("(deleted)")


def test_a_script_publishes_and_loads_in_a_bucket(store: ObjectStore) -> None:
    checkpoint = saved(store)
    CheckpointManifest.publish(checkpoint, metadata(), required_artifacts=CONTENT, compatibility={})
    loaded = CheckpointManifest.load(checkpoint, required_artifacts=CONTENT, compatibility={})
    assert {name: artifact.digest for name, artifact in loaded.artifacts.items()} == {
        name: digest_bytes(data) for name, data in CONTENT.items()
    }
    with pytest.raises(CheckpointNotFoundError):
        CheckpointManifest.publish(
            store.within("checkpoints/none"), metadata(), required_artifacts=CONTENT, compatibility={}
        )


def test_what_is_not_what_was_committed_is_refused_by_name(store: ObjectStore) -> None:
    checkpoint = saved(store)
    manifest = manifest_of(artifacts=receipts())
    publish_from_receipts(checkpoint, manifest)

    def load() -> None:
        CheckpointManifest.load(checkpoint, required_artifacts=CONTENT, compatibility=manifest.compatibility)

    name, data = "policy-0/state.pt", CONTENT["policy-0/state.pt"]
    for other in (data[:-1], data[:-1] + b"X", b""):
        checkpoint.delete(name)
        checkpoint.put_if_absent(name, other)
        with pytest.raises(CheckpointDamagedError, match=r"policy-0/state\.pt"):
            load()
        with pytest.raises(CheckpointDamagedError, match=r"policy-0/state\.pt"):
            open_artifacts(checkpoint, manifest, place(0), path="c")
        open_artifacts(checkpoint, manifest, place(1), path="c").close()
    checkpoint.delete(name)
    with pytest.raises(ArtifactMissingError, match=r"policy-0/state\.pt"):
        load()
    with pytest.raises(ArtifactMissingError, match=r"policy-0/state\.pt"):
        open_artifacts(checkpoint, manifest, place(0), path="c")
    checkpoint.put_if_absent(name, data)
    checkpoint.put_if_absent("extra", b"x")
    with pytest.raises(ArtifactUnexpectedError, match="extra"):
        load()


def test_a_manifest_whose_reply_is_lost_is_published(proxy: Faults, s3: Moto) -> None:
    checkpoint = saved(s3_store(proxy.address, s3.bucket()))
    proxy.add("lose the reply", path="manifest.json")
    manifest = manifest_of(artifacts=receipts())
    assert publish_from_receipts(checkpoint, manifest) == manifest.digest()
    assert read_manifest(checkpoint)[1] == manifest.digest()
