"""Opening a file below a directory, by a name that cannot lead out of it, whatever is renamed or replaced meanwhile.

* Linux does it in one call, ``openat2`` (5.6 and newer, where no filter of system calls forbids it); elsewhere each part of the name is
  opened from the one before. Which, is found out once per process; both refuse the same.
* No link below the directory is followed; the directory itself may be reached through one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path

# A directory on the way is only passed through, so it need not be readable.
_DIRECTORY_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
# A FIFO would block an open without O_NONBLOCK.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

# linux/openat2.h: RESOLVE_BENEATH, RESOLVE_NO_SYMLINKS, RESOLVE_NO_MAGICLINKS. The call's number is the same on all of these machines.
_RESOLVE = 0x08 | 0x04 | 0x02
_OPENAT2 = 437
_MACHINES = {"x86_64", "aarch64", "ppc64le", "riscv64", "s390x"}


def open_beneath(directory: Path, name: str) -> int:
    """Open `name`, a safe relative path, for reading; returns its descriptor.

    Raises:
        OSError: ELOOP or ENOTDIR for a link or another kind on the way, ENXIO for a socket, or whatever else the system says.
    """
    with ExitStack() as stack:
        at = os.open(directory, _DIRECTORY_FLAGS)
        stack.callback(os.close, at)
        if has_openat2():
            return _openat2(at, name, _FILE_FLAGS)
        *parents, last = name.split("/")
        for parent in parents:
            at = os.open(parent, _DIRECTORY_FLAGS | os.O_NOFOLLOW, dir_fd=at)
            stack.callback(os.close, at)
        return os.open(last, _FILE_FLAGS, dir_fd=at)


@cache
def has_openat2() -> bool:
    """Whether this process can use it: an old kernel says ENOSYS, a filter EPERM or ENOSYS, an unknown flag would be EINVAL."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return False
    try:
        os.close(_openat2(-100, ".", _DIRECTORY_FLAGS))  # AT_FDCWD
    except OSError:
        return False
    return True


@cache
def _syscall() -> Callable[..., int]:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    call.argtypes = ctypes.c_long, ctypes.c_long, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t
    return call


def _openat2(at: int, name: str, flags: int) -> int:
    how = struct.pack("=QQQ", flags, 0, _RESOLVE)
    while (opened := _syscall()(_OPENAT2, at, os.fsencode(name), how, len(how))) < 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number), name)
    return opened
