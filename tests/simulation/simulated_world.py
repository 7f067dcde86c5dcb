"""One execution's controller, its clock, and an oracle that listens to what the core says happened."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

import simulated_storage as storage
from oracle import Checkpoint, Cut, Oracle
from simulated_plan import LARGEST_GROUP, Plan, first_state, samplers_of, uninterrupted

from cosmos_ctrl.core.agreement import Resumed
from cosmos_ctrl.core.commands import Save
from cosmos_ctrl.core.controller import Controller
from cosmos_ctrl.core.execution import ExecutionIdentity, Place, WorkerInfo
from cosmos_ctrl.core.groups import LeasesCancelled
from cosmos_ctrl.core.ledger import SamplingBoundary
from cosmos_ctrl.core.replay import Doubt, Replay, restore
from cosmos_ctrl.core.resume import ControllerResumeMetadata
from cosmos_ctrl.core.sampling import Prompt, PromptFeedback, Sampling

_SEED = 7


class Crash(Exception):
    """The controller dies here."""


@dataclass
class Run:
    """What outlives an execution."""

    plan: Plan
    rng: random.Random
    names: Iterator[int]
    published: list[Checkpoint] = field(default_factory=list)
    journals: list[list[dict[str, Any]]] = field(default_factory=list)
    oracles: list[Oracle] = field(default_factory=list)
    """Of each execution."""
    seen: Counter[str] = field(default_factory=Counter)
    """How often something rare has happened: a simulation in which it never does proves nothing of it."""

    @property
    def newest(self) -> Checkpoint | None:
        return max(self.published, key=lambda checkpoint: checkpoint.order, default=None)


class _Adapter:
    """Restores the sampler, once, to the state that is due."""

    def __init__(self, due: Callable[[], Any]) -> None:
        self._due, self.restored = due, 0

    def load_metadata(self, config: Any) -> None:
        return None

    def restore_sampler(self, sampler: Any, metadata: ControllerResumeMetadata) -> None:
        self.restored += 1
        assert metadata.sampler_state == self._due(), "the sampler is restored to a state that it never had there"
        sampler.load_state_dict(metadata.sampler_state)


def prompt_of(key: str) -> Prompt:
    """The prompt of a key, equal in every execution."""
    return Prompt(key=key, source="pool", payload=key.encode())


class World:
    """A controller that resumed from the newest checkpoint, and everything that is not a worker."""

    def __init__(self, run: Run, *, number: int) -> None:
        plan, parent = run.plan, run.newest
        self.run, self.plan, self.rng = run, plan, run.rng
        self.policy = plan.policy_of(run.rng)
        self.number, self.id, self.parent = number, f"execution-{number}", parent
        self.calm = False
        """No more faults: from now on the run has to end."""
        self.now = 1000.0 * number
        self.stopped = False
        seed = _SEED + (run.rng.randint(0, 1) if plan.reorders else 0)
        n = run.rng.randint(1, LARGEST_GROUP) if plan.reorders and run.rng.random() < 0.3 else plan.n
        self.oracle = Oracle(
            budget=plan.budget,
            n=n,
            due=uninterrupted(plan, seed),
            names=run.names,
            parent=parent,
            keys_recorded=self.policy.records_window == "keys",
        )
        self.first_state = first_state(plan)
        self.cuts: dict[str, Cut] = {}
        """Per checkpoint the books when it was cut."""
        self.failures: Counter[int] = Counter()
        """Leases of each group that reported a failure."""
        self.lapsed: set[str] = set()
        """Incarnations whose session has lapsed at least once."""
        self.out: dict[int, int] = {}
        """Newest lease of each group of which its holder has not reported everything."""
        self.given_up: set[int] = set()
        self.longest_payload = 0
        """Of this execution, in bytes."""
        """Groups that were discarded to make room."""
        self.due_feedback: list[PromptFeedback] = []
        """What the next commit tells the sampler."""
        self._heard: list[list[PromptFeedback]] = []
        self.doubts = 0
        self._ids = self._checked = 0
        run.journals.append([])
        run.oracles.append(self.oracle)
        prompts, owner = samplers_of(plan, seed, self.oracle.on_draw, lambda results: self._heard.append(list(results)))
        sampling = Sampling(
            prompts if plan.batch else owner,
            owner if plan.batch else None,
            prompt_of=lambda index: prompt_of(f"{prompts.epoch}/{index}"),
            completions_per_prompt=n,
        )
        self.sampling_owner = sampling.owner_name
        self.resumed = None
        start, replay = self._begin(sampling)
        if parent is not None:
            self.resumed = Resumed(
                metadata=parent.metadata, manifest_digest=parent.digest, repeat_bound_completions=parent.repeat_bound
            )
        self.steps_before = parent.metadata.completed_training_steps if parent else 0
        self.controller: Any = None
        self.controller = Controller(
            self.policy,
            ExecutionIdentity(number, self.id),
            sampling,
            start,
            self.resumed,
            replay=replay,
            clock=lambda: self.now,
            new_id=self._new_id,
            record=self._record,
        )
        if replay is not None and replay.doubt and not self.controller.lifecycle.over:
            self.doubts += 1
        if self.oracle.due_draws and not self.controller.lifecycle.over:
            run.seen["limits smaller than the record"] += 1
        self.check()

    # -- a resume, as the server does it

    def _begin(self, sampling: Sampling) -> tuple[SamplingBoundary, Replay | None]:
        parent, oracle = self.parent, self.oracle
        if parent is None:
            return sampling.start(self.plan.budget), None
        fault, record = storage.read(parent, self.run.published, self.rng)
        mode = self.policy.records_window
        if mode == "nothing" and record is not None:
            # Switched off, which is no news; or the sampler does not say that it is deterministic, which is.
            fault, record = "off", self.rng.choice([None, Doubt("not deterministic")])
        unknown = None
        if fault == "intact" and mode == "keys" and parent.cut.keys_recorded and self.rng.random() < 0.15:
            fault, unknown = "unknown key", self.rng.choice(self.rng.choice(parent.cut.window).keys)
        reissues = fault == "intact" and mode == "keys" and parent.cut.keys_recorded
        if reissues:
            oracle.reissue()
        adapter = _Adapter(lambda: oracle.state_at(oracle.drawn, self.first_state))

        def find(key: str) -> Prompt:
            if key == unknown:
                raise KeyError(key)
            return prompt_of(key)

        start, replay = restore(
            sampling, adapter, parent.metadata, record, prompt_by_key=find if mode == "keys" else None
        )
        assert adapter.restored == 1, "the sampler was not restored once"
        if fault == "intact" and not reissues:
            proved = oracle.redraw()
            fault = "intact" if proved else "other draws"
            assert proved or self.plan.feedback or self.plan.reorders or parent.cut.keys_recorded
        else:
            proved = reissues
            assert not oracle.draws, "drawn from without a record to compare with"
        doubted = not proved and record is not None
        assert bool(replay.doubt) == doubted, f"the record is {fault}, and the doubt is {replay.doubt!r}"
        self.run.seen[f"record {fault}"] += 1
        self.run.seen["reissued"] += reissues
        if oracle.to_spare and parent.cut.inherited:
            self.run.seen["record upon record"] += 1
        return start, replay

    # -- what must hold after every event

    def check(self) -> None:
        """Both budget equations (G1), what is spared (G2), the limits (G8, G10)."""
        core, oracle, policy = self.controller, self.oracle, self.policy
        oracle.check_ledger(core.ledger.cursor, core.ledger.snapshot())
        if not core.lifecycle.over or core.commands.last is not None:
            oracle.check_spared()
        assert core.rollouts.buffered_bytes >= 0
        limit = policy.max_training_steps
        assert limit is None or core.commands.steps <= max(limit, self.steps_before), "G8: past the limit"
        draws, size = oracle.window_size()
        fits = draws <= policy.max_window_draws and size <= policy.max_window_bytes
        assert draws <= 1 or fits, f"G10: a window of {draws} draws and {size} bytes"
        assert not self._heard, "feedback outside of a commit"
        if self._checked != len(self.run.journals[-1]):
            self._checked = len(self.run.journals[-1])
            self._check_counts()

    def _check_counts(self) -> None:
        counted, due = self.controller.statistics(), self.oracle.counts
        found = counted.trained_completions, counted.discarded_completions, counted.spared_completions
        assert found == (due["trained"], due["discarded"], due["recorded"]), f"counted {found}"
        assert counted.replay_doubts == self.doubts, f"{counted.replay_doubts} doubts are told of {self.doubts}"

    @property
    def no_more_work_is_wanted(self) -> bool:
        """Whether leases may have been cancelled."""
        limit = self.policy.max_training_steps
        return self.stopped or (limit is not None and self.controller.commands.steps >= limit)

    def counts(self) -> Any:
        """Everything that a repeat must not change, cheaply."""
        core = self.controller
        return core.statistics(), core.rollouts.buffered_bytes, core.rollouts.last_lease, core.lifecycle.revision

    # -- what the core says happened

    def _record(self, event: str, **values: Any) -> None:
        self.run.journals[-1].append({"event": event, "t": self.now} | values)
        oracle = self.oracle
        if event == "issue":
            oracle.on_issue(values["group"], values["key"], values["size"], values["epoch"])
        elif event == "lease":
            self.out[values["group"]] = values["lease"]
        elif event == "settle":
            self._on_settle(**values)
        elif event == "cut":
            save = self.controller.commands.last
            assert isinstance(save, Save)
            self.cuts[save.checkpoint_id] = oracle.cut()
            oracle.check_cut(save.boundary, save.window_completions, self.first_state)
        elif event == "lapse":
            self.lapsed.update(w.info.incarnation for w in self.controller.workers if str(w.place) == values["worker"])
        elif event == "train":
            assert values["step"] == self.controller.commands.steps + 1
        elif event == "commit" and self.plan.feedback:
            assert self._heard == [self.due_feedback], "the sampler was not told what the step did"
            self._heard.clear()

    def _on_settle(self, *, rows: Sequence[tuple[int, int]], outcome: str, reason: str, step: int) -> None:
        for group, mask in rows:
            if reason == "window_full":
                self._check_given_up(group)
            self.oracle.on_settle(group, mask, outcome, reason)
        if self.controller is None:  # it is being made, and issues what an earlier one had drawn
            assert (outcome, step) == ("recorded", self.steps_before), (
                f"{outcome} at step {step} before anything happened"
            )
            return
        ledger = self.controller.ledger
        self.oracle.check_ledger(ledger.cursor, ledger.snapshot())
        assert step == self.controller.commands.steps
        if outcome == "discarded":
            for group, mask in rows:
                self._check_reason(group, mask, reason)

    def _check_given_up(self, group: int) -> None:
        """A full window gives up its oldest group, when that is out with a worker, who is told."""
        assert self.policy.on_full_window == "discard", "a group was given up where the window should wait"
        assert self._window_is_full(), "a group was given up while there was room"
        assert self._holds_up(group), "a group was given up that does not hold up the window"
        assert group in self.out, "a group was given up that is not out with a worker"
        notices = [notice.content for worker in self.controller.workers for notice in worker.log.notices]
        cancelled = [lease for told in notices if isinstance(told, LeasesCancelled) for lease in told.leases]
        assert self.out[group] in cancelled, "the holder of a group that was given up is not told"
        self.given_up.add(group)
        self.run.seen["given up"] += 1

    def check_nothing_to_give(self) -> None:
        """A worker that asked got nothing: some limit must say so, and one that a full window's oldest group could lift does not."""
        core, policy, oracle = self.controller, self.policy, self.oracle
        if core.lifecycle.phase != "RUNNING" or (policy.announces_weights and core.leasing.weights is None):
            return
        assert not core.leasing.can_give, "G9: nothing was given, though something could be"
        # At most so much may be expected of what is out; before the first payload nothing is.
        expected = core.rollouts.leased_groups * self.plan.largest_group * self.longest_payload
        if core.rollouts.buffered_bytes + expected > policy.max_buffered_bytes or oracle.issued == self.plan.budget:
            return
        if core.rollouts.outstanding_groups < policy.max_outstanding_groups:
            assert self._window_is_full(), "G9: nothing was drawn, though there is room"
            waits = policy.on_full_window == "wait" or not any(map(self._holds_up, self.out))
            assert waits, "G9: a full window does not give up its oldest group"

    def _holds_up(self, group: int) -> bool:
        """Whether a group is the oldest of the window, and something after it is settled or waits for a command."""
        oracle = self.oracle
        return oracle.is_oldest(group) and (oracle.is_overtaken(group) or self.controller.rollouts.ready_groups > 0)

    def _window_is_full(self) -> bool:
        draws, size = self.oracle.window_size()
        size += self.oracle.next_state_bytes(self.first_state)
        return draws > 0 and (draws >= self.policy.max_window_draws or size > self.policy.max_window_bytes)

    def _check_reason(self, group: int, mask: int, reason: str) -> None:
        policy, settled = self.policy, self.oracle.settled
        places = self.oracle.places(group, (1 << self.oracle.size_of[group]) - 1)
        kept = sum(settled.get(place) in ("trained", "recorded") for place in places) + mask.bit_count()
        assert {
            "worker-discarded": True,
            "trainer-rejected": True,
            "poison:worker-failed": self.failures[group] >= policy.poison_limit,
            "stale": policy.max_staleness is not None and policy.on_stale == "discard",
            "below_minimum": kept < policy.min_completions_per_group,
            "tail": policy.tail == "discard" and self.oracle.issued == self.plan.budget,
            "window_full": group in self.given_up,
        }[reason], f"group {group} was discarded as {reason} without cause"

    # -- small things

    def part_of(self, mask: int) -> int:
        """Some of the bits, at least one."""
        bits = [1 << bit for bit in bits_of(mask)]
        return sum(self.rng.sample(bits, self.rng.randint(1, len(bits))))

    def digest(self) -> bytes:
        """Of a batch: no two are alike."""
        return self.rng.randbytes(8)

    def info(self, place: Place) -> WorkerInfo:
        """A new process at `place`."""
        world_size = dict(self.policy.trainer_groups).get(place.group, 1)
        return WorkerInfo(place=place, incarnation=f"{self.rng.getrandbits(128):032x}", world_size=world_size)

    def _new_id(self) -> str:
        self._ids += 1
        return f"{self.number:016x}{self._ids:016x}"


def bits_of(mask: int) -> list[int]:
    """The completions of a mask."""
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]


def fingerprint(value: Any) -> Any:
    """Everything reachable as plain values; the fence's own counter apart."""
    seen: set[int] = set()

    def walk(item: Any) -> Any:
        if item is None or isinstance(item, bool | int | float | str | bytes | Enum):
            return item
        if id(item) in seen:
            return "again"
        seen.add(id(item))
        if isinstance(item, dict):
            return [(walk(key), walk(content)) for key, content in item.items()]
        if isinstance(item, set | frozenset):
            return sorted(map(repr, item))
        if hasattr(item, "__iter__"):
            return [walk(content) for content in item] if hasattr(item, "__len__") else "iterator"
        if callable(item):
            return "callable"
        names = [f.name for f in fields(item)] if is_dataclass(item) else list(getattr(item, "__dict__", {}))
        return [(name, walk(getattr(item, name))) for name in names if name != "refused"]

    return walk(value)
