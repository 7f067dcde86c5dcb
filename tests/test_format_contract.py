"""The contract test for checkpoint formats: it passes sound ones, and names what is wrong with others."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from own_format import ManyFiles, OwnFormat

from cosmos_ctrl.checkpoints.adapter import ManifestAdapter
from cosmos_ctrl.checkpoints.artifacts import Artifact
from cosmos_ctrl.checkpoints.digests import digest_bytes
from cosmos_ctrl.checkpoints.manifest import CheckpointManifest, publish_from_receipts
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.core.resume import ControllerResumeMetadata, ResumeSettings
from cosmos_ctrl.core.samplers import SeekableSampler
from cosmos_ctrl.core.state import EncodedState
from cosmos_ctrl.testing import FormatContractError, check_format
from cosmos_worker.commands import SaveWork

FEW = ({"seed": 7, "ü": [True, 1, 1.5, {"deep": [None]}]}, b"\x00\xff")


def save_with(form: type[OwnFormat]) -> Callable[[Path, SaveWork], None]:
    return lambda directory, command: form(directory).save(command)


@pytest.mark.parametrize("form", [OwnFormat, ManyFiles])
def test_a_sound_format_passes(form: type[OwnFormat]) -> None:
    check_format(form, save=save_with(form))


class Manifests(ManifestAdapter):
    """This package's own format, as an application's."""

    def __init__(self, directory: Path) -> None:
        super().__init__(LocalStore(directory))

    @property
    def repeat_bound_completions(self) -> int:
        assert self.found
        return self.found.manifest.repeat_bound_completions

    @property
    def horizon_training_steps(self) -> int | None:
        assert self.found
        return self.found.manifest.horizon_training_steps


def publish(directory: Path, command: SaveWork) -> None:
    path = directory / command.path
    path.mkdir(parents=True)
    (path / "state.pt").write_bytes(b"state")
    artifacts = {"state.pt": Artifact(size_bytes=5, digest=digest_bytes(b"state"))}
    manifest = CheckpointManifest(
        metadata=command.metadata,
        artifacts=artifacts,
        compatibility={},
        execution_number=command.execution_number,
        execution_id=f"id-{command.execution_number}",
        repeat_bound_completions=command.repeat_bound_completions,
        horizon_training_steps=command.horizon_training_steps,
    )
    publish_from_receipts(path, manifest)


def test_the_manifest_is_a_sound_format() -> None:
    check_format(Manifests, save=publish)


class Seeking(OwnFormat):
    """Restores a sampler in its own way."""

    def restore_sampler(self, sampler: Any, metadata: ControllerResumeMetadata) -> None:
        sampler.set_epoch(metadata.epoch)
        sampler.load_state_dict(metadata.sampler_state)


def test_a_real_sampler_may_be_restored_instead() -> None:
    states = []
    for position in (0, 3, 9):
        sampler = SeekableSampler(10, seed=3)
        sampler.set_epoch(1)
        for _ in zip(range(position), sampler, strict=False):
            """Draws."""
        states.append(sampler.state_dict())
    check_format(Seeking, save=save_with(Seeking), states=states, make_sampler=lambda: SeekableSampler(10, seed=3))


# --- formats that are not sound ---


class InPlace(OwnFormat):
    def save(self, command: SaveWork) -> None:
        self.path.write_bytes(self.encode(command))


class RemovedFirst(OwnFormat):
    def save(self, command: SaveWork) -> None:
        self.path.unlink(missing_ok=True)
        super().save(command)


class LeftoversInTheWay(OwnFormat):
    def save(self, command: SaveWork) -> None:
        with self.path.with_suffix(".lock").open("x"):
            super().save(command)
        self.path.with_suffix(".lock").unlink()


class PointedAtTooEarly(ManyFiles):
    """What is called the newest is so before it is there."""

    def save(self, command: SaveWork) -> None:
        (self.directory / "latest").write_text(str(self.directory / f"{self.name(command)}.json"))
        super().save(command)

    def load_metadata(self, config: ResumeSettings) -> ControllerResumeMetadata | None:
        latest = self.directory / "latest"
        if config.train.resume is True and latest.exists():
            return self.decode(Path(latest.read_text()).read_bytes())
        return super().load_metadata(config)


class TakesAnyFile(ManyFiles):
    def committed(self) -> list[Path]:
        return list(self.directory.glob("*-*"))


class StuckOnLeftovers(ManyFiles):
    """Nothing that came after something unfinished counts."""

    def committed(self) -> list[Path]:
        unfinished = [self.order(path) for path in self.directory.glob("*.tmp")]
        return [path for path in super().committed() if all(self.order(path) < order for order in unfinished)]


class WithdrawnOnce(OwnFormat):
    """Publishes, and then once more."""

    def save(self, command: SaveWork) -> None:
        super().save(command)
        aside = self.path.with_suffix(".aside")
        self.path.rename(aside)
        aside.rename(self.path)


class AbsentIsAnError(OwnFormat):
    def load_metadata(self, config: ResumeSettings) -> ControllerResumeMetadata | None:
        self.path.stat()
        return super().load_metadata(config)


class AbsentIsStepZero(OwnFormat):
    def load_metadata(self, config: ResumeSettings) -> ControllerResumeMetadata | None:
        return super().load_metadata(config) or ControllerResumeMetadata(
            completed_training_steps=0,
            completed_optimizer_updates=0,
            remaining_completions=1,
            epoch=1,
            sampling_owner="sampler",
            sampler_state={},
            checkpoint_path="nowhere",
        )


class DamageIsAbsence(OwnFormat):
    def load_metadata(self, config: ResumeSettings) -> ControllerResumeMetadata | None:
        try:
            return super().load_metadata(config)
        except ValueError:
            return None


class DamageIsPassedOver(ManyFiles):
    def load_metadata(self, config: ResumeSettings) -> ControllerResumeMetadata | None:
        if config.train.resume is not True:
            return super().load_metadata(config)
        for path in sorted(self.committed(), key=self.order, reverse=True):
            try:
                self.path = path
                return self.decode(path.read_bytes())
            except ValueError:
                continue
        return None


class WithoutADigest(OwnFormat):
    def decode(self, data: bytes) -> ControllerResumeMetadata:
        text = data.partition(b"\n")[2]
        return super().decode(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)


class ByStepAlone(ManyFiles):
    def order(self, path: Path) -> Any:
        return super().order(path)[1:]


class ByText(ManyFiles):
    def order(self, path: Path) -> Any:
        return path.stem


class ByExecutionAndStepAlone(ManyFiles):
    def name(self, command: SaveWork) -> str:
        return f"{command.execution_number}-{command.step}-{-command.number}"

    def order(self, path: Path) -> Any:
        execution, step, number = path.stem.split("-", 2)
        return int(execution), int(step), int(number)


class ExplicitIsIgnored(OwnFormat):
    def load_metadata(self, config: ResumeSettings) -> ControllerResumeMetadata | None:
        return self.decode(self.path.read_bytes()) if self.path.exists() else None


class ExplicitIsTheOldest(ManyFiles):
    def load_metadata(self, config: ResumeSettings) -> ControllerResumeMetadata | None:
        if isinstance(config.train.resume, str) and Path(config.train.resume).exists():
            return self.decode(min(self.committed(), key=self.order).read_bytes())
        return super().load_metadata(config)


class ExplicitIsRefused(OwnFormat):
    def load_metadata(self, config: ResumeSettings) -> ControllerResumeMetadata | None:
        if config.train.resume is not True:
            raise FileNotFoundError(config.train.resume)
        return super().load_metadata(config)


class ForgetsRepeats(OwnFormat):
    def decode(self, data: bytes) -> ControllerResumeMetadata:
        metadata = super().decode(data)
        del self.repeat_bound_completions
        return metadata


class ForgetsTheHorizon(OwnFormat):
    def decode(self, data: bytes) -> ControllerResumeMetadata:
        metadata = super().decode(data)
        del self.horizon_training_steps
        return metadata


class Changed(OwnFormat):
    """Comes back with something changed."""

    def changed(self, values: dict[str, Any]) -> None:
        raise NotImplementedError

    def decode(self, data: bytes) -> ControllerResumeMetadata:
        values = super().decode(data).values()
        self.changed(values)
        return ControllerResumeMetadata(**values)


class EpochOne(Changed):
    def changed(self, values: dict[str, Any]) -> None:
        values["epoch"] = 1


class OwnerLost(Changed):
    def changed(self, values: dict[str, Any]) -> None:
        values["sampling_owner"] = "sampler"


class UpdatesAreSteps(Changed):
    def changed(self, values: dict[str, Any]) -> None:
        values["completed_optimizer_updates"] = values["completed_training_steps"]


class CountsAreFloats(Changed):
    def changed(self, values: dict[str, Any]) -> None:
        values["remaining_completions"] = int(float(values["remaining_completions"]))


class PathIsEmpty(Changed):
    def changed(self, values: dict[str, Any]) -> None:
        values["checkpoint_path"] = ""


class BytesAreText(Changed):
    def changed(self, values: dict[str, Any]) -> None:
        state: EncodedState = values["sampler_state"]
        if state.codec == "bytes":
            values["sampler_state"] = state.data.decode("latin-1")


class BoolsAreInts(Changed):
    def changed(self, values: dict[str, Any]) -> None:
        state: EncodedState = values["sampler_state"]
        if state.codec == "json":
            values["sampler_state"] = json.loads(state.data.replace(b"true", b"1"))


class TextIsAscii(Changed):
    def changed(self, values: dict[str, Any]) -> None:
        state: EncodedState = values["sampler_state"]
        if state.codec == "json":
            values["sampler_state"] = json.loads(state.data.decode().encode("ascii", "replace"))


class NotMetadata(OwnFormat):
    def load_metadata(self, config: ResumeSettings) -> Any:
        metadata = super().load_metadata(config)
        return metadata.values() if metadata else None


class RefusesBytes(OwnFormat):
    def encode(self, command: SaveWork) -> bytes:
        json.dumps(command.metadata.sampler_state)
        return super().encode(command)


class RestoresTwice(OwnFormat):
    def restore_sampler(self, sampler: Any, metadata: ControllerResumeMetadata) -> None:
        super().restore_sampler(sampler, metadata)
        super().restore_sampler(sampler, metadata)


class RestoresNothing(OwnFormat):
    def restore_sampler(self, sampler: Any, metadata: ControllerResumeMetadata) -> None:
        """Forgotten."""


class RestoresText(OwnFormat):
    def restore_sampler(self, sampler: Any, metadata: ControllerResumeMetadata) -> None:
        sampler.load_state_dict(str(metadata.sampler_state))


class SharesItsState(OwnFormat):
    state: Any = None

    def restore_sampler(self, sampler: Any, metadata: ControllerResumeMetadata) -> None:
        if self.state is None:
            self.state = metadata.sampler_state
        sampler.load_state_dict(self.state)


class LoadsOnce(OwnFormat):
    def load_metadata(self, config: ResumeSettings) -> ControllerResumeMetadata | None:
        metadata = super().load_metadata(config)
        self.path = self.path.with_suffix(".used")
        return metadata


BROKEN = [
    (InPlace, "unfinished saves: the first save, killed on its way, makes load_metadata fail"),
    (InPlace, "unfinished saves: a save after another, killed on its way, makes load_metadata fail"),
    (RemovedFirst, "unfinished saves: a save after another, killed on its way, hides the checkpoint before it"),
    (LeftoversInTheWay, "unfinished saves: the first save, killed on its way, makes the next one fail"),
    (PointedAtTooEarly, "unfinished saves: the first save, killed on its way, makes load_metadata fail"),
    (TakesAnyFile, "unfinished saves: the first save, killed on its way, makes load_metadata fail"),
    (
        StuckOnLeftovers,
        "unfinished saves: a save after another, killed on its way, keeps the next one from being found",
    ),
    (WithdrawnOnce, "unfinished saves: the first save, killed on its way, had been found and then was not"),
    (AbsentIsAnError, "absence: a call failed with FileNotFoundError"),
    (AbsentIsStepZero, "absence: load_metadata where nothing was ever saved gave"),
    (AbsentIsStepZero, "absence: an explicit checkpoint where nothing was ever saved"),
    (AbsentIsStepZero, "unfinished saves: the first save, killed on its way, is found with other values"),
    (DamageIsAbsence, "damage: a file (mine.json) cut short (not empty) gave None: a fresh start"),
    (DamageIsAbsence, "damage: a file (mine.json) cut short (empty) gave None: a fresh start"),
    (DamageIsAbsence, "damage: a file (mine.json) with a flipped bit gave None: a fresh start"),
    (DamageIsPassedOver, "with a flipped bit gave another checkpoint"),
    (WithoutADigest, "with a flipped bit gave another checkpoint, or other values"),
    (ByStepAlone, "newest: after a save of an earlier step of a newer execution"),
    (ByText, "newest: after a save of step 10 after step 9"),
    (ByText, "newest: after a save of execution 10 after execution 2"),
    (ByExecutionAndStepAlone, "newest: after a save of step 10 again"),
    (ExplicitIsIgnored, "newest: an explicit checkpoint that is not there"),
    (ExplicitIsTheOldest, "newest: resume = a checkpoint_path gave another checkpoint"),
    (ExplicitIsRefused, "newest: resume = the newest one's checkpoint_path raised FileNotFoundError"),
    (ForgetsRepeats, "content: the adapter's repeat_bound_completions after load_metadata gave None"),
    (ForgetsTheHorizon, "content: the adapter's horizon_training_steps after load_metadata gave None"),
    (EpochOne, "of epoch"),
    (OwnerLost, "of the batch_sampler came back with other values, or other types, of sampling_owner"),
    (UpdatesAreSteps, "of completed_optimizer_updates"),
    (CountsAreFloats, "of remaining_completions"),
    (PathIsEmpty, "content: checkpoint_path is empty"),
    (BytesAreText, "of sampler_state"),
    (BoolsAreInts, "of sampler_state"),
    (TextIsAscii, "of sampler_state"),
    (NotMetadata, "load_metadata gave dict, expected ControllerResumeMetadata"),
    (RefusesBytes, "failed with TypeError"),
    (RestoresTwice, "content: calls of load_state_dict by restore_sampler gave 2, expected 1"),
    (RestoresNothing, "content: calls of load_state_dict by restore_sampler gave 0, expected 1"),
    (RestoresText, "content: restore_sampler put the sampler somewhere else"),
    (SharesItsState, "content: restore_sampler after another sampler went on put the sampler somewhere else"),
    (LoadsOnce, "content: a second load_metadata, after the sampler went on, gave something else"),
]


@pytest.mark.parametrize(("form", "rule"), BROKEN, ids=[f"{form.__name__}: {rule[:40]}" for form, rule in BROKEN])
def test_a_rule_that_is_broken_is_named(form: type[OwnFormat], rule: str) -> None:
    with pytest.raises(FormatContractError) as caught:
        check_format(form, save=save_with(form), states=FEW)
    assert any(rule in broken for broken in caught.value.broken), caught.value
    assert caught.value.name == form.__name__
    assert str(caught.value).count("\n") == len(caught.value.broken)


def test_a_format_that_trusts_the_disk_may_say_so() -> None:
    check_format(WithoutADigest, save=save_with(WithoutADigest), states=FEW, flipped_bits=False)


def test_what_lies_elsewhere_cannot_be_checked_and_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(FormatContractError, match="changed nothing in the directory"):
        check_format(lambda _: OwnFormat(tmp_path), save=lambda _, command: OwnFormat(tmp_path).save(command))


def test_whoever_was_profiling_goes_on() -> None:
    def profile(*_: object) -> None:
        """Somebody else's."""

    sys.setprofile(profile)
    try:
        check_format(OwnFormat, save=save_with(OwnFormat), states=FEW)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
