"""What a trainer is told to do, as values; and how it says what became of a command's completions.

* The leader names every completion of a TRAIN command exactly once; what the user does not name was trained.
* A completion that is not the command's, or that is named twice, is refused before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from cosmos_ctrl.core.resume import ControllerResumeMetadata
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1 import reports_pb2
from cosmos_worker.errors import ProtocolError, UsageError
from cosmos_worker.payloads import Handle, decode_payload
from cosmos_worker.report_items import WORD_BITS, words_of
from cosmos_worker.resuming import metadata_of
from cosmos_worker.transport import name_of

DEFAULT_REASON = "rejected"


@dataclass(frozen=True, slots=True)
class TrainCompletion:
    """One completion to train on."""

    index: int
    """Its place in the group."""
    reward: float
    lowest_version: int
    """Lowest weight version that any of its tokens was sampled with."""
    highest_version: int
    payload: Any
    """Decoded (`payloads.decode_payload`), or a `Handle`, or None where the run has no payloads."""
    codec: str
    """Of the payload; empty without one."""


@dataclass(frozen=True, slots=True)
class TrainGroup:
    """Completions of one prompt."""

    group_id: int
    prompt_key: str
    """Stable identity of the prompt."""
    source: str
    prompt: bytes | None
    """Encoded; None when workers hold the data."""
    prompt_codec: str
    completions: tuple[TrainCompletion, ...]
    """In order of the index. Some of the group's may be absent, having been discarded before."""

    def decoded_prompt(self) -> Any:
        """The prompt, decoded as `payloads.decode_payload` does; None without one."""
        return None if self.prompt is None else decode_payload(self.prompt, self.prompt_codec)


@dataclass(frozen=True, slots=True)
class TrainWork:
    """Train one step."""

    is_save: ClassVar[bool] = False

    number: int
    """Of the command."""
    step: int
    """Completed training steps once this is done."""
    masks: Mapping[int, int]
    """Every group of the step, of all data-parallel shares, with its completions as a bit mask."""
    share: Mapping[int, int]
    """The same for this rank's own share."""
    _fetch: Callable[[TrainWork], list[TrainGroup]] = field(repr=False, compare=False)

    @property
    def completions(self) -> int:
        """Completions of the step, all shares."""
        return sum(mask.bit_count() for mask in self.masks.values())

    def payloads(self) -> list[TrainGroup]:
        """This rank's share, in the command's order; empty if it has none. Fetched anew at each call.

        Raises:
            ProtocolError: what came is not the share that the command names.
        """
        return self._fetch(self)


@dataclass(frozen=True, slots=True)
class SaveWork:
    """Save the model as it is after the last completed step."""

    is_save: ClassVar[bool] = True

    number: int
    """Of the command."""
    step: int
    """Completed training steps that the model contains."""
    updates: int
    """Optimizer updates that the model contains."""
    checkpoint_id: str
    path: str
    """Directory, relative to the run."""
    execution_number: int
    metadata: ControllerResumeMetadata
    """With the boundary; stored by the application when it owns its checkpoints."""
    final: bool
    """The last one: the end follows."""
    repeat_bound_completions: int = 0
    """W; stored with the metadata by an application that owns its checkpoints."""
    horizon_training_steps: int = 0
    """As `Resume.horizon_training_steps`; stored as well."""

    def payloads(self) -> list[TrainGroup]:
        """Raises UsageError: only a TRAIN command has payloads."""
        raise UsageError(f"command {self.number} is a SAVE, which has no payloads: look at is_save first")


Work: TypeAlias = TrainWork | SaveWork


@dataclass(frozen=True, slots=True)
class EndReason:
    """Why the execution ended."""

    name: str
    """BUDGET_EXHAUSTED, STEP_LIMIT, STOP_REQUESTED or FAILURE; UNKNOWN_n of a newer controller, whose end is as it should be."""
    message: str
    completed_training_steps: int

    def __str__(self) -> str:
        text = self.name.lower().replace("_", " ")
        return f"ended after {self.completed_training_steps} training steps: {text}{f' ({self.message})' if self.message else ''}"

    @classmethod
    def of(cls, end: pb.EndCommand) -> EndReason:
        """The message as a value."""
        return cls(name_of(pb.EndReason, end.reason), end.message, end.completed_training_steps)


def work_of(
    response: pb.NextCommandResponse, number: int, dp_rank: int, fetch: Callable[[TrainWork], list[TrainGroup]]
) -> Work | EndReason | None:
    """Command `number` as a value; None: there is none yet."""
    kind = response.WhichOneof("command")
    if kind is None:
        return None
    if kind == "end":
        return EndReason.of(response.end)
    if kind == "save":
        save = response.save
        return SaveWork(
            number=number,
            step=save.completed_training_steps,
            updates=save.completed_optimizer_updates,
            checkpoint_id=save.checkpoint_id,
            path=save.path,
            execution_number=save.execution_number,
            metadata=metadata_of(save.metadata),
            final=save.final,
            repeat_bound_completions=save.repeat_bound_completions,
            horizon_training_steps=save.horizon_training_steps,
        )
    train = response.train
    masks: dict[int, int] = {}
    share: dict[int, int] = {}
    for row, (group, mask) in enumerate(zip(train.groups, train.masks, strict=True)):
        wide = mask << (WORD_BITS * train.words[row] if train.words else 0)
        masks[group] = masks.get(group, 0) | wide
        if (train.dp_ranks[row] if train.dp_ranks else 0) == dp_rank:
            share[group] = share.get(group, 0) | wide
    return TrainWork(number, train.step, masks, share, fetch)


def groups_of(responses: Iterable[pb.FetchPayloadsResponse], work: TrainWork) -> list[TrainGroup]:
    """What FetchPayloads sent, a group that came in parts put together.

    Raises:
        ProtocolError: it is not the share that the command names.
    """
    parts: dict[int, tuple[pb.GroupPayloads, list[TrainCompletion]]] = {}
    for response in responses:
        for message in response.groups:
            _, completions = parts.setdefault(message.group, (message, []))
            completions.extend(map(_completion_of, message.completions))
    groups = [
        TrainGroup(
            group_id=group,
            prompt_key=message.prompt_key,
            source=message.source,
            prompt=message.prompt if message.HasField("prompt") else None,
            prompt_codec=message.prompt_codec,
            completions=tuple(completions),
        )
        for group, (message, completions) in parts.items()
    ]
    found = {group.group_id: sum(1 << one.index for one in group.completions) for group in groups}
    if found != dict(work.share):
        wrong = sorted(group for group in found.keys() | work.share.keys() if found.get(group) != work.share.get(group))
        raise ProtocolError(f"the payloads of command {work.number} are not its share's: groups {wrong[:10]} differ")
    return groups


def _completion_of(message: pb.CompletionPayload) -> TrainCompletion:
    kind = message.WhichOneof("payload")
    payload: Any = None
    if kind == "inline":
        payload = decode_payload(message.inline, message.codec)
    elif kind == "handle":
        payload = Handle(message.handle)
    return TrainCompletion(
        message.completion,
        message.reward,
        message.lowest_version,
        message.highest_version,
        payload,
        message.codec if kind else "",
    )


@runtime_checkable
class NamedCompletion(Protocol):
    """A completion by its attributes; ``reason`` (str) may be missing."""

    @property
    def group_id(self) -> int:
        """The group."""

    @property
    def index(self) -> int:
        """Its place in the group."""


Named: TypeAlias = "Iterable[NamedCompletion | tuple[int, int] | tuple[int, int, str]] | Mapping[tuple[int, int], str]"
"""Completions by name: objects with ``group_id`` and ``index`` (and ``reason``), tuples of the same, or a mapping to reasons."""


def dispositions(work: TrainWork, *, discarded: Named, returned: Named, lost: Named) -> list[reports_pb2.DisposedRows]:
    """Rows that name every completion of `work` once.

    Raises:
        UsageError: a completion is not the command's, or is named twice.
    """
    left = dict(work.masks)
    rows: dict[tuple[reports_pb2.Disposition.ValueType, str], dict[int, int]] = {}
    for disposition, named in (
        (reports_pb2.DISPOSITION_DISCARDED, discarded),
        (reports_pb2.DISPOSITION_RETURNED, returned),
        (reports_pb2.DISPOSITION_PAYLOAD_LOST, lost),
    ):
        for group, index, reason in _named(named):
            if not work.masks.get(group, 0) >> index & 1:
                raise UsageError(f"completion {index} of group {group} is not of command {work.number}")
            if not left[group] >> index & 1:
                raise UsageError(f"completion {index} of group {group} is named twice")
            left[group] &= ~(1 << index)
            key = (disposition, reason if disposition == reports_pb2.DISPOSITION_DISCARDED else "")
            masks = rows.setdefault(key, {})
            masks[group] = masks.get(group, 0) | 1 << index
    rows[reports_pb2.DISPOSITION_TRAINED, ""] = {group: mask for group, mask in left.items() if mask}
    return [_rows_of(disposition, reason, masks) for (disposition, reason), masks in rows.items() if masks]


def _named(named: Named) -> Iterable[tuple[int, int, str]]:
    if isinstance(named, Mapping):
        for (group, index), reason in named.items():
            yield group, index, reason or DEFAULT_REASON
        return
    for one in named:
        if isinstance(one, tuple):
            yield one[0], one[1], one[2] if len(one) > 2 else DEFAULT_REASON
        else:
            yield one.group_id, one.index, getattr(one, "reason", "") or DEFAULT_REASON


def _rows_of(
    disposition: reports_pb2.Disposition.ValueType, reason: str, masks: Mapping[int, int]
) -> reports_pb2.DisposedRows:
    rows = reports_pb2.DisposedRows(disposition=disposition, reason=reason)
    words = []
    for group, mask in masks.items():
        for word, bits in words_of(mask):
            rows.groups.append(group)
            rows.masks.append(bits)
            words.append(word)
    if any(words):
        rows.words.extend(words)
    return rows
