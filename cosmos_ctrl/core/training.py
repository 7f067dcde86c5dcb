"""What every trainer rank does next, and what follows when a step commits.

* A TRAIN command is formed when enough groups are ready, or when no more can come and the policy trains the tail. A tail that waits ends
  the run unsettled; an execution that could form nothing but such a tail is over before it begins.
* On commit exactly what the leader named settles, and where a SAVE follows, its boundary is cut in the same event: before
  anything of the next step can settle.
* A step that is committed, or is being saved, is not saved again, unless discards alone have used up the budget since. END is given when nothing is left to save.
* What was issued and is not trained when a stop or a limit ends the run stays unsettled: the next execution issues it again.
  Only an exhausted budget may discard a tail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cosmos_ctrl.core.commands import Command, CommandLog, DisposedRows, End, Save, ShardReceipt, Train
from cosmos_ctrl.core.execution import ExecutionIdentity, Place
from cosmos_ctrl.core.ledger import SamplingReplayLedger
from cosmos_ctrl.core.lifecycle import EndReason, Lifecycle
from cosmos_ctrl.core.policy import RunPolicy
from cosmos_ctrl.core.rollouts import Rollouts
from cosmos_ctrl.core.sampling import PromptFeedback


class Training:
    """Forms commands and commits steps."""

    def __init__(
        self,
        policy: RunPolicy,
        identity: ExecutionIdentity,
        log: CommandLog,
        ledger: SamplingReplayLedger,
        rollouts: Rollouts,
        lifecycle: Lifecycle,
        *,
        resumed_steps: int | None,
        lineage_remaining: int,
        can_give: Callable[[], bool],
        clock: Callable[[], float],
        new_id: Callable[[], str],
        publish: Callable[[Save], None],
        on_feedback: Callable[[Sequence[PromptFeedback]], None] | None = None,
    ) -> None:
        """
        Args:
            resumed_steps: None for a fresh run.
            lineage_remaining: what the budget holds beyond everything that the lineage had issued before this execution.
            can_give: whether a worker that asks now could be given something.
            publish: starts the commit of a complete save.
            on_feedback: told what a committed step did with its prompts; None: nobody asks.
        """
        self._policy, self._identity, self._log = policy, identity, log
        self._ledger, self._rollouts, self._lifecycle = ledger, rollouts, lifecycle
        self._clock, self._new_id, self._publish = clock, new_id, publish
        # Step and remaining budget of the newest checkpoint of the lineage, committed or being saved.
        self._saved = None if resumed_steps is None else (resumed_steps, ledger.snapshot().remaining_completions)
        self._lineage_remaining, self._can_give = lineage_remaining, can_give
        # A legacy controller publishes nothing, so it asks for no save.
        self._saves = bool(identity.id)
        self._on_feedback = on_feedback
        self.last_save: Save | None = None
        """Newest committed save of this execution."""
        self.mean_reward: float | None = None
        """Over the completions trained in the last step."""

    # -- commands

    def command(self, number: int, place: Place) -> Command | None:
        """Command `number` for a rank, formed now if it can be; None when there is none yet."""
        command = self._log.get(number, place)
        if command is None:
            self.form()
            command = self._log.get(number, place)
        return command

    def form(self) -> None:
        """Form the next command, if there is one to form."""
        if not self._log.may_form:
            return
        if self._lifecycle.ending is None:
            if self._rollouts.drop_stale(self._log.steps):
                self._lifecycle.touch()  # there is room, or work, for a worker that waits
            if self._is_exhausted():
                self._lifecycle.begin_ending("BUDGET_EXHAUSTED", "every completion of the budget is settled")
        if self._lifecycle.ending is not None:
            self._form_ending()
            return
        rows = self._take_rows()
        if rows:
            deadline = self._clock() + self._policy.step_timeout_s
            command = Train(self._log.next_number, self._log.steps + 1, tuple(rows), deadline)
            self._log.add(command)
            self._lifecycle.record("train", command=command.number, step=command.step, rows=rows)
            self._lifecycle.touch()

    def finish_if_nothing_is_left(self, groups_left: int) -> None:
        """A restart at or past the limit, with no budget left, or with a tail that waits, is over before it begins.

        Args:
            groups_left: that may still be in a step, drawn or not.
        """
        limit, steps = self._policy.max_training_steps, self._log.steps
        if limit is not None and steps >= limit:
            message = f"nothing to do: at step {steps}, the limit is {limit}"
            self._lifecycle.begin_ending("STEP_LIMIT", message)
        elif self._ledger.cursor.remaining_completions == 0:
            message = f"nothing to do: at step {steps} with no budget left"
            self._lifecycle.begin_ending("BUDGET_EXHAUSTED", message)
        elif self._policy.tail == "wait" and 0 < groups_left < self._policy.groups_per_step:
            message = f"nothing to do: at step {steps} the {groups_left} groups that are left are too few for a step, and wait"
            self._lifecycle.begin_ending("BUDGET_EXHAUSTED", message)
        if self._lifecycle.ending is not None:
            self._form_ending()

    def end_if_exhausted(self) -> None:
        """Form the ending when the last completion settled without a step (a discard, say)."""
        if self._lifecycle.gate_open and self._lifecycle.ending is None and self._is_exhausted():
            self.form()

    def _is_exhausted(self) -> bool:
        return self._ledger.cursor.remaining_completions == 0 and not self._rollouts.unsettled_groups

    def _take_rows(self) -> list[tuple[int, int]]:
        whole, ready = self._policy.groups_per_step, self._rollouts.ready_groups
        if ready >= whole:
            return self._rollouts.take(whole)
        if ready == 0 or self._rollouts.leased_groups or self._can_give():
            return []
        exhausted = self._ledger.cursor.remaining_completions == 0 and self._rollouts.outstanding_groups == ready
        if self._policy.tail == "train" or not exhausted:
            # The tail; or a limit keeps more from coming, and only a step makes room.
            return self._rollouts.take(ready)
        if self._policy.tail == "wait":
            message = f"the budget is issued; {ready} groups are too few for a step, and wait"
            self._lifecycle.begin_ending("BUDGET_EXHAUSTED", message)
        else:
            self._rollouts.drop_tail("tail")
        self.form()
        return []

    def _form_ending(self) -> None:
        if self._needs_last_save():
            self._form_save(final=True)
        elif not self._log.saves and self._lifecycle.ending is not None:
            reason, message = self._lifecycle.ending
            self._log.add(End(self._log.next_number, reason, message, self._log.steps))
            self._lifecycle.finish()

    def _needs_last_save(self) -> bool:
        if not self._saves or not self._lifecycle.gate_open:
            return False
        if self._saved is None or self._saved[0] != self._log.steps:
            return True
        # Discards alone have used up the budget since: saved once more, so that a restart finds the run finished.
        return self._is_exhausted() and self._saved[1] > 0

    def _form_save(self, *, final: bool) -> None:
        number, steps, checkpoint_id = self._log.next_number, self._log.steps, self._new_id()
        boundary = self._ledger.snapshot()
        # The model may hold completions that an earlier execution issued and this one has not come to again.
        issued_to = min(self._ledger.cursor.remaining_completions, self._lineage_remaining)
        save = Save(
            number=number,
            checkpoint_id=checkpoint_id,
            path=f"checkpoints/e{self._identity.number:04d}-s{steps:08d}-{checkpoint_id[:8]}",
            steps=steps,
            updates=self._log.updates,
            boundary=boundary,
            window_completions=boundary.remaining_completions - issued_to,
            window=self._ledger.window() if self._policy.records_window != "nothing" else None,
            parent=self.last_save,
            final=final,
            deadline=self._clock() + self._policy.save_timeout_s,
        )
        self._saved = (steps, boundary.remaining_completions)
        self._log.add(save)
        self._lifecycle.record(
            "cut",
            checkpoint=checkpoint_id,
            path=save.path,
            step=steps,
            remaining=save.boundary.remaining_completions,
            window=save.window_completions,
        )
        self._lifecycle.touch()

    # -- commit

    def commit(self, command: Train) -> None:
        """Every required rank has completed `command`: settle what the leader named, and save where it is due."""
        disposed = command.reports[self._log.leader].disposed
        results = self._results(disposed) if self._on_feedback else []
        count, reward = 0, 0.0
        for block in disposed:
            if block.disposition == "trained":
                reward += self._rollouts.train(block.rows)
                count += sum(mask.bit_count() for _, mask in block.rows)
            else:
                self._rollouts.dispose(block.rows, block.disposition, block.reason)
        if count:
            self.mean_reward = reward / count
        if self._on_feedback:
            self._tell(self._on_feedback, results)
        self._lifecycle.record(
            "commit",
            step=self._log.steps,
            updates=self._log.updates,
            trained=count,
            mean_reward=self.mean_reward if count else None,
            cursor=self._ledger.cursor.remaining_completions,
            safe=self._ledger.snapshot().remaining_completions,
        )
        self._lifecycle.touch()
        limit, every = self._policy.max_training_steps, self._policy.save_every_steps
        if limit is not None and self._log.steps >= limit:
            self.stop_giving_work("STEP_LIMIT", f"step {self._log.steps} of at most {limit} is complete")
        self.end_if_exhausted()
        if self._lifecycle.ending is not None:
            self.form()
        elif self._saves and every and self._log.steps % every == 0 and not self._log.saves:
            self._form_save(final=False)

    def _results(self, disposed: Iterable[DisposedRows]) -> list[PromptFeedback]:
        masks: dict[int, int] = {}  # a group may take several rows, and its prompt is told of once
        for block in disposed:
            for token, mask in block.rows if block.disposition in ("trained", "discarded") else ():
                masks[token] = masks.get(token, 0) | mask
        results = []
        for token, mask in masks.items():
            group = self._rollouts.group(token)
            if group is not None:
                rewards = tuple(payload.reward for payload in self._rollouts.payloads(token, mask))
                results.append(PromptFeedback(group.prompt.key, group.prompt.source, rewards))
        return results

    def _tell(self, on_feedback: Callable[[Sequence[PromptFeedback]], None], results: Sequence[PromptFeedback]) -> None:
        try:
            on_feedback(results)
        except Exception as error:
            # It may have taken half of it, as a draw may have moved it.
            self._lifecycle.fail(f"the sampler could not take its feedback: {type(error).__name__}: {error}")
            raise

    def stop_giving_work(self, reason: EndReason, message: str) -> None:
        """Begin to end; what is leased is not wanted any more and stays unsettled."""
        if self._lifecycle.ending is None:
            self._lifecycle.begin_ending(reason, message)
            self._rollouts.cancel_all()

    # -- saves

    def receive(self, save: Save, place: Place, receipts: tuple[ShardReceipt, ...], note: str) -> None:
        """A rank has made its artifacts durable; the last one starts publication."""
        if self._log.record_receipts(save, place, receipts, note):
            save.deadline = self._clock() + self._policy.save_timeout_s
            self._publish(save)
            self._lifecycle.touch()

    def committed(self, save: Save, manifest_digest: str) -> None:
        """The save is visible and durable."""
        save.state, save.manifest_digest, save.window = "COMMITTED", manifest_digest, None
        # An asynchronous save may finish after a later one.
        if self.last_save is None or self.last_save.steps <= save.steps:
            self.last_save = save
        self._lifecycle.record("published", checkpoint=save.checkpoint_id, path=save.path, step=save.steps)
        self._lifecycle.touch()
        if self._lifecycle.ending is not None:
            self.form()

    def abandon(self, save: Save, why: str) -> None:
        """Nothing of the save is published, now or later."""
        save.state, save.why_abandoned, save.window = "ABANDONED", why, None
        if self._saved == (save.steps, save.boundary.remaining_completions):
            self._saved = None
        self._lifecycle.record("abandoned", checkpoint=save.checkpoint_id, step=save.steps, why=why)
        self._lifecycle.touch()
        if save.final:
            self._lifecycle.fail(f"the last save, of step {save.steps}, was abandoned: {why}")
        elif self._lifecycle.ending is not None:
            self.form()

    def fail_overdue_step(self) -> None:
        """A step that a rank does not complete in time ends the execution: it hangs, and its siblings with it."""
        last = self._log.last
        if isinstance(last, Train) and not last.committed and self._clock() > last.deadline:
            missing = ", ".join(str(rank) for rank in self._log.ranks if rank not in last.reports)
            self._lifecycle.fail(
                f"{missing} did not complete step {last.step} within {self._policy.step_timeout_s:.0f} s"
            )

    def abandon_overdue(self) -> None:
        """Give up saves past their deadline."""
        now, why = self._clock(), f"not finished within {self._policy.save_timeout_s:.0f} s"
        for save in self._log.saves:
            if now > save.deadline and save.state == "PENDING":
                self.abandon(save, why)
            elif now > save.deadline:
                # Its manifest may yet become visible, so it can neither be abandoned nor waited for.
                self._lifecycle.fail(f"the publication of the checkpoint of step {save.steps} was {why}")
