"""What the controller's process says when it ends."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of ``cosmos-ctrl``. Workers have their own: 10 is a stale one."""

    ENDED = 0
    """The run ended as it should, or there was nothing to do."""
    ERROR = 1
    """Something unexpected; the log has the trace."""
    CONFIGURATION = 2
    """The configuration, or an argument, was refused."""
    FAILED = 11
    """The execution failed; nothing half-saved was published. Start it again."""
    RESUME_MISMATCH = 12
    """A trainer rank restored something else. Starting it again as it is will not help."""
    CANNOT_RESUME = 13
    """The checkpoint to resume from is missing, damaged, unreadable or incompatible."""
    SUPERSEDED = 14
    """A newer execution has claimed the run. Do not start this one again."""
    INTERRUPTED = 130
    """A person interrupted it before there was anything to save."""
    DAMAGE_FOUND = 15
    """A rank found damage while loading; it is recorded, and the next execution errs or passes over, as configured. Of
    ``cosmos-ctrl verify``: it found damage."""
