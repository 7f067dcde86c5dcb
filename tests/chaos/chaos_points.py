"""Makes ckpt-chaos see the files of this package: what is opened by ``os.open``, and what gets its name by ``os.link``.

By itself ckpt-chaos tears, and takes back unsynced, only what is written through Python's ``open``, ``torch.save`` to a path and the like;
shards, claims and manifests are written with system calls. Here these get the same treatment:

* a file that is opened for writing can be torn: cut to half its size when it is first fsynced or closed, and the process dies there;
* in mode ``unsynced`` it loses what was not fsynced, and so does a name that was linked to it;
* linking is an event of its own; making a directory that is there, or whose parent is missing, changes nothing and is none;
* events are named without what is random in them, so that two runs have the same ones.

It leans on the inner names of the pinned version.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_chaos import inject

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

#: Random or particular to a process: IDs of checkpoints, temporary names of the store and of weights.
_RANDOM = re.compile(r"(?<=-s\d{8})-[0-9a-f]{8}$|(?<=tmp-)[0-9a-f]{16}$|(?<=tmp-probe-)[0-9a-f]{16}$|\.\d+$")

_open: Callable[..., int] = os.open
_close: Callable[[int], None] = os.close
_link: Callable[..., None] = os.link
_tearing: dict[int, str] = {}
"""Path of each open file that is to be torn, by descriptor."""


def install() -> None:
    """Put it in place, before the modules that keep these functions are imported. Nothing happens until ckpt-chaos is armed."""
    inject._install_fsync()
    fsync, event = os.fsync, inject._event

    def synced(descriptor: int) -> None:
        _tear(descriptor)
        fsync(descriptor)

    def counted(kind: str, path: Any, tornable: bool) -> bool:
        named = Path(path)
        if kind == "os.mkdir" and (named.is_dir() or not named.parent.is_dir()):
            return False
        return bool(event(kind, named.with_name(_RANDOM.sub("", named.name)), tornable))

    inject._event = counted
    for name, function in {"open": _opened, "close": _closed, "fsync": synced, "link": _linked}.items():
        setattr(os, name, function)


def _opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    watched = dir_fd is None and flags & _WRITING and inject._state["watch"] and inject._under(path)
    if not watched or inject._state["quiet"]:
        return _open(path, flags, mode, dir_fd=dir_fd)
    tear = inject._event("os.open", path, tornable=True)
    name = inject._norm(path)
    if inject._state["unsynced"]:
        inject._note_open_for_write(name)
    with inject._quietly():  # it is counted already
        descriptor = _open(path, flags, mode)
    if inject._state["unsynced"]:
        inject._state["fd_path"][descriptor] = name
    if tear:
        _tearing[descriptor] = name
    return descriptor


def _closed(descriptor: int) -> None:
    _tear(descriptor)
    # The number will be another file's.
    inject._state["fd_path"].pop(descriptor, None)
    _close(descriptor)


def _tear(descriptor: int) -> None:
    if descriptor in _tearing:
        inject._tear(_tearing[descriptor])
        os._exit(137)


def _linked(source: Any, target: Any, **options: Any) -> None:
    if inject._state["watch"] and inject._under(target):
        inject._event("os.link", target, tornable=False)
    _link(source, target, **options)
    old, new = inject._norm(source), inject._norm(target)
    if old in inject._state["dirty"]:
        inject._state["dirty"].add(new)
        inject._state["zero"].add(new)
