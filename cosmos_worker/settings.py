"""Who a worker is, where its controller is, and how long it waits for what.

* Explicit arguments win over the environment; a value that cannot be read is refused with its name.
* Every wait that the client does has its limit here, in seconds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cosmos_ctrl.core.resume import require_count

ADDRESS = "COSMOS_CTRL_ADDRESS"
EXECUTION_ID = "COSMOS_CTRL_EXECUTION_ID"
REPLICA = "COSMOS_CTRL_REPLICA"
RUN_DIRECTORY = "COSMOS_CTRL_RUN_DIR"

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Limits of a client, in seconds and bytes."""

    call_s: float = 10.0
    """Deadline of one call, beyond what it was asked to wait."""
    connect_total_s: float = 60.0
    """A controller that gives no answer for so long is gone."""
    not_ready_total_s: float = 1800.0
    """A controller may answer "later" (restoring, awaiting agreement, a full window) for so long."""
    idle_total_s: float = 6 * 3600.0
    """Longest wait for a command or for work from a controller that answers."""
    poll_s: float = 5.0
    """How long one NextCommand or ConfirmResume waits at the controller."""
    lease_wait_s: float = 2.0
    """How long one LeasePrompts waits at the controller; also bounds how long leaving a rollout loop takes."""
    confirm_total_s: float = 600.0
    """Longest wait for the agreement of all trainer ranks."""
    report_s: float = 120.0
    """Longest wait for a report's acknowledgement, or for room in a full window."""
    save_total_s: float = 1800.0
    """Longest that an asynchronous save is waited for: by itself, by the next one, and when the trainer leaves."""
    silence_s: float = 10.0
    """A report stream that owes answers and gives none for so long is opened anew."""
    unfinished_total_s: float = 600.0
    """After the last lease: longest wait for groups that were handed out and not reported."""
    close_s: float = 15.0
    """Longest wait for the last reports when a worker leaves."""
    after_end_s: float = 3.0
    """After the end was told: a controller that gives no answer for so long has ended too."""
    end_grace_s: float = 20.0
    """After an execution's end: how long the main thread may take to come back before the process is ended."""
    backoff_first_s: float = 0.05
    """Pause after the first failure; doubles."""
    backoff_max_s: float = 2.0
    """Longest pause."""
    keepalive_s: float = 30.0
    """Silence on the connection after which the transport pings."""
    ping_timeout_s: float = 5.0
    """A ping unanswered for so long closes the connection."""
    max_message_bytes: int = 64 * MIB
    """Largest message in either direction."""
    window_bytes: int = 256 * MIB
    """Bytes of reports that may be unacknowledged."""
    window_completions: int = 1 << 17
    """Completions whose reports may be unacknowledged."""
    batch_bytes: int = 4 * MIB
    """Bytes of reports that are sent without waiting for the batch before."""
    digest: Literal["sha256", "blake3"] = "sha256"
    """Of what a trainer saves. blake3 is the faster one where the CPU has no instructions for sha256; it needs the extra of that name,
    wherever a checkpoint is saved, loaded or verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """The place in the run that one process holds for one role."""

    role: Literal["trainer", "rollout"]
    group: str
    """Trainer group or rollout pool."""
    replica: int = 0
    rank: int = 0
    """Within the trainer group, or within the rollout replica."""
    world_size: int = 1
    """Ranks of the trainer group, or reporting ranks of the rollout replica."""
    dp_rank: int = 0
    """Trainers: whose share of payloads is this rank's."""
    dp_size: int = 1

    def __post_init__(self) -> None:
        if not self.group:
            raise ValueError("group must be a name, not empty")
        require_count("replica", self.replica)
        require_count("world_size", self.world_size, least=1)
        require_count("dp_size", self.dp_size, least=1)
        for name, rank, size in (
            ("rank", self.rank, self.world_size),
            ("dp_rank", self.dp_rank, self.dp_size),
        ):
            if require_count(name, rank) >= size:
                raise ValueError(f"{name} is {rank}, but there are {size}")

    def __str__(self) -> str:
        return f"{self.role} {self.group}/{self.replica}/{self.rank}"

    @property
    def prefix(self) -> str:
        """Folder of this rank's artifacts in a checkpoint, with its slash."""
        return rank_folder(self.group, self.rank)


def rank_folder(group: str, rank: int) -> str:
    """Folder of a trainer rank's artifacts in a checkpoint, with its slash."""
    return f"{group}-{rank}/"


def rank_of(artifact: str, group: str) -> int | None:
    """The rank in whose `rank_folder` an artifact lies; None if it is no rank's of the group."""
    match = re.match(rf"{re.escape(group)}-(\d+)/", artifact)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the controller is, and which execution this process was launched for."""

    address: str
    """``host:port``, or any gRPC target."""
    execution_id: str = ""
    """Empty for a process that was given none: it takes the one of its first registration, once."""

    @classmethod
    def find(
        cls,
        *,
        address: str | None = None,
        execution_id: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Endpoint:
        """From arguments, else from the environment.

        Raises:
            ValueError: no address is given anywhere.
        """
        environ = os.environ if environ is None else environ
        address = address or environ.get(ADDRESS)
        if not address:
            raise ValueError(f"no controller address: pass address=, or set {ADDRESS}=host:port")
        return cls(
            address=address,
            execution_id=environ.get(EXECUTION_ID, "") if execution_id is None else execution_id,
        )


def count_from(environ: Mapping[str, str], name: str, default: int) -> int:
    """A count in the environment, or `default` where it is not set.

    Raises:
        ValueError: it is set to something else.
    """
    text = environ.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{name}={text!r} is not a count")
    return int(text)
