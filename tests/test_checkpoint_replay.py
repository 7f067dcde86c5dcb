"""What comes again after a restart, and what does not: the two-rank canaries on CPU, and real controllers that are killed.

The canaries are started as their users start them. The ledger and the window, exhaustively: `core/test_ledger.py`, `simulation/`,
`core/test_replay.py`; samplers at an epoch's end: `core/test_restoration.py`, `samplers/`; limits: `core/test_training.py`; counted from the
journals of the main job: `test_main_job.py`.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pytest
import torch
from canary_controller import BATCH, RANKS, ShardCursors, key_of
from canary_ranks import SKIPPED, main, torchrun
from controller_process import ControllerProcess, Worker, Workers, serving, started, write_config

from cosmos_ctrl.audit import audit
from cosmos_ctrl.checkpoints.discovery import list_checkpoints
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.core.samplers import SeekableSampler
from cosmos_ctrl.core.sampling import Prompt, Sampling
from cosmos_ctrl.exits import ExitCode
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1 import reports_pb2

TESTS = Path(__file__).resolve().parent
REPLAY, PARITY = TESTS / "controller_resume_replay_canary.py", TESTS / "controller_resume_gpu_canary.py"

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canaries run what is tested here, wherever the package is installed from."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS.parent))


def canary(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Its deadlines are its own; this one is only the last."""
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


# -- the two-rank fixtures


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory after the replay canary's first phase, which is never touched."""
    directory = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS.parent))
        assert torchrun(str(REPLAY), "save", directory, "cpu") == 0
    return directory


def test_g1_g2_g3_two_ranks_resume_to_the_bit_and_do_again_what_was_outstanding(
    saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = Path(shutil.copytree(saved, tmp_path / "copy"))
    assert torchrun(str(REPLAY), "resume", directory, "cpu") == 0
    assert "skipped 0, repeated 4 of at most 8" in capfd.readouterr().out
    steps = [found.manifest.order for found in list_checkpoints(LocalStore(directory / "replay/run"))]
    assert steps == [(2, 6), (2, 4), (1, 2)]


def test_g3_rng_files_of_two_ranks_that_were_swapped_are_refused_and_nothing_is_trained(
    saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = Path(shutil.copytree(saved, tmp_path / "copy"))
    run = directory / "replay/run"
    (checkpoint,) = (run / "checkpoints").iterdir()
    one, other = (checkpoint / f"policy-{rank}/rng.pt" for rank in range(RANKS))
    first, second = one.read_bytes(), other.read_bytes()
    assert first != second
    assert len(first) == len(second)
    one.write_bytes(second)
    other.write_bytes(first)
    assert torchrun(str(REPLAY), "resume", directory, "cpu") != 0
    said = capfd.readouterr()
    assert re.search(r"policy-[01]/rng\.pt is damaged", said.err)
    assert "restored to the bit" not in said.out
    assert [found.manifest.order for found in list_checkpoints(LocalStore(run))] == [(1, 2)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_with_nothing_outstanding_a_resumed_run_ends_as_an_uninterrupted_one(device: str, tmp_path: Path) -> None:
    done = canary(PARITY, "both", str(tmp_path), "--device", device)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "both ranks are as without the interruption, to the bit" in done.stdout


@needs_gpu
def test_g1_g2_g3_on_a_gpu(tmp_path: Path) -> None:
    done = canary(REPLAY, "both", str(tmp_path), "--device", "cuda")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_canary_without_its_device_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(PARITY), "both", str(tmp_path / "new"), "--device", "cuda"])
    assert main(str(PARITY), {}, account="") == SKIPPED
    assert capsys.readouterr().err == "skipped: there is no CUDA device here\n"
    assert not (tmp_path / "new").exists()


def test_every_ranks_cursor_goes_on_in_its_own_shard_at_any_place() -> None:
    def sampling() -> Sampling:
        cursors = ShardCursors([SeekableSampler(10, seed=7 + rank) for rank in range(RANKS)])
        return Sampling(batch_sampler=cursors, prompt_of=lambda place: Prompt(key_of(place)), completions_per_prompt=1)

    whole = sampling()
    boundaries = [whole.start(budget=1000)]
    keys: list[list[str]] = []
    for _ in range(11):  # through two epochs, of five batches each
        draw = whole.draw(1000)
        keys.append([prompt.key for prompt in draw.prompts])
        boundaries.append(draw.after)
    assert [key.split("/")[0] for key in keys[0]] == ["shard0", "shard1"] * (BATCH // RANKS)
    for epoch in (keys[:5], keys[5:10]):
        assert sorted(chain.from_iterable(epoch)) == sorted(
            key_of((rank, index)) for rank in range(RANKS) for index in range(10)
        )
    for place, boundary in enumerate(boundaries[:-1]):
        resumed = sampling()
        adapter = _Plain()
        metadata = resumed.metadata(
            boundary, completed_training_steps=0, completed_optimizer_updates=0, checkpoint_path=""
        )
        resumed.restore(adapter, metadata)
        assert [prompt.key for prompt in resumed.draw(1000).prompts] == keys[place]


class _Plain:
    def load_metadata(self, config: object) -> None:
        return None

    def restore_sampler(self, sampler: ShardCursors, metadata: object) -> None:
        sampler.load_state_dict(metadata.sampler_state)  # type: ignore[attr-defined]


# -- where a checkpoint may stand


def kill(controller: ControllerProcess) -> None:
    controller.process.kill()
    controller.process.wait()


def lease_one(worker: Worker) -> pb.LeasedGroup:
    worker.requests += 1
    request = pb.LeasePromptsRequest(worker=worker.identity, number=worker.requests, max_groups=1)
    (group,) = worker.stub.LeasePrompts(request, timeout=20).groups
    return group


def report(worker: Worker, group: pb.LeasedGroup, *, mask: int) -> None:
    version = worker.controller.state().metadata.completed_training_steps
    rows = reports_pb2.RolloutRows(
        outcome=reports_pb2.OUTCOME_COMPLETED,
        groups=[group.group],
        leases=[group.lease],
        masks=[mask],
        lowest_versions=[version],
        highest_versions=[version],
        rewards=[0.5] * mask.bit_count(),
    )
    worker.submit(rollouts=[rows])


def test_g1_a_group_that_was_half_complete_at_the_save_comes_again_whole(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with serving(config) as first:
        workers = Workers(first)
        half = lease_one(workers.rollout)
        report(workers.rollout, half, mask=0b01)
        workers.step()
        trained = workers.keys
        workers.save()
        (manifest,) = first.manifests()
        assert manifest["metadata"]["remaining_completions"] == 16
        assert manifest["repeat_bound_completions"] == 6
        kill(first)
    with serving(config) as second:
        workers = Workers(second)
        again = lease_one(workers.rollout)
        assert again.prompt_key == half.prompt_key
        assert list(again.masks) == [0b11]
        report(workers.rollout, again, mask=0b11)
        # What the step had trained is in the model, and in the record of the window: it does not come again.
        others = workers.rollout.rollout(8)
        assert len({*others, *trained, half.prompt_key}) == len(others) + 3 == 8
        assert workers.to_the_end().completed_training_steps == 4
        assert second.exit_code() == ExitCode.ENDED
    found = audit(tmp_path / "run")
    assert (found.skipped, found.repeated, found.remaining_completions) == (0, 0, 0)


def test_g1_g8_a_checkpoint_at_an_epochs_end_goes_on_with_the_whole_next_epoch(tmp_path: Path) -> None:
    config = write_config(tmp_path, sampling={"completions": None, "epochs": 2}, checkpoints={"every_steps": 4})
    with serving(config) as first:
        workers = Workers(first)
        for _ in range(4):
            workers.step()
        assert len(set(workers.keys)) == 8
        workers.save()
        kill(first)
    with serving(config) as second:
        metadata = second.state().metadata
        counts = metadata.completed_training_steps, metadata.remaining_completions, metadata.epoch
        assert counts == (4, 16, 1)
        again = Workers(second)
        for step in range(4):
            again.step()
            assert again.number == step + 2
        assert sorted(again.keys) == sorted(workers.keys)
        assert again.keys != workers.keys, "the next epoch has its own order"
        end = again.to_the_end()
        assert (end.reason, end.completed_training_steps) == (pb.END_REASON_BUDGET_EXHAUSTED, 8)
        assert second.exit_code() == ExitCode.ENDED
    # Another limit is one for a fresh run: this one was planned for two epochs, has had them, and that is said.
    config = write_config(tmp_path, sampling={"completions": None, "epochs": 3}, checkpoints={"every_steps": 4})
    with started(config) as third:
        third.wait_until_ready()
        third.signal(signal.SIGTERM)
        assert third.exit_code() == ExitCode.ENDED
        assert "was planned for 8 training steps when it began, where the configuration gives 12" in third.log
        assert "nothing to do: at step 8 with no budget left" in third.log
    journals = [path.read_text() for path in sorted((tmp_path / "run/executions").glob("*.jsonl"))]
    issued = [json.loads(line) for text in journals for line in text.splitlines() if '"issue"' in line]
    assert sorted((event["epoch"], event["key"]) for event in issued) == sorted(
        (epoch, key) for epoch in (1, 2) for key in workers.keys
    )
    found = audit(tmp_path / "run")
    assert (found.skipped, found.repeated, found.remaining_completions) == (0, 0, 0)


def test_g8_a_limit_between_two_intervals_is_saved_and_the_work_that_was_out_comes_again(tmp_path: Path) -> None:
    def to_the_limit(limit: int, steps: Sequence[int]) -> tuple[list[str], list[int]]:
        config = write_config(tmp_path, train={"max_steps": limit}, checkpoints={"every_steps": 3})
        with serving(config) as controller:
            workers = Workers(controller)
            for step in steps:
                workers.step()
                if step == 1:
                    lease_one(workers.rollout)  # and never reported
                if step % 3 == 0:
                    workers.save()
            end = workers.to_the_end()
            assert (end.reason, end.completed_training_steps) == (pb.END_REASON_STEP_LIMIT, limit)
            assert controller.exit_code() == ExitCode.ENDED
            return workers.keys, [m["metadata"]["completed_training_steps"] for m in controller.manifests()]

    first, saved = to_the_limit(2, [1, 2])
    assert saved == [2]
    second, saved = to_the_limit(4, [3, 4])
    assert saved == [2, 3, 4]
    assert len({*first, *second}) == len(first) + len(second) == 8
    # At its limit, and with every step saved, there is nothing to do and nothing to save.
    assert to_the_limit(4, []) == ([], [2, 3, 4])
