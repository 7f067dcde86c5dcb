"""What a power loss may leave of what was done: every state of the disk, by a pessimistic model.

* Bytes that were not fsynced may be there, in part or not at all; a file may be as long as if they were, with zeros or
  with whatever lay on the device instead.
* A name that was given or taken away may have been so or not, each independently of every other, until its directory is
  fsynced. An fsync of a file says nothing of its name, that of a directory nothing of what its names hold.
* Power may go after any step. A state is a tree; equal trees are one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from crash_recording import Cut, Named, Node, Step, Synced, Told, Tree, Volume, Wrote, written

State: TypeAlias = frozenset[tuple[str, bytes | None]]
"""The items of a tree."""

Change: TypeAlias = Wrote | Cut

#: More contents of one file than this would say that the model is not fit for the task.
MAX_CONTENTS = 2000


@dataclass(slots=True)
class Disk:
    """What is durable, and what is not yet."""

    durable: Volume
    names: dict[tuple[Node, str], list[Node | None]] = field(default_factory=dict)
    changes: dict[Node, list[Change]] = field(default_factory=dict)

    def apply(self, step: Step) -> None:
        """Do what the step did, as far as it lasts."""
        if isinstance(step, Named):
            self.names.setdefault((step.directory, step.name), []).append(step.node)
        elif isinstance(step, Wrote | Cut):
            self.changes.setdefault(step.file, []).append(step)
        elif isinstance(step, Synced):
            for change in self.changes.pop(step.node, ()):
                self.durable.apply(change)
            for directory, name in [key for key in self.names if key[0] == step.node]:
                self.durable.apply(Named(directory, name, self.names.pop((directory, name))[-1]))

    def states(self) -> set[State]:
        """Every state that a power loss now may leave."""
        return {frozenset(items) for items, _ in self._below(self.durable.root, "", {})}

    def _below(
        self, directory: Node, prefix: str, chosen: dict[Node, bytes]
    ) -> Iterator[tuple[tuple[tuple[str, bytes | None], ...], dict[Node, bytes]]]:
        """What may lie below a directory, with the contents that were chosen: a file of two names has one."""
        held = self.durable.names.get(directory, {})
        names = sorted(held.keys() | {name for at, name in self.names if at == directory})

        def from_name(
            index: int, chosen: dict[Node, bytes]
        ) -> Iterator[tuple[tuple[tuple[str, bytes | None], ...], dict[Node, bytes]]]:
            if index == len(names):
                yield (), chosen
                return
            name = names[index]
            path = prefix + name
            for node in dict.fromkeys([held.get(name), *self.names.get((directory, name), ())]):
                for here, then in self._node(node, path, chosen):
                    for rest, last in from_name(index + 1, then):
                        yield here + rest, last

        yield from from_name(0, chosen)

    def _node(
        self, node: Node | None, path: str, chosen: dict[Node, bytes]
    ) -> Iterator[tuple[tuple[tuple[str, bytes | None], ...], dict[Node, bytes]]]:
        if node is None:
            yield (), chosen
        elif node.is_directory:
            for below, then in self._below(node, f"{path}/", chosen):
                yield ((path, None), *below), then
        elif node in chosen:
            yield ((path, chosen[node]),), chosen
        else:
            durable = self.durable.contents.get(node, b"")
            for content in contents(durable, self.changes.get(node, ())):
                yield ((path, content),), chosen | {node: content}


def contents(durable: bytes, changes: Sequence[Change]) -> set[bytes]:
    """What a file may hold that held `durable` and was changed since: every change is lost, whole, or a part of itself."""
    found = {durable}
    for change in changes:
        found |= {content for before in found for content in _after(before, change)}
        assert len(found) <= MAX_CONTENTS, "too many contents of one file"
    return found


def _after(before: bytes, change: Change) -> Iterator[bytes]:
    if isinstance(change, Cut):
        yield before.ljust(change.size_bytes, b"\0")[: change.size_bytes]
        return
    data, size = change.data, len(change.data)
    half = size // 2
    for part in (
        data,
        data[:-1],
        data[:half],
        data[:half] + bytes(size - half),
        bytes(half) + data[half:],
        bytes(size),
        bytes(byte ^ 0xA5 for byte in data),
    ):
        yield written(before, change.offset, part)


@dataclass(frozen=True, slots=True)
class Violation:
    """A state that must not be."""

    after: int
    """Steps that were made."""
    told: tuple[str, ...]
    """What had been told by then."""
    seen: str
    """What a reader sees."""
    state: State


@dataclass(slots=True)
class Reader:
    """A reader's view of a state, for which the state is laid out as a directory. It remembers what it saw."""

    scratch: Path
    look: Callable[[Path], str]
    passes_over: str = ""
    """Names that begin with this are not laid out, if it is not empty."""
    seen: dict[State, str] = field(default_factory=dict)

    def see(self, state: State) -> str:
        """What `look` sees."""
        if self.passes_over:
            names = ((path.rpartition("/")[2], path, content) for path, content in state)
            state = frozenset((path, content) for name, path, content in names if not name.startswith(self.passes_over))
        if state not in self.seen:
            lay_out(dict(state), self.scratch)
            self.seen[state] = self.look(self.scratch)
        return self.seen[state]


def lay_out(tree: Tree, directory: Path) -> None:
    """Make `directory` hold the tree and nothing else."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for path, content in sorted(tree.items()):
        if content is None:
            (directory / path).mkdir()
        else:
            (directory / path).write_bytes(content)


def crash_states(before: Volume, steps: Iterable[Step]) -> Iterator[tuple[int, tuple[str, ...], State]]:
    """The states after every number of steps, each once for what had been told by then."""
    disk = Disk(before.copy())
    told: tuple[str, ...] = ()
    known: set[State] = set()
    for after, step in enumerate([None, *steps]):
        if isinstance(step, Told):
            told, known = (*told, step.what), set()
        elif step is not None:
            disk.apply(step)
        if isinstance(step, Synced):
            continue  # it takes states away and adds none
        for state in disk.states() - known:
            known.add(state)
            yield after, told, state


def violations(
    before: Volume, steps: Iterable[Step], reader: Reader, allowed: Callable[[tuple[str, ...]], set[str]]
) -> Iterator[Violation]:
    """The states in which a reader sees what it may not, after what had been told."""
    for after, told, state in crash_states(before, steps):
        seen = reader.see(state)
        if seen not in allowed(told):
            yield Violation(after, told, seen, state)
