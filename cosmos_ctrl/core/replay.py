"""What a checkpoint records of its window, so that a resume repeats only what is unfinished.

* The safe boundary alone says where to go on. The record beside it says what of the draws beyond it was settled when the
  checkpoint was cut; it can make a resume repeat less, and nothing else.
* Settled work is passed over only where the record proves it: it belongs to this boundary, and the sampler gives draw for
  draw what was recorded. At the first doubt everything that follows is generated again.
* A feedback-driven sampler would draw something else. With its keys recorded, the window is issued again as it was, as one
  draw, and the sampler goes on from the cursor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from cosmos_ctrl.core.ledger import LedgerWindow, SamplingBoundary
from cosmos_ctrl.core.resume import ControllerResumeAdapter, ControllerResumeMetadata
from cosmos_ctrl.core.sampling import Draw, Prompt, Sampling, boundary_of


@dataclass(frozen=True, slots=True)
class DrawLabel:
    """What the ledger keeps with a draw for the record."""

    identity: int
    keys: tuple[str, ...]
    """Empty unless the window is to be issued again as it was."""
    epochs: tuple[int, ...] = ()
    """Epoch that each group was first drawn in; empty as `keys` is."""


@dataclass(frozen=True, slots=True)
class RecordedDraw:
    """One draw of the window."""

    identity: int
    """As `draw_identity`, 64 bits."""
    sizes: tuple[int, ...]
    """Completions of each group."""
    settled: tuple[int, ...]
    """Mask of each group's settled completions."""
    keys: tuple[str, ...] = ()
    """Prompt keys; empty unless the window is to be issued again as it was."""
    epochs: tuple[int, ...] = ()
    """Epoch that each group was first drawn in; empty as `keys` is."""


@dataclass(frozen=True, slots=True)
class ReplayRecord:
    """The window of a checkpoint."""

    base: str
    """`boundary_digest` of the safe boundary that it lies beyond."""
    draws: tuple[RecordedDraw, ...]
    """Oldest first. Without keys, none after the last that has something settled."""
    cursor: SamplingBoundary | None = None
    """The boundary after all of them, when their keys are recorded."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """Why a record was not made, or is not believed; the resume repeats more."""

    why: str


@dataclass(frozen=True, slots=True)
class ReplayedDraw:
    """A draw to issue again."""

    draw: Draw
    settled: tuple[int, ...] = ()
    """Mask of each group's settled completions; empty: nothing is proved."""
    epochs: tuple[int, ...] = ()
    """Epoch that each group was first drawn in; empty: the draw's."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What a resumed execution issues before it draws anew."""

    draws: tuple[ReplayedDraw, ...] = ()
    doubt: str = ""
    """Why the record was not used, or not to its end."""

    @property
    def settled_groups(self) -> int:
        """Groups of which nothing is left to do."""
        return sum(
            mask == (1 << size) - 1
            for replayed in self.draws
            for size, mask in zip(replayed.draw.sizes, replayed.settled, strict=False)
        )


def draw_identity(draw: Draw) -> int:
    """64 bits over what a draw gave: its epoch and, group for group, the prompt's key and source and the completions."""
    digest = blake2b(f"{draw.after.epoch}".encode(), digest_size=8)
    for prompt, size in zip(draw.prompts, draw.sizes, strict=True):
        key, source = prompt.key.encode(), prompt.source.encode()
        digest.update(b"/%d/%d/%d/" % (size, len(key), len(source)) + key + source)
    return int.from_bytes(digest.digest(), "big")


def boundary_digest(boundary: SamplingBoundary) -> str:
    """128 bits over a boundary, as hex."""
    state = boundary.encoded_state
    head = f"{boundary.epoch}/{boundary.remaining_completions}/{len(state.codec)}/{state.codec}/"
    return blake2b(head.encode() + state.data, digest_size=16).hexdigest()


def record_of(window: LedgerWindow) -> ReplayRecord | None:
    """The record of a window whose draws were issued with a `DrawLabel`; None when it has nothing to say."""
    draws, useful = [], 0
    for label, sizes, settled in window.draws():
        draws.append(RecordedDraw(label.identity, sizes, settled, label.keys, label.epochs))
        if label.keys or any(settled):
            useful = len(draws)
    if not useful:
        return None
    kept = tuple(draws[:useful])
    return ReplayRecord(boundary_digest(window.safe), kept, window.cursor if kept[-1].keys else None)


def restore(
    sampling: Sampling,
    adapter: ControllerResumeAdapter,
    metadata: ControllerResumeMetadata,
    record: ReplayRecord | Doubt | None,
    *,
    prompt_by_key: Callable[[str], Prompt] | None = None,
) -> tuple[SamplingBoundary, Replay]:
    """Restore the sampler, once; returns the boundary to go on from, and what is issued before the sampler is drawn from.

    Args:
        sampling: nothing was drawn from it yet.
        adapter: restores it; its exceptions propagate as they are.
        metadata: of the checkpoint.
        record: the checkpoint's; None: it has none.
        prompt_by_key: finds a recorded prompt again, KeyError for one that it does not know; None: the sampler is drawn from again.
    """
    start = boundary_of(metadata)
    if isinstance(record, ReplayRecord) and record.base != boundary_digest(start):
        record = Doubt("the record belongs to another boundary")
    if isinstance(record, ReplayRecord) and record.cursor is not None and prompt_by_key is not None:
        found = _recorded_draw(record, record.cursor, start, prompt_by_key)
        if isinstance(found, ReplayedDraw):
            sampling.restore(adapter, _moved(metadata, record.cursor))
            return start, Replay((found,))
        record = found
    sampling.restore(adapter, metadata)
    if isinstance(record, ReplayRecord):
        return start, _redraw(sampling, start.remaining_completions, record)
    return start, Replay(doubt=record.why if record else "")


def _redraw(sampling: Sampling, remaining: int, record: ReplayRecord) -> Replay:
    draws: list[ReplayedDraw] = []
    for number, recorded in enumerate(record.draws, start=1):
        place = f"draw {number} of {len(record.draws)} beyond the boundary"
        if remaining == 0:
            return Replay(tuple(draws), f"the budget ends before {place}")
        draw = sampling.draw(remaining)
        remaining = draw.after.remaining_completions
        if draw_identity(draw) != recorded.identity or draw.sizes != recorded.sizes:
            draws.append(ReplayedDraw(draw))
            return Replay(tuple(draws), f"{place} gives other prompts than were recorded")
        draws.append(ReplayedDraw(draw, recorded.settled))
    return Replay(tuple(draws))


def _recorded_draw(
    record: ReplayRecord,
    cursor: SamplingBoundary,
    start: SamplingBoundary,
    prompt_by_key: Callable[[str], Prompt],
) -> ReplayedDraw | Doubt:
    """The whole window as one draw: the boundary moves past it when all of it is settled."""
    sizes = tuple(size for draw in record.draws for size in draw.sizes)
    if start.remaining_completions - sum(sizes) != cursor.remaining_completions or cursor.epoch < start.epoch:
        return Doubt("the record's groups do not lead from its boundary to its cursor")
    try:
        prompts = tuple(prompt_by_key(key) for draw in record.draws for key in draw.keys)
    except KeyError as error:
        return Doubt(f"the application has no prompt {error}")
    epochs = tuple(epoch for draw in record.draws for epoch in draw.epochs)
    if len(prompts) != len(sizes) or len(epochs) not in (0, len(sizes)):
        return Doubt("the record has not one key for each group")
    settled = tuple(mask for draw in record.draws for mask in draw.settled)
    return ReplayedDraw(Draw(prompts, sizes, cursor), settled, epochs)


def _moved(metadata: ControllerResumeMetadata, to: SamplingBoundary) -> ControllerResumeMetadata:
    place = {
        "epoch": to.epoch,
        "remaining_completions": to.remaining_completions,
        "sampler_state": to.encoded_state,
    }
    return ControllerResumeMetadata(**(metadata.values() | place))
