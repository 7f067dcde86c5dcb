"""The model of crashes itself: against a dumber one, and each of its rules by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest
from crash_recording import Cut, Named, Node, Recording, Step, Synced, Told, Volume, Wrote
from crash_states import Disk, State, contents, crash_states
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT, BELOW = Node(0, True), Node(1, True)
FILES = (Node(2, False), Node(3, False))

#: The parts of b"wxyz" that a power loss may leave, spelled out.
PARTS = (b"wxyz", b"wxy", b"wx", b"wx\0\0", b"\0\0yz", b"\0\0\0\0", bytes(byte ^ 0xA5 for byte in b"wxyz"))


def states(*steps: Step) -> set[State]:
    disk = Disk(Volume())
    for step in steps:
        disk.apply(step)
    return disk.states()


def tree(**items: bytes | None) -> State:
    return frozenset(items.items())


def dumb_states(steps: list[Step]) -> set[State]:
    """Every step is lost or made, in whole or in part, on its own; a later sync of what it is in leaves it no choice."""
    choices: list[list[bytes | bool]] = []
    for place, step in enumerate(steps):
        synced = {later.node for later in steps[place:] if isinstance(later, Synced)}
        if isinstance(step, Named):
            choices.append([True] if step.directory in synced else [True, False])
        elif isinstance(step, Wrote):
            choices.append([PARTS[0]] if step.file in synced else [*PARTS, False])
        else:
            choices.append([True])
    found = set()
    for chosen in itertools.product(*choices):
        volume = Volume()
        for step, choice in zip(steps, chosen, strict=True):
            if choice is not False:
                volume.apply(Wrote(step.file, 0, choice) if isinstance(step, Wrote) and choice is not True else step)
        found.add(frozenset(volume.tree().items()))
    return found


STEPS = st.one_of(
    st.builds(Named, st.sampled_from([ROOT, BELOW]), st.sampled_from("ab"), st.sampled_from([None, *FILES])),
    st.just(Named(ROOT, "below", BELOW)),
    st.builds(Wrote, st.sampled_from(FILES), st.just(0), st.just(b"wxyz")),
    st.builds(Synced, st.sampled_from([ROOT, BELOW, *FILES]), st.just("")),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=7).filter(lambda steps: sum(isinstance(step, Wrote) for step in steps) <= 3))
def test_the_states_are_those_of_a_dumber_model(steps: list[Step]) -> None:
    assert states(*steps) == dumb_states(steps)


def made(file: Node = FILES[0]) -> Iterable[Step]:
    return (Named(ROOT, "a", file), Wrote(file, 0, b"wxyz"))


def test_an_fsync_of_a_file_says_nothing_of_its_name() -> None:
    assert states(*made(), Synced(FILES[0], "a")) == {tree(), tree(a=b"wxyz")}


def test_an_fsync_of_a_directory_says_nothing_of_what_its_names_hold() -> None:
    assert states(*made(), Synced(ROOT, "")) == {tree(a=b""), *(tree(a=part) for part in PARTS)}
    assert states(*made(), Synced(ROOT, ""), Synced(FILES[0], "a")) == {tree(a=b"wxyz")}


def test_names_of_one_directory_are_lost_independently() -> None:
    both = (Named(ROOT, "a", FILES[0]), Named(ROOT, "b", FILES[1]))
    assert states(*both) == {tree(), tree(a=b""), tree(b=b""), tree(a=b"", b=b"")}


def test_a_rename_may_leave_both_names_or_neither() -> None:
    before = (*made(), Synced(FILES[0], "a"), Synced(ROOT, ""))
    renamed = (Named(ROOT, "b", FILES[0]), Named(ROOT, "a", None))
    assert states(*before, *renamed) == {tree(a=b"wxyz"), tree(b=b"wxyz"), tree(a=b"wxyz", b=b"wxyz"), tree()}


def test_two_names_of_a_file_hold_the_same() -> None:
    found = states(*made(), Named(ROOT, "b", FILES[0]), Synced(ROOT, ""))
    assert all(len({content for _, content in state}) == 1 for state in found)


def test_what_is_below_a_name_that_is_lost_is_lost() -> None:
    inner = (Named(ROOT, "below", BELOW), Named(BELOW, "a", FILES[0]), Synced(BELOW, "below"))
    assert states(*inner) == {tree(), frozenset({("below", None), ("below/a", b"")})}


def test_a_deletion_may_come_back_until_its_directory_is_synced() -> None:
    before = (*made(), Synced(FILES[0], "a"), Synced(ROOT, ""), Named(ROOT, "a", None))
    assert states(*before) == {tree(), tree(a=b"wxyz")}
    assert states(*before, Synced(ROOT, "")) == {tree()}


def test_a_size_may_be_there_without_the_bytes() -> None:
    assert contents(b"old", [Cut(FILES[0], 5)]) == {b"old", b"old\0\0"}
    assert contents(b"old", [Cut(FILES[0], 0)]) == {b"old", b""}
    assert b"old\0\0\0\0" in contents(b"old", [Wrote(FILES[0], 3, b"wxyz")])


def test_states_come_after_every_number_of_steps_and_anew_when_something_is_told() -> None:
    steps: list[Step] = [Named(ROOT, "a", FILES[0]), Told("ok")]
    assert next(crash_states(Volume(), steps)) == (0, (), tree())
    assert {(after, told) for after, told, _ in crash_states(Volume(), steps)} == {(0, ()), (1, ()), (2, ("ok",))}


# --- the recording ---


def recorded(tmp_path: Path, *lines: str) -> Recording:
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "log").write_text("".join(f"{line}\n" for line in lines).replace("DISK", str(disk)), encoding="latin-1")
    recording = Recording(disk)
    (disk / "a").write_bytes(b'w\n"\0\xff')
    recording.process(tmp_path / "log")
    return recording


OPEN = 'openat(AT_FDCWD, "DISK/a", O_WRONLY|O_CREAT|O_EXCL|O_CLOEXEC, 0644) = 7'
WRITE = r'write(7, "w\n\"\0\377", 5) = 5'


def test_a_recording_has_the_steps_that_lay_open_what_was_done(tmp_path: Path) -> None:
    recording = recorded(tmp_path, OPEN, WRITE, "fsync(7) = 0", "close(7) = 0", r'write(6, "{\"ok\": 1}\n", 10) = 10')
    file = Node(1, False)
    data = b'w\n"\0\xff'
    assert recording.steps == [Named(ROOT, "a", file), Wrote(file, 0, data), Synced(file, "a"), Told("ok")]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([OPEN, WRITE, 'symlink("x", "DISK/b") = 0'], "symlink"),
        ([OPEN, WRITE, "dup(7) = 8"], "dup"),
        ([OPEN], "not what lies on the disk"),
        ([OPEN, WRITE, 'write(7, "more"..., 100) = 100'], "cut a string short"),
        ([OPEN, WRITE, "nonsense"], "not a call"),
    ],
)
def test_what_a_recording_does_not_understand_is_an_error(lines: list[str], why: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=why):
        recorded(tmp_path, *lines)


@pytest.mark.parametrize(
    "line",
    [
        "fsync(7) = -1 EIO (Input/output error) (INJECTED)",
        "fsync(7) = 0 (INJECTED)",
        "fsync(7 <unfinished ...>",
        "fsync(7) = ?",
    ],
)
def test_a_call_that_was_not_made_is_no_step(line: str, tmp_path: Path) -> None:
    recording = recorded(tmp_path, OPEN, WRITE, line)
    assert not any(isinstance(step, Synced) for step in recording.steps)
