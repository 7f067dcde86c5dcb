"""The disk: what a checkpoint keeps of its window, and what has become of it when it is read again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from oracle import Checkpoint, Cut

from cosmos_ctrl.checkpoints.window import decode_record, encode_record
from cosmos_ctrl.core.commands import Save
from cosmos_ctrl.core.ledger import SamplingBoundary
from cosmos_ctrl.core.replay import Doubt, ReplayRecord, boundary_digest, record_of

_MOST_BYTES = 1 << 20


def write(save: Save, cut: Cut, mode: str) -> bytes | None:
    """The record of a save that is not committed yet, compared with the books of its cut; None: there is nothing to record."""
    if save.window is None:
        assert mode == "nothing", "the window of a save is gone before it is committed"
        return None
    assert mode != "nothing"
    record = record_of(save.window)
    if record is not None:
        data = encode_record(record)
        assert decode_record(data, most_bytes=_MOST_BYTES) == record, "a record came back changed"
    _check(record, cut, keys=mode == "keys")
    return data if record is not None else None


def _check(record: ReplayRecord | None, cut: Cut, *, keys: bool) -> None:
    wanted = list(cut.window)
    while wanted and not keys and not any(wanted[-1].settled):
        wanted.pop()
    if record is None:
        assert not wanted, "nothing was recorded of a window that has something settled"
        return
    found = [(draw.sizes, draw.settled, draw.keys) for draw in record.draws]
    assert found == [(draw.sizes, draw.settled, draw.keys if keys else ()) for draw in wanted], (
        "the record is not the window as it was when the checkpoint was cut"
    )
    assert (record.cursor is not None) == keys
    if record.cursor is not None and cut.cursor is not None:
        cursor = record.cursor
        assert (cursor.epoch, cursor.sampler_state) == (cut.cursor.epoch, cut.cursor.state), "not the cursor of the cut"


def read(parent: Checkpoint, published: Sequence[Checkpoint], rng: random.Random) -> tuple[str, Any]:
    """What a resume finds of the record, and how that came: "intact", or what is wrong with it."""
    if parent.record is None:
        return "none", None
    data = parent.record
    fault = rng.choices(["intact", "lost", "cut off", "damaged", "foreign"], [76, 5, 5, 6, 8])[0]
    if fault == "lost":
        return fault, None
    if fault == "cut off":
        data = parent.record[: rng.choice([rng.randrange(len(parent.record)), -rng.randint(1, 4)])]
    elif fault == "damaged":
        at = rng.randrange(len(parent.record))
        data = parent.record[:at] + bytes([parent.record[at] ^ 1 << rng.randrange(8)]) + parent.record[at + 1 :]
    elif fault == "foreign":
        data = _of_another_boundary(parent, published, rng)
    record = _decode(data)
    if fault == "damaged" and record == _decode(parent.record):
        fault = "intact"  # a bit that says nothing
    assert isinstance(record, Doubt) == (fault in ("cut off", "damaged")), f"what is {fault} is read as {record}"
    return fault, record


def _decode(data: bytes) -> ReplayRecord | Doubt:
    try:
        return decode_record(data, most_bytes=_MOST_BYTES)
    except ValueError as error:
        return Doubt(f"the record cannot be used: {error}")


def _of_another_boundary(parent: Checkpoint, published: Sequence[Checkpoint], rng: random.Random) -> bytes:
    """Another checkpoint's record, or this one's as if its boundary had another epoch, budget or sampler state."""

    def place(checkpoint: Checkpoint) -> tuple[int, int, Any]:
        # The manifest's digest tells records of one boundary apart.
        metadata = checkpoint.metadata
        return metadata.epoch, metadata.remaining_completions, metadata.sampler_state

    others = [other.record for other in published if place(other) != place(parent) and other.record is not None]
    if others and rng.random() < 0.5:
        return rng.choice(others)
    epoch, remaining, state = place(parent)
    other_place = rng.choice(
        [(epoch + 1, remaining, state), (epoch, remaining + 1, state), (epoch, remaining, {**state, "padding": "y"})]
    )
    base = SamplingBoundary(epoch=other_place[0], remaining_completions=other_place[1], sampler_state=other_place[2])
    record = decode_record(parent.record or b"", most_bytes=_MOST_BYTES)
    return encode_record(replace(record, base=boundary_digest(base)))
