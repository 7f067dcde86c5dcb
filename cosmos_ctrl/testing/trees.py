"""What lies in a directory, as a value: taken, laid out again, and watched while something changes it."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Thing:
    """Something in a directory."""

    mode: int
    """Kind and permissions."""
    content: bytes
    """Of a link, its target; of a directory, nothing."""
    modified_ns: int


Tree: TypeAlias = Mapping[str, Thing]
"""By relative path."""


def read_tree(directory: Path) -> dict[str, Thing]:
    """Everything below `directory`, by relative path; a directory comes before what is in it."""
    found: dict[str, Thing] = {}
    for top, directories, files in os.walk(directory):
        for path in sorted(Path(top) / name for name in (*directories, *files)):
            status = path.lstat()
            content = b""
            if stat.S_ISLNK(status.st_mode):
                content = os.fsencode(path.readlink())
            elif stat.S_ISREG(status.st_mode):
                content = path.read_bytes()
            found[str(path.relative_to(directory))] = Thing(status.st_mode, content, status.st_mtime_ns)
    return found


def lay_out(directory: Path, tree: Tree) -> None:
    """Make `directory` hold the tree and nothing else."""
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    for name, thing in tree.items():
        lay_out_one(directory / name, thing)
    for name, thing in reversed(list(tree.items())):  # what was made in a directory has changed its time
        os.utime(directory / name, ns=(thing.modified_ns, thing.modified_ns), follow_symlinks=False)


def lay_out_one(path: Path, thing: Thing) -> None:
    """Make `path` hold the thing."""
    if stat.S_ISDIR(thing.mode):
        path.mkdir()
    elif stat.S_ISLNK(thing.mode):
        path.symlink_to(os.fsdecode(thing.content))
        return
    else:
        path.write_bytes(thing.content)
    path.chmod(stat.S_IMODE(thing.mode))
    os.utime(path, ns=(thing.modified_ns, thing.modified_ns))


def states_of(directory: Path, call: Callable[[], object]) -> list[Tree]:
    """What lies in `directory` before, during and after the call, as it is whenever the call calls something of the interpreter's."""
    states: list[Tree] = [read_tree(directory)]

    def look(*_: object) -> None:
        tree = read_tree(directory)
        if tree != states[-1]:
            states.append(tree)

    profiler = sys.getprofile()
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(profiler)
    look()
    return states
