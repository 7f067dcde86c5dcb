"""Every interleaving of actors over one store, explored: the code is the real one, the store is stepped.

* An actor is a function of a store. It is replayed with the outcomes that its calls had so far, up to its next call: so a state is the
  store's content and each actor's outcomes, nothing is copied, and equal states are explored once.
* At each step any actor may go on. A crash is an actor that never does: every state on the way is checked, so it needs no step of its own.
* One call of a path may fail, in each way a call can: not done; done, and the reply lost; not done yet, and landing at any later time;
  done, and done again at any later time, by a request that was sent twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from cosmos_ctrl.checkpoints.stores import Entry, EntryKind
from cosmos_ctrl.core.errors import CheckpointConflictError, ControlError, StorageUnavailableError

Content = frozenset[tuple[str, bytes]]
Outcome = tuple[str, Any]
"""("ok", value) or ("error", exception)."""


class Memory:
    """The store's semantics, a dictionary. Directories are prefixes, as in an object store."""

    def __init__(self, content: Content) -> None:
        self.names = dict(content)

    @property
    def uri(self) -> str:
        return "memory"

    def location(self, name: str) -> str:
        return f"memory/{name}"

    def put_if_absent(self, name: str, data: bytes) -> bool:
        there = self.names.setdefault(name, data)
        if there is not data and there != data:
            raise CheckpointConflictError(path=name, what="other content")
        return there is data

    def read(self, name: str, *, limit: int) -> bytes | None:
        return self.names.get(name)

    def list(self, prefix: str) -> tuple[str, ...]:
        rests = [name[len(prefix) + 1 :].partition("/") for name in self.names if name.startswith(f"{prefix}/")]
        return tuple(sorted({first + slash for first, slash, _ in rests}))

    def scan(self, prefix: str) -> tuple[Entry, ...]:
        below = {name[len(prefix) + 1 :]: data for name, data in self.names.items() if name.startswith(f"{prefix}/")}
        return tuple(Entry(name, "file", len(data)) for name, data in sorted(below.items()))

    def head(self, name: str) -> int | None:
        return len(self.names[name]) if name in self.names else None

    def kind(self, name: str) -> EntryKind | None:
        if name in self.names:
            return "file"
        return "directory" if self.scan(name) else None

    def delete(self, name: str) -> bool:
        return self.names.pop(name, None) is not None

    def sync(self, prefix: str) -> None:
        """All is durable."""

    def make_directory(self, name: str) -> None:
        """There are none."""

    def content(self) -> Content:
        return frozenset(self.names.items())


@dataclass(frozen=True)
class Call:
    """What an actor does next."""

    method: str
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...] = ()

    def on(self, content: Content) -> tuple[Outcome, Content]:
        memory = Memory(content)
        try:
            outcome: Outcome = ("ok", getattr(memory, self.method)(*self.arguments, **dict(self.keywords)))
        except ControlError as error:
            outcome = ("error", error)
        return outcome, memory.content()


class _Next(BaseException):
    def __init__(self, call: Call) -> None:
        self.call = call


class Replayed:
    """Answers an actor's calls with the outcomes they had."""

    def __init__(self, outcomes: tuple[Outcome, ...]) -> None:
        self._outcomes = list(reversed(outcomes))
        self.uri = "memory"

    def location(self, name: str) -> str:
        return f"memory/{name}"

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if not self._outcomes:
                raise _Next(Call(method, arguments, tuple(sorted(keywords.items()))))
            kind, value = self._outcomes.pop()
            if kind == "error":
                raise value
            return value

        return call


Notes = dict[str, Any]
Actor = Callable[[Any, Notes], None]

_WRITES = ("put_if_absent", "delete")


@dataclass(frozen=True, eq=False)
class Node:
    """Where an actor has come to."""

    outcomes: tuple[Outcome, ...]
    notes: Notes
    call: Call | None
    """What it does next; None: it is through."""


@dataclass(frozen=True)
class State:
    """Equal states are the same state."""

    content: Content
    nodes: tuple[Node, ...]
    """By actor."""
    pending: Call | None = None
    """A put that was answered with an error and has yet to land."""
    faults: int = 0
    """How many calls may still fail."""
    late: bool = False
    """Whether a put was to land late."""

    @property
    def over(self) -> bool:
        return not any(node.call for node in self.nodes)

    def notes(self, actor: int) -> Notes:
        return self.nodes[actor].notes


class Exploration:
    """The states that some actors can come to."""

    def __init__(
        self, content: Content, actors: list[Actor], *, faults: int = 0, settled: tuple[str, ...] = ()
    ) -> None:
        """`settled` are prefixes of names that no actor ever changes: what reads there is not interleaved."""
        self._actors, self._settled = actors, settled
        self._nodes: dict[tuple[Any, ...], Node] = {}
        self._start = State(
            content, tuple(self._after_call(index, None, None) for index in range(len(actors))), faults=faults
        )

    def __iter__(self) -> Iterator[State]:
        waiting, known = [self._start], {self._start}
        while waiting:
            state = waiting.pop()
            yield state
            for following in self._steps(state):
                if following not in known:
                    known.add(following)
                    waiting.append(following)

    def _after_call(self, index: int, node: Node | None, outcome: Outcome | None) -> Node:
        # Exceptions do not compare equal; their texts do.
        key: tuple[Any, ...] = (index, node, repr(outcome))
        if key not in self._nodes:
            outcomes = (*node.outcomes, outcome) if node and outcome else ()
            notes: Notes = {}
            call = None
            try:
                self._actors[index](Replayed(outcomes), notes)
            except _Next as following:
                call = following.call
            found = Node(outcomes, notes, call)
            if call is None:  # what it went through does not matter any more, but what it came to
                found = self._nodes.setdefault((index, repr(notes)), found)
            self._nodes[key] = found
        return self._nodes[key]

    def _steps(self, state: State) -> Iterator[State]:
        if state.pending is not None:
            _, content = state.pending.on(state.content)
            yield replace(state, content=content, pending=None)
        calls = [(index, node.call) for index, node in enumerate(state.nodes) if node.call]
        for index, call in calls:
            if call.method not in _WRITES and call.arguments[0].startswith(self._settled or ("none",)):
                calls = [(index, call)]
        for index, call in calls:
            outcome, content = call.on(state.content)
            yield self._after(state, index, outcome, content=content)
            if call.method not in _WRITES:
                continue
            assert not call.arguments[0].startswith(self._settled or ("none",)), (
                f"{call} changes what is said to be settled"
            )
            if state.faults:
                cause = StorageUnavailableError(path=call.arguments[0], operation=call.method, cause="EIO")
                error: Outcome = ("error", cause)
                spent = replace(state, faults=state.faults - 1)
                yield self._after(spent, index, error)
                yield self._after(spent, index, error, content=content)
                if call.method == "put_if_absent":
                    late = replace(spent, pending=call, late=True)
                    yield self._after(late, index, error)
                    yield self._after(late, index, outcome, content=content)

    def _after(self, state: State, index: int, outcome: Outcome, **changes: Any) -> State:
        nodes = list(state.nodes)
        nodes[index] = self._after_call(index, nodes[index], outcome)
        return replace(state, nodes=tuple(nodes), **changes)
