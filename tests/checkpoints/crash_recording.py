"""What a process did to a directory, from the log that strace wrote of it.

* A step is a change that a power loss may undo (a name, bytes), a sync that forbids that, or something that was told.
* Nothing is guessed: a call that succeeded below the directory and is not known here is an error, and so is a recording
  whose outcome is not what then lies on the disk.
* Several processes may be recorded one after the other; each has descriptors of its own, all have one disk.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from cosmos_ctrl.checkpoints.names import TEMPORARY_PREFIX


@dataclass(frozen=True, slots=True)
class Node:
    """A file or a directory, whatever its names are."""

    number: int
    is_directory: bool


@dataclass(frozen=True, slots=True)
class Named:
    """In a directory a name is given to a node, or taken away (None)."""

    directory: Node
    name: str
    node: Node | None


@dataclass(frozen=True, slots=True)
class Wrote:
    """Bytes were written."""

    file: Node
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Cut:
    """A file was given a size."""

    file: Node
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Synced:
    """fsync or fdatasync returned: of a file, its bytes last; of a directory, its names do."""

    node: Node
    path: str
    """For people."""


@dataclass(frozen=True, slots=True)
class Told:
    """Somebody outside was told something."""

    what: str


Step: TypeAlias = Named | Wrote | Cut | Synced | Told

Tree: TypeAlias = Mapping[str, bytes | None]
"""Paths and what they hold; None: a directory."""


@dataclass(slots=True)
class Volume:
    """Names and contents, of nodes."""

    root: Node = Node(0, True)
    names: dict[Node, dict[str, Node]] = field(default_factory=lambda: {Node(0, True): {}})
    contents: dict[Node, bytes] = field(default_factory=dict)

    def copy(self) -> Volume:
        """Another one, alike."""
        names = {directory: dict(names) for directory, names in self.names.items()}
        return Volume(self.root, names, dict(self.contents))

    def apply(self, step: Step) -> None:
        """Do what the step did, at once and for good."""
        if isinstance(step, Named):
            names = self.names.setdefault(step.directory, {})
            if step.node is None:
                names.pop(step.name, None)
            else:
                names[step.name] = step.node
        elif isinstance(step, Wrote):
            self.contents[step.file] = written(self.contents.get(step.file, b""), step.offset, step.data)
        elif isinstance(step, Cut):
            self.contents[step.file] = self.contents.get(step.file, b"").ljust(step.size_bytes, b"\0")[
                : step.size_bytes
            ]

    def tree(self) -> dict[str, bytes | None]:
        """What is reached from the root."""
        return dict(self._below(self.root, ""))

    def _below(self, directory: Node, prefix: str) -> Iterator[tuple[str, bytes | None]]:
        for name, node in self.names.get(directory, {}).items():
            yield prefix + name, None if node.is_directory else self.contents.get(node, b"")
            if node.is_directory:
                yield from self._below(node, f"{prefix}{name}/")


def written(content: bytes, offset: int, data: bytes) -> bytes:
    """`content` after a write; a gap is zeros."""
    return content[:offset].ljust(offset, b"\0") + data + content[offset + len(data) :]


#: Calls that change nothing a power loss could undo.
HARMLESS = {
    *("access", "faccessat2", "fcntl", "fstat", "getcwd", "getdents64", "ioctl", "lstat", "newfstatat", "pread64"),
    *(
        "preadv",
        "preadv2",
        "pselect6",
        "read",
        "readlink",
        "restart_syscall",
        "select",
        "stat",
        "statx",
        "mmap",
        "munmap",
    ),
}

_LINE = re.compile(r"(?P<name>\w+)\((?P<arguments>.*)\)\s+= (?P<result>-?\d+|\?)(?P<rest>.*)")
_TOKEN = re.compile(r'"((?:[^"\\]|\\.)*)"(\.\.\.)?|([^",\s]+)')
_TEMPORARY = re.compile(re.escape(TEMPORARY_PREFIX) + "[0-9a-f]+")


@dataclass(slots=True)
class _Open:
    node: Node
    path: str
    offset: int = 0
    appends: bool = False


class Recording:
    """The steps of processes over the directory `root`; what lies there when it is made is taken to be durable."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.steps: list[Step] = []
        self._temporary: dict[str, str] = {}
        self._numbers = 0
        self._live = Volume()
        self._load(self.root, self._live.root)
        self.before = self._live.copy()
        self._files: dict[int, _Open] = {}

    def process(self, log: Path) -> None:
        """Add what one process did; its descriptors are closed then, however it ended."""
        for line in log.read_text(encoding="latin-1").splitlines():
            if line.startswith(("+++", "---")):
                continue
            found = _LINE.fullmatch(line)
            if found is None:
                # Killed in the call: it was not made.
                assert "<unfinished ...>" in line, f"not a call: {line[:200]}"
                continue
            # A call that was tampered with was not made, whatever it returned.
            if found["result"] in ("?", "-1") or "(INJECTED)" in found["rest"]:
                self._not_made(found["name"], found["arguments"])
            else:
                self._call(found["name"], found["arguments"], int(found["result"]))
        self._files = {}
        here = {self._canonical(name): data for name, data in tree_at(self.root).items()}
        assert self._live.tree() == here, "the recording is not what lies on the disk"

    def _load(self, directory: Path, node: Node) -> None:
        for path in sorted(directory.iterdir()):
            child = self._new(is_directory=path.is_dir())
            self._live.names[node][self._canonical(path.name)] = child
            if child.is_directory:
                self._load(path, child)
            else:
                self._live.contents[child] = path.read_bytes()

    def _new(self, *, is_directory: bool) -> Node:
        self._numbers += 1
        node = Node(self._numbers, is_directory)
        if is_directory:
            self._live.names[node] = {}
        return node

    def _step(self, step: Step) -> None:
        self._live.apply(step)
        self.steps.append(step)

    def _canonical(self, path: str) -> str:
        # Random names would make every recording one of its own.
        def number(found: re.Match[str]) -> str:
            return self._temporary.setdefault(found[0], f"{TEMPORARY_PREFIX}{len(self._temporary)}")

        return _TEMPORARY.sub(number, path)

    def _inside(self, path: str, at: str = "AT_FDCWD") -> str | None:
        """The path below the root ("" is the root); None when it is elsewhere."""
        if not path.startswith("/"):
            if at == "AT_FDCWD" or int(at) not in self._files:
                return None
            base = self._files[int(at)].path
            return f"{base}/{path}" if base else path
        if path == str(self.root):
            return ""
        prefix = f"{self.root}/"
        return self._canonical(path[len(prefix) :]) if path.startswith(prefix) else None

    def _find(self, path: str) -> Node | None:
        node: Node | None = self._live.root
        for part in path.split("/") if path else ():
            node = self._live.names.get(node, {}).get(part) if node else None
        return node

    def _name(self, path: str, node: Node | None) -> None:
        parent, _, name = path.rpartition("/")
        directory = self._find(parent)
        assert directory is not None, f"{path} was named in a directory that is not there"
        self._step(Named(directory, name, node))

    def _not_made(self, name: str, arguments: str) -> None:
        if name == "close":
            self._files.pop(int(arguments), None)

    def _call(self, name: str, text: str, result: int) -> None:
        if name in HARMLESS:
            return
        arguments = list(_arguments(text))
        known = getattr(self, f"_on_{name}", None)
        assert known is not None, f"{name}({text[:200]}) is not known to the model"
        known(arguments, result)

    def _on_openat(self, arguments: list[str], result: int) -> None:
        path, flags = self._inside(arguments[1], arguments[0]), arguments[2].split("|")
        if path is None:
            return
        assert "O_TMPFILE" not in flags
        node = self._find(path)
        if node is None:
            assert "O_CREAT" in flags, f"{path} was opened and is not there"
            node = self._new(is_directory=False)
            self._name(path, node)
        if "O_TRUNC" in flags and self._live.contents.get(node):
            self._step(Cut(node, 0))
        self._files[result] = _Open(node, path, appends="O_APPEND" in flags)

    def _on_openat2(self, arguments: list[str], result: int) -> None:
        self._on_openat([*arguments[:2], arguments[2].removeprefix("{flags=")], result)

    def _on_close(self, arguments: list[str], _: int) -> None:
        self._files.pop(int(arguments[0]), None)

    def _on_lseek(self, arguments: list[str], result: int) -> None:
        if int(arguments[0]) in self._files:
            self._files[int(arguments[0])].offset = result

    def _on_write(self, arguments: list[str], result: int) -> None:
        data = arguments[1].encode("latin-1")[:result]
        file = self._files.get(int(arguments[0]))
        if file is None:
            # Not a file of this directory: the pipe to whoever asked.
            self._step(Told(_what_is_told(data)))
            return
        offset = len(self._live.contents.get(file.node, b"")) if file.appends else file.offset
        self._step(Wrote(file.node, offset, data))
        file.offset = offset + result

    def _on_writev(self, arguments: list[str], _: int) -> None:
        # The descriptor, what stands before the first buffer, the buffer.
        assert int(arguments[0]) not in self._files
        self._step(Told(_what_is_told(arguments[2].encode("latin-1"))))

    def _on_ftruncate(self, arguments: list[str], _: int) -> None:
        if int(arguments[0]) in self._files:
            self._step(Cut(self._files[int(arguments[0])].node, int(arguments[1])))

    def _on_fsync(self, arguments: list[str], _: int) -> None:
        file = self._files.get(int(arguments[0]))
        if file is not None:
            self._step(Synced(file.node, file.path))

    _on_fdatasync = _on_fsync

    def _on_sync_file_range(self, arguments: list[str], result: int) -> None:
        """Starts write-back and promises nothing."""

    def _on_mkdir(self, arguments: list[str], _: int) -> None:
        path = self._inside(arguments[0])
        if path is not None:
            self._name(path, self._new(is_directory=True))

    def _on_unlink(self, arguments: list[str], _: int) -> None:
        path = self._inside(arguments[0])
        if path is not None:
            self._name(path, None)

    _on_rmdir = _on_unlink

    def _on_link(self, arguments: list[str], _: int) -> None:
        source, target = (self._inside(path) for path in arguments[:2])
        assert (source is None) == (target is None)
        if source is not None and target is not None:
            self._name(target, self._find(source))

    def _on_rename(self, arguments: list[str], _: int) -> None:
        source, target = (self._inside(path) for path in arguments[:2])
        assert (source is None) == (target is None)
        if source is not None and target is not None:
            # Two changes: what a journal makes one of is not promised.
            self._name(target, self._find(source))
            self._name(source, None)

    def _on_renameat2(self, arguments: list[str], result: int) -> None:
        assert arguments[0] == arguments[2] == "AT_FDCWD"
        self._on_rename([arguments[1], arguments[3]], result)


def tree_at(directory: Path) -> dict[str, bytes | None]:
    """What lies below a directory; nothing in it is a link."""
    found: dict[str, bytes | None] = {}
    for top, directories, files in os.walk(directory):
        below = Path(top)
        found |= {str((below / name).relative_to(directory)): None for name in directories}
        found |= {str((below / name).relative_to(directory)): (below / name).read_bytes() for name in files}
    return found


def _arguments(text: str) -> Iterator[str]:
    for quoted, cut, word in _TOKEN.findall(text):
        assert not cut, "strace cut a string short; give it a larger -s"
        yield word or ast.literal_eval(f'b"{quoted}"').decode("latin-1")


def _what_is_told(data: bytes) -> str:
    message = json.loads(data)
    return str(message["told"]) if "told" in message else next(iter(message))
