"""Checkpoints of a Hugging Face `Trainer`, or one of TRL's, that are committed or absent. Needs the extra ``huggingface``.

* The Trainer writes its checkpoint as it always does, into a fresh directory of the run; the callback makes it durable, hashes it, and
  publishes the manifest last. What has no manifest is never resumed from, and no two attempts write into one directory.
* `CheckpointCallback.resume` chooses by manifests alone, verifies every byte, and returns what ``train()`` is to be given. Missing, damaged,
  unreadable and "nothing there" are told apart, and only the last is a fresh start.
* The position belongs to the checkpoint: the Trainer derives its place in the data from ``global_step`` of ``trainer_state.json`` and skips
  what comes before. What else the place depends on is compared (`positions`), and a change is refused by name.
* ``trainer_state.json`` carries the checkpoint's ID. Before the first step every rank compares what the Trainer loaded with what was chosen.
* A run that is over trains nothing when it is started again; a Trainer by itself would train one step more.
* With several ranks the first one claims, chooses and publishes, and not before the files of all ranks are durable.

Example:
    trainer = Trainer(model, args, train_dataset=dataset)
    checkpoints = CheckpointCallback(trainer, compatibility={"dataset": dataset_fingerprint(dataset)})
    trainer.add_callback(checkpoints)
    trainer.train(resume_from_checkpoint=checkpoints.resume())
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("this needs the package transformers: pip install 'cosmos-ctrl[huggingface]'") from error

from cosmos_ctrl.checkpoints import durable
from cosmos_ctrl.checkpoints.discovery import Found, OnCorrupt, list_checkpoints
from cosmos_ctrl.checkpoints.driver import DriverExecution, Place, begin, place_of
from cosmos_ctrl.checkpoints.manifest import CheckpointManifest
from cosmos_ctrl.checkpoints.retention import RetentionPolicy
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.core.errors import ArtifactForeignError
from cosmos_ctrl.core.resume import ControllerResumeMetadata, check_agreement
from cosmos_worker.errors import UsageError
from cosmos_worker.integrations import positions
from cosmos_worker.integrations.ranks import on_first, together
from cosmos_worker.stamps import Stamp

_log = logging.getLogger(__name__)

#: Where the stamp lies among the states of callbacks in ``trainer_state.json``.
STAMP = "cosmos_ctrl"

#: Settings that must be off, and why.
_REFUSED = {
    "save_total_limit": "it deletes by name and time; give keep_last= or keep_every= to the callback",
    "save_only_model": "nothing could be resumed from such checkpoints",
    "ignore_data_skip": "a resumed run would begin its epoch again and not reach the epoch's end",
    "save_on_each_node": "a checkpoint is one directory that all ranks share",
    "auto_find_batch_size": "the place in the data counts batches, so their size must not change",
    "enable_jit_checkpoint": "it saves past the callbacks, and nothing would commit what it saves",
}

_FOLDER = re.compile(r"checkpoint-[0-9]+")


@dataclass(frozen=True, slots=True)
class _Start:
    """What all ranks know of the execution."""

    number: int
    execution_id: str
    checkpoint: str
    """Relative to the run; empty when it is fresh."""
    stamp: Stamp | None
    """Of that checkpoint; None when it is fresh."""
    sampler_state: Any
    """Of that checkpoint; None when it is fresh."""


class CheckpointCallback(TrainerCallback):  # type: ignore[misc]  # the extra may be absent where types are checked
    """Commits the checkpoints of one trainer; its run is the trainer's ``output_dir``. Make one on every rank."""

    def __init__(
        self,
        trainer: Any,
        *,
        compatibility: Mapping[str, Any] | None = None,
        on_corrupt: OnCorrupt = "error",
        keep_last: int = 0,
        keep_every: int = 0,
    ) -> None:
        """Take over where `trainer` saves; it is to be added to it with ``add_callback``.

        Args:
            trainer: a `transformers.Trainer`, of any subclass.
            compatibility: what a resumed run must share, beside the settings of the trainer that its place in the data depends on: plain JSON
                values, a dataset's fingerprint say.
            on_corrupt: "previous" lets `resume` pass over damage at the newest end.
            keep_last: so many of the newest checkpoints are kept; 0: all.
            keep_every: and those whose step is a multiple of this, for ever; 0: none.

        Raises:
            ValueError: a setting of the trainer's does not go with committed checkpoints, or `compatibility` has a key that is its own.
        """
        args = trainer.args
        wrong = [
            f"{name}={getattr(args, name)!r}: {why}" for name, why in _REFUSED.items() if getattr(args, name, None)
        ]
        if keep_last and args.load_best_model_at_end:
            wrong.append("load_best_model_at_end=True with keep_last: the best checkpoint might be deleted; keep all")
        if positions.generates_ahead(args) and args.save_strategy == "best":
            wrong.append("save_strategy='best': it saves in the midst of a generation; use 'steps' or 'epoch'")
        if wrong:
            raise ValueError(f"the trainer's settings do not go with committed checkpoints: {'; '.join(wrong)}")
        own = positions.settings(args, trainer.train_dataset)
        if taken := sorted(own.keys() & (compatibility or {}).keys()):
            raise ValueError(f"compatibility has the key {taken[0]!r}, which is taken from the trainer")
        self._trainer = trainer
        self._run = Path(args.output_dir).absolute()
        self._compatibility = own | dict(compatibility or {})
        self._on_corrupt: OnCorrupt = on_corrupt
        self._retention = RetentionPolicy(keep_last, keep_every)
        self._execution: DriverExecution | None = None
        """On the first rank."""
        self._start: _Start | None = None
        self._training = False
        self._passes = 0
        """Over the data, begun in this execution."""
        self._saves = 0
        """Committed in this execution."""
        self._open: Place | None = None
        """Where the trainer is saving."""
        self._due = False
        """A save was put off."""
        self._order: dict[str, Any] = {}
        """What gives the order of the data."""
        self._finished = False
        """There is no step left."""
        self._next_batches = trainer.get_batch_samples
        trainer.get_batch_samples = self._batches
        # The one place that every save of a Trainer asks where to go.
        trainer._get_output_dir = self._directory_of_save

    def resume(self, checkpoint: bool | str = True) -> str | None:
        """Begin an execution: claim the run, and choose and verify what it starts from. All ranks call it, right before ``train()``.

        Args:
            checkpoint: True: the newest committed one; a path: that one and no other; False: start fresh, whatever is there.

        Returns:
            What ``train(resume_from_checkpoint=)`` is to be given: a directory, or None for a fresh start.

        Raises:
            UsageError: there are only checkpoints that were saved without this callback.
            CheckpointError: by case: the checkpoint is missing, damaged, unreadable, or of other settings; it says which. Raised on rank 0.
            RankFailedError: on the other ranks.
        """
        self._training, self._finished, self._due = False, False, False
        self._passes, self._saves, self._open = 0, 0, None
        self._start = start = on_first(lambda: self._begin(checkpoint))
        return str(self._run / start.checkpoint / _folder(start.stamp.steps)) if start.stamp else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What the Trainer restored is compared on every rank, before the first step.

        Raises:
            UsageError: there was no `resume` for this ``train()``, or the sampler's order could not be restored.
            ResumeMetadataMismatch: the Trainer did not load what `resume` chose, or its data have another order.
        """
        together(lambda: self._compare(args, state))
        dataloader = kwargs["train_dataloader"]
        self._order = order = positions.order_of(dataloader)
        # Of the first rank alone: seeds may differ from rank to rank.
        on_first(lambda: self._compare_place(positions.place(state.global_step, order)))
        self._training = True
        self._finished = control.should_training_stop = state.global_step >= state.max_steps
        if self._finished:
            _log.info("the run is over: step %d of %d; nothing is trained", state.global_step, state.max_steps)
        else:
            positions.restore_sampler(args, dataloader, state.global_step)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A pass over the data begins.

        Raises:
            UsageError: the second one over a stream.
        """
        self._passes += 1
        if self._passes > 1:
            positions.require_length(kwargs["train_dataloader"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A save in the midst of a generation is put off until all that was generated is trained, or the run is over."""
        self._due = self._due or control.should_save
        over = state.global_step >= state.max_steps
        control.should_save = self._due and (
            over or positions.at_rest(args, kwargs["train_dataloader"], state.global_step)
        )

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Nothing of a finished run is saved again."""
        control.should_save = control.should_save and not self._finished

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The files that the Trainer wrote are made durable, and committed.

        Raises:
            SupersededError: a newer execution has claimed the run; end this process.
            CheckpointError: something could not be hashed, or made durable; nothing was acknowledged.
            RankFailedError: another rank met one of these.
        """
        place = self._open
        if place is None:
            raise UsageError("the Trainer did not ask where to save; this version of transformers is not known here")
        together(lambda: None)  # until every rank has written
        together(lambda: self._sync(args, place))
        on_first(lambda: self._commit(args, state, place))
        self._saves, self._open, self._due = self._saves + 1, None, False

    def _batches(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the Trainer's method: it would train one step more of a run that is over."""
        return ([], None) if self._finished else self._next_batches(*args, **kwargs)

    def _begin(self, checkpoint: bool | str) -> _Start:
        if isinstance(checkpoint, str) and _FOLDER.fullmatch(Path(checkpoint).name):
            checkpoint = str(Path(checkpoint).parent)  # as `resume` returns it
        plain = sorted(path.name for path in self._run.glob("checkpoint-*") if _FOLDER.fullmatch(path.name))
        if checkpoint is True and plain and not list_checkpoints(LocalStore(self._run)):
            raise UsageError(
                f"{self._run} holds {', '.join(plain)}, saved without this callback, so nothing can be verified, and a fresh start would pass "
                "over them in silence: use another output_dir, or start fresh with resume(False)"
            )
        self._execution = execution = begin(
            LocalStore(self._run),
            resume=checkpoint,
            compatibility=self._compatibility,
            on_corrupt=self._on_corrupt,
            retention=self._retention,
            check=self._check_state,
        )
        found = execution.resumed
        return _Start(
            execution.number,
            execution.execution_id,
            found.path if found else "",
            _stamp_of(found.manifest) if found else None,
            found.manifest.metadata.sampler_state if found else None,
        )

    def _check_state(self, found: Found) -> None:
        """Whether the Trainer's own state in a verified checkpoint is that checkpoint's."""
        stamp = _stamp_of(found.manifest)
        name = f"{_folder(stamp.steps)}/trainer_state.json"
        if name not in found.manifest.artifacts:
            what, wanted = "content", "a checkpoint of a Trainer"
            raise ArtifactForeignError(path=found.path, artifact=name, what=what, expected=wanted, found="no such file")
        state = json.loads((self._run / found.path / name).read_text(encoding="utf-8"))
        stamp.check(state["stateful_callbacks"].get(STAMP), path=found.path, artifact=name)
        if (step := state["global_step"]) != stamp.steps:
            what, wanted = "global_step", str(stamp.steps)
            raise ArtifactForeignError(path=found.path, artifact=name, what=what, expected=wanted, found=str(step))

    def _compare(self, args: Any, state: Any) -> None:
        if self._start is None or self._training:
            raise UsageError(
                "call resume() of the CheckpointCallback before each train(), and give train() what it returns"
            )
        stamp = self._start.stamp
        expected = {"global_step": stamp.steps} | stamp.values() if stamp else None
        found = state.stateful_callbacks.get(STAMP)
        restored = {"global_step": state.global_step} | (found or {}) if found or state.global_step else None
        check_agreement(f"the Trainer of rank {args.process_index}", expected, restored)

    def _compare_place(self, place: dict[str, Any]) -> None:
        saved = self._start.sampler_state if self._start else None
        if saved is not None:
            check_agreement("the Trainer's sampler", saved, place)

    def _directory_of_save(self, trial: Any) -> str:
        """In place of the Trainer's method: asked at the beginning of every save, on every rank."""
        if trial is not None or self._start is None:
            raise UsageError(
                "a CheckpointCallback commits the saves of train(), after resume(); it has no place for others"
            )
        state, start = self._trainer.state, self._start
        place = place_of(start.number, start.execution_id, steps=state.global_step, save=self._saves)
        if place != self._open:
            self._open = place
            state.stateful_callbacks[STAMP] = _stamp(
                state.global_step, start.execution_id, place.checkpoint_id
            ).values()
        return str(self._run / place.path)

    def _sync(self, args: Any, place: Place) -> None:
        """Make durable what this machine's ranks wrote: only their own kernel can. The first rank's is done when it hashes."""
        if args.local_process_index != 0 or args.process_index == 0:
            return
        if not any((self._run / place.path).glob("*/trainer_state.json")):
            raise UsageError(
                f"{self._run / place.path} has no trainer_state.json, which the first rank has written: output_dir has to be one directory that "
                "all machines share"
            )
        for path in sorted((self._run / place.path).rglob("*")):
            if path.is_file():
                with durable.storage_errors(path, "open"), path.open("rb") as file:
                    durable.fsync_file(file.fileno(), path)

    def _commit(self, args: Any, state: Any, place: Place) -> None:
        assert self._execution is not None, "the first rank has begun it"
        per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        metadata = ControllerResumeMetadata(
            completed_training_steps=state.global_step,
            completed_optimizer_updates=state.global_step,
            # Sequences that the steps which are left hold, if no batch is cut short by an epoch's end.
            remaining_completions=max(0, state.max_steps - state.global_step) * per_step,
            epoch=math.floor(state.epoch) + 1,
            sampling_owner="sampler",
            sampler_state=positions.place(state.global_step, self._order),
            checkpoint_path=place.path,
            checkpoint_id=place.checkpoint_id,
        )
        self._execution.commit(place, metadata)


def _folder(steps: int) -> str:
    return f"checkpoint-{steps}"


def _stamp(steps: int, execution_id: str, checkpoint_id: str) -> Stamp:
    # One file for all ranks: the first one's.
    return Stamp(rank=0, steps=steps, updates=steps, execution_id=execution_id, checkpoint_id=checkpoint_id)


def _stamp_of(manifest: CheckpointManifest) -> Stamp:
    steps = manifest.metadata.completed_training_steps
    return _stamp(steps, manifest.execution_id, manifest.checkpoint_id)
