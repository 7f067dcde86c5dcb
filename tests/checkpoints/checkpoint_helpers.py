"""What the checkpoint tests share: metadata, artifacts on disk, and a process whose system calls can be tampered with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cosmos_ctrl.checkpoints.artifacts import Artifact
from cosmos_ctrl.checkpoints.digests import digest_bytes
from cosmos_ctrl.checkpoints.document import Parent, sealed
from cosmos_ctrl.checkpoints.manifest import CheckpointManifest, publish_from_receipts
from cosmos_ctrl.core.resume import ControllerResumeMetadata

REPOSITORY = Path(__file__).resolve().parents[2]
CONTENT = {"rank0.pt": b"first shard" * 100, "sub/rank1.pt": b"second shard" * 50}
COMPATIBILITY = {"dataset": {"digest": "sha256:aa", "rows": 10}, "world_size": 2}


def metadata(step: int = 3, checkpoint_id: str = "c0ffee", path: str = "anywhere") -> ControllerResumeMetadata:
    return ControllerResumeMetadata(
        completed_training_steps=step,
        completed_optimizer_updates=2 * step,
        remaining_completions=max(0, 100 - step),
        epoch=1,
        sampling_owner="sampler",
        sampler_state={"seed": 7, "position": step},
        checkpoint_path=path,
        checkpoint_id=checkpoint_id,
    )


def write(directory: Path, content: dict[str, bytes] | None = None) -> Path:
    for name, data in (CONTENT if content is None else content).items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return directory


def publish(directory: Path, step: int = 3, checkpoint_id: str = "c0ffee", **kwargs: Any) -> CheckpointManifest:
    arguments: dict[str, Any] = {"required_artifacts": CONTENT, "compatibility": COMPATIBILITY} | kwargs
    return CheckpointManifest.publish(directory, metadata(step, checkpoint_id), **arguments)


def load(directory: Path, **kwargs: Any) -> CheckpointManifest:
    arguments: dict[str, Any] = {"required_artifacts": CONTENT, "compatibility": COMPATIBILITY} | kwargs
    return CheckpointManifest.load(directory, **arguments)


def receipts(content: dict[str, bytes] | None = None) -> dict[str, Artifact]:
    return {
        name: Artifact(size_bytes=len(data), digest=digest_bytes(data), rank=rank, group="policy")
        for rank, (name, data) in enumerate((CONTENT if content is None else content).items())
    }


def manifest_of(step: int = 3, number: int = 1, checkpoint_id: str = "c0ffee", **kwargs: Any) -> CheckpointManifest:
    fields: dict[str, Any] = {
        "metadata": metadata(step, checkpoint_id),
        "artifacts": receipts(),
        "compatibility": COMPATIBILITY,
        "execution_number": number,
        "execution_id": f"id-{number}" if number else "",
        "parent": Parent("parent", digest_bytes(b"parent")),
        "repeat_bound_completions": 12,
        "application_note": '{"tracker": "run-1"}',
    }
    return CheckpointManifest(**(fields | kwargs))


def commit(run: Path, name: str, step: int = 3, number: int = 1, **kwargs: Any) -> Path:
    """A committed checkpoint in a run."""
    directory = write(run / "checkpoints" / name)
    publish_from_receipts(
        directory, manifest_of(step, number, checkpoint_id=kwargs.pop("checkpoint_id", name), **kwargs)
    )
    return directory


def resealed(manifest: Path, old: bytes, new: bytes) -> None:
    """Change a manifest on the disk, and its own digest with it."""
    body = manifest.read_bytes().rpartition(b',"self_digest"')[0] + b"}\n"
    assert old in body
    manifest.write_bytes(sealed(body.replace(old, new)))


class Zygote:
    """A process that has everything imported and forks a child per task, so that a traced child makes only the task's calls."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        script = Path(__file__).with_name("checkpoint_tasks.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def close(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()

    def run(self, task: str, directory: Path, *strace: str, **how: Any) -> dict[str, Any]:
        """The task's outcome: ``{"ok": value}``, ``{"error": class, …}``, or ``{"killed": signal}``, and what it ``told`` before.

        Args:
            task: its name in ``checkpoint_tasks``.
            directory: what it works on.
            strace: options of strace.
            how: what the child is to be: ``mutant`` (a name), ``user`` (an ID), ``umask``, ``file_limit`` (bytes).
        """
        pid = self._ask({"task": task, "directory": str(directory), **how})["pid"]
        tracer = subprocess.Popen(["strace", "-p", str(pid), *strace], stderr=subprocess.PIPE, text=True)
        assert tracer.stderr
        with tracer.stderr:
            first = tracer.stderr.readline()
            if "attached" not in first:
                tracer.wait(10)
                self._ask({})
                unavailable(f"strace cannot attach: {first.strip()}")
            outcome = self._ask({})
            tracer.stderr.read()
        tracer.wait(10)
        return outcome

    def run_untraced(self, task: str, directory: Path, **how: Any) -> dict[str, Any]:
        """As `run`, with nobody looking on."""
        self._ask({"task": task, "directory": str(directory), **how})
        return self._ask({})

    def calls(self, task: str, directory: Path, log: Path, *strace: str) -> Counter[str]:
        """How often the task makes each system call; untampered, unless `strace` says so."""
        outcome = self.run(task, directory, "-o", str(log), *strace)
        assert "ok" in outcome, outcome
        names = re.findall(r"^([a-z_0-9]+)\(", log.read_text(), flags=re.MULTILINE)
        # The wait for the go-ahead is taken up anew when the child is traced: a kill there comes before the task, or not, as it happens.
        return Counter(name for name in names if name not in ("pselect6", "select", "restart_syscall"))

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


def unavailable(why: str) -> None:
    """Skip for want of a tool; where the tools are said to be complete, fail."""
    if os.environ.get("CI") == "true":
        pytest.fail(why)
    pytest.skip(why)
