"""Who speaks, for which execution, and what of it was heard before.

* One fence: an execution ID that is not this controller's is refused before anything else is looked at. Without an ID of
  its own (legacy) a controller accepts any.
* A worker's *place* is (role, group, replica, rank). The newest incarnation holds it; an older one is retired for good and
  can never take it back. Retired incarnations are remembered, so their number is limited.
* Numbers belong to the incarnation and go on through its sessions: a batch, and a request for leases, takes effect once.
* A session lives as long as something is heard from it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from cosmos_ctrl.core.errors import (
    ConflictingRetryError,
    MalformedError,
    NotRegisteredError,
    SequenceGapError,
    StaleExecutionError,
    SupersededError,
    WindowFullError,
    WorkerLimitError,
)

Role = Literal["trainer", "rollout"]

#: Notices that an incarnation may leave unconfirmed before it may report again. One batch adds one a row at most.
_MAX_NOTICES = 1 << 16


#: Characters in a name that a worker states of itself.
_LONGEST_NAME = 256


@dataclass(frozen=True, slots=True)
class ExecutionIdentity:
    """One start of a controller over a run."""

    number: int
    """1, 2, 3 …; 0 for legacy."""
    id: str
    """Random; empty for legacy."""


class Fence:
    """Lets only this execution's requests in."""

    def __init__(self, identity: ExecutionIdentity) -> None:
        self.identity = identity
        self.refused = 0

    def check(self, stated: str) -> None:
        """Raises StaleExecutionError unless `stated` is this execution's ID."""
        if self.identity.id and stated != self.identity.id:
            self.refused += 1
            raise StaleExecutionError(stated=stated, current=self.identity.id)


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A worker's position in the run."""

    role: Role
    group: str
    replica: int
    rank: int

    def __str__(self) -> str:
        replica = f".{self.replica}" if self.role == "rollout" else ""
        return f"{self.role} {self.group}{replica}/{self.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a process says of itself when it registers."""

    place: Place
    incarnation: str
    world_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    host: str = ""
    pid: int = 0

    def __post_init__(self) -> None:
        place = self.place
        if not place.group:
            raise MalformedError(what="the worker group is empty")
        # Kept for as long as the execution lives, and listed.
        for name, value in (("worker group", place.group), ("incarnation", self.incarnation), ("host", self.host)):
            if len(value) > _LONGEST_NAME:
                raise MalformedError(what=f"the {name} has {len(value)} characters, at most {_LONGEST_NAME}")
        if len(self.incarnation) < 32:
            raise MalformedError(what="the incarnation is shorter than 16 bytes of hex")
        if place.rank >= self.world_size:
            raise MalformedError(what=f"rank {place.rank} of a world of {self.world_size}")
        if self.dp_rank >= self.dp_size:
            raise MalformedError(what=f"data-parallel rank {self.dp_rank} of {self.dp_size}")


@dataclass(frozen=True, slots=True)
class Notice:
    """Something one incarnation is told, until it confirms the number."""

    number: int
    content: Any


class BatchLog:
    """Which batches of an incarnation were applied, and what it still has to be told."""

    def __init__(self, *, max_unacknowledged: int) -> None:
        self.applied = 0
        self.notices: list[Notice] = []
        self._max = max_unacknowledged
        self._acked = 0
        self._next_notice = 1
        self._digests: dict[int, Hashable] = {}

    def confirm(self, acked_through: int, notices_through: int) -> None:
        """Forget what the client has seen; raises MalformedError for what was never applied or sent."""
        if acked_through > self.applied or notices_through >= self._next_notice:
            raise MalformedError(what="the confirmation of a batch or notice that was never sent")
        for number in range(self._acked + 1, acked_through + 1):
            del self._digests[number]
        self._acked = max(self._acked, acked_through)
        if self.notices and self.notices[0].number <= notices_through:
            self.notices = [notice for notice in self.notices if notice.number > notices_through]

    def is_repeat(self, number: int, digest: Hashable) -> bool:
        """Whether batch `number` was applied before; raises unless it is a true repeat or the next one."""
        if number < 1:
            raise MalformedError(what="batch number 0")
        if number <= self._acked:
            # Its content was confirmed as applied and is forgotten: whatever it is, it changes nothing.
            return True
        if number <= self.applied:
            if self._digests[number] != digest:
                raise ConflictingRetryError(what="batch", number=number)
            return True
        if number > self.applied + 1:
            raise SequenceGapError(what="batch", expected=self.applied + 1, found=number)
        if number - self._acked > self._max:
            raise WindowFullError(what="unacknowledged batches", limit=self._max, found=number - self._acked)
        self.require_notices_confirmed()
        return False

    def require_notices_confirmed(self) -> None:
        """Raises WindowFullError when the client has left too many notices unconfirmed."""
        if len(self.notices) >= _MAX_NOTICES:
            raise WindowFullError(what="unconfirmed notices", limit=_MAX_NOTICES, found=len(self.notices) + 1)

    def record(self, number: int, digest: Hashable) -> None:
        """Batch `number` is applied."""
        self.applied = number
        self._digests[number] = digest

    def notify(self, content: Any) -> None:
        """Tell the client with every ack until it confirms."""
        self.notices.append(Notice(self._next_notice, content))
        self._next_notice += 1


@dataclass(slots=True)
class Incarnation:
    """One process life of a worker. Mutable: the controller's record of it."""

    info: WorkerInfo
    log: BatchLog
    session: str = ""
    """Empty while it has none."""
    last_heard: float = 0.0
    ended: bool = False
    """It reported its end."""
    replica_ended: bool = False
    """Every reporting rank of its replica did."""
    told: bool = False
    """It was answered with what ended the execution."""
    given_end: bool = False
    """It was given the END command."""
    leases: set[int] = field(default_factory=set)
    """Groups leased to it."""
    lease_number: int = 0
    lease_reply: Any = None
    """Answer to the newest request for leases, repeated when it is asked again."""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def place(self) -> Place:
        """Where it stands."""
        return self.info.place

    def __str__(self) -> str:
        where = f" ({self.info.host}, process {self.info.pid})" if self.info.pid else ""
        return f"{self.place}{where}"


@dataclass(frozen=True, slots=True)
class Registration:
    """What a registration did."""

    worker: Incarnation
    new: bool
    """Whether this incarnation was never seen before."""
    retired: Incarnation | None
    """The older incarnation that lost the place."""


class Workers:
    """The worker table."""

    def __init__(
        self,
        *,
        max_workers: int,
        max_unacknowledged: int,
        session_ttl_s: float,
        clock: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        self._max_workers, self._max_unacknowledged = max_workers, max_unacknowledged
        self._ttl, self._clock, self._new_id = session_ttl_s, clock, new_id
        self._by_place: dict[Place, Incarnation] = {}
        self._by_session: dict[str, Incarnation] = {}
        self._departed: set[str] = set()
        self._retired: dict[str, Place] = {}

    def __iter__(self) -> Iterator[Incarnation]:
        return iter(self._by_place.values())

    def take_departed(self) -> set[str]:
        """Sessions that were closed, or whose worker reported its end, since this was last asked."""
        departed, self._departed = self._departed, set()
        return departed

    def at(self, place: Place) -> Incarnation | None:
        """Who holds `place`."""
        return self._by_place.get(place)

    def check_registration(self, info: WorkerInfo) -> Incarnation | None:
        """Who would lose the place; raises when `info` may not have it."""
        if info.incarnation in self._retired:
            raise SupersededError(place=str(info.place), incarnation=info.incarnation)
        holder = self._by_place.get(info.place)
        if holder is not None and holder.info.incarnation == info.incarnation:
            return None
        known = len(self._by_place) + len(self._retired)
        if known >= self._max_workers:
            raise WorkerLimitError(limit=self._max_workers, found=known + 1)
        return holder

    def register(self, info: WorkerInfo) -> Registration:
        """Open a session for `info`, retiring an older incarnation of its place."""
        retired = self.check_registration(info)
        if retired is not None:
            self._retired[retired.info.incarnation] = info.place
            self.lapse(retired)
        worker = self._by_place.get(info.place)
        new = worker is None or worker is retired
        if worker is None or worker is retired:
            worker = Incarnation(info, BatchLog(max_unacknowledged=self._max_unacknowledged))
            self._by_place[info.place] = worker
        self._by_session.pop(worker.session, None)
        worker.session = self._new_id()
        worker.last_heard = self._clock()
        self._by_session[worker.session] = worker
        return Registration(worker, new, retired)

    def of(self, session: str) -> Incarnation:
        """The worker of a session; raises NotRegisteredError when there is none."""
        worker = self._by_session.get(session)
        if worker is None:
            raise NotRegisteredError(session=session)
        return worker

    def hear(self, session: str) -> None:
        """Something came from the session's worker just now: it lives on."""
        self.of(session).last_heard = self._clock()

    def end(self, worker: Incarnation) -> None:
        """`worker` has reported its end; with the last rank of its replica the replica has ended."""
        worker.ended = True
        self._departed.add(worker.session)
        place = worker.place
        mine = (place.role, place.group, place.replica)
        ranks = [w for w in self if w.ended and (w.place.role, w.place.group, w.place.replica) == mine]
        if len(ranks) == worker.info.world_size:
            for rank in ranks:
                rank.replica_ended = True

    def lapse(self, worker: Incarnation) -> None:
        """Close the worker's session."""
        self._departed.add(worker.session)
        self._by_session.pop(worker.session, None)
        worker.session = ""

    def silent(self) -> list[Incarnation]:
        """Workers whose session is due to lapse."""
        limit = self._clock() - self._ttl
        return [worker for worker in self._by_session.values() if worker.last_heard < limit]

    def excuse(self, seconds: float) -> None:
        """Nobody could be heard for so long."""
        for worker in self._by_session.values():
            worker.last_heard += seconds

    def silence_s(self, worker: Incarnation) -> float:
        """Seconds since anything was heard from `worker`."""
        return self._clock() - worker.last_heard
