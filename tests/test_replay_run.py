"""A run that is killed with settled work beyond its boundary, over real files and real calls: what its resume generates again."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
import pytest
from controller_process import DEADLINE_S, Worker, Workers, serving, write_config

from cosmos_ctrl.audit import RunReport, audit
from cosmos_ctrl.checkpoints.adapter import ManifestAdapter
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.checkpoints.window import RECORD_NAME
from cosmos_ctrl.config import ConfigurationError, load_config
from cosmos_ctrl.core.errors import StorageUnavailableError
from cosmos_ctrl.core.resume import ControllerResumeMetadata
from cosmos_ctrl.core.sampling import Prompt, PromptFeedback
from cosmos_ctrl.exits import ExitCode
from cosmos_ctrl.server import Application, Ready, prompts_application, serve
from cosmos_ctrl.service import runtime
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1 import reports_pb2
from cosmos_ctrl.v1.controller_service_pb2_grpc import ControllerServiceStub

Leased = list[tuple[str, int]]


# -- workers


def lease(worker: Worker, most: int) -> Sequence[pb.LeasedGroup]:
    worker.requests += 1
    request = pb.LeasePromptsRequest(worker=worker.identity, number=worker.requests, max_groups=most)
    return worker.stub.LeasePrompts(request, timeout=DEADLINE_S).groups


def report(worker: Worker, *done: tuple[pb.LeasedGroup, int], discarded: bool = False) -> None:
    """Completions of groups: generated, or given up for good."""
    steps = worker.controller.state().metadata.completed_training_steps
    rows = reports_pb2.RolloutRows(
        outcome=reports_pb2.OUTCOME_DISCARDED if discarded else reports_pb2.OUTCOME_COMPLETED,
        groups=[group.group for group, _ in done],
        leases=[group.lease for group, _ in done],
        masks=[mask for _, mask in done],
    )
    if discarded:
        rows.reason = "dull"
    else:
        rows.lowest_versions.extend([steps] * len(done))
        rows.highest_versions.extend([steps] * len(done))
        rows.rewards.extend([0.5] * sum(mask.bit_count() for _, mask in done))
    worker.submit(rollouts=[rows])


def step(workers: Workers) -> pb.TrainCommand:
    """The step that is due."""
    command = workers.trainers[0].next(workers.number)
    assert command.WhichOneof("command") == "train", command
    for trainer in workers.trainers:
        trainer.complete(workers.number, command.train)
    workers.number += 1
    return command.train


def run_state(controller: Any) -> pb.RunState:
    for response in controller.stub.WatchRun(pb.WatchRunRequest(), timeout=DEADLINE_S):
        return response.state
    raise AssertionError("the stream ended")


def to_the_save(controller: Any) -> tuple[Workers, list[pb.LeasedGroup], pb.SaveCommand]:
    """Six groups out; the second and the fourth trained, of the third a half discarded; saved."""
    workers = Workers(controller)
    groups = list(lease(workers.rollout, 6))
    assert len(groups) == 6
    report(workers.rollout, (groups[2], 0b01), discarded=True)
    report(workers.rollout, (groups[1], 0b11), (groups[3], 0b11))
    step(workers)
    return workers, groups, workers.save()


def to_the_end(controller: Any) -> tuple[Leased, pb.RunState]:
    """Generates and trains all that is given; what was leased, and the state when the workers came."""
    workers = Workers(controller)
    state = run_state(controller)
    leased: Leased = []
    for _ in range(100):
        if groups := lease(workers.rollout, 2):
            leased += [(group.prompt_key, group.masks[0]) for group in groups]
            report(workers.rollout, *((group, group.masks[0]) for group in groups))
        request = pb.NextCommandRequest(worker=workers.trainers[0].identity, number=workers.number)
        command = workers.trainers[0].stub.NextCommand(request, timeout=DEADLINE_S)
        kind = command.WhichOneof("command")
        if kind == "train":
            step(workers)
        elif kind == "save":
            workers.save()
        elif kind == "end":
            assert command.end.reason == pb.END_REASON_BUDGET_EXHAUSTED
            workers.leave()
            return leased, state
    raise AssertionError("it does not end")


# -- controllers


class Here:
    """A controller in this process, for workers in a thread."""

    def __init__(self, ready: Ready, run: Path, channel: grpc.Channel) -> None:
        self.execution_id, self.run, self.ready = ready.execution_id, run, ready
        self.stub = ControllerServiceStub(channel)

    def state(self) -> pb.GetResumeStateResponse:
        return self.stub.GetResumeState(pb.GetResumeStateRequest(), timeout=DEADLINE_S)


async def here(config: Path, play: Callable[[Any], Any], application: Application | None = None) -> Any:
    """Serve in this process while `play` speaks to it; what it returns. An execution that is not over then is dropped where it stands."""
    loaded = load_config(config, environment={})
    ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
    process = asyncio.create_task(serve(loaded, application or prompts_application(loaded), on_ready=ready.set_result))

    def speak(told: Ready) -> Any:
        with grpc.insecure_channel(told.address) as channel:
            return play(Here(told, loaded.directory, channel))

    try:
        await asyncio.wait({process, ready}, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        if process.done():
            process.result()
        return await asyncio.wait_for(asyncio.to_thread(speak, ready.result()), DEADLINE_S)
    finally:
        process.cancel()
        await asyncio.gather(process, return_exceptions=True)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A directory with the run of an execution that was killed after its save and one more step; the prompts' keys in order."""
    directory = tmp_path_factory.mktemp("killed")
    with serving(write_config(directory)) as controller:
        workers, groups, _ = to_the_save(controller)
        report(workers.rollout, (groups[4], 0b11), (groups[5], 0b11))
        step(workers)
        state = run_state(controller)
        assert (state.spared_completions, state.replay_doubts, state.window_draws) == (0, 0, 6)
        controller.process.kill()
        controller.process.wait()
    return directory / "run", [group.prompt_key for group in groups]


def go_on(run: Path, directory: Path, **overrides: Any) -> Path:
    """A configuration for a copy of that run."""
    shutil.copytree(run, directory / "run")
    return write_config(directory, **overrides)


def record_in(run: Path) -> Path:
    (found,) = run.glob(f"checkpoints/*/{RECORD_NAME}")
    return found


def counts(found: RunReport) -> tuple[int, int, int, int]:
    return found.skipped, found.repeated, found.redone, found.spared


# -- what is settled is spared


def test_a_killed_run_generates_only_what_was_unfinished_in_another_process_too(killed, tmp_path):
    run, keys = killed
    with serving(go_on(run, tmp_path)) as second:
        assert second.state().repeat_bound_completions == 12
        leased, state = to_the_end(second)
        assert second.exit_code() == ExitCode.ENDED
        assert "5 completions beyond the boundary are settled already and not generated again" in second.log
        assert "WARNING" not in second.log
    assert leased[:4] == [(keys[0], 0b11), (keys[2], 0b10), (keys[4], 0b11), (keys[5], 0b11)]
    assert len({key for key, _ in leased} | {keys[1], keys[3]}) == 8
    assert len(leased) == 6
    assert (state.spared_completions, state.replay_doubts) == (5, 0)
    assert (state.window_draws, state.window_completions, state.remaining_completions) == (4, 8, 8)
    assert state.safe_remaining_completions == 16
    # The fifth and sixth were trained, after the cut: redone, and nothing that the model contains is repeated.
    assert counts(audit(tmp_path / "run")) == (0, 0, 4, 5)


def test_the_record_lies_beside_the_shards_and_is_in_the_manifest(killed):
    run, _ = killed
    record = record_in(run)
    manifest = json.loads((record.parent / "manifest.json").read_text())
    artifact = manifest["artifacts"].pop(RECORD_NAME)
    assert artifact["size_bytes"] == record.stat().st_size
    assert (artifact["rank"], artifact["group"]) == (None, "")
    assert sorted(manifest["artifacts"]) == ["policy-0.pt", "policy-1.pt"]
    assert manifest["metadata"]["remaining_completions"] == 16  # the boundary is what it was without a record


async def test_a_run_that_dies_again_soon_generates_exactly_the_unfinished_remains(killed, tmp_path):
    run, keys = killed
    config = go_on(run, tmp_path)

    def a_little(controller: Any) -> None:
        workers = Workers(controller)
        assert run_state(controller).spared_completions == 5
        groups = lease(workers.rollout, 3)
        assert [group.prompt_key for group in groups] == [keys[0], keys[2], keys[4]]
        report(workers.rollout, *((group, group.masks[0]) for group in groups[1:]))
        step(workers)
        workers.save()

    await here(config, a_little)
    leased, state = await here(config, to_the_end)
    assert (state.spared_completions, state.replay_doubts) == (8, 0)
    assert leased[:2] == [(keys[0], 0b11), (keys[5], 0b11)]
    assert len(leased) == 4
    found = audit(tmp_path / "run")
    assert (found.skipped, found.repeated, found.spared) == (0, 0, 13)
    assert [execution.spared for execution in found.executions] == [0, 5, 8]
    assert [execution.window for execution in found.executions] == [0, 12, 12]


# -- doubts: more is repeated, and never less


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: data[:-1] + bytes([data[-1] ^ 1]), id="a flipped bit"),
        pytest.param(lambda data: bytes(len(data)), id="zeros"),
    ],
)
async def test_a_record_that_is_corrupted_on_disk_means_that_the_window_is_repeated(killed, tmp_path, caplog, damage):
    run, keys = killed
    config = go_on(run, tmp_path)
    record = record_in(tmp_path / "run")
    record.write_bytes(damage(record.read_bytes()))
    with caplog.at_level(logging.WARNING):
        leased, state = await here(config, to_the_end)
    assert leased[:6] == [(key, 0b11) for key in keys]
    assert (state.spared_completions, state.replay_doubts) == (0, 1)
    assert [r.getMessage() for r in caplog.records if "repeated" in r.getMessage()] == [
        f"more of the window is repeated than would have to be: {RECORD_NAME} is damaged: its digest is not the manifest's"
    ]
    assert counts(audit(tmp_path / "run")) == (0, 4, 4, 0)
    (doubt,) = [event for event in events(tmp_path / "run", 2) if event["event"] == "replay_doubt"]
    assert "damaged" in doubt["why"]


def events(run: Path, number: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "executions" / f"{number:08d}.jsonl").read_text().splitlines()]


async def test_a_record_larger_than_this_run_reads_means_that_the_window_is_repeated(killed, tmp_path, caplog):
    run, keys = killed
    leased, state = await here(go_on(run, tmp_path, replay={"max_record_bytes": 10}), to_the_end)
    assert leased[:6] == [(key, 0b11) for key in keys]
    assert state.replay_doubts == 1
    assert "at most 10 are read" in caplog.text
    assert counts(audit(tmp_path / "run"))[:2] == (0, 4)


async def test_a_record_that_was_removed_is_a_damaged_checkpoint(killed, tmp_path):
    run, _ = killed
    config = go_on(run, tmp_path)
    record_in(tmp_path / "run").unlink()
    with pytest.raises(Exception, match=RECORD_NAME):
        await here(config, pytest.fail)


async def test_switched_off_on_purpose_the_window_is_repeated_and_nothing_is_doubted(killed, tmp_path, caplog):
    run, keys = killed
    record = record_in(go_on(run, tmp_path, replay={"skip_settled": False}).parent / "run")
    record.write_bytes(bytes(record.stat().st_size))  # nor is it looked at
    leased, state = await here(tmp_path / "config.toml", to_the_end)
    assert leased[:6] == [(key, 0b11) for key in keys]
    assert (state.spared_completions, state.replay_doubts) == (0, 0)
    assert "repeated" not in caplog.text
    assert counts(audit(tmp_path / "run")) == (0, 4, 4, 0)


@pytest.mark.parametrize(
    ("replay", "doubts"),
    [({"max_record_bytes": 16}, 1), ({"skip_settled": False}, 0)],
    ids=["too small", "switched off"],
)
async def test_a_save_without_a_record_is_committed_all_the_same(tmp_path, caplog, replay, doubts):
    config = write_config(tmp_path, replay=replay)

    def play(controller: Any) -> pb.RunState:
        to_the_save(controller)
        return run_state(controller)

    state = await here(config, play)
    assert (state.replay_doubts, state.completed_training_steps) == (doubts, 1)
    (manifest,) = (tmp_path / "run").glob("checkpoints/*/manifest.json")
    assert sorted(os.listdir(manifest.parent)) == ["manifest.json", "policy-0.pt", "policy-1.pt"]  # noqa: PTH208
    assert ("will repeat more" in caplog.text) == bool(doubts)
    kinds = [event["event"] for event in events(tmp_path / "run", 1)]
    assert kinds.count("replay_doubt") == doubts
    leased, state = await here(config, to_the_end)
    assert (len(leased), state.spared_completions, state.replay_doubts) == (8, 0, 0)
    assert counts(audit(tmp_path / "run"))[:2] == (0, 4)


async def test_a_record_that_cannot_be_written_abandons_the_save_and_the_run_goes_on(tmp_path, monkeypatch):
    real = runtime.write_record
    calls: list[LocalStore] = []

    def full(checkpoint: LocalStore, *arguments: Any, **named: Any) -> Any:
        calls.append(checkpoint)
        if len(calls) > 1:
            return real(checkpoint, *arguments, **named)
        # The disk is full: the file is there, and not whole.
        checkpoint.path_of(RECORD_NAME).write_bytes(b"half")
        raise StorageUnavailableError(path=checkpoint.uri, operation="write", cause="ENOSPC")

    monkeypatch.setattr(runtime, "write_record", full)

    def play(controller: Any) -> list[str]:
        workers = Workers(controller)
        groups = list(lease(workers.rollout, 6))
        report(workers.rollout, (groups[1], 0b11), (groups[3], 0b11))
        step(workers)
        save = workers.trainers[0].next(workers.number).save
        states = [trainer.save(workers.number, save).state for trainer in workers.trainers]
        assert states == [pb.SAVE_STATE_PENDING, pb.SAVE_STATE_ABANDONED]
        workers.number += 1
        report(workers.rollout, (groups[4], 0b11), (groups[5], 0b11))
        step(workers)
        workers.save()
        return [group.prompt_key for group in groups]

    keys = await here(write_config(tmp_path), play)
    assert len(list((tmp_path / "run").glob("checkpoints/*/manifest.json"))) == 1
    leased, state = await here(tmp_path / "config.toml", to_the_end)
    assert state.spared_completions == 8
    assert leased[:2] == [(keys[0], 0b11), (keys[2], 0b11)]
    assert counts(audit(tmp_path / "run")) == (0, 0, 0, 8)


# -- issued again by key


class Pools:
    """A sampler that depends on feedback: what it draws next no state could tell."""

    def __init__(self, seed: int, length: int = 8) -> None:
        self.random, self.length, self.told = random.Random(seed), length, 0

    def __iter__(self) -> Iterator[int]:
        while True:
            yield self.random.randrange(1000)

    def state_dict(self) -> dict[str, int]:
        return {"told": self.told}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.told = state["told"]

    def feedback(self, results: Sequence[PromptFeedback]) -> None:
        self.told += 1


def pools(config: Path, seed: int, restored: list[ControllerResumeMetadata], *, unknown: str = "") -> Application:
    class Noting(ManifestAdapter):
        def restore_sampler(self, sampler: Any, metadata: ControllerResumeMetadata) -> None:
            restored.append(metadata)
            super().restore_sampler(sampler, metadata)

    def by_key(key: str) -> Prompt:
        if key == unknown:
            raise KeyError(key)
        return Prompt(key)

    return Application(
        sampler=Pools(seed),
        prompt_of=lambda index: Prompt(f"pool-{index}"),
        prompt_by_key=by_key,
        budget_completions=16,
        adapter=Noting(LocalStore(config.parent / "run")),
    )


async def test_a_feedback_driven_window_is_issued_again_by_its_keys(tmp_path):
    config = write_config(tmp_path, replay={"reissue_recorded": True})
    restored: list[ControllerResumeMetadata] = []

    def play(controller: Any) -> list[str]:
        return [group.prompt_key for group in to_the_save(controller)[1]]

    keys = await here(config, play, pools(config, 1, restored))
    assert restored == []
    leased, state = await here(config, to_the_end, pools(config, 2, restored))
    assert leased[:4] == [(keys[0], 0b11), (keys[2], 0b10), (keys[4], 0b11), (keys[5], 0b11)]
    assert (state.spared_completions, state.window_draws, state.replay_doubts) == (5, 1, 0)
    (metadata,) = restored
    # Restored at the cursor; the ranks are still told the checkpoint's own boundary.
    assert metadata.remaining_completions == 4
    found = audit(tmp_path / "run")
    assert (found.skipped, found.repeated, found.spared, found.remaining_completions) == (0, 0, 5, 0)


async def test_without_keys_a_feedback_driven_window_is_not_recorded_and_drawn_anew(tmp_path):
    config = write_config(tmp_path)
    restored: list[ControllerResumeMetadata] = []

    def play(controller: Any) -> list[str]:
        return [group.prompt_key for group in to_the_save(controller)[1]]

    keys = await here(config, play, pools(config, 1, restored))
    assert not list((tmp_path / "run").glob(f"checkpoints/*/{RECORD_NAME}"))
    leased, state = await here(config, to_the_end, pools(config, 2, restored))
    assert set(keys).isdisjoint(key for key, _ in leased)
    assert (len(leased), state.spared_completions, state.replay_doubts) == (8, 0, 0)
    assert [metadata.remaining_completions for metadata in restored] == [16]


async def test_a_key_that_is_unknown_now_means_that_the_window_is_drawn_anew(tmp_path, caplog):
    config = write_config(tmp_path, replay={"reissue_recorded": True})
    restored: list[ControllerResumeMetadata] = []

    def play(controller: Any) -> list[str]:
        return [group.prompt_key for group in to_the_save(controller)[1]]

    keys = await here(config, play, pools(config, 1, restored))
    application = pools(config, 2, restored, unknown=keys[2])
    _, state = await here(config, to_the_end, application)
    assert (state.spared_completions, state.replay_doubts) == (0, 1)
    assert f"the application has no prompt '{keys[2]}'" in caplog.text
    assert [metadata.remaining_completions for metadata in restored] == [16]


async def test_a_prompts_file_finds_its_prompts_by_key(tmp_path):
    config = write_config(tmp_path, replay={"reissue_recorded": True})

    def play(controller: Any) -> list[str]:
        return [group.prompt_key for group in to_the_save(controller)[1]]

    keys = await here(config, play)
    leased, state = await here(config, to_the_end)
    assert leased[:4] == [(keys[0], 0b11), (keys[2], 0b10), (keys[4], 0b11), (keys[5], 0b11)]
    assert (state.spared_completions, state.window_draws) == (5, 1)
    assert counts(audit(tmp_path / "run")) == (0, 0, 0, 5)


async def test_a_window_recorded_with_its_keys_is_drawn_again_where_that_is_not_asked_for_any_more(tmp_path):
    def play(controller: Any) -> list[str]:
        return [group.prompt_key for group in to_the_save(controller)[1]]

    keys = await here(write_config(tmp_path, replay={"reissue_recorded": True}), play)
    leased, state = await here(write_config(tmp_path), to_the_end)
    assert leased[:4] == [(keys[0], 0b11), (keys[2], 0b10), (keys[4], 0b11), (keys[5], 0b11)]
    assert (state.spared_completions, state.window_draws, state.replay_doubts) == (5, 6, 0)


async def test_a_recorded_window_of_a_sampler_that_is_not_deterministic_any_more_is_a_doubt(killed, tmp_path, caplog):
    run, keys = killed
    config = go_on(run, tmp_path)
    application = prompts_application(load_config(config, environment={}))
    application.sampler.deterministic = False
    leased, state = await here(config, to_the_end, application)
    assert leased[:6] == [(key, 0b11) for key in keys]
    assert (state.spared_completions, state.replay_doubts) == (0, 1)
    assert "does not declare itself deterministic" in caplog.text


async def test_said_in_so_many_words_a_sampler_need_not_declare_itself(killed, tmp_path):
    run, keys = killed
    config = go_on(run, tmp_path, replay={"skip_settled": True})
    application = prompts_application(load_config(config, environment={}))
    application.sampler.deterministic = False
    leased, state = await here(config, to_the_end, application)
    assert (leased[1], state.spared_completions) == ((keys[2], 0b10), 5)


async def test_another_prompt_in_the_window_is_generated_and_all_that_follow_it(killed, tmp_path, caplog):
    """Its dataset was changed, and the application did not say so in its compatibility."""
    run, keys = killed
    config = go_on(run, tmp_path)
    application = prompts_application(load_config(config, environment={}))
    known = application.prompt_of

    def prompt_of(index: Any) -> Prompt:
        prompt = known(index)
        return replace(prompt, key="another") if prompt.key == keys[2] else prompt

    leased, state = await here(config, to_the_end, replace(application, prompt_of=prompt_of))
    assert leased[:5] == [(key, 0b11) for key in (keys[0], "another", *keys[3:6])]
    assert (state.spared_completions, state.replay_doubts) == (2, 1)
    assert "draw 3 of 4 beyond the boundary gives other prompts than were recorded" in caplog.text


# -- configuration


@pytest.mark.parametrize("key", ["skip_settled", "reissue_recorded"])
def test_a_record_needs_a_manifest_to_lie_beside(tmp_path, key):
    config = write_config(tmp_path, checkpoints={"owner": "application"}, replay={key: True})
    with pytest.raises(ConfigurationError, match=r"checkpoints.owner = 'manifest'"):
        load_config(config, environment={})
    off = write_config(tmp_path, checkpoints={"owner": "application"}, replay={key: False})
    assert load_config(off, environment={}).policy(deterministic=True).records_window == "nothing"


@pytest.mark.parametrize(
    ("replay", "deterministic", "records"),
    [
        ({}, True, "settled"),
        ({}, False, "nothing"),
        ({"skip_settled": True}, False, "settled"),
        ({"skip_settled": False}, True, "nothing"),
        ({"reissue_recorded": True}, True, "keys"),
        ({"reissue_recorded": True}, False, "keys"),
        ({"reissue_recorded": True, "skip_settled": False}, True, "keys"),
    ],
)
def test_what_is_recorded_is_what_was_asked_for(tmp_path, replay, deterministic, records):
    config = load_config(write_config(tmp_path, replay=replay), environment={})
    assert config.policy(deterministic=deterministic).records_window == records


async def test_keys_to_be_issued_again_need_somebody_who_finds_them(tmp_path):
    config = write_config(tmp_path, replay={"reissue_recorded": True})
    application = replace(prompts_application(load_config(config, environment={})), prompt_by_key=None)
    with pytest.raises(ValueError, match="prompt_by_key"):
        await here(config, pytest.fail, application)
    assert not list((tmp_path / "run").glob("executions/*"))
