"""Rollout workers: they lease, report out of order and in parts, lose replies, die, come back, and haunt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from simulated_world import World, bits_of, fingerprint, prompt_of

from cosmos_ctrl.core.admission import Batch, RowRefused
from cosmos_ctrl.core.errors import NotRegisteredError, StaleExecutionError, SupersededError
from cosmos_ctrl.core.execution import Place, WorkerInfo
from cosmos_ctrl.core.groups import Lease, LeasesCancelled, RolloutRows


@dataclass
class Held:
    """A lease, and what of it is not reported."""

    lease: Lease
    left: int


@dataclass
class RolloutWorker:
    """A process."""

    info: WorkerInfo
    session: str
    handles: bool
    """Whether its payloads stay with it."""
    version: int
    alive: bool = True
    slow: bool = False
    """Whether it holds on to its groups for long."""
    replaceable: bool = True
    """Whether a new process will take its place when it is dead; if not, only its silence frees its leases."""
    batches: int = 0
    requests: int = 0
    notices: int = 0
    held: dict[int, Held] = field(default_factory=dict)
    over: list[Lease] = field(default_factory=list)
    last: Batch | None = None


class RolloutSide:
    """All rollout workers of an execution."""

    def __init__(self, world: World) -> None:
        self.world, self.rng, self.core = world, world.rng, world.controller
        self.workers: list[RolloutWorker] = []
        self.replaced: list[RolloutWorker] = []
        self._failed_leases: set[int] = set()

    def start(self, place: Place) -> None:
        """A new process takes `place`."""
        info = self.world.info(place)
        session = self.core.register(self.world.id, info).session
        handles, slow = self.rng.random() < 0.5, self.rng.random() < 0.35
        self.workers.append(RolloutWorker(info, session, handles, version=self.world.steps_before, slow=slow))

    def any(self) -> RolloutWorker:
        return self.rng.choice(self.workers)

    # -- work

    def lease(self, worker: RolloutWorker) -> None:
        if not worker.alive:
            return
        most, number, last_call = self.rng.randint(1, 4), worker.requests + 1, self.rng.random() < 0.5
        reply = self.core.lease(self.world.id, worker.session, number, most, last_call=last_call)
        if reply is None or not (reply.leases or reply.no_more):
            self.world.check_nothing_to_give()
        if reply is None:
            return
        worker.requests = number
        if self.rng.random() < 0.2:
            # The reply was lost: the same request gets the same answer, and nothing is drawn anew.
            before = self.core.ledger.cursor
            assert self.core.lease(self.world.id, worker.session, number, most, last_call=last_call) == reply
            assert self.core.ledger.cursor is before
        if reply.weights is not None:
            worker.version = reply.weights.version
        for lease in reply.leases:
            oracle = self.world.oracle
            for place in oracle.places(lease.group, lease.mask):
                assert place not in oracle.settled, f"leased {place}, which is settled"
            assert (lease.prompt, lease.size) == (prompt_of(oracle.key_of[lease.group]), oracle.size_of[lease.group])
            worker.held[lease.group] = Held(lease, lease.mask)

    def report(self, worker: RolloutWorker) -> None:
        """A batch about some of what it holds, and at times about what it does not hold any more."""
        calm = self.world.calm
        if not worker.alive or (worker.slow and not calm and self.rng.random() < 0.8):
            return
        held = self.rng.sample(list(worker.held.values()), min(len(worker.held), self.rng.randint(1, 3)))
        said = []
        blocks = []
        for item in held:
            mask = item.left if calm or self.rng.random() < 0.6 else self.world.part_of(item.left)
            outcome = "completed" if calm else self._outcome()
            again = item.lease.mask & ~item.left if not calm and self.rng.random() < 0.05 else 0
            blocks.append(self._rows(worker, item.lease, mask | again, outcome))
            said.append((item, mask))
            if outcome == "failed" and item.lease.number not in self._failed_leases:
                self._failed_leases.add(item.lease.number)
                self.world.failures[item.lease.group] += 1
        if not calm and worker.over and self.rng.random() < 0.05:
            late = self.rng.choice(worker.over)
            blocks.append(self._rows(worker, late, late.mask, "completed"))
        if blocks:
            batch = Batch(number=worker.batches + 1, digest=self.world.digest(), rollouts=tuple(blocks))
            self._submit(worker, batch, said)

    def _submit(self, worker: RolloutWorker, batch: Batch, said: list[tuple[Held, int]]) -> None:
        acked = worker.batches if self.rng.random() < 0.8 else max(0, worker.batches - 3)
        ack = self.core.submit(self.world.id, worker.session, acked, worker.notices, batch)
        assert ack.applied == batch.number
        worker.batches, worker.last = batch.number, batch
        self.world.check()
        if self.rng.random() < 0.1:
            # The ack was lost: the batch comes again, and applies once (G6).
            counts = self.world.counts()
            again = self.core.submit(self.world.id, worker.session, acked, worker.notices, batch)
            assert again == ack, "a repeated batch was answered otherwise"
            assert self.world.counts() == counts, "G6: a repeated batch changed something"
        lost = self._hear(worker, ack.notices, len(said))
        for item, mask in said:
            if item.lease.number in lost:
                excused = worker.info.incarnation in self.world.lapsed or item.lease.group in self.world.given_up
                excused = excused or self.world.policy.lease_deadline_s is not None
                assert excused or self.world.no_more_work_is_wanted, "a lease was lost for no reason"
                continue
            item.left &= ~mask
            if not item.left:
                worker.held.pop(item.lease.group, None)
                worker.over.append(item.lease)
                if self.world.out.get(item.lease.group) == item.lease.number:
                    del self.world.out[item.lease.group]

    def _hear(self, worker: RolloutWorker, notices: Any, said: int) -> set[int]:
        """Lease numbers that the worker has lost; it drops those."""
        lost: set[int] = set()
        for notice in notices:
            if notice.number <= worker.notices:
                continue
            worker.notices = notice.number
            content = notice.content
            if isinstance(content, LeasesCancelled):
                lost.update(content.leases)
            elif isinstance(content, RowRefused) and content.block < said and content.reason != "ALREADY_REPORTED":
                lost.update(held.lease.number for held in worker.held.values() if held.lease.group == content.group)
        for group in [group for group, held in worker.held.items() if held.lease.number in lost]:
            del worker.held[group]
        return lost

    def _outcome(self) -> str:
        return self.rng.choices(["completed", "discarded", "failed", "returned"], [80, 5, 8, 7])[0]

    def _rows(self, worker: RolloutWorker, lease: Lease, mask: int, outcome: Any) -> RolloutRows:
        rows: dict[str, Any] = {"outcome": outcome, "groups": [lease.group], "leases": [lease.number], "masks": [mask]}
        if outcome in ("discarded", "failed"):
            rows["reason"] = f"worker-{outcome}"
        elif outcome == "completed":
            bits = bits_of(mask)
            texts = [f"{lease.prompt.key}:{bit}" for bit in bits]
            version = worker.version
            if not self.world.policy.announces_weights:
                steps = self.core.commands.steps
                version = steps if self.world.calm else self.rng.randint(self.world.steps_before, steps)
            rows |= {
                "lowest_versions": [version],
                "highest_versions": [version],
                "rewards": [float(bit) for bit in bits],
            }
            if not worker.handles:
                self.world.longest_payload = max(self.world.longest_payload, *map(len, texts))
            rows |= {"handles": texts} if worker.handles else {"payloads": [text.encode() for text in texts]}
        return RolloutRows(**rows)

    # -- life and death

    def kill(self, worker: RolloutWorker) -> None:
        worker.alive = False
        worker.replaceable = self.rng.random() < 0.6

    def replace_some(self) -> None:
        """New processes take the places of dead ones, before or after those were found dead."""
        for worker in [worker for worker in self.workers if not worker.alive and worker.replaceable]:
            if self.rng.random() < 0.2:
                self.workers.remove(worker)
                self.replaced.append(worker)
                self.start(worker.info.place)

    def keep_one_alive(self) -> None:
        if not any(worker.alive for worker in self.workers):
            self.start(Place("rollout", "rollout", 99, 0))

    def reconnect(self, worker: RolloutWorker) -> None:
        """The same process opens another session and sends its last batch again: it applies once, its leases stay."""
        if not worker.alive:
            return
        worker.session = self.core.register(self.world.id, worker.info).session
        if worker.last is not None:
            counts = self.world.counts()
            self.core.submit(self.world.id, worker.session, 0, worker.notices, worker.last)
            assert self.world.counts() == counts, "G6: a batch applied again in a new session"

    def haunt(self) -> None:
        """A process that was replaced wakes up: it changes nothing, and cannot come back (G5)."""
        if not self.replaced or self.replaced[-1].last is None:
            return
        ghost = self.replaced[-1]
        before = fingerprint(self.core)
        for attempt in (
            lambda: self.core.submit(self.world.id, ghost.session, 0, 0, ghost.last),
            lambda: self.core.lease(self.world.id, ghost.session, ghost.requests + 1, 1, last_call=True),
            lambda: self.core.register(self.world.id, ghost.info),
        ):
            try:
                attempt()
            except (NotRegisteredError, SupersededError):
                continue
            raise AssertionError("G5: a superseded process was heard")
        assert fingerprint(self.core) == before, "G5: a superseded process changed something"

    def speak_for_the_dead(self, execution: str, worker: RolloutWorker) -> None:
        """A worker of a dead execution reports into this one: refused, and nothing changes (G5)."""
        last = worker.last or Batch(number=1, digest=b"")
        session = self.any().session
        before = fingerprint(self.core)
        for stated in (execution, ""):
            for attempt in (
                lambda stated=stated: self.core.submit(stated, worker.session, 0, 0, last),
                lambda stated=stated: self.core.submit(stated, session, 0, 0, last),
                lambda stated=stated: self.core.lease(stated, session, 1, 1, last_call=True),
                lambda stated=stated: self.core.register(stated or execution, worker.info),
                lambda stated=stated: self.core.hear(stated, session),
            ):
                try:
                    attempt()
                except StaleExecutionError:
                    continue
                raise AssertionError("G5: a dead execution's worker was heard")
        assert fingerprint(self.core) == before, "G5: a dead execution's worker changed something"
