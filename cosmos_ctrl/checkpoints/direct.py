"""Past the page cache: what is read or written once and not soon again need not push out what others keep there.

* It costs a tenth of the CPU time, for no page is made and nothing is copied; the memory is the caller's, in large pages where there are any.
* Sectors are the unit, of memory, position and length alike. So whole blocks go past the cache, and what is less goes through it.
* A file system that cannot do it says so when it is asked, or at the first call: then all goes through the cache.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from io import RawIOBase

#: Bytes of a block: a large page, so that a disk is asked for it in one piece.
BLOCK_BYTES = 2 << 20

_FLAG: int = getattr(os, "O_DIRECT", 0)


def new_block() -> memoryview:
    """Memory of `BLOCK_BYTES` that begins at a page."""
    memory = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # not on every system; a disk is asked in pieces as large as a page
        memory.madvise(mmap.MADV_HUGEPAGE)
        # A fork while the disk reads from it would make the child's and the parent's one of undefined content (open(2), O_DIRECT).
        memory.madvise(mmap.MADV_DONTFORK)
    return memoryview(memory)


def set_direct(descriptor: int, direct: bool) -> None:
    """Go past the page cache from now on, or through it.

    Raises:
        OSError: EINVAL when this file system has no way past it.
    """
    if not _FLAG:
        raise OSError(errno.EINVAL, "this system has no O_DIRECT")
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _FLAG if direct else flags & ~_FLAG)


def read_blocks(file: RawIOBase) -> Iterator[memoryview]:
    """An unbuffered file, from its start to its end. Each piece is overwritten by the next. What is no file of this machine has no cache to
    go past, and is read all the same.

    Raises:
        OSError: as the system said it.
    """
    block, count = new_block(), BLOCK_BYTES
    direct, descriptor = False, -1
    with suppress(OSError):
        descriptor = file.fileno()
        set_direct(descriptor, True)
        direct = True
    file.seek(0)
    while count:
        try:
            count = file.readinto(block) or 0
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            direct = _leave(descriptor)
            continue
        if count:
            yield block[:count]
        if direct and count < BLOCK_BYTES:
            # The end, or a position that is no sector's.
            direct = _leave(descriptor)


def _leave(descriptor: int) -> bool:
    set_direct(descriptor, False)
    return False
