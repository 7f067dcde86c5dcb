"""Restoring in order, with the real adapter and through the server: what `test_sampling.py` does not say already."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_ctrl.checkpoints.adapter import ManifestAdapter
from cosmos_ctrl.checkpoints.artifacts import Artifact
from cosmos_ctrl.checkpoints.claims import is_superseded
from cosmos_ctrl.checkpoints.digests import digest_bytes
from cosmos_ctrl.checkpoints.manifest import CheckpointManifest, publish_from_receipts
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.config import load_config
from cosmos_ctrl.core.errors import (
    ArtifactMissingError,
    CheckpointDamagedError,
    CheckpointNotFoundError,
    CheckpointUncommittedError,
)
from cosmos_ctrl.core.ledger import SamplingBoundary
from cosmos_ctrl.core.resume import ControllerResumeMetadata
from cosmos_ctrl.core.samplers import SeekableSampler
from cosmos_ctrl.core.sampling import Prompt, ResumeRequest, Sampling, TrainRequest, load_resume_metadata
from cosmos_ctrl.server import Application, _open_run, _restore

Calls = list[tuple[Any, ...]]


def metadata(**overrides: Any) -> ControllerResumeMetadata:
    values: dict[str, Any] = {
        "completed_training_steps": 3,
        "completed_optimizer_updates": 6,
        "remaining_completions": 10,
        "epoch": 2,
        "sampling_owner": "sampler",
        "sampler_state": {"position": 1},
        "checkpoint_path": "checkpoints/x",
        "checkpoint_id": "abc",
    }
    return ControllerResumeMetadata(**values | overrides)


class Reluctant:
    """Says nothing of itself before it is restored; a set epoch is all that it lets happen to it."""

    def __init__(self, calls: Calls | None = None, length: int = 4) -> None:
        self.calls: Calls = [] if calls is None else calls
        self.length, self.position, self.restored = length, -1, False

    def set_epoch(self, epoch: int) -> None:
        self.calls.append(("set_epoch", epoch))
        if self.restored:
            self.position = 0

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls.append(("load_state_dict", dict(state)))
        self.position, self.restored = state["position"], True
        state["position"] = 10**6  # it is its own copy

    def _be_restored(self, what: str) -> None:
        assert self.restored, f"{what} of a sampler that is not restored yet"
        self.calls.append((what,))

    def __iter__(self) -> Iterator[int]:
        self._be_restored("iter")
        while self.position < self.length:
            self.position += 1
            yield self.position - 1

    def __len__(self) -> int:
        self._be_restored("len")
        return self.length

    def __bool__(self) -> bool:
        self._be_restored("bool")
        return True

    def __getitem__(self, index: int) -> int:
        self._be_restored("getitem")
        return index

    def state_dict(self) -> dict[str, int]:
        self._be_restored("state_dict")
        return {"position": self.position}


class Adapter:
    def __init__(self, calls: Calls, found: Any = None, *, error: Exception | None = None) -> None:
        self.calls, self.found, self.error = calls, found, error

    def load_metadata(self, config: Any) -> Any:
        self.calls.append(("load_metadata", config.train.resume))
        if self.error is not None:
            raise self.error
        return self.found

    def restore_sampler(self, sampler: Any, metadata: ControllerResumeMetadata) -> None:
        self.calls.append(("restore_sampler",))
        sampler.load_state_dict(metadata.sampler_state)


def sampling_of(sampler: Any, batch_sampler: Any = None, n: int = 1) -> Sampling:
    return Sampling(sampler, batch_sampler, prompt_of=lambda index: Prompt(str(index)), completions_per_prompt=n)


def request(resume: bool | str) -> ResumeRequest:
    return ResumeRequest(TrainRequest(resume, "run"))


def drain(sampling: Sampling, left: int) -> list[tuple[int, list[str]]]:
    found = []
    while left:
        draw = sampling.draw(left)
        found.append((draw.after.epoch, [prompt.key for prompt in draw.prompts]))
        left = draw.after.remaining_completions
    return found


# -- nothing is touched too early


@pytest.mark.parametrize("batch", [False, True])
def test_a_live_sampler_is_neither_probed_nor_advanced_before_it_is_restored(batch: bool) -> None:
    calls: Calls = []
    sampler, owner = Reluctant(), Reluctant(calls)
    sampling = sampling_of(sampler, owner) if batch else sampling_of(owner)
    found = load_resume_metadata(
        Adapter(calls, metadata(sampling_owner=sampling.owner_name)), request(True), owner=sampling.owner_name
    )
    assert found is not None
    assert calls == [("load_metadata", True)]
    sampling.restore(Adapter(calls), found)
    assert calls[1:] == [("set_epoch", 2), ("restore_sampler",), ("load_state_dict", {"position": 1})]
    if batch:
        assert sampler.calls == [("set_epoch", 2)]  # and it is never asked for anything else here
    assert found.sampler_state == {"position": 1}  # what the sampler does with its copy is its own affair


def test_no_metadata_that_is_refused_lets_anything_happen_to_the_sampler() -> None:
    calls: Calls = []
    sampling = sampling_of(Reluctant(calls))
    for adapter, resume, error in (
        (Adapter(calls), "checkpoints/x", FileNotFoundError),
        (Adapter(calls, {"step": 1}), True, TypeError),
        (Adapter(calls, metadata(sampling_owner="batch_sampler")), True, ValueError),
        (Adapter(calls, error=ZeroDivisionError()), True, ZeroDivisionError),
        (Adapter(calls, error=FileNotFoundError()), True, FileNotFoundError),
    ):
        with pytest.raises(error):
            load_resume_metadata(adapter, request(resume), owner=sampling.owner_name)
    assert {call[0] for call in calls} == {"load_metadata"}
    assert len(calls) == 5


def test_resume_off_does_not_ask_even_an_adapter_that_would_raise() -> None:
    calls: Calls = []
    assert load_resume_metadata(Adapter(calls, error=OSError()), request(False), owner="sampler") is None
    assert calls == []


@pytest.mark.parametrize("falsy", [{}, 0, False, "", [], b""])
def test_only_none_is_nothing_there(falsy: Any) -> None:
    for resume in (True, "checkpoints/x"):
        with pytest.raises(TypeError, match=type(falsy).__name__):
            load_resume_metadata(Adapter([], falsy), request(resume), owner="sampler")


@pytest.mark.parametrize("batch", [False, True])
def test_what_owns_the_position_must_be_able_to_say_it(batch: bool) -> None:
    class Mute:
        state_dict = "not callable"

        def __iter__(self) -> Iterator[int]:
            pytest.fail("asked for an item")

    with pytest.raises(TypeError, match="Mute has no state_dict"):
        sampling_of(Reluctant(), Mute()) if batch else sampling_of(Mute())
    sampling_of(object(), Reluctant())  # what is nested in the owner need not


# -- once


@pytest.mark.parametrize("first", ["start", "restore", "a restore that raises"])
@pytest.mark.parametrize("second", ["start", "restore"])
def test_a_sampler_is_started_or_restored_once_and_a_second_attempt_does_not_touch_it(first: str, second: str) -> None:
    calls: Calls = []
    sampler = Reluctant(calls)
    sampling = sampling_of(sampler)
    if first == "start":
        sampler.restored, sampler.position = True, 0
        sampling.start(5)
    elif first == "restore":
        sampling.restore(Adapter(calls), metadata())
    else:
        with pytest.raises(KeyError):
            sampling.restore(Adapter(calls), metadata(sampler_state={"elsewhere": 1}))
    before = list(calls)
    with pytest.raises(RuntimeError, match="already"):
        sampling.start(5) if second == "start" else sampling.restore(Adapter(calls), metadata())
    assert calls == before


def test_nothing_is_drawn_before_a_start() -> None:
    calls: Calls = []
    with pytest.raises(RuntimeError, match="start or restore"):
        sampling_of(Reluctant(calls)).draw(5)
    assert calls == []


# -- epochs


class Epochs:
    """Yields its epoch and index; notes the epochs that it is given."""

    def __init__(self, length: int = 2) -> None:
        self.length, self.epochs, self.position = length, [0], 0

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)
        self.position = 0

    def __iter__(self) -> Iterator[str]:
        while self.position < self.length:
            self.position += 1
            yield f"{self.epochs[-1]}.{self.position}"

    def state_dict(self) -> int:
        return self.position

    def load_state_dict(self, state: int) -> None:
        self.position = state


class Over:
    """A batch sampler without set_epoch over a sampler that has it: each item a list, a tuple, or a generator."""

    def __init__(self, sampler: Epochs, kind: Any, batch: int = 2, *, drop_last: bool = False) -> None:
        self.sampler, self.kind, self.batch, self.drop_last = sampler, kind, batch, drop_last

    def __iter__(self) -> Iterator[Any]:
        held: list[str] = []
        for item in self.sampler:
            held.append(item)
            if len(held) == self.batch:
                yield self.kind(held)
                held = []
        if held and not self.drop_last:
            yield self.kind(held)

    def state_dict(self) -> int:
        return self.sampler.position

    def load_state_dict(self, state: int) -> None:
        self.sampler.position = state


def lazily(items: list[str]) -> Iterator[str]:
    yield from list(items)


@pytest.mark.parametrize("kind", [list, tuple, lazily])
def test_an_epoch_is_set_on_the_one_that_has_it_and_batches_come_as_they_like(kind: Any) -> None:
    sampler = Epochs(3)
    sampling = sampling_of(sampler, Over(sampler, kind))
    start = sampling.restore(
        Adapter([]), metadata(sampling_owner="batch_sampler", sampler_state=2, remaining_completions=7)
    )
    assert sampler.epochs == [0, 2]
    assert drain(sampling, start.remaining_completions) == [
        (2, ["2.3"]),
        (3, ["3.1", "3.2"]),
        (3, ["3.3"]),
        (4, ["4.1", "4.2"]),
        (4, ["4.3"]),
    ]
    assert sampler.epochs == [0, 2, 3, 4]


def test_an_epoch_is_set_on_a_batch_sampler_alone() -> None:
    class Batched(Epochs):
        def __iter__(self) -> Iterator[list[str]]:  # type: ignore[override]
            return ([item, item] for item in super().__iter__())

    batched = Batched(1)
    sampling = sampling_of([1, 2, 3], batched)
    sampling.start(6)
    assert drain(sampling, 6) == [(1, ["1.1"] * 2), (2, ["2.1"] * 2), (3, ["3.1"] * 2)]
    assert batched.epochs == [0, 1, 2, 3]


def test_a_batch_sampler_needs_no_sampler_beside_it() -> None:
    batches = Over(Epochs(2), list)
    sampling = sampling_of(None, batches)
    assert sampling.owner_name == "batch_sampler"
    sampling.start(2)
    assert drain(sampling, 2) == [(1, ["0.1", "0.2"])]


def test_a_last_batch_that_is_dropped_is_not_made_up_for() -> None:
    sampler = Epochs(5)
    sampling = sampling_of(sampler, Over(sampler, list, drop_last=True))
    sampling.start(6)
    assert drain(sampling, 6) == [(1, ["1.1", "1.2"]), (1, ["1.3", "1.4"]), (2, ["2.1", "2.2"])]


def test_a_draws_state_is_the_owners_after_the_whole_batch() -> None:
    sampler = Epochs(5)
    sampling = sampling_of(sampler, Over(sampler, lazily))
    sampling.start(9)
    assert sampling.draw(9).after.sampler_state == 2
    assert sampling.draw(7).after.sampler_state == 4


@pytest.mark.parametrize("saved", [0, 1, 2, 3])
def test_a_restore_at_or_near_an_epochs_end_gives_what_is_left_and_then_the_whole_next_epoch(saved: int) -> None:
    sampler = Epochs(3)
    sampling = sampling_of(sampler)
    left = 3 - saved + 4
    sampling.restore(Adapter([]), metadata(sampler_state=saved, remaining_completions=left))
    expected = [(2, f"2.{at}") for at in range(saved + 1, 4)] + [(3, "3.1"), (3, "3.2"), (3, "3.3"), (4, "4.1")]
    assert [(epoch, *keys) for epoch, keys in drain(sampling, left)] == expected
    assert sampler.epochs == [0, 2, 3, 4]


@given(
    length=st.integers(1, 5),
    batch=st.integers(1, 4),
    drop=st.booleans(),
    budget=st.integers(1, 30),
    at=st.integers(0, 30),
)
def test_a_batch_sampler_goes_on_anywhere_as_if_nothing_had_happened(
    length: int, batch: int, drop: bool, budget: int, at: int
) -> None:
    if drop and batch > length:
        return

    def make() -> Sampling:
        sampler = Epochs(length)
        return sampling_of(sampler, Over(sampler, lazily, batch, drop_last=drop))

    whole = make()
    boundaries, expected, left = [whole.start(budget)], [], budget
    while left:
        draw = whole.draw(left)
        left = draw.after.remaining_completions
        boundaries.append(draw.after)
        expected.append((draw.after.epoch, [prompt.key for prompt in draw.prompts]))
    at = min(at, len(expected))
    resumed, found = make(), boundaries[at]
    saved = metadata(
        epoch=found.epoch,
        sampler_state=found.encoded_state,
        remaining_completions=found.remaining_completions,
        sampling_owner="batch_sampler",
    )
    assert resumed.restore(Adapter([]), saved) == found
    assert drain(resumed, found.remaining_completions) == expected[at:]


# -- with the adapter of this package


SHARD = b"model"


def checkpoint(run: Path, name: str = "one", **overrides: Any) -> Path:
    directory = run / "checkpoints" / name
    directory.mkdir(parents=True)
    (directory / "model.pt").write_bytes(SHARD)
    state = SeekableSampler(4, shuffle=False).state_dict() | {"position": 3}
    manifest = CheckpointManifest(
        metadata=metadata(**{"checkpoint_id": name, "epoch": 1, "sampler_state": state} | overrides),
        artifacts={"model.pt": Artifact(len(SHARD), digest_bytes(SHARD), 0, "policy")},
        execution_number=1,
        execution_id="first",
    )
    publish_from_receipts(directory, manifest)
    return directory


def ask(run: Path, resume: bool | str, **options: Any) -> ControllerResumeMetadata | None:
    return load_resume_metadata(ManifestAdapter(LocalStore(run), **options), request(resume), owner="sampler")


def test_automatic_and_nothing_there_is_a_fresh_start(tmp_path: Path) -> None:
    assert ask(tmp_path, True) is None


def test_explicit_and_missing_is_file_not_found_whatever_else_is_there(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    for path in ("checkpoints/two", str(tmp_path / "checkpoints" / "two")):
        with pytest.raises(FileNotFoundError) as caught:
            ask(tmp_path, path)
        assert isinstance(caught.value, CheckpointNotFoundError)


def test_explicit_and_corrupt_is_an_error_also_where_older_ones_would_do(tmp_path: Path) -> None:
    checkpoint(tmp_path, completed_training_steps=1)
    two = checkpoint(tmp_path, "two", completed_training_steps=2)
    (two / "model.pt").write_bytes(b"other")
    assert ask(tmp_path, "checkpoints/two") is not None  # of the same size: it is the ranks that verify content
    (two / "model.pt").write_bytes(b"too long")
    for resume in ("checkpoints/two", True):
        with pytest.raises(CheckpointDamagedError):
            ask(tmp_path, resume)
    with pytest.raises(CheckpointDamagedError):
        ask(tmp_path, "checkpoints/two", on_corrupt="previous")
    (two / "model.pt").unlink()
    with pytest.raises(ArtifactMissingError):
        ask(tmp_path, "checkpoints/two")
    found = ask(tmp_path, True, on_corrupt="previous")
    assert found is not None
    assert found.checkpoint_id == "one"


def test_a_manifest_that_is_none_is_an_error_and_never_a_fresh_start(tmp_path: Path) -> None:
    (checkpoint(tmp_path) / "manifest.json").write_bytes(b"{")
    for resume in (True, "checkpoints/one"):
        for on_corrupt in ("error", "previous"):
            with pytest.raises(CheckpointDamagedError):
                ask(tmp_path, resume, on_corrupt=on_corrupt)


def test_explicit_and_uncommitted_is_an_error_and_automatic_passes_over_it(tmp_path: Path) -> None:
    (checkpoint(tmp_path) / "manifest.json").unlink()
    with pytest.raises(CheckpointUncommittedError):
        ask(tmp_path, "checkpoints/one")
    assert ask(tmp_path, True) is None


def test_step_zero_is_a_checkpoint(tmp_path: Path) -> None:
    checkpoint(tmp_path, completed_training_steps=0, completed_optimizer_updates=0)
    found = ask(tmp_path, True)
    assert found is not None
    assert found.completed_training_steps == 0


@pytest.mark.parametrize("resume", [True, "checkpoints/one"])
def test_a_checkpoint_of_the_other_owner_is_refused(tmp_path: Path, resume: Any) -> None:
    checkpoint(tmp_path, sampling_owner="batch_sampler")
    with pytest.raises(ValueError, match="owner"):
        ask(tmp_path, resume)


def test_the_adapter_hands_the_sampler_a_copy_and_lets_its_refusal_through(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    found = ask(tmp_path, True)
    assert found is not None
    adapter = ManifestAdapter(LocalStore(tmp_path))
    sampler = Reluctant()
    adapter.restore_sampler(sampler, found)
    assert found.sampler_state["position"] == 3
    with pytest.raises(ValueError, match="length"):
        sampling_of(SeekableSampler(5, shuffle=False)).restore(adapter, found)


# -- through the server


def a_config(run: Path, **train: Any) -> Any:
    return load_config(None, environment={}, overrides={"run": {"directory": str(run)}, "train": train})


def an_application(calls: Calls, adapter: Any, *, batch: bool = False) -> Application:
    return Application(
        sampler=Reluctant([] if batch else calls),
        batch_sampler=Reluctant(calls) if batch else None,
        prompt_of=lambda index: Prompt(str(index)),
        budget_completions=8,
        adapter=adapter,
    )


def test_the_server_claims_its_number_then_asks_and_only_then_restores(tmp_path: Path) -> None:
    calls: Calls = []
    claimed: list[bool] = []

    class Noting(Adapter):
        def load_metadata(self, config: Any) -> Any:
            claimed.append(not is_superseded(LocalStore(tmp_path), 1) and is_superseded(LocalStore(tmp_path), 0))
            return super().load_metadata(config)

    application = an_application(calls, Noting(calls, metadata()))
    config = a_config(tmp_path)
    opened = _open_run(config, application)
    assert (calls, claimed, opened.identity.number) == ([("load_metadata", True)], [True], 1)
    start, replay = _restore(config, application, opened)
    assert calls[1:] == [("set_epoch", 2), ("restore_sampler",), ("load_state_dict", {"position": 1})]
    assert start == SamplingBoundary(epoch=2, sampler_state={"position": 1}, remaining_completions=10)
    assert replay is not None
    assert (replay.draws, replay.doubt) == ((), "")


def test_the_server_starts_fresh_without_asking_where_resume_is_off(tmp_path: Path) -> None:
    calls: Calls = []
    application = an_application(calls, Adapter(calls, metadata()))
    application.sampler.restored, application.sampler.position = True, 0
    config = a_config(tmp_path, resume=False)
    start, replay = _restore(config, application, _open_run(config, application))
    assert calls == [("set_epoch", 1), ("state_dict",)]
    assert (start.epoch, start.remaining_completions, replay) == (1, 8, None)


@pytest.mark.parametrize(
    ("found", "resume", "error"),
    [
        (None, "checkpoints/x", FileNotFoundError),
        ({"step": 1}, True, TypeError),
        (metadata(sampling_owner="batch_sampler"), True, ValueError),
    ],
    ids=["missing", "wrong type", "wrong owner"],
)
def test_the_server_touches_no_sampler_when_the_metadata_are_refused(
    tmp_path: Path, found: Any, resume: Any, error: type[Exception]
) -> None:
    calls: Calls = []
    with pytest.raises(error):
        _open_run(a_config(tmp_path, resume=resume), an_application(calls, Adapter(calls, found)))
    assert calls == [("load_metadata", resume)]


def test_the_server_restores_a_batch_sampler_as_the_owner(tmp_path: Path) -> None:
    calls: Calls = []
    application = an_application(calls, Adapter(calls, metadata(sampling_owner="batch_sampler")), batch=True)
    config = a_config(tmp_path)
    _restore(config, application, _open_run(config, application))
    assert calls[1:] == [("set_epoch", 2), ("restore_sampler",), ("load_state_dict", {"position": 1})]
    assert application.sampler.calls == [("set_epoch", 2)]


def test_keys_to_be_issued_again_need_somebody_who_finds_them(tmp_path: Path) -> None:
    calls: Calls = []
    application = an_application(calls, Adapter(calls, metadata()))
    config = load_config(
        None,
        environment={},
        overrides={"run": {"directory": str(tmp_path / "run")}, "replay": {"reissue_recorded": True}},
    )
    with pytest.raises(ValueError, match="prompt_by_key"):
        _open_run(config, application)
    assert calls == []
    assert not (tmp_path / "run").exists()  # nor is a number claimed
    _open_run(config, replace(application, prompt_by_key=Prompt))
