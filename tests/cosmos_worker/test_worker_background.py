"""Saves that go on while training does, against a scripted controller."""

# ruff: noqa: PT012  # what is raised comes out of the worker's with statement, body and all
from __future__ import annotations

import dataclasses
import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from fake_controller import DEADLINE_S, FakeController, end, save, train
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from cosmos_ctrl.checkpoints.digests import digest_bytes
from cosmos_ctrl.core.errors import ExecutionEndedError, StaleExecutionError
from cosmos_worker.commands import SaveWork, TrainWork
from cosmos_worker.errors import DeadlineError, SaveFailedError, UsageError
from cosmos_worker.saves import Save
from cosmos_worker.settings import ClientConfig
from cosmos_worker.trainer import Trainer

PATH = "checkpoints/e1-s1"
Fresh = Callable[..., AbstractContextManager[Trainer]]


@pytest.fixture
def fresh(controller: FakeController, options: Callable[..., dict[str, Any]], tmp_path: Path) -> Fresh:
    """A trainer that has agreed that the run is fresh."""
    controller.resume_state.run_uri = f"file://{tmp_path}"

    @contextmanager
    def make(**more: Any) -> Iterator[Trainer]:
        with Trainer.from_env(**options(**more)) as trainer:
            trainer.resume()
            trainer.confirm(steps=0, updates=0)
            yield trainer

    return make


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


class Held:
    """Writes like `torch.save` once it is let go, or fails."""

    def __init__(self, failure: BaseException | None = None) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.failure = failure

    def __call__(self, state: Any, file: IO[bytes]) -> None:
        self.begun.set()
        assert self.go.wait(DEADLINE_S)
        if self.failure is not None:
            raise self.failure
        torch.save(state, file)

    def let_go(self, delay_s: float = 0.0) -> Held:
        timer = threading.Timer(delay_s, self.go.set)
        timer.daemon = True
        timer.start()
        return self


def next_of(trainer: Trainer, kind: type[Any]) -> Any:
    command = next(trainer.commands())
    assert isinstance(command, kind)
    return command


def begin(trainer: Trainer, write: Any = None, state: Any = None) -> Save:
    """An asynchronous save of the next command."""
    command: SaveWork = next_of(trainer, SaveWork)
    with trainer.save(command) as saving:
        saving.write_later("state.pt", {"w": torch.ones(3)} if state is None else state, write)
    return saving


def read(run: Path, path: str = PATH) -> Any:
    return torch.load(run / path / "policy-0" / "state.pt", weights_only=True)


def completions(controller: FakeController) -> list[int]:
    return [report.command for batch in controller.batches for report in batch.completions]


def outcomes(controller: FakeController) -> list[tuple[int, str | None]]:
    return [(shards.command, shards.WhichOneof("outcome")) for shards in controller.shards]


def test_a_save_goes_on_while_training_does_and_later_steps_never_reach_it(
    controller: FakeController, fresh: Fresh, tmp_path: Path
) -> None:
    controller.commands = [save(1, updates=3), train(2, {1: 1}), end(steps=2)]
    weight = torch.arange(4.0, requires_grad=True)
    live = {"w": weight, "view": weight.detach()[1:], "rates": [0.1], "step": 1}
    held = Held()
    with fresh() as trainer:
        saving = begin(trainer, held, live)
        assert held.begun.wait(DEADLINE_S)
        # It does not keep a process alive whose main thread has ended.
        assert {thread.daemon for thread in threading.enumerate() if thread.name == "cosmos-save"} == {True}
        with torch.no_grad():
            weight.fill_(9.0)
        live["rates"].append(0.2)  # type: ignore[attr-defined]
        live["step"] = 2
        trainer.complete(next_of(trainer, TrainWork), updates=1)
        assert (saving.state, controller.shards) == ("", [])
        held.go.set()
        assert list(trainer.commands()) == []
    assert (saving.state, saving.manifest_digest) == ("COMMITTED", "sha256:" + "0" * 64)
    found = read(tmp_path)
    assert found["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert (found["rates"], found["step"], found["w"].requires_grad) == ([0.1], 1, False)
    found["w"][1] = 5.0
    assert found["view"].tolist() == [5.0, 2.0, 3.0]
    (receipt,) = controller.shards[0].receipts.receipts
    data = (tmp_path / PATH / "policy-0" / "state.pt").read_bytes()
    assert (receipt.size_bytes, receipt.digest) == (len(data), digest_bytes(data))
    assert (receipt.completed_training_steps, receipt.completed_optimizer_updates, receipt.rank) == (1, 3, 0)
    assert saving.stamp.values() == {
        "rank": 0,
        "steps": 1,
        "updates": 3,
        "execution_id": "exec-1",
        "checkpoint_id": "ck",
    }


def test_g10_the_next_save_waits_for_the_one_before(controller: FakeController, fresh: Fresh) -> None:
    controller.commands = [save(1), save(2, path="checkpoints/second"), end(steps=2)]
    held, second = Held(), Held().let_go()
    with fresh() as trainer:
        first = begin(trainer, held)
        assert held.begun.wait(DEADLINE_S)
        command = next_of(trainer, SaveWork)
        held.let_go(0.2)
        with trainer.save(command) as saving:
            # Its receipts are through, and its copy is free, before anything of the next is copied.
            assert (first.state, outcomes(controller)) == ("COMMITTED", [(1, "receipts")])
            saving.write_later("state.pt", {}, second)
        assert list(trainer.commands()) == []
    assert outcomes(controller) == [(1, "receipts"), (2, "receipts")]


def test_g9_the_wait_for_the_one_before_has_a_deadline(
    controller: FakeController, fresh: Fresh, quick: ClientConfig
) -> None:
    controller.commands = [save(1), save(2, path="checkpoints/second"), end(steps=2)]
    held = Held()
    with fresh(config=dataclasses.replace(quick, save_total_s=0.3)) as trainer:
        begin(trainer, held)
        command = next_of(trainer, SaveWork)
        with pytest.raises(DeadlineError, match=r"asynchronous save.*0\.3 s"):
            trainer.save(command)
        held.go.set()
        with trainer.save(command) as saving:
            saving.open("state.pt").write(b"x")
    assert outcomes(controller) == [(1, "receipts"), (2, "receipts")]


def test_a_failure_is_raised_at_once_though_another_writer_still_has_the_memory(
    controller: FakeController, fresh: Fresh, quick: ClientConfig
) -> None:
    controller.commands = [save(1), save(2, path="checkpoints/second"), end()]
    never: Future[None] = Future()
    with fresh(config=dataclasses.replace(quick, save_total_s=3.0)) as trainer:
        with trainer.save(next_of(trainer, SaveWork)) as saving:
            saving.finish_after(never)
            saving.write_later("state.pt", {}, held := Held(OSError("full")))
        command = next_of(trainer, SaveWork)
        held.let_go(0.2)
        with pytest.raises(SaveFailedError, match="full"):
            trainer.save(command)
        never.set_result(None)
        with trainer.save(command) as second:
            second.write_later("state.pt", {})


def test_g5_no_save_is_begun_for_an_execution_that_is_over(
    controller: FakeController, fresh: Fresh, tmp_path: Path
) -> None:
    controller.commands = [save(1)]
    controller.lease_time_s = 0.15
    with pytest.raises(StaleExecutionError), fresh() as trainer:
        command = next_of(trainer, SaveWork)
        controller.change(lambda: setattr(controller, "execution_id", "exec-2"))
        over = threading.Event()
        for _ in range(1000):
            if trainer._connection.terminal is None:
                over.wait(0.01)
        with pytest.raises(StaleExecutionError):
            trainer.save(command)
        trainer.metric("loss", 1.0)
    assert not (tmp_path / PATH).exists()


CALLS: dict[str, tuple[list[Any], Callable[[Trainer], Any]]] = {
    "complete": ([train(2, {1: 1})], lambda trainer: next_of(trainer, TrainWork)),
    "save": ([save(2, path="checkpoints/second")], lambda trainer: next_of(trainer, SaveWork)),
    "commands": ([], lambda trainer: None),
    "announce_weights": ([], lambda trainer: None),
    "metric": ([], lambda trainer: None),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_failure_in_the_background_comes_with_the_next_call_once_and_nothing_is_published(
    controller: FakeController, fresh: Fresh, name: str
) -> None:
    commands, prepare = CALLS[name]
    controller.commands = [save(1), *commands, end(steps=2)]
    held = Held(OSError(28, "No space left on device"))
    with fresh() as trainer:
        saving = begin(trainer, held)
        command = prepare(trainer)
        call: Callable[[], Any] = {
            "complete": lambda: trainer.complete(command, updates=1),
            "save": lambda: trainer.save(command),
            "commands": lambda: list(trainer.commands()),
            "announce_weights": lambda: trainer.announce_weights(1, "w"),
            "metric": lambda: trainer.metric("loss", 1.0),
        }[name]
        held.go.set()
        controller.until(lambda: controller.shards)
        trainer._background._finished.wait(DEADLINE_S)
        with pytest.raises(SaveFailedError, match=r"step 1 .*ck.* abandoned: OSError: .*No space left") as caught:
            call()
        assert isinstance(caught.value.__cause__, OSError)
        assert (caught.value.step, caught.value.checkpoint_id, saving.state) == (1, "ck", "ABANDONED")
        # It has done nothing, and does it now.
        assert completions(controller) == []
        result = call()
        if isinstance(result, Save):
            with result:
                result.open("state.pt").write(b"x")
    assert outcomes(controller)[0] == (1, "abandoned")
    assert controller.shards[0].abandoned.reason.startswith("OSError: [Errno 28]")
    assert completions(controller) == ([2] if name == "complete" else [])


def test_leaving_waits_for_it(controller: FakeController, fresh: Fresh, tmp_path: Path) -> None:
    controller.commands = [save(1)]
    held = Held()
    with fresh() as trainer:
        begin(trainer, held, {"w": torch.zeros(2)})
        held.let_go(0.2)
    assert outcomes(controller) == [(1, "receipts")]
    assert read(tmp_path)["w"].tolist() == [0.0, 0.0]
    assert controller.batches[-1].end.reason == "left"


def test_g9_leaving_waits_for_it_no_longer_than_that(
    controller: FakeController, fresh: Fresh, quick: ClientConfig
) -> None:
    controller.commands = [save(1)]
    held = Held()
    with (
        pytest.raises(DeadlineError, match="asynchronous save"),
        fresh(config=dataclasses.replace(quick, save_total_s=0.2)) as trainer,
    ):
        begin(trainer, held)
    assert "DeadlineError" in controller.batches[-1].end.reason
    held.go.set()


def test_leaving_says_that_it_failed(controller: FakeController, fresh: Fresh) -> None:
    controller.commands = [save(1)]
    with pytest.raises(SaveFailedError, match="full"), fresh() as trainer:
        begin(trainer, Held(OSError("full")).let_go(0.1))
    assert outcomes(controller) == [(1, "abandoned")]
    assert "full" in controller.batches[-1].end.reason


@pytest.mark.parametrize("failure", [None, OSError("full")])
def test_what_the_user_raises_is_what_comes_out_and_the_save_still_ends(
    controller: FakeController, fresh: Fresh, failure: BaseException | None
) -> None:
    controller.commands = [save(1)]
    with pytest.raises(ZeroDivisionError), fresh() as trainer:
        begin(trainer, Held(failure).let_go(0.1))
        raise ZeroDivisionError
    assert outcomes(controller) == [(1, "abandoned" if failure else "receipts")]
    assert controller.batches[-1].end.reason == "ZeroDivisionError: "


@pytest.mark.parametrize("fails", [False, True])
def test_the_last_save_is_waited_for(controller: FakeController, fresh: Fresh, fails: bool) -> None:
    controller.commands = [save(1, final=True), end(steps=1)]
    held = Held(OSError("full") if fails else None).let_go(0.2)
    with fresh() as trainer:
        if fails:
            with pytest.raises(SaveFailedError, match="full"):
                begin(trainer, held)
        else:
            assert begin(trainer, held).state == "COMMITTED"
        assert outcomes(controller) == [(1, "abandoned" if fails else "receipts")]
        assert list(trainer.commands()) == []


@pytest.mark.parametrize("staged", [False, True])
def test_a_save_stays_open_until_its_futures_are_done(controller: FakeController, fresh: Fresh, staged: bool) -> None:
    controller.commands = [save(1), train(2, {1: 1}), end(steps=2)]
    future: Future[None] = Future()
    with fresh(artifacts=("state.pt", "part")) as trainer:
        with trainer.save(next_of(trainer, SaveWork)) as saving:
            saving.finish_after(AsyncSaveResponse(Future(), future) if staged else future)
            saving.write_later("state.pt", {"w": 1})
        trainer.complete(next_of(trainer, TrainWork), updates=1)
        # As torch's thread does: opened, and written, long after the with statement has ended.
        with saving.open("part") as file:
            file.write(b"late")
        assert controller.shards == []
        future.set_result(None)
        assert list(trainer.commands()) == []
    receipts = {receipt.name: receipt.size_bytes for receipt in controller.shards[0].receipts.receipts}
    assert receipts["policy-0/part"] == 4
    with pytest.raises(UsageError, match="inside"):
        saving.open("part")


class TorchError(BaseException):
    """Like torch's CheckpointException."""


@pytest.mark.parametrize("failure", [TorchError("rank 3"), RuntimeError("rank 3")])
def test_a_future_that_fails_abandons_the_save(
    controller: FakeController, fresh: Fresh, failure: BaseException
) -> None:
    controller.commands = [save(1), end()]
    future: Future[None] = Future()
    with fresh() as trainer:
        with trainer.save(next_of(trainer, SaveWork)) as saving:
            saving.finish_after(future)
            saving.open("state.pt").write(b"x")
        future.set_exception(failure)
        controller.until(lambda: controller.shards)
        trainer._background._finished.wait(DEADLINE_S)
        with pytest.raises(SaveFailedError, match="rank 3"):
            trainer.metric("loss", 1.0)
    assert outcomes(controller) == [(1, "abandoned")]


def test_g9_a_future_that_is_never_done_is_waited_for_to_a_deadline(
    controller: FakeController, fresh: Fresh, quick: ClientConfig
) -> None:
    controller.commands = [save(1), save(2, path="checkpoints/second"), end()]
    future: Future[None] = Future()
    with fresh(config=dataclasses.replace(quick, save_total_s=0.3)) as trainer:
        with trainer.save(next_of(trainer, SaveWork)) as saving:
            saving.finish_after(future)
            file = saving.open("state.pt")
        command = next_of(trainer, SaveWork)
        controller.until(lambda: controller.shards)
        assert outcomes(controller) == [(1, "abandoned")]
        trainer._background._finished.wait(DEADLINE_S)
        with pytest.raises(SaveFailedError, match="what is written for the checkpoint of step 1"):
            trainer.save(command)
        # Whoever still writes has its file: its descriptor's number is nobody else's yet, and its memory counts.
        file.write(b"late")
        with pytest.raises(DeadlineError):
            trainer.save(command)
        future.set_result(None)
        with trainer.save(command) as second:
            second.open("state.pt").write(b"x")
        with pytest.raises((ValueError, OSError)):
            file.write(b"too late")
    assert outcomes(controller) == [(1, "abandoned"), (2, "receipts")]


def test_an_exception_in_the_body_abandons_it_and_leaves_the_file_to_who_writes(
    controller: FakeController, fresh: Fresh, pool: ThreadPoolExecutor
) -> None:
    controller.commands = [save(1), save(2, path="checkpoints/second"), end()]
    held = Held()
    with fresh() as trainer:
        with pytest.raises(ZeroDivisionError), trainer.save(next_of(trainer, SaveWork)) as saving:
            future = pool.submit(held, {"w": 1}, saving.open("state.pt"))
            saving.finish_after(future)
            raise ZeroDivisionError
        assert (saving.state, outcomes(controller)) == ("ABANDONED", [(1, "abandoned")])
        command = next_of(trainer, SaveWork)
        held.let_go(0.2)
        with trainer.save(command) as second:
            assert future.result(0) is None
            second.open("state.pt").write(b"x")
        assert list(trainer.commands()) == []
    assert outcomes(controller) == [(1, "abandoned"), (2, "receipts")]


@pytest.mark.parametrize("harm", ["nothing is written", "one is missing"])
def test_an_incomplete_asynchronous_save_is_abandoned(controller: FakeController, fresh: Fresh, harm: str) -> None:
    controller.commands = [save(1)]
    message = "empty" if harm == "nothing is written" else "not saved: other"
    names = ("state.pt",) if harm == "nothing is written" else ("state.pt", "other")
    with pytest.raises(SaveFailedError, match=message), fresh(artifacts=names) as trainer:
        begin(trainer, (lambda state, file: None) if harm == "nothing is written" else None)
    assert outcomes(controller) == [(1, "abandoned")]


def test_a_state_that_cannot_be_copied_is_refused_at_once(controller: FakeController, fresh: Fresh) -> None:
    controller.commands = [save(1), end()]
    with fresh() as trainer:
        with pytest.raises(TypeError, match="pickle"):
            begin(trainer, state={"lock": threading.Lock()})
        assert list(trainer.commands()) == []
    assert outcomes(controller) == [(1, "abandoned")]


def test_misuse_of_an_asynchronous_save_is_named(controller: FakeController, fresh: Fresh) -> None:
    controller.commands = [save(1), save(2, path="checkpoints/second"), end()]
    with fresh() as trainer:
        saving = trainer.save(next_of(trainer, SaveWork))
        with pytest.raises(UsageError, match="inside the save's with statement"):
            saving.write_later("state.pt", {})
        with pytest.raises(UsageError, match="inside the save's with statement"):
            saving.finish_after(Future())
        with pytest.raises(UsageError, match=r"command 1 was not saved: .*with statement"):
            next(trainer.commands())
        with saving:
            with pytest.raises(UsageError, match="not declared"):
                saving.write_later("other.pt", {})
            with pytest.raises(UsageError, match=r"futures of concurrent\.futures, not Event"):
                saving.finish_after(threading.Event())  # type: ignore[arg-type]
            with pytest.raises(UsageError, match=r"command 1 was not saved: .*with statement"):
                next(trainer.commands())
            saving.write_later("state.pt", {})
            with pytest.raises(UsageError, match="opened before"):
                saving.write_later("state.pt", {})
        with pytest.raises(UsageError, match="inside the save's with statement"):
            saving.write_later("state.pt", {})
        with pytest.raises(UsageError, match="command 1 was entered before"), saving:
            pass
        with trainer.save(next_of(trainer, SaveWork)) as second:
            second.write_later("state.pt", {})


def test_g5_the_end_of_the_execution_is_what_the_user_hears_of(controller: FakeController, fresh: Fresh) -> None:
    controller.commands = [save(1), end()]
    held = Held()
    with pytest.raises(StaleExecutionError), fresh() as trainer:
        begin(trainer, held)
        controller.change(lambda: setattr(controller, "execution_id", "exec-2"))
        held.go.set()
        trainer._background._finished.wait(DEADLINE_S)
        trainer.metric("loss", 1.0)


def test_g9_what_the_background_hears_does_not_keep_a_hanging_main_thread_alive(
    controller: FakeController, fresh: Fresh, quick: ClientConfig
) -> None:
    controller.commands = [save(1)]
    controller.lease_time_s = 0.15
    held, ended, codes = Held(), threading.Event(), []

    def leave(code: int) -> None:
        codes.append(code)
        ended.set()

    config = dataclasses.replace(quick, end_grace_s=0.5)
    failure = ExecutionEndedError(end_reason="FAILURE", message="rank 1")
    with pytest.raises(ExecutionEndedError), fresh(config=config, exit_process=leave) as trainer:
        begin(trainer, held)
        controller.change(lambda: controller.errors["StreamReports"].append(failure))
        while trainer._connection.terminal is None:
            ended.wait(0.01)
        held.go.set()
        # The background calls the controller, and is told; the main thread makes no call, as in a collective.
        assert trainer._background._finished.wait(DEADLINE_S)
        assert ended.wait(DEADLINE_S)
        trainer.metric("loss", 1.0)
    assert codes == [11]


def test_a_lost_word_about_a_save_is_no_news_after_the_end(
    controller: FakeController, fresh: Fresh, quick: ClientConfig
) -> None:
    controller.commands = [save(1), end(steps=1)]
    held = Held()
    config = dataclasses.replace(quick, after_end_s=0.2, connect_total_s=0.5, call_s=0.5)
    with fresh(config=config) as trainer:
        begin(trainer, held)
        assert list(trainer.commands()) == []
        controller.stop()
        held.go.set()
    assert trainer.end_reason is not None


def test_lost_replies_send_the_same_receipts_again(controller: FakeController, fresh: Fresh) -> None:
    controller.commands = [save(1), end()]
    controller.lose_replies["ReportShards"] = 2
    with fresh() as trainer:
        saving = begin(trainer)
        assert list(trainer.commands()) == []
    assert saving.state == "COMMITTED"
    assert len(controller.shards) == 3
    assert len({shards.SerializeToString(deterministic=True) for shards in controller.shards}) == 1


def test_any_writer_gets_the_copy(controller: FakeController, fresh: Fresh, tmp_path: Path) -> None:
    controller.commands = [save(1), end()]
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {"w": torch.arange(3.0)}
    with fresh() as trainer:
        begin(trainer, lambda state, file: file.write(safetensors.save(state)), tensors)
        tensors["w"].zero_()
        assert list(trainer.commands()) == []
    data = (tmp_path / PATH / "policy-0" / "state.pt").read_bytes()
    assert safetensors.load(io.BytesIO(data).read())["w"].tolist() == [0.0, 1.0, 2.0]
