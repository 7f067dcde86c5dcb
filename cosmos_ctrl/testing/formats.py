"""The contract of an application's own checkpoint format, from outside: `ControllerResumeAdapter`, and whatever saves at a SAVE command.

* What a save leaves on its way is read too: the directory as it is at every call that the save makes is what a kill there would leave.
* Each look is by a fresh adapter, as a restarted controller has.
* What a power loss takes, and what a format keeps elsewhere than in the directory, is not checked.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

from cosmos_ctrl.checkpoints.names import SaveName
from cosmos_ctrl.core.resume import ControllerResumeAdapter, ControllerResumeMetadata, SamplingOwner
from cosmos_ctrl.core.sampling import ResumeRequest, TrainRequest
from cosmos_ctrl.core.state import EncodedState, same_value
from cosmos_ctrl.testing.expectations import Expectations, FormatContractError
from cosmos_ctrl.testing.trees import lay_out, lay_out_one, read_tree, states_of
from cosmos_worker.commands import SaveWork

#: Sampler states that have come back as something else from one format or another. A sampler's are JSON values, or bytes.
STATES: tuple[Any, ...] = (
    {"seed": 7, "position": 3},
    {"true": True, "one": 1, "float": 1.0, "none": None, "text": "1", "tiny": 5e-324, "third": 1 / 3},
    {"big": 2**53 + 1, "bigger": 10**40, "negative": -(2**63), "": {"": [[], {}, ""]}, "list": [0, [1, [2]]]},
    {"ü": "日本 😀", "line\u2028": "\0\r\n\t\"'\\/", "e\u0301": "é", "__class__": "x", "sampler_state": {}},
    {"pool": list(range(50_000)), "text": "x" * 1_000_000},
    *(None, [], "text", 0, False),
    b"",
    bytes(range(256)),
    b'{"json": "by chance"}',
    bytes(range(256)) * 4096,
)

#: Bits of each file that are flipped, evenly spread.
FLIPS = 24


def check_format(
    make_adapter: Callable[[Path], ControllerResumeAdapter],
    *,
    save: Callable[[Path, SaveWork], object],
    states: Sequence[Any] = STATES,
    make_sampler: Callable[[], Any] | None = None,
    flipped_bits: bool = True,
) -> None:
    """Hold a format of an application that owns its checkpoints to what a run relies on.

    Args:
        make_adapter: makes an adapter over the checkpoints in a directory, which is empty at first.
        save: what the application does there with a SAVE command before it reports the checkpoint as committed.
        states: sampler states to save, at least one; those that the application's sampler can have.
        make_sampler: a sampler to restore, which has ``state_dict``; None: one that has only ``load_state_dict``, and takes any state.
        flipped_bits: False for a format that has no digest and trusts the disk.

    Raises:
        FormatContractError: it breaks rules; it names each, with what was expected and what was found.
    """
    broken: list[str] = []
    for check in (_absence, _content, _newest, _unfinished_saves, _damage):
        expect = Expectations(check.__name__.strip("_").replace("_", " "), broken)
        with tempfile.TemporaryDirectory() as directory:
            under = _Format(Path(directory), make_adapter, save, states, make_sampler or _Sampler, flipped_bits)
            try:
                check(under, expect)
            except Exception as error:
                expect.broke(f"a call failed with {type(error).__name__}: {error}")
    if broken:
        raise FormatContractError(getattr(make_adapter, "__name__", repr(make_adapter)), broken)


class _Sampler:
    """A sampler that takes any state, and keeps the very object."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []

    def load_state_dict(self, state: Any) -> None:
        self.loaded.append(state)

    def state_dict(self) -> Any:
        return self.loaded[-1]


@dataclass(frozen=True, slots=True)
class _Format:
    """The format under test, over one directory."""

    directory: Path
    make_adapter: Callable[[Path], ControllerResumeAdapter]
    save: Callable[[Path, SaveWork], object]
    states: Sequence[Any]
    make_sampler: Callable[[], Any]
    flipped_bits: bool
    _saves: list[SaveWork] = field(default_factory=list)

    def load(self, resume: bool | str = True) -> tuple[ControllerResumeAdapter, ControllerResumeMetadata | None]:
        """What a fresh adapter finds, and the adapter."""
        adapter = self.make_adapter(self.directory)
        return adapter, adapter.load_metadata(_request(self.directory, resume))

    def commit(self, **how: Any) -> SaveWork:
        """Save, to the end."""
        work = self.work(**how)
        self.save(self.directory, work)
        return work

    def work(
        self,
        execution: int = 1,
        step: int | None = None,
        *,
        state: Any = None,
        owner: SamplingOwner = "sampler",
        final: bool = False,
    ) -> SaveWork:
        """A SAVE command as a trainer gets it, of the next step, with less of the budget left than the one before."""
        count = len(self._saves)
        step = count if step is None else step
        checkpoint_id = secrets.token_hex(16)
        path = SaveName(execution, step, checkpoint_id[:8]).path
        metadata = ControllerResumeMetadata(
            completed_training_steps=step,
            completed_optimizer_updates=3 * step,
            remaining_completions=2**53 + 1 - count,
            epoch=count + 1,
            sampling_owner=owner,
            sampler_state=self.states[0] if state is None else state,
            checkpoint_path=path,
            checkpoint_id=checkpoint_id,
        )
        work = SaveWork(
            number=count + 1,
            step=step,
            updates=3 * step,
            checkpoint_id=checkpoint_id,
            path=path,
            execution_number=execution,
            metadata=metadata,
            final=final,
            repeat_bound_completions=count + 10,
            horizon_training_steps=count + 20,
        )
        self._saves.append(work)
        return work


def _request(directory: Path, resume: bool | str) -> ResumeRequest:
    return ResumeRequest(TrainRequest(resume, str(directory)))


def _differing(metadata: ControllerResumeMetadata, saved: ControllerResumeMetadata) -> list[str]:
    """Fields that did not come back equal and of their type; where it lies, and whether it has an ID, is the format's own."""
    found, expected = metadata.values(), saved.values()
    own = {"checkpoint_path", *(() if metadata.checkpoint_id else ("checkpoint_id",))}
    return sorted(name for name in expected.keys() - own if not same_value(found[name], expected[name]))


def _is(found: ControllerResumeMetadata | None, work: SaveWork) -> bool:
    return isinstance(found, ControllerResumeMetadata) and not _differing(found, work.metadata)


def _absence(under: _Format, expect: Expectations) -> None:
    _, found = under.load()
    expect.equal("load_metadata where nothing was ever saved", found, None)
    _expect_no_other(under, expect, "an explicit checkpoint where nothing was ever saved", "absent")


def _expect_no_other(under: _Format, expect: Expectations, what: str, path: str) -> None:
    try:
        _, found = under.load(path)
    except Exception:
        return  # that it is not there, in the application's own words
    if found is not None:
        expect.broke(f"{what} ({path!r}) gave another one, expected None or an error")


def _content(under: _Format, expect: Expectations) -> None:
    for number, state in enumerate(under.states):
        for owner in get_args(SamplingOwner):
            what = f"a save of state {number} ({EncodedState.of(state)!r}) of the {owner}"
            try:
                work = under.commit(state=EncodedState.of(state), owner=owner)
            except Exception as error:
                expect.broke(f"{what} failed with {type(error).__name__}: {error}")
                continue
            _expect_back(under, expect, what, work)


def _expect_back(under: _Format, expect: Expectations, what: str, work: SaveWork) -> None:
    adapter, found = under.load()
    if not isinstance(found, ControllerResumeMetadata):
        expect.broke(f"{what}: load_metadata gave {type(found).__name__}, expected ControllerResumeMetadata")
        return
    if changed := _differing(found, work.metadata):
        expect.broke(f"{what} came back with other values, or other types, of {', '.join(changed)}")
        return
    if not found.checkpoint_path:
        expect.broke("checkpoint_path is empty, expected where the checkpoint lies")
    for name in ("repeat_bound_completions", "horizon_training_steps"):
        expect.equal(f"the adapter's {name} after load_metadata", getattr(adapter, name, None), getattr(work, name))
    _expect_restored(under, expect, adapter, found, "restore_sampler", work)
    again = adapter.load_metadata(_request(under.directory, True))
    if not _is(again, work) or again is None:
        expect.broke("a second load_metadata, after the sampler went on, gave something else than the first")
        return
    _expect_restored(under, expect, adapter, again, "restore_sampler after another sampler went on", work)


def _expect_restored(
    under: _Format,
    expect: Expectations,
    adapter: ControllerResumeAdapter,
    metadata: ControllerResumeMetadata,
    what: str,
    work: SaveWork,
) -> None:
    """Restore a sampler, and let it go on: whatever it was handed is its own to change."""
    sampler = under.make_sampler()
    adapter.restore_sampler(sampler, metadata)
    if isinstance(sampler, _Sampler):
        expect.equal(f"calls of load_state_dict by {what}", len(sampler.loaded), 1)
        if not sampler.loaded:
            return
    if not same_value(EncodedState.of(sampler.state_dict()), work.metadata.encoded_state):
        expect.broke(f"{what} put the sampler somewhere else than it was saved")
    if isinstance(sampler, _Sampler):
        _spoil(sampler.loaded[0])
    if not _is(metadata, work):
        expect.broke("the sampler shares its state with the metadata: what it did changed that")


def _spoil(value: Any) -> None:
    if isinstance(value, dict):
        for item in value.values():
            _spoil(item)
        value["spoilt"] = 1
    elif isinstance(value, list):
        for item in value:
            _spoil(item)
        value.append("spoilt")


def _newest(under: _Format, expect: Expectations) -> None:
    places: dict[str, SaveWork] = {}
    for what, execution, step, final in (
        ("the first step", 1, 0, False),
        ("step 9", 1, 9, False),
        ("step 10 after step 9", 1, 10, False),
        ("step 10 again, with less of the budget left", 1, 10, True),
        ("an earlier step of a newer execution", 2, 3, False),
        ("step 4 of that execution", 2, 4, False),
        ("execution 10 after execution 2", 10, 1, False),
    ):
        work = under.commit(execution=execution, step=step, final=final)
        _, found = under.load()
        if not _is(found, work):
            expect.broke(f"after a save of {what}, load_metadata gave another checkpoint, or none")
        elif found is not None:
            places[found.checkpoint_path] = work
    for path, work in places.items():
        try:
            _, found = under.load(path)
        except Exception as error:
            if work is places[max(places, key=lambda place: places[place].number)]:
                expect.broke(f"resume = the newest one's checkpoint_path raised {type(error).__name__}: {error}")
            continue  # an older one may be gone by now
        if found is not None and not _is(found, work):
            expect.broke("resume = a checkpoint_path gave another checkpoint than was saved there")
    _expect_no_other(under, expect, "an explicit checkpoint that is not there, beside others", "absent")


def _unfinished_saves(under: _Format, expect: Expectations) -> None:
    old: SaveWork | None = None
    for what in ("the first save", "a save after another"):
        work = under.work()
        states = states_of(under.directory, partial(under.save, under.directory, work))
        if len(states) < 2:
            expect.broke("a save changed nothing in the directory, so what it leaves when it dies cannot be checked")
            return
        done = False
        for state in states:
            lay_out(under.directory, state)
            done = _expect_old_or_new(under, expect, f"{what}, killed on its way,", old, work, done)
            following = under.work(execution=2 + len(under._saves))
            try:
                under.save(under.directory, following)
                stands = _is(under.load()[1], following)
            except Exception as error:
                expect.broke(f"{what}, killed on its way, makes the next one fail with {type(error).__name__}: {error}")
            else:
                if not stands:
                    expect.broke(f"{what}, killed on its way, keeps the next one from being found")
        lay_out(under.directory, states[-1])
        old = work


def _expect_old_or_new(
    under: _Format, expect: Expectations, what: str, old: SaveWork | None, new: SaveWork, done: bool
) -> bool:
    """Whether the new one is found; `done`: it was before."""
    try:
        _, found = under.load()
    except Exception as error:
        expect.broke(f"{what} makes load_metadata fail with {type(error).__name__}: {error}")
        return done
    if _is(found, new):
        return True
    if done:
        expect.broke(f"{what} had been found and then was not")
    elif found is None and old is not None:
        expect.broke(f"{what} hides the checkpoint before it: a fresh start")
    elif found is not None and (old is None or not _is(found, old)):
        expect.broke(f"{what} is found with other values than were to be saved")
    return False


def _damage(under: _Format, expect: Expectations) -> None:
    under.commit()
    newest = under.commit()
    whole = read_tree(under.directory)
    for name, thing in whole.items():
        if not stat.S_ISREG(thing.mode):
            continue
        for how, data in _damaged(thing.content, under.flipped_bits):
            (under.directory / name).write_bytes(data)
            os.utime(under.directory / name, ns=(thing.modified_ns, thing.modified_ns))
            try:
                _, found = under.load()
            except Exception:
                continue
            finally:
                lay_out_one(under.directory / name, thing)
            if not _is(found, newest):
                gave = "None: a fresh start" if found is None else "another checkpoint, or other values"
                expect.broke(f"{_kind_of_file(name, newest)} {how} gave {gave}, expected an error")


def _kind_of_file(name: str, newest: SaveWork) -> str:
    return f"a file of the newest ({Path(name).name})" if newest.checkpoint_id[:8] in name else f"a file ({name})"


def _damaged(data: bytes, flipped_bits: bool) -> Iterator[tuple[str, bytes]]:
    for size in sorted({0, len(data) // 2, len(data) - 1} - {-1, len(data)}):
        yield f"cut short ({'empty' if size == 0 else 'not empty'})", data[:size]
    for flip in range(min(FLIPS, len(data)) if flipped_bits else 0):
        place = flip * len(data) // FLIPS if len(data) > FLIPS else flip
        yield "with a flipped bit", data[:place] + bytes([data[place] ^ 1 << flip % 8]) + data[place + 1 :]
