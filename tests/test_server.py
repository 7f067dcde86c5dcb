"""The controller as a process: its order at start, its signals, and what it says when it ends."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
import grpc.aio
import pytest
from controller_process import (
    DEADLINE_S,
    ControllerProcess,
    Worker,
    Workers,
    refused,
    run_to_the_end,
    serving,
    started,
    write_config,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cosmos_ctrl.checkpoints.adapter import ManifestAdapter
from cosmos_ctrl.checkpoints.claims import claim_execution
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.config import load_config
from cosmos_ctrl.core.errors import ExecutionEndedError, RestoringError, ResumeMetadataMismatch, StaleExecutionError
from cosmos_ctrl.core.samplers import SeekableSampler
from cosmos_ctrl.core.sampling import Prompt
from cosmos_ctrl.exits import ExitCode
from cosmos_ctrl.server import Application, Ready, serve
from cosmos_ctrl.service.status import from_rpc_error
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1.controller_service_pb2_grpc import ControllerServiceStub

SERVICE = "cosmos_ctrl.v1.ControllerService"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


# -- one process that nothing is changed in


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControllerProcess]:
    with serving(write_config(tmp_path_factory.mktemp("idle"))) as controller:
        yield controller


def test_the_ready_file_says_where_and_who(idle):
    ready = json.loads(idle.ready_file.read_text())
    assert ready.keys() == {"address", "execution_number", "execution_id", "pid", "phase", "end", "resumed_from"}
    assert ready["execution_number"] == 1
    assert ready["pid"] == idle.process.pid
    assert ready["phase"] == "AWAITING_AGREEMENT"
    assert ready["resumed_from"] == ""
    assert idle.state().header.execution_id == ready["execution_id"]
    claim = json.loads((idle.run / "executions" / "00000001.json").read_text())
    assert claim["execution_id"] == ready["execution_id"]
    assert not list(idle.ready_file.parent.glob(f"{idle.ready_file.name}.*"))


def test_the_state_is_told_to_anyone(idle):
    state = idle.state()
    assert (state.run, state.run_uri, state.execution_number) == ("test", str(idle.run), 1)
    assert state.phase == pb.PHASE_AWAITING_AGREEMENT
    assert not state.HasField("metadata")
    assert state.limits.max_message_bytes == 64 << 20
    assert not state.limits.HasField("max_training_steps")


def test_health_is_serving(idle):
    stub = health_pb2_grpc.HealthStub(idle.channel)
    for name in ("", SERVICE):
        assert stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=DEADLINE_S).status == SERVING


def test_reflection_lists_the_service_and_its_messages(idle):
    stub = reflection_pb2_grpc.ServerReflectionStub(idle.channel)
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
    ]
    listed, described = stub.ServerReflectionInfo(iter(asked), timeout=DEADLINE_S)
    names = {service.name for service in listed.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names
    assert described.file_descriptor_response.file_descriptor_proto


def test_a_second_controller_on_the_port_is_an_error(idle, tmp_path):
    port = int(idle.address.rpartition(":")[2])
    with started(write_config(tmp_path, server={"port": port})) as second:
        assert second.exit_code() == ExitCode.ERROR
        assert "cannot listen" in second.log
        assert "another controller" in second.log
        assert "Traceback" not in second.log
    assert idle.state().execution_number == 1


def test_a_start_that_cannot_have_its_port_supersedes_nobody(idle):
    run = Path(idle.state().run_uri)
    port = int(idle.address.rpartition(":")[2])
    before = sorted((run / "executions").iterdir())
    with started(write_config(run.parent / "again", run={"directory": str(run)}, server={"port": port})) as second:
        assert second.exit_code() == ExitCode.ERROR
    assert sorted((run / "executions").iterdir()) == before


def test_resume_state_prints_json(idle):
    command = [sys.executable, "-m", "cosmos_ctrl.cli", "resume-state", idle.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    state = json.loads(done.stdout)
    assert state["header"]["execution_id"] == idle.execution_id
    assert state["phase"] == "PHASE_AWAITING_AGREEMENT"
    assert "metadata" not in state


def test_garbage_on_the_port_harms_nobody(idle):
    host, _, port = idle.address.rpartition(":")
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 4096, os.urandom(4096)):
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
            connection.sendall(data)
    assert idle.state().execution_number == 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's directory of an execution that ended at its limit of two steps, with a checkpoint of each."""
    directory = tmp_path_factory.mktemp("trained")
    run_to_the_end(write_config(directory, train={"max_steps": 2}), 2)
    return directory / "run"


def go_on(trained: Path, directory: Path, **overrides: Any) -> Path:
    """A configuration for a copy of that run: nothing in it is absolute."""
    if not (directory / "run").exists():
        shutil.copytree(trained, directory / "run")
    return write_config(directory, **overrides)


# -- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_in_a_checkpoint_at_the_real_step(tmp_path, number):
    config = write_config(tmp_path, checkpoints={"every_steps": 0})
    with serving(config) as controller:
        workers = Workers(controller)
        workers.step()
        workers.rollout.rollout(2)
        train = workers.trainers[0].next(2).train
        workers.rollout.requests += 1
        # Work is out, a command is issued: the command is finished, the rest stays unsettled.
        controller.signal(number)
        states = controller.stub.WatchRun(pb.WatchRunRequest(), timeout=DEADLINE_S)
        assert any(state.state.phase == pb.PHASE_DRAINING for state in states)
        for trainer in workers.trainers:
            trainer.complete(2, train)
        workers.number = 3
        end = workers.to_the_end()
        assert end.reason == pb.END_REASON_STOP_REQUESTED
        assert signal.Signals(number).name in end.message
        assert end.completed_training_steps == 2
        assert controller.exit_code() == ExitCode.ENDED
        (manifest,) = controller.manifests()
        assert manifest["metadata"]["completed_training_steps"] == 2
        assert manifest["metadata"]["completed_optimizer_updates"] == 2
        assert manifest["metadata"]["remaining_completions"] == 8


@pytest.mark.parametrize("heard", [True, False])
def test_g9_a_stop_asked_for_by_a_rank_is_no_good_end_if_another_never_hears_of_it(tmp_path, heard):
    """torchrun signals the siblings of a rank that died: the one that lives asks for a stop, and all there is may be saved already."""
    with serving(write_config(tmp_path, server={"linger_s": 0.5})) as controller:
        workers = Workers(controller)
        workers.step()
        workers.save()
        first, second = workers.trainers
        first.stub.RequestStop(pb.RequestStopRequest(worker=first.identity, reason="SIGTERM to it"), timeout=DEADLINE_S)
        for trainer in (first, second) if heard else (first,):
            assert trainer.next(workers.number).end.reason == pb.END_REASON_STOP_REQUESTED
        assert controller.exit_code() == (ExitCode.ENDED if heard else ExitCode.FAILED)
        assert heard or "trainer policy/1 did not hear of the end" in controller.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_anything_was_trained_ends_with_nothing(tmp_path, number):
    with serving(write_config(tmp_path, server={"linger_s": 0.2})) as controller:
        controller.signal(number)
        assert controller.exit_code() == ExitCode.ENDED
        assert controller.manifests() == []


def test_a_second_signal_ends_at_once_and_publishes_nothing(tmp_path):
    with serving(write_config(tmp_path, server={"linger_s": 1.0})) as controller:
        workers = Workers(controller)
        workers.step()
        controller.signal(signal.SIGTERM)
        command = workers.trainers[0].next(2)
        assert command.WhichOneof("command") == "save"
        workers.trainers[0].save(2, command.save)
        controller.signal(signal.SIGINT)
        error = refused(lambda: workers.trainers[1].next(9))
        while error.reason == "UNKNOWN_WORK":
            error = refused(lambda: workers.trainers[1].next(9))
        assert isinstance(error, ExecutionEndedError)
        assert "second signal" in error.message
        assert controller.exit_code() == ExitCode.FAILED
        assert controller.manifests() == []


# -- death and resume


def test_a_killed_run_resumes_from_its_newest_committed_checkpoint_and_skips_nothing(tmp_path):
    config = write_config(tmp_path)
    with serving(config) as first:
        workers = Workers(first)
        workers.step()
        workers.save()
        workers.step()
        workers.save()
        workers.step()
        lost = workers.rollout.rollout(1)
        # An unfinished save of the step that is lost.
        command = workers.trainers[0].next(workers.number)
        workers.trainers[0].save(workers.number, command.save)
        first.process.kill()
        first.process.wait()
    with serving(config) as second:
        state = second.state()
        assert state.execution_number == 2
        assert state.metadata.completed_training_steps == 2
        assert state.metadata.completed_optimizer_updates == 2
        assert state.repeat_bound_completions == 0
        assert json.loads(second.ready_file.read_text())["resumed_from"] == state.metadata.checkpoint_path
        for worker in (workers.trainers[0], workers.rollout):
            worker.stub = second.stub
            assert isinstance(refused(lambda worker=worker: worker.submit()), StaleExecutionError)
        again = Workers(second)
        again.step()
        again.save()
        again.step()
        assert again.keys[:3] == [*workers.keys[4:6], lost[0]]
        assert again.to_the_end().reason == pb.END_REASON_BUDGET_EXHAUSTED
        assert second.exit_code() == ExitCode.ENDED
    steps = [(m["execution_number"], m["metadata"]["completed_training_steps"]) for m in second.manifests()]
    assert steps == [(1, 1), (1, 2), (2, 3), (2, 4)]
    parents = [m["parent"]["checkpoint_id"] if m["parent"] else None for m in second.manifests()]
    assert parents == [None, *[m["metadata"]["checkpoint_id"] for m in second.manifests()[:3]]]


def test_a_finished_run_started_again_does_nothing_and_says_so(tmp_path):
    config = write_config(tmp_path, server={"linger_s": 0.2})
    run_to_the_end(config, 4)
    with serving(config) as again:
        assert again.exit_code() == ExitCode.ENDED
        assert "nothing to do: at step 4" in again.log
        assert len(again.manifests()) == 4
        assert json.loads(again.ready_file.read_text())["phase"] == "ENDED"
    assert len(list(again.run.glob("checkpoints/*"))) == 4


@pytest.mark.parametrize("limit", [2, 1, 0])
def test_g8_a_run_started_again_at_its_limit_or_past_it_tells_its_workers(tmp_path, trained, limit):
    with serving(go_on(trained, tmp_path, train={"max_steps": limit})) as again:
        workers = Workers(again)
        end = workers.to_the_end()
        assert (end.reason, end.completed_training_steps) == (pb.END_REASON_STEP_LIMIT, 2)
        assert end.message == f"nothing to do: at step 2, the limit is {limit}"
        assert again.exit_code() == ExitCode.ENDED
        assert len(again.manifests()) == 2


def test_a_finished_run_started_again_waits_for_its_ranks_however_early_a_rollout_worker_came(tmp_path, trained):
    with serving(go_on(trained, tmp_path, train={"max_steps": 2})) as again:
        early = Worker(again, pb.ROLE_ROLLOUT)
        early.end()
        # Longer than the server takes to close.
        with pytest.raises(subprocess.TimeoutExpired):
            again.process.wait(1.5)
        ranks = [Worker(again, pb.ROLE_TRAINER, rank, 2) for rank in range(2)]
        for rank in ranks:
            rank.confirm()
            assert rank.next(1).end.reason == pb.END_REASON_STEP_LIMIT
        for rank in ranks:
            rank.end()
        assert again.exit_code() == ExitCode.ENDED


def test_resume_switched_off_where_checkpoints_are_held_says_so_loudly(tmp_path, trained):
    with serving(go_on(trained, tmp_path, train={"resume": False})) as fresh:
        assert not fresh.state().HasField("metadata")
        assert "WARNING" in fresh.log
        assert "starts FRESH although the run holds 2 checkpoints" in fresh.log
        workers = Workers(fresh)
        workers.step()
        workers.save()
        assert [m["execution_number"] for m in fresh.manifests()] == [1, 1, 2]
        assert fresh.manifests()[2]["parent"] is None


def test_an_explicit_checkpoint_that_is_missing_starts_nothing(tmp_path, trained):
    config = go_on(trained, tmp_path, train={"resume": "checkpoints/not-there"})
    before = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    with started(config) as controller:
        assert controller.exit_code() == ExitCode.CANNOT_RESUME
        assert "checkpoints/not-there: no such checkpoint" in controller.log
        assert "Traceback" not in controller.log
        assert not controller.ready_file.exists()
        assert not (controller.run / "executions" / "00000002.jsonl").exists()
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == before


def test_an_explicit_checkpoint_is_that_one(tmp_path, trained):
    (oldest, _) = sorted((trained / "checkpoints").iterdir())
    with serving(go_on(trained, tmp_path, train={"resume": f"checkpoints/{oldest.name}"})) as controller:
        assert controller.state().metadata.completed_training_steps == 1


def test_another_dataset_is_refused_by_name(tmp_path, trained):
    config = go_on(trained, tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(prompts.read_text().replace("3 + 3", "3 + 4"))
    with started(config) as controller:
        assert controller.exit_code() == ExitCode.CANNOT_RESUME
        assert "dataset" in controller.log


# -- agreement


@pytest.mark.parametrize("optimized", [False, True], ids=["plain", "python -O"])
def test_a_mismatch_reaches_every_rank_and_the_process_says_so(tmp_path, trained, optimized):
    with serving(go_on(trained, tmp_path, server={"linger_s": 1.0}), optimized=optimized) as controller:
        first, second = (Worker(controller, pb.ROLE_TRAINER, rank, 2) for rank in range(2))
        waiting = controller.stub.ConfirmResume.future(first.confirmation(wait={"seconds": 50}), timeout=DEADLINE_S)
        while first.confirm().missing != ["trainer policy/1"]:
            pass
        own = refused(lambda: second.confirm(completed_training_steps=0))
        other = refused(waiting.result)
        for error in (own, other):
            assert isinstance(error, ResumeMetadataMismatch)
            assert error.changed == ("restored_training_steps",)
        assert controller.exit_code() == ExitCode.RESUME_MISMATCH
        assert len(controller.manifests()) == 2


def test_damage_that_a_rank_finds_is_recorded_and_the_next_execution_errs_or_passes_over(tmp_path, trained):
    config = go_on(trained, tmp_path, server={"linger_s": 0.5})
    with serving(config) as controller:
        damaged = controller.state().metadata
        worker = Worker(controller, pb.ROLE_TRAINER, 0, 2)
        request = pb.ConfirmResumeRequest(worker=worker.identity)
        request.damaged.name, request.damaged.explanation = "policy-0.pt", "sha256 differs"
        controller.stub.ConfirmResume(request, timeout=DEADLINE_S)
        assert isinstance(refused(worker.confirm), ExecutionEndedError)
        assert controller.exit_code() == ExitCode.DAMAGE_FOUND
    with started(config) as controller:
        assert controller.exit_code() == ExitCode.CANNOT_RESUME
        assert "sha256 differs" in controller.log
    with serving(go_on(trained, tmp_path, checkpoints={"on_corrupt": "previous"})) as controller:
        state = controller.state()
        assert state.metadata.completed_training_steps == 1
        assert state.metadata.checkpoint_id != damaged.checkpoint_id
        candidates = controller.stub.ExplainResume(pb.ExplainResumeRequest(), timeout=DEADLINE_S).candidates
        verdicts = {candidate.path: candidate.verdict for candidate in candidates}
        assert verdicts[damaged.checkpoint_path] == checkpoint_verdict("DAMAGED")
        assert verdicts[state.metadata.checkpoint_path] == checkpoint_verdict("CHOSEN")


def checkpoint_verdict(name: str) -> int:
    from cosmos_ctrl.v1 import checkpoint_pb2

    return checkpoint_pb2.Verdict.Value(f"VERDICT_{name}")


def test_a_superseded_controller_acknowledges_nothing(tmp_path):
    with serving(write_config(tmp_path, server={"linger_s": 0.5})) as controller:
        workers = Workers(controller)
        workers.step()
        command = workers.trainers[0].next(2).save
        workers.trainers[0].save(2, command)
        claim_execution(LocalStore(controller.run), execution_id="a newer one", note={})
        error = refused(lambda: workers.trainers[1].save(2, command))
        assert isinstance(error, ExecutionEndedError)
        assert "newer execution" in error.message
        assert controller.exit_code() == ExitCode.SUPERSEDED
        assert controller.manifests() == []


def test_a_trainer_rank_that_dies_ends_the_execution_in_bounded_time(tmp_path):
    config = write_config(tmp_path, workers={"session_ttl_s": 1.0}, server={"linger_s": 0.2})
    with serving(config) as controller:
        workers = Workers(controller)
        stream = controller.stub.WatchRun(pb.WatchRunRequest(), timeout=DEADLINE_S)
        last = None
        for response in stream:
            last = response.state
            if last.phase == pb.PHASE_RUNNING:
                break
        assert last is not None
        del workers
        assert controller.exit_code() == ExitCode.FAILED
        assert "was not heard for" in controller.log


# -- in this process


class HeldSampler(SeekableSampler):
    """Its restore takes as long as the test wants."""

    def __init__(self) -> None:
        super().__init__(4)
        self.asked, self.go_on = threading.Event(), threading.Event()

    def set_epoch(self, epoch: int) -> None:
        self.asked.set()
        assert self.go_on.wait(DEADLINE_S)
        super().set_epoch(epoch)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_the_port_is_open_and_answers_restoring_while_the_sampler_restores(tmp_path):
    port = free_port()
    config = load_config(
        None,
        environment={},
        overrides={
            "run": {"directory": str(tmp_path / "run")},
            "server": {"port": port, "linger_s": 0.0},
            "train": {"trainers": {"policy": 1}},
        },
    )
    sampler = HeldSampler()
    application = Application(
        sampler=sampler,
        prompt_of=lambda index: Prompt(str(index)),
        budget_completions=8,
        adapter=ManifestAdapter(LocalStore(tmp_path / "run")),
    )
    ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
    process = asyncio.create_task(serve(config, application, on_ready=ready.set_result))
    try:
        assert await asyncio.to_thread(sampler.asked.wait, DEADLINE_S)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub, health = ControllerServiceStub(channel), health_pb2_grpc.HealthStub(channel)

            async def status_of(name: str) -> Any:
                return (await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=DEADLINE_S)).status

            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetResumeState(pb.GetResumeStateRequest(), timeout=DEADLINE_S)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert isinstance(from_rpc_error(caught.value), RestoringError)
            assert [await status_of(name) for name in ("", SERVICE)] == [NOT_SERVING] * 2
            assert not ready.done()
            sampler.go_on.set()
            told = await asyncio.wait_for(ready, DEADLINE_S)
            assert told.address == f"127.0.0.1:{port}"
            assert [await status_of(name) for name in ("", SERVICE)] == [SERVING] * 2
            state = await stub.GetResumeState(pb.GetResumeStateRequest(), timeout=DEADLINE_S)
            assert state.phase == pb.PHASE_AWAITING_AGREEMENT
            stop = pb.RequestStopRequest(worker={"execution_id": told.execution_id}, reason="enough")
            await stub.RequestStop(stop, timeout=DEADLINE_S)
        assert await asyncio.wait_for(process, DEADLINE_S) == ExitCode.ENDED
    finally:
        sampler.go_on.set()
        process.cancel()
        await asyncio.gather(process, return_exceptions=True)


async def test_a_legacy_controller_claims_nothing_states_no_id_and_asks_for_no_save(tmp_path):
    """G11."""
    run = tmp_path / "run"
    overrides = {
        "run": {"directory": str(run)},
        "server": {"linger_s": 5.0},
        "train": {"groups_per_step": 2},
        "checkpoints": {"every_steps": 1},
        "rollout": {"announces_weights": False, "n_generation": 2},
    }
    config = load_config(None, environment={}, overrides=overrides)
    application = Application(
        sampler=SeekableSampler(4), prompt_of=lambda index: Prompt(str(index)), budget_completions=8, adapter=None
    )
    ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
    process = asyncio.create_task(serve(config, application, on_ready=ready.set_result))
    told = await asyncio.wait_for(ready, DEADLINE_S)
    assert (told.execution_number, told.execution_id) == (0, "")

    def play() -> pb.EndCommand:
        with grpc.insecure_channel(told.address) as channel:
            controller = SimpleNamespace(stub=ControllerServiceStub(channel), execution_id="whatever", run=run)
            controller.state = lambda: controller.stub.GetResumeState(pb.GetResumeStateRequest(), timeout=DEADLINE_S)
            assert controller.state().header.execution_id == ""
            trainer = Worker(controller, pb.ROLE_TRAINER)
            rollout = Worker(controller, pb.ROLE_ROLLOUT)
            trainer.identity.execution_id = "another"
            assert trainer.confirm().agreed
            for number in (1, 2):
                rollout.rollout(2)
                trainer.complete(number, trainer.next(number).train)
            end = trainer.next(3).end
            trainer.end()
            rollout.end()
            return end

    end = await asyncio.wait_for(asyncio.to_thread(play), DEADLINE_S)
    assert (end.reason, end.completed_training_steps) == (pb.END_REASON_BUDGET_EXHAUSTED, 2)
    assert await asyncio.wait_for(process, DEADLINE_S) == ExitCode.ENDED
    assert not run.exists() or not list(run.iterdir())


async def test_a_sampler_that_cannot_be_restored_is_the_applications_own_exception(tmp_path):
    class Broken(SeekableSampler):
        def set_epoch(self, epoch: int) -> None:
            raise KeyError("the application's own")

    config = load_config(None, environment={}, overrides={"run": {"directory": str(tmp_path / "run"), "journal": True}})
    application = Application(
        sampler=Broken(4),
        prompt_of=lambda index: Prompt(str(index)),
        budget_completions=8,
        adapter=ManifestAdapter(LocalStore(tmp_path / "run")),
    )
    with pytest.raises(KeyError, match="the application's own"):
        await asyncio.wait_for(serve(config, application, on_ready=pytest.fail), DEADLINE_S)


async def test_an_adapters_error_propagates_as_it_is(tmp_path):
    class Adapter:
        def load_metadata(self, config: Any) -> None:
            assert config.train.resume is True
            assert config.train.output_dir == str(Path(tmp_path / "run"))
            raise ZeroDivisionError("mine")

        def restore_sampler(self, sampler: Any, metadata: Any) -> None:
            pytest.fail("not asked")

    config = load_config(None, environment={}, overrides={"run": {"directory": str(tmp_path / "run")}})
    application = Application(
        sampler=SeekableSampler(4), prompt_of=lambda index: Prompt(str(index)), budget_completions=8, adapter=Adapter()
    )
    with pytest.raises(ZeroDivisionError, match="mine"):
        await serve(config, application, on_ready=pytest.fail)


def test_an_application_cannot_write_the_topology_itself():
    with pytest.raises(ValueError, match="'topology', which the controller writes"):
        Application(
            sampler=SeekableSampler(4),
            prompt_of=lambda index: Prompt(str(index)),
            budget_completions=8,
            adapter=None,
            compatibility={"topology": {"policy": {"world_size": 1}}},
        )
