"""Configuration: one TOML file, then the environment, then flags. Validated whole, before anything is started.

* Unknown keys, other types and impossible values are refused with the key, the value and the reason.
* ``COSMOS_CTRL__SECTION__KEY=value`` overrides ``[section] key``; the value is read as TOML, and as a string if it is none.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from cosmos_ctrl.checkpoints.compatibility import Topology, plain_compatibility
from cosmos_ctrl.checkpoints.retention import RetentionPolicy
from cosmos_ctrl.checkpoints.stores.opening import ObjectLocation, parse_location
from cosmos_ctrl.core.policy import RunPolicy

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

ENVIRONMENT_PREFIX = "COSMOS_CTRL__"

_Count = Annotated[int, Field(ge=0)]
_Positive = Annotated[int, Field(ge=1)]
#: Finite, and short enough for a timer and for the wire.
_Seconds = Annotated[float, Field(gt=0, le=1e6)]
_Name = Annotated[str, Field(min_length=1)]
_Mesh = Annotated[dict[_Name, _Positive], Field(min_length=1)]


def _storable(value: dict[str, Any]) -> dict[str, Any]:
    # What a manifest cannot carry would be refused only at the first checkpoint, after the training it should save.
    try:
        plain_compatibility(value)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return value


def _openable(location: str) -> str:
    if location:
        parse_location(location)
    return location


class ConfigurationError(Exception):
    """The configuration cannot be used. Names every wrong key, its value and the reason."""

    def __init__(self, source: str, problems: list[str]) -> None:
        self.source, self.problems = source, tuple(problems)
        super().__init__(f"{source}:\n" + "\n".join(f"  {problem}" for problem in problems))


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RunSection(_Section):
    """[run]"""

    name: Annotated[str, Field(min_length=1, pattern=r"^[^/\\]+$")] = "run"
    """Name of the run, for people, and of its directory unless one is given: without separators."""
    directory: Annotated[str, AfterValidator(_openable)] = ""
    """Where executions and checkpoints lie: a path, or s3://bucket/prefix, gs://bucket/prefix, az://container/prefix; runs/NAME when
    empty."""
    journal: bool = False
    """Whether every draw, settlement and step is written to executions/NUMBER.jsonl, for `cosmos-ctrl report`; of a run in an object
    store below runs/NAME."""


class ServerSection(_Section):
    """[server]"""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on; 0 takes a free one, which is printed."""
    max_message_bytes: Annotated[int, Field(ge=1 << 16, le=(1 << 31) - 1)] = 64 << 20
    """Largest message in either direction."""
    keepalive_s: _Seconds = 20.0
    """Silence after which the connection itself is probed."""
    linger_s: Annotated[float, Field(ge=0, le=1e6)] = 10.0
    """How long an execution that is over waits for its workers to hear so."""


class TrainSection(_Section):
    """[train]"""

    resume: bool | _Name = True
    """true: the newest committed checkpoint; a path: that one and no other; false: a lineage of its own."""
    groups_per_step: _Positive = 8
    """Prompt groups in one training step."""
    max_steps: _Count | None = None
    """Hard limit; counts replayed steps."""
    tail: Literal["train", "discard", "wait"] = "train"
    """What becomes of groups that are too few for a whole step when the budget is exhausted. They wait in the final checkpoint, and come
    again in an execution with another `tail` or smaller steps."""
    stop_grace_s: _Seconds = 120.0
    """Time to finish in after a stop was requested."""
    step_timeout_s: _Seconds = 3600.0
    """Longest time between a TRAIN command and its last rank's report: a rank that hangs in a collective ends the execution."""
    gate_timeout_s: _Seconds = 600.0
    """Longest wait for all trainer ranks to confirm what they restored."""
    trainers: Annotated[dict[_Name, _Positive], Field(min_length=1)] = {"policy": 1}
    """Trainer groups and their ranks; rank 0 of the first one leads."""
    mesh: dict[_Name, _Mesh] = {}
    """By trainer group the dimensions of its device mesh, in order, with their sizes: { policy = { dp_shard = 2, tp = 2 } }. Recorded in every
    checkpoint with the world size."""
    sharding: dict[_Name, _Name] = {}
    """By trainer group how its state lies on the mesh, in a word of the application's own: { policy = "fsdp2" }. Recorded as well."""

    @model_validator(mode="after")
    def _topology_fits(self) -> TrainSection:
        for key, declared in (("mesh", self.mesh), ("sharding", self.sharding)):
            if unknown := sorted(declared.keys() - self.trainers.keys()):
                raise ValueError(
                    f"train.{key} names {', '.join(unknown)}, and train.trainers has {', '.join(self.trainers)}"
                )
        for group, sizes in self.mesh.items():
            if math.prod(sizes.values()) != self.trainers[group]:
                told = " × ".join(f"{name} {size}" for name, size in sizes.items())
                raise ValueError(
                    f"train.mesh of {group} is {told}, and train.trainers gives it {self.trainers[group]} ranks"
                )
        return self


class RolloutSection(_Section):
    """[rollout]"""

    n_generation: _Positive = 8
    """Completions of one prompt group."""
    max_outstanding_groups: _Positive = 64
    """Groups that may be waiting, leased or ready at once."""
    max_buffered_bytes: _Positive = 1 << 30
    """Payload bytes held before leasing stops."""
    min_completions_per_group: _Positive = 1
    """A group with fewer left after discards is dropped whole."""
    max_staleness: _Count | None = None
    """Most training steps between a group's lowest weight version and the step that uses it."""
    on_stale: Literal["discard", "regenerate"] = "discard"
    """What becomes of a group that is too old."""
    poison_limit: _Positive = 3
    """Failure reports after which a group is discarded."""
    lease_deadline_s: _Seconds | None = None
    """Longest time a group may be out; unset: as long as the worker's session lives."""
    announces_weights: bool = True
    """Whether workers wait for announced weights."""

    @model_validator(mode="after")
    def _minimum_fits(self) -> RolloutSection:
        if self.min_completions_per_group > self.n_generation:
            raise ValueError(
                f"min_completions_per_group {self.min_completions_per_group} is more than n_generation {self.n_generation}: "
                "every group would be dropped"
            )
        if self.max_staleness is not None and not self.announces_weights:
            raise ValueError("max_staleness is counted in announced weight versions, and announces_weights is false")
        return self


class SamplingSection(_Section):
    """[sampling]"""

    prompts: str = ""
    """Prompts file, JSON Lines with `prompt` and anything else; given to workers as it is."""
    shuffle: bool = True
    """Whether each epoch has an order of its own."""
    seed: _Count = 0
    """Of that order."""
    epochs: _Positive | None = None
    """Budget as passes over the prompts."""
    completions: _Positive | None = None
    """Budget as completions; one of the two is due."""


class WindowSection(_Section):
    """[window]"""

    max_draws: _Positive = 1 << 20
    """Draws beyond the safe boundary before no more are made."""
    max_bytes: _Positive = 1 << 30
    """Sampler-state bytes beyond the safe boundary."""
    on_full: Literal["wait", "discard"] = "wait"
    """Whether a full window waits for its oldest group, or discards it when it is out with a worker."""


class ReplaySection(_Section):
    """[replay]"""

    skip_settled: bool | None = None
    """Whether checkpoints record what of their window is settled, and a resume does not generate that again where the sampler draws
    what was recorded; unset: if the sampler declares itself deterministic."""
    reissue_recorded: bool = False
    """Whether checkpoints also record the window's prompt keys, and a resume issues those instead of drawing anew: for samplers that
    depend on feedback."""
    max_record_bytes: _Positive = 16 << 20
    """Largest record; a window that needs more is repeated whole."""


class CheckpointsSection(_Section):
    """[checkpoints]"""

    owner: Literal["manifest", "application"] = "manifest"
    """Who commits a checkpoint."""
    every_steps: _Count = 0
    """A checkpoint follows every so many steps; 0: only the last."""
    on_corrupt: Literal["error", "previous"] = "error"
    """What a damaged newest checkpoint means for automatic resume."""
    save_timeout_s: _Seconds = 1800.0
    """Longest time a save may take."""
    keep_last: _Count = 0
    """So many of the newest sound checkpoints are kept, by execution number, then step; 0: all."""
    keep_every: _Count = 0
    """With keep_last: checkpoints whose step is a multiple of this are kept for ever as well; 0: none."""
    compatibility: Annotated[dict[str, Any], AfterValidator(_storable)] = {}
    """The application's own settings that a resumed run must share. Kept and shown in the clear."""
    reshard: bool = False
    """Whether a checkpoint of another world size, mesh or sharding may be loaded: its state is saved by torch.distributed.checkpoint."""

    @model_validator(mode="after")
    def _retention_fits(self) -> CheckpointsSection:
        if self.owner == "application" and self.keep_last:
            raise ValueError("keep_last deletes checkpoints that a manifest commits, and owner is 'application'")
        self.retention()
        return self

    def retention(self) -> RetentionPolicy:
        """Which checkpoints are kept."""
        return RetentionPolicy(keep_last=self.keep_last, keep_every=self.keep_every)


class WorkersSection(_Section):
    """[workers]"""

    session_ttl_s: _Seconds = 15.0
    """A worker's session lapses when nothing was heard for so long."""
    max: _Positive = 100_000
    """Worker processes remembered in one execution."""
    max_unacknowledged_batches: _Positive = 64
    """Report batches a worker may have unacknowledged."""
    max_batch_completions: _Positive = 1 << 16
    """Completions in one batch."""


class LocalSection(_Section):
    """[local]: what `cosmos-ctrl run` starts on this machine."""

    rollout_workers: _Positive = 2
    """Rollout worker processes."""
    crash_at_step: _Count = 0
    """After so many steps of the first execution, everything but one rollout worker is killed; 0: never."""
    restarts: _Count = 5
    """Executions started anew after a failure before giving up."""


class Config(_Section):
    """The whole configuration."""

    run: RunSection = RunSection()
    server: ServerSection = ServerSection()
    train: TrainSection = TrainSection()
    rollout: RolloutSection = RolloutSection()
    sampling: SamplingSection = SamplingSection()
    window: WindowSection = WindowSection()
    replay: ReplaySection = ReplaySection()
    checkpoints: CheckpointsSection = CheckpointsSection()
    workers: WorkersSection = WorkersSection()
    local: LocalSection = LocalSection()
    application: dict[str, Any] = {}
    """Handed to the workers as it is."""

    @model_validator(mode="after")
    def _sections_fit(self) -> Config:
        wanted = self.train.groups_per_step
        if self.rollout.max_outstanding_groups < wanted:
            raise ValueError(
                f"rollout.max_outstanding_groups {self.rollout.max_outstanding_groups} is less than train.groups_per_step "
                f"{wanted}: no step would ever be whole"
            )
        if self.workers.max_batch_completions < self.rollout.n_generation:
            raise ValueError(
                f"workers.max_batch_completions {self.workers.max_batch_completions} is less than rollout.n_generation "
                f"{self.rollout.n_generation}: no group would fit a batch"
            )
        if self.checkpoints.owner == "application" and (self.replay.skip_settled or self.replay.reissue_recorded):
            raise ValueError(
                "replay.skip_settled and replay.reissue_recorded need checkpoints.owner = 'manifest': their record is an artifact of the "
                "manifest"
            )
        return self

    @property
    def location(self) -> str:
        """Where executions and checkpoints lie: a path, or an object store's URI."""
        found = self._location
        return str(found) if isinstance(found, Path) else found.uri

    @property
    def in_object_store(self) -> bool:
        """Whether `location` is in an object store."""
        return not isinstance(self._location, Path)

    @property
    def directory(self) -> Path:
        """The run's directory; of a run in an object store the one for what stays on this machine, such as its journals."""
        return self._location if isinstance(self._location, Path) else Path("runs", self.run.name)

    @property
    def _location(self) -> Path | ObjectLocation:
        return parse_location(self.run.directory or f"runs/{self.run.name}")

    def topology(self) -> Topology:
        """How the trainers are laid out, and whether a checkpoint of another layout may be loaded."""
        train = self.train
        return Topology.of(train.trainers, train.mesh, train.sharding, reshard=self.checkpoints.reshard)

    def policy(self, *, deterministic: bool = False) -> RunPolicy:
        """What the core is told, with a sampler that is deterministic or is not."""
        return RunPolicy(
            trainer_groups=tuple(self.train.trainers.items()),
            groups_per_step=self.train.groups_per_step,
            max_training_steps=self.train.max_steps,
            save_every_steps=self.checkpoints.every_steps,
            tail=self.train.tail,
            min_completions_per_group=self.rollout.min_completions_per_group,
            max_staleness=self.rollout.max_staleness,
            on_stale=self.rollout.on_stale,
            poison_limit=self.rollout.poison_limit,
            max_outstanding_groups=self.rollout.max_outstanding_groups,
            max_buffered_bytes=self.rollout.max_buffered_bytes,
            max_window_draws=self.window.max_draws,
            max_window_bytes=self.window.max_bytes,
            on_full_window=self.window.on_full,
            records_window=self._records_window(deterministic),
            announces_weights=self.rollout.announces_weights,
            application_owns_checkpoints=self.checkpoints.owner == "application",
            lease_deadline_s=self.rollout.lease_deadline_s,
            session_ttl_s=self.workers.session_ttl_s,
            gate_timeout_s=self.train.gate_timeout_s,
            save_timeout_s=self.checkpoints.save_timeout_s,
            stop_grace_s=self.train.stop_grace_s,
            max_message_bytes=self.server.max_message_bytes,
            step_timeout_s=self.train.step_timeout_s,
            max_workers=self.workers.max,
            max_unacknowledged_batches=self.workers.max_unacknowledged_batches,
            max_batch_completions=self.workers.max_batch_completions,
        )

    def _records_window(self, deterministic: bool) -> Literal["nothing", "settled", "keys"]:
        if self.replay.reissue_recorded:
            return "keys"
        wanted = deterministic if self.replay.skip_settled is None else self.replay.skip_settled
        return "settled" if wanted and self.checkpoints.owner == "manifest" else "nothing"


def load_config(
    path: Path | None, *, environment: Mapping[str, str], overrides: Mapping[str, Mapping[str, Any]] | None = None
) -> Config:
    """Read and validate the configuration.

    Args:
        path: the TOML file; None: defaults.
        environment: variables, of which those with the prefix override the file.
        overrides: values by section and key, from flags, that override both.

    Raises:
        ConfigurationError: it cannot be read, or a value is refused.
    """
    source = str(path) if path is not None else "configuration"
    values: dict[str, Any] = {}
    said: dict[str, str] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(source, [f"cannot be read: {error.strerror}"]) from error
        except ValueError as error:
            raise ConfigurationError(source, [f"is not TOML: {error}"]) from error
    for name in sorted(environment):
        if name.startswith(ENVIRONMENT_PREFIX):
            *sections, key = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
            if not sections or not all((*sections, key)):
                raise ConfigurationError(source, [f"{name}: expected {ENVIRONMENT_PREFIX}SECTION__KEY"])
            table = values
            for section in sections:
                table = _section(table, section, source)
            table[key] = _toml_value(environment[name])
            said[".".join((*sections, key))] = name
    for section, keys in (overrides or {}).items():
        _section(values, section, source).update(keys)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigurationError(source, problems_of(error, said)) from error


def problems_of(error: ValidationError, said: Mapping[str, str] | None = None, *, section: str = "") -> list[str]:
    """Each refused key with its value and the reason, a line each.

    Args:
        error: pydantic's.
        said: variables that set keys, by the key.
        section: what the keys lie in, if the whole configuration was not validated.
    """
    return [_problem(detail, said or {}, section) for detail in error.errors()]


def _section(values: dict[str, Any], name: str, source: str) -> dict[str, Any]:
    section = values.setdefault(name, {})
    if not isinstance(section, dict):
        raise ConfigurationError(source, [f"{name} = {section!r}: expected a section [{name}]"])
    return section


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text


def _problem(detail: Any, said: Mapping[str, str], section: str) -> str:
    key = ".".join(str(part) for part in (*filter(None, [section]), *detail["loc"]))
    if key in said:
        key = f"{key} (from {said[key]})"
    if detail["type"] == "extra_forbidden":
        return f"{key} = {detail['input']!r}: no such key"
    return f"{key} = {detail['input']!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}"
