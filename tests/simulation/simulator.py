"""One seed, one history: a run with random workers, random faults and random crashes, over the real controller.

* Every choice comes from one random generator, so a seed is a history.
* What survives a crash is what was published: nothing else is carried over, except workers of the dead execution, who go
  on talking.
* The last life of a run begins as wild as the others and then becomes calm: no fault happens any more, and with what the
  faults have left behind the run has to end in a bounded number of events (G9).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

from simulated_plan import SESSION_TTL_S, Plan
from simulated_rollouts import RolloutSide, RolloutWorker
from simulated_trainers import TrainerSide
from simulated_world import Crash, Run, World

from cosmos_ctrl.audit import audit_journals
from cosmos_ctrl.core.errors import ExecutionEndedError
from cosmos_ctrl.core.execution import Place

_CALM_ROUNDS = 3000


class Failure(AssertionError):
    """A guarantee was broken; its text names the seed."""


class Simulation:
    """A run of several executions."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.plan = Plan.of(self.rng)
        self.carried = Run(self.plan, self.rng, names=itertools.count())
        self.executions = 0
        self.events = 0
        self.survivor: tuple[str, RolloutWorker] | None = None
        """A worker of an execution that is over."""

    def run(self) -> None:
        """All lives; raises Failure with the seed."""
        try:
            over = False
            for life in range(self.plan.lives):
                over = over or self._live(calm_after=80 if life == self.plan.lives - 1 else None)
            if not over:
                # The last life failed while it was wild, or was stopped: this one has no excuse.
                assert self._live(calm_after=0), "G9: the calm run did not end"
            self._check_restart_does_nothing()
            self._check_audit()
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise Failure(f"seed {self.seed}, execution {self.executions}: {what}\n{self.plan}") from error

    def execution(self) -> World:
        """The next execution, resumed from the newest checkpoint."""
        self.executions += 1
        return World(self.carried, number=self.executions)

    def _live(self, *, calm_after: int | None) -> bool:
        world = self.execution()
        life = _Life(world, self.survivor)
        try:
            over = life.live(calm_after)
        finally:
            self.events += life.events
        world.oracle.check_repeats()
        if life.rollouts.workers:
            self.survivor = world.id, life.rollouts.any()
        return over

    def _check_restart_does_nothing(self) -> None:
        """G8: a restart of a run that is over is over at once, wherever a limit or the budget ended it."""
        newest = self.carried.newest
        if newest is None:
            return
        limit, metadata = self.plan.policy.max_training_steps, newest.metadata
        at_limit = limit is not None and metadata.completed_training_steps >= limit
        if metadata.remaining_completions and not at_limit:
            return  # what was discarded after the last save is in no checkpoint
        controller = self.execution().controller
        assert controller.lifecycle.phase == "ENDED", "G8: a finished run went on"
        assert controller.commands.steps == metadata.completed_training_steps

    def _check_audit(self) -> None:
        """The journals alone say the same as the oracles."""
        if self.plan.feedback or self.plan.reorders:
            return  # a completion is not identified by its prompt
        report = audit_journals(self.carried.journals)
        assert report.skipped == 0, f"the audit finds {report.skipped} skipped"
        found = [(execution.repeated, execution.spared) for execution in report.executions]
        assert found == [(len(oracle.repeated), len(oracle.spared)) for oracle in self.carried.oracles]


class _Life:
    """One execution, event by event."""

    def __init__(self, world: World, survivor: tuple[str, RolloutWorker] | None) -> None:
        self.world, self.rng, self.core = world, world.rng, world.controller
        self.rollouts = RolloutSide(world)
        self.trainers = TrainerSide(world)
        self.survivor = survivor
        self.events = 0
        self._dead_since: float | None = None
        """When a trainer died: the execution must not outlive it for long."""

    def live(self, calm_after: int | None) -> bool:
        """Until the end, a failure or a crash; True when the run is over."""
        world, lifecycle = self.world, self.core.lifecycle
        try:
            self._start()
            while not lifecycle.over and (calm_after is None or self.events < calm_after):
                self._event(may_crash=calm_after is None)
            if not lifecycle.over and self._dead_since is None and not world.stopped:
                self._be_calm()
        except Crash:
            return False
        except ExecutionEndedError:
            assert lifecycle.failure is not None
        if lifecycle.failure is not None:
            excused = self.trainers.has_forgotten_a_save
            assert not world.calm or excused, f"the calm run failed: {lifecycle.failure}"
            return False
        end = lifecycle.end
        if end is None or end[0] == "STOP_REQUESTED":
            assert not world.calm, "G9: the calm run did not end"
            return False
        if end[0] == "BUDGET_EXHAUSTED" and end[1].endswith("too few for a step, and wait"):
            assert world.policy.tail == "wait"
            most = (world.policy.groups_per_step - 1) * world.plan.largest_group
            world.oracle.check_tail(most, self.core.rollouts.unsettled_groups)
        elif end[0] == "BUDGET_EXHAUSTED":
            world.oracle.check_complete()
            assert not self.core.rollouts.buffered_bytes, "payloads are kept of what is settled"
        return True

    def _start(self) -> None:
        self.trainers.start()
        for replica in range(self.world.plan.rollouts):
            self.rollouts.start(Place("rollout", "rollout", replica, 0))

    def _be_calm(self) -> None:
        """Whatever the faults have left behind, everyone alive now does what it should."""
        self.world.calm = True
        self.rollouts.keep_one_alive()
        if self.world.policy.announces_weights:
            self.trainers.announce(self.trainers.leader_steps)
        for _ in range(_CALM_ROUNDS):
            for worker in self.rollouts.workers:
                self.rollouts.lease(worker)
            for worker in self.rollouts.workers:
                self.rollouts.report(worker)
            for trainer in self.trainers.trainers:
                self.trainers.train(trainer)
                self.trainers.save(trainer)
            self.trainers.take_effects()
            while self.trainers.publishing:
                self.trainers.publish()
            if self.core.lifecycle.over:
                return
            self._pass_time(1.0)
            self.world.check()

    def _event(self, *, may_crash: bool) -> None:
        self.events += 1
        # What has left nothing behind teaches little by dying.
        crash = self.world.plan.crash * (1.0 if self.world.run.published else 0.25)
        if may_crash and self.rng.random() < crash:
            raise Crash
        action, arguments = self._choose()
        action(*arguments)
        self.trainers.take_effects()
        self.world.check()

    def _choose(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        choices: list[tuple[float, Callable[..., None], Callable[[], tuple[Any, ...]]]] = [
            (22, self.rollouts.lease, lambda: (self.rollouts.any(),)),
            (30, self.rollouts.report, lambda: (self.rollouts.any(),)),
            (23, self.trainers.train, lambda: (self.trainers.any(),)),
            (10, self.trainers.save, lambda: (self.trainers.any_saving(),)),
            (8, self.trainers.publish, tuple),
            (6, self._pass_time, lambda: (self.rng.uniform(0.5, 4.0),)),
            (1, self.rollouts.kill, lambda: (self.rollouts.any(),)),
            (1, self.rollouts.reconnect, lambda: (self.rollouts.any(),)),
            (0.5, self.rollouts.haunt, tuple),
            (0.5, self._speak_for_the_dead, tuple),
            (0.15, self._stop, tuple),
            (0.15, self._kill_a_trainer, tuple),
        ]
        _, action, arguments = self.rng.choices(choices, [weight for weight, _, _ in choices])[0]
        return action, arguments()

    def _pass_time(self, seconds: float) -> None:
        world = self.world
        world.now += seconds
        for worker in self.rollouts.workers:
            if worker.alive:
                self.core.hear(world.id, worker.session)
        for trainer in self.trainers.trainers:
            if trainer.alive:
                self.core.hear(world.id, trainer.session)
        self.core.tick()
        if self._dead_since is not None and world.now - self._dead_since > SESSION_TTL_S + 8.0:
            assert self.core.lifecycle.over, "G9: a dead trainer went unnoticed"
        self.rollouts.replace_some()

    def _stop(self) -> None:
        self.core.request_stop(self.world.id, "", "maintenance", None)
        self.world.stopped = True

    def _kill_a_trainer(self) -> None:
        self.trainers.any().alive = False
        self._dead_since = self.world.now if self._dead_since is None else self._dead_since

    def _speak_for_the_dead(self) -> None:
        if self.survivor is not None:
            self.rollouts.speak_for_the_dead(*self.survivor)
