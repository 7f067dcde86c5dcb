"""What checkpoints cost: saves of two ranks, publication, verification, discovery.

Prints a table and, last, one JSON line. Ranks are processes of their own; what is compared takes turns in every round, and a ratio is of
one round. A figure is the median of the rounds. Everything is written below one folder: the first argument, or a temporary one.
Before a save the file system is synced, so that no round pays for another's; before a verification the files are dropped from the page
cache as far as an ordinary user can.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from cosmos_ctrl.checkpoints import digests
from cosmos_ctrl.checkpoints.artifacts import Artifact
from cosmos_ctrl.checkpoints.digests import default_threads, digest_bytes, hash_file
from cosmos_ctrl.checkpoints.discovery import discover
from cosmos_ctrl.checkpoints.manifest import CheckpointManifest, publish_from_receipts
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.core.resume import ControllerResumeMetadata
from cosmos_worker.shards import HashingFile, sync_directories

MIB = 1 << 20
ROUNDS = 5
RANKS = 2
SHARD_BYTES = 512 * MIB
TENSORS = 16
"""Of a shard; torch.save writes each at once."""
LARGE_BYTES, LARGE_ARTIFACTS = 4096 * MIB, 32
SMALL_BYTES = MIB
PUBLICATIONS = 20
DISCOVERED, DISCOVERED_ARTIFACTS = 1000, 64
COMPATIBILITY = {"dataset": {"digest": "sha256:aa"}, "world_size": RANKS}


class NoHasher:
    """Hashes nothing: what is left is the same save."""

    algorithm, size_bytes = "sha256", 0

    def update(self, data: Any) -> None:
        """Do nothing."""

    def digest(self) -> str:
        """Of nothing."""
        return digest_bytes(b"")


class Rank:
    """A process that saves its shard when it is told."""

    def __init__(self, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_rank, args=(theirs, number, SHARD_BYTES), daemon=True)
        self._process.start()
        assert self._pipe.recv() == "ready"

    def start(self, how: str, directory: Path) -> None:
        """Save into `directory`; `answer` is due."""
        self._pipe.send((how, directory))

    def answer(self) -> tuple[str, int, str]:
        """Name, bytes and digest of what is durable."""
        found: tuple[str, int, str] = self._pipe.recv()
        return found

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.join()


def _rank(pipe: Any, number: int, shard_bytes: int) -> None:
    import torch  # only the ranks need it

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(number)
    size = shard_bytes // TENSORS // 4
    state = {f"layer{index}": torch.randn(size, generator=generator) for index in range(TENSORS)}
    name = f"rank{number}.pt"
    pipe.send("ready")
    while True:
        how, directory = pipe.recv()
        path = directory / name
        if how == "plain":
            with path.open("wb") as opened:
                torch.save(state, opened)
                opened.flush()
                os.fsync(opened.fileno())
            result = name, path.stat().st_size, ""
        else:
            file = HashingFile(path)
            if how == "unhashed":
                file._hasher = NoHasher()  # type: ignore[assignment]
            torch.save(state, file)
            file.close()
            result = name, file.result.size_bytes, file.result.digest
        sync_directories({directory}, top=directory.parent)
        pipe.send(result)


def manifest_of(artifacts: dict[str, Artifact], step: int = 1) -> CheckpointManifest:
    metadata = ControllerResumeMetadata(
        completed_training_steps=step,
        completed_optimizer_updates=step,
        remaining_completions=1000,
        epoch=1,
        sampling_owner="sampler",
        sampler_state={"seed": 7, "position": step},
        checkpoint_path="anywhere",
        checkpoint_id=f"{step:032x}",
    )
    return CheckpointManifest(
        metadata=metadata,
        artifacts=artifacts,
        compatibility=COMPATIBILITY,
        execution_number=1,
        execution_id="e" * 32,
        parent=None,
        repeat_bound_completions=0,
        application_note="",
    )


def save(ranks: list[Rank], directory: Path, how: str) -> float:
    """Seconds until the checkpoint of all ranks is published, or durable without a manifest ("unhashed")."""
    directory.mkdir(parents=True)
    os.sync()
    began = time.perf_counter()
    for rank in ranks:
        rank.start(how, directory)
    written = [rank.answer() for rank in ranks]
    if how == "plain":
        # One coordinator reads again what all have written.
        written = [(name, size, digest_of(directory / name)) for name, size, _ in written]
    if how != "unhashed":
        publish_from_receipts(
            directory, manifest_of({name: Artifact(size, digest, 0) for name, size, digest in written})
        )
    took = time.perf_counter() - began
    shutil.rmtree(directory)
    return took


def digest_of(path: Path) -> str:
    """Of a whole file."""
    with path.open("rb", buffering=0) as file:
        return hash_file(cast("BinaryIO", file))[0]


def saves(top: Path) -> Iterable[dict[str, float]]:
    """Two ranks of half a gibibyte each."""
    ranks = [Rank(number) for number in range(RANKS)]
    try:
        for number in range(ROUNDS + 1):
            took = {how: save(ranks, top / f"{how}-{number}", how) for how in ("hashed", "unhashed", "plain")}
            if number:  # the first warms up
                yield {
                    "save_hashed_s": took["hashed"],
                    "save_ratio_hash_on_write": took["hashed"] / took["unhashed"],
                    "save_ratio_vs_reread": took["hashed"] / took["plain"],
                }
    finally:
        for rank in ranks:
            rank.close()


def filled(directory: Path, total: int, count: int) -> dict[str, Artifact]:
    """`count` durable artifacts of `total` bytes together."""
    directory.mkdir(parents=True)
    artifacts = {}
    block = os.urandom(MIB)
    for index in range(count):
        file = HashingFile(directory / f"shard{index:03d}.pt")
        left = total // count
        while left:
            left -= file.write(block[: min(left, MIB)])
        file.close()
        artifacts[f"shard{index:03d}.pt"] = Artifact(file.result.size_bytes, file.result.digest, 0)
    sync_directories({directory}, top=directory.parent)
    return artifacts


def publication(directory: Path, artifacts: dict[str, Artifact]) -> float:
    """Milliseconds from the last receipt to the answer; the median of many."""
    took = []
    for _ in range(PUBLICATIONS):
        os.sync()
        began = time.perf_counter()
        publish_from_receipts(directory, manifest_of(artifacts))
        took.append(time.perf_counter() - began)
        (directory / "manifest.json").unlink()
    return statistics.median(took) * 1e3


def verification(directory: Path, artifacts: dict[str, Artifact]) -> Iterable[dict[str, float]]:
    """Against the slower of reading and of hashing, with as many threads.

    Reading and verifying both come right after a pass over the same bytes that filled the page cache and was forgotten: where a machine
    is virtual, memory that lay free for seconds has gone back to its host, and a page costs several times as much.
    """
    publish_from_receipts(directory, manifest_of(artifacts))
    paths = [directory / name for name in artifacts]
    total = sum(artifact.size_bytes for artifact in artifacts.values())
    for _ in range(ROUNDS):
        hashed = total / timed(paths, lambda path: hash_memory(path.stat().st_size))
        timed(paths, read_through)
        read = total / timed(paths, read_through)
        forget(paths)
        began = time.perf_counter()
        CheckpointManifest.load(directory, required_artifacts=artifacts, compatibility=COMPATIBILITY)
        rate = total / (time.perf_counter() - began)
        yield {
            "verify_mib_per_s": rate / MIB,
            "read_mib_per_s": read / MIB,
            "hash_mib_per_s": hashed / MIB,
            "verify_ratio_to_limit": rate / min(read, hashed),
        }


def timed(paths: list[Path], work: Callable[[Path], None]) -> float:
    """Seconds for `work` over all paths, one thread a CPU."""
    forget(paths)
    began = time.perf_counter()
    with ThreadPoolExecutor(default_threads()) as pool:
        list(pool.map(work, paths))
    return time.perf_counter() - began


def read_through(path: Path) -> None:
    """Read every byte."""
    buffer = memoryview(bytearray(digests.BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def hash_memory(size: int) -> None:
    """Hash as many bytes, without reading any."""
    hasher, block = hashlib.sha256(), memoryview(bytearray(digests.BLOCK_BYTES))
    for _ in range(size // len(block)):
        hasher.update(block)


def forget(paths: list[Path]) -> None:
    """Drop files from the page cache."""
    for path in paths:
        with suppress(AttributeError):  # not on every system
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def discovery(top: Path) -> Iterable[dict[str, float]]:
    """The newest of a thousand checkpoints, without hashing a shard."""
    names = [f"policy-0/part{index:02d}.pt" for index in range(DISCOVERED_ARTIFACTS)]
    artifacts = {name: Artifact(1, digest_bytes(b"x"), 0) for name in names}
    manifests = []
    for step in range(DISCOVERED):
        directory = top / "checkpoints" / f"e0001-s{step:08d}-{step:08x}"
        (directory / "policy-0").mkdir(parents=True)
        for name in names:
            (directory / name).write_bytes(b"x")
        # Not published one by one: that would take a minute of fsync.
        manifests.append(directory / "manifest.json")
        manifests[-1].write_bytes(manifest_of(artifacts, step).to_bytes())
    os.sync()
    for _ in range(ROUNDS):
        forget(manifests)
        began = time.perf_counter()
        found = discover(LocalStore(top), compatibility=COMPATIBILITY, on_corrupt="error")
        took = time.perf_counter() - began
        assert found.chosen is not None
        assert found.chosen.manifest.metadata.completed_training_steps == DISCOVERED - 1
        yield {"discover_1000_s": took}


def medians(rounds: Iterable[dict[str, float]]) -> dict[str, float]:
    """Of each figure over the rounds."""
    all_rounds = list(rounds)
    return {name: statistics.median(one[name] for one in all_rounds) for name in all_rounds[0]}


def main(arguments: list[str]) -> None:
    given = Path(arguments[0]) if arguments else None
    with tempfile.TemporaryDirectory(dir=given) as folder:
        top, began = Path(folder), time.perf_counter()
        found: dict[str, Any] = medians(saves(top / "saves"))
        large, small = top / "large", top / "small"
        of_large, of_small = filled(large, LARGE_BYTES, LARGE_ARTIFACTS), filled(small, SMALL_BYTES, LARGE_ARTIFACTS)
        found["publish_ms"] = {"1MiB": publication(small, of_small), "4GiB": publication(large, of_large)}
        hundred = top / "hundred"
        found["publish_ms_100_artifacts"] = publication(hundred, filled(hundred, 100 * MIB, 100))
        found |= medians(verification(large, of_large))
        shutil.rmtree(large)
        found |= medians(discovery(top / "run"))
        took = time.perf_counter() - began
    print(f"{os.cpu_count()} cores, {RANKS} ranks of {SHARD_BYTES // MIB} MiB\n")
    for what, value in (
        ("save, hashed while written, published", f"{found['save_hashed_s']:.2f} s"),
        ("  to the same save without hashing", f"{found['save_ratio_hash_on_write']:.2f} x"),
        ("  to save, read again and hash, publish", f"{found['save_ratio_vs_reread']:.2f} x"),
        ("publish 32 artifacts of 1 MiB together", f"{found['publish_ms']['1MiB']:.1f} ms"),
        ("publish 32 artifacts of 4 GiB together", f"{found['publish_ms']['4GiB']:.1f} ms"),
        ("publish 100 artifacts", f"{found['publish_ms_100_artifacts']:.1f} ms"),
        ("verify 4 GiB in 32 artifacts", f"{found['verify_mib_per_s']:.0f} MiB/s"),
        ("  to reading, to hashing alone", f"{found['read_mib_per_s']:.0f}, {found['hash_mib_per_s']:.0f} MiB/s"),
        ("  to the slower of both", f"{found['verify_ratio_to_limit']:.2f} x"),
        ("discover the newest of 1,000", f"{found['discover_1000_s']:.2f} s"),
    ):
        print(f"{what:46} {value:>16}")
    print(f"took {took:.0f} s\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
