"""The record of a window as an artifact: it says what it was told, or it is a doubt; nothing in it can fail a resume."""

from __future__ import annotations

import base64
import errno
import json
import os
import random
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_helpers import CONTENT, load, manifest_of, publish, receipts, write
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_ctrl.checkpoints import durable
from cosmos_ctrl.checkpoints.artifacts import Artifact
from cosmos_ctrl.checkpoints.digests import digest_bytes
from cosmos_ctrl.checkpoints.discovery import Found, discover, open_checkpoint
from cosmos_ctrl.checkpoints.manifest import publish_from_receipts
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.checkpoints.window import RECORD_NAME, decode_record, encode_record, read_record, write_record
from cosmos_ctrl.core.errors import (
    ArtifactMissingError,
    ArtifactUnexpectedError,
    CheckpointConflictError,
    CheckpointDamagedError,
    StorageUnavailableError,
    UnsafeNameError,
)
from cosmos_ctrl.core.ledger import LedgerWindow, SamplingBoundary, SamplingReplayLedger
from cosmos_ctrl.core.replay import Doubt, DrawLabel, RecordedDraw, ReplayRecord, record_of
from cosmos_ctrl.server import _check_declared_names

LIMIT = 1 << 20


def boundary(remaining: int, *, epoch: int = 1, state: Any = None) -> SamplingBoundary:
    return SamplingBoundary(
        epoch=epoch, sampler_state={"at": remaining} if state is None else state, remaining_completions=remaining
    )


def a_window(
    draws: int = 4, *, size: int = 3, keys: bool = False, settled: Any = ((1, 0b111), (2, 0b010))
) -> LedgerWindow:
    """Draws of one group, some of them with something settled."""
    ledger = SamplingReplayLedger(boundary(size * draws))
    for at in range(draws):
        label = DrawLabel(7919 * (at + 1) << 40, (f"key-{at}",) if keys else ())
        ledger.issue_draw(boundary(size * (draws - 1 - at)), (size,), label)
    for at, mask in settled:
        ledger.settle_mask(1 + at, mask)
    return ledger.window()


def a_record(**options: Any) -> ReplayRecord:
    record = record_of(a_window(**options))
    assert record is not None
    return record


def decode(data: bytes, most_bytes: int = LIMIT) -> ReplayRecord:
    return decode_record(data, most_bytes=most_bytes)


@st.composite
def records(draw: st.DrawFn) -> ReplayRecord:
    keyed = draw(st.booleans())
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    found = []
    for _ in range(draw(st.integers(1, 6))):
        sizes = tuple(draw(st.lists(st.integers(1, 130), min_size=1, max_size=4)))
        masks = tuple(draw(st.integers(0, (1 << size) - 1)) for size in sizes)
        keys = tuple(draw(text) for _ in sizes) if keyed else ()
        found.append(RecordedDraw(draw(st.integers(0, (1 << 64) - 1)), sizes, masks, keys))
    state = draw(st.one_of(st.binary(max_size=20), st.dictionaries(text, st.integers(), max_size=3), st.none()))
    cursor = SamplingBoundary(
        epoch=draw(st.integers(1, (1 << 64) - 1)),
        sampler_state=state,
        remaining_completions=draw(st.integers(0, (1 << 64) - 1)),
    )
    return ReplayRecord(draw(text), tuple(found), cursor if keyed else None)


# -- what is written is read


@given(records())
def test_what_is_encoded_is_decoded(record: ReplayRecord) -> None:
    data = encode_record(record)
    assert decode(data) == record
    assert encode_record(decode(data)) == data
    assert encode_record(replace(record)) == data


def test_a_states_codec_comes_back_as_it_was() -> None:
    for state in (b"\x00\xff", {"a": [1, None, "ü"]}, "text", [1]):
        cursor = boundary(0, state=state)
        record = replace(a_record(keys=True), cursor=cursor)
        assert decode(encode_record(record)).cursor == cursor


def test_the_format_is_what_it_was() -> None:
    """Checkpoints of an older version are read: their records by these names and numbers."""
    document = json.loads(zlib.decompress(encode_record(a_record(keys=True))))
    expected = {
        "schema_version": 1,
        "base": a_record().base,
        "identities": base64.b64encode(b"".join((7919 * at << 40).to_bytes(8, "big") for at in range(1, 5))).decode(),
        "sizes": [[3], [3], [3], [3]],
        "settled": base64.b64encode(bytes([0b10111000, 0b0000])).decode(),
        "keys": [["key-0"], ["key-1"], ["key-2"], ["key-3"]],
        "cursor": {
            "epoch": 1,
            "remaining_completions": 0,
            "sampler_state": {"codec": "json", "data": '{"at":0}'},
        },
    }
    assert {name: document[name] for name in expected} == expected
    without = json.loads(zlib.decompress(encode_record(a_record())))
    assert (without["keys"], without["cursor"], without["sizes"]) == (None, None, [[3], [3], [3]])
    assert without["settled"] == base64.b64encode(bytes([0b10111000, 0])).decode()


# -- damage


def changed(**values: Any) -> bytes:
    """A small record with other values in its document; None leaves one out."""
    document = json.loads(zlib.decompress(encode_record(a_record(keys=True)))) | values
    document = {key: value for key, value in document.items() if value is not LEFT_OUT}
    return zlib.compress(json.dumps(document).encode())


LEFT_OUT = object()
FIELDS = ("schema_version", "base", "identities", "sizes", "settled", "keys", "cursor")


def test_the_small_record_is_whole_before_it_is_damaged() -> None:
    assert decode(changed()) == a_record(keys=True)


def cursor_with(**values: Any) -> dict[str, Any]:
    state = {"codec": "json", "data": "1"}
    return {"epoch": 1, "remaining_completions": 0, "sampler_state": state} | values


DAMAGED = {
    "empty": b"",
    "no compression": b'{"schema_version":1}',
    "cut off": encode_record(a_record())[:-1],
    "trailing bytes": encode_record(a_record()) + b"\0",
    "twice": encode_record(a_record()) * 2,
    "not JSON": zlib.compress(b"{"),
    "not UTF-8": zlib.compress(b'{"base":"\xff"}'),
    "a list": zlib.compress(b"[]"),
    "null": zlib.compress(b"null"),
    "too deep": zlib.compress(b"[" * 100_000 + b"]" * 100_000),
    "a key twice": zlib.compress(b'{"base":"a","base":"b"}'),
    **{f"without {name}": changed(**{name: LEFT_OUT}) for name in FIELDS},
    "an unknown field": changed(more=1),
    "another version": changed(schema_version=2),
    "a version that is no number": changed(schema_version=True),
    "a version as text": changed(schema_version="1"),
    "a base that is no text": changed(base=1),
    "identities that are not base64": changed(identities="*" * 12),
    "identities that are not ASCII": changed(identities="é"),
    "identities with something between them": changed(identities="*" + base64.b64encode(bytes(32)).decode()),
    "a bitmap with something in it": changed(settled="*" + base64.b64encode(b"\0\0").decode()),
    "an identity too few": changed(identities=base64.b64encode(bytes(24)).decode()),
    "an identity too many": changed(identities=base64.b64encode(bytes(40)).decode()),
    "half an identity": changed(identities=base64.b64encode(bytes(28)).decode()),
    "a draw too few": changed(sizes=[[3], [3], [3]]),
    "a draw too many": changed(sizes=[[3], [3], [3], [3], [3]]),
    "no draws": changed(identities="", sizes=[], settled="", keys=[]),
    "draws without groups": changed(sizes=[[], [], [], []], settled="", keys=[[], [], [], []]),
    "a size of zero": changed(sizes=[[3], [3], [3], [0]]),
    "a negative size": changed(sizes=[[3], [3], [3], [-3]]),
    "a size that is no int": changed(sizes=[[3], [3], [3], [3.0]]),
    "a size that is a bool": changed(sizes=[[3], [3], [3], [True]]),
    "a size beyond all bounds": changed(sizes=[[3], [3], [3], [1 << 40]]),
    "sizes beyond the bitmap": changed(sizes=[[3], [3], [3], [8]]),
    "sizes far beyond the bitmap": changed(sizes=[[3], [3], [3], [(1 << 32) - 1]]),
    "sizes short of the bitmap": changed(sizes=[[1], [1], [3], [3]]),
    "a bitmap that is not base64": changed(settled="***"),
    "a bitmap too short": changed(settled=base64.b64encode(b"\0").decode()),
    "a bitmap too long": changed(settled=base64.b64encode(b"\0\0\0").decode()),
    "bits beyond the completions": changed(settled=base64.b64encode(bytes([0, 0b10000])).decode()),
    "the last bit of all": changed(settled=base64.b64encode(bytes([0, 0b10000000])).decode()),
    "keys of a draw too few": changed(keys=[["a"], ["b"], ["c"]]),
    "keys of a draw too many": changed(keys=[["a"], ["b"], ["c"], ["d"], ["e"]]),
    "keys that are no texts": changed(keys=[[1], [2], [3], [4]]),
    "keys that are no lists": changed(keys=["a", "b", "c", "d"]),
    "a key that is half a surrogate pair": changed(keys=[["\ud800"], ["b"], ["c"], ["d"]]),
    "a cursor that is none": changed(cursor=[]),
    "an epoch of zero": changed(cursor=cursor_with(epoch=0)),
    "an epoch beyond all bounds": changed(cursor=cursor_with(epoch=1 << 64)),
    "a negative rest": changed(cursor=cursor_with(remaining_completions=-1)),
    "a rest that is no int": changed(cursor=cursor_with(remaining_completions=1.0)),
    "a cursor with more": changed(cursor=cursor_with(more=1)),
    "a state that is not its codec's": changed(cursor=cursor_with(sampler_state={"codec": "json", "data": "{"})),
    "a state that is not base64": changed(cursor=cursor_with(sampler_state={"codec": "bytes", "data": "*"})),
    "a state without codec": changed(cursor=cursor_with(sampler_state={"codec": "", "data": "1"})),
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_damage_is_a_value_error_and_a_doubt_and_nothing_else(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of any text: what matters is that it is of no other kind
        decode(data)
    if data:
        doubt = read_record(*committed(tmp_path, data), most_bytes=LIMIT)
        assert isinstance(doubt, Doubt)
        assert RECORD_NAME in doubt.why


def test_damage_is_described_without_its_content() -> None:
    with pytest.raises(ValueError, match="fields are wrong") as caught:
        decode(changed(base=["secret"]))
    assert "secret" not in str(caught.value)


def committed(run: Path, data: bytes) -> tuple[LocalStore, Found]:
    """A checkpoint whose record is `data`, whatever that is: committed with its true digest."""
    directory = write(run / "checkpoints" / "c", {"rank0.pt": b"shard", RECORD_NAME: data})
    publish_from_receipts(directory, manifest_of(artifacts=receipts({"rank0.pt": b"shard", RECORD_NAME: data})))
    store = LocalStore(run)
    found = discover(store, compatibility=None, on_corrupt="error").chosen
    assert found is not None
    return store, found


def test_each_flipped_byte_is_a_value_error_or_says_the_same() -> None:
    """zlib's own checksum sees every one of them; a few bits, of its header and its padding, mean nothing."""
    record = a_record(draws=3)
    data = encode_record(record)
    for at in range(len(data)):
        for bit in (0, 3, 7):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            try:
                assert decode(bytes(flipped)) == record
            except ValueError:
                continue


def test_each_flipped_byte_of_the_document_is_a_value_error_or_another_record() -> None:
    """Below the checksum: what a writer with a bug might have written."""
    text = zlib.decompress(encode_record(a_record(draws=3, keys=True, settled=((1, 0b111),))))
    for at in range(len(text)):
        for bit in range(8):
            flipped = bytearray(text)
            flipped[at] ^= 1 << bit
            try:
                found = decode(zlib.compress(bytes(flipped), 0))
            except ValueError:
                continue
            for draw in found.draws:
                assert len(draw.sizes) == len(draw.settled) > 0
                assert all(0 <= mask < 1 << size for size, mask in zip(draw.sizes, draw.settled, strict=True))


@settings(max_examples=200)
@given(st.binary(max_size=60), st.booleans())
def test_any_bytes_are_a_record_or_a_value_error(data: bytes, compressed: bool) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        decode(zlib.compress(data) if compressed else data)


def test_every_truncation_is_a_value_error() -> None:
    data = encode_record(a_record(keys=True))
    for length in range(len(data)):
        with pytest.raises(ValueError):  # noqa: PT011
            decode(data[:length])


def test_a_record_that_grows_beyond_the_limit_is_not_inflated_any_further() -> None:
    bomb = zlib.compress(b" " * (64 << 20))
    assert len(bomb) < 100_000
    with pytest.raises(ValueError, match="grows to more than 1000000 bytes"):
        decode(bomb, 1_000_000)


def test_a_record_may_grow_to_its_limit_and_not_a_byte_further() -> None:
    record = a_record()
    data = encode_record(record)
    size = len(zlib.decompress(data))
    assert decode(data, size) == record
    with pytest.raises(ValueError, match="grows"):
        decode(data, size - 1)


# -- in a checkpoint


def write_and_publish(run: Path, window: LedgerWindow | None = None) -> tuple[Path, dict[str, Artifact]]:
    directory = write(run / "checkpoints" / "c")
    record = write_record(LocalStore(directory), window or a_window(), most_bytes=LIMIT)
    assert isinstance(record, dict)
    publish_from_receipts(directory, manifest_of(artifacts=receipts() | record))
    return directory, record


def test_a_record_is_written_whole_and_is_what_its_artifact_says(tmp_path: Path) -> None:
    written = write_record(LocalStore(tmp_path), a_window(), most_bytes=LIMIT)
    data = (tmp_path / RECORD_NAME).read_bytes()
    assert written == {RECORD_NAME: Artifact(len(data), digest_bytes(data))}
    assert decode(data) == a_record()
    assert os.listdir(tmp_path) == [RECORD_NAME]  # noqa: PTH208


def test_a_record_is_durable_before_its_artifact_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, bytes | None]] = []
    real_fsync, real_link = os.fsync, os.link

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
        made.append(("fsync", None if path.is_dir() else path.read_bytes()))
        real_fsync(descriptor)

    def link(source: Path, target: Path) -> None:
        made.append(("link", None))
        real_link(source, target)

    store = LocalStore(tmp_path)
    store.put_if_absent("before", b"")  # the directory's own name
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    write_record(store, a_window(), most_bytes=LIMIT)
    assert made == [("fsync", (tmp_path / RECORD_NAME).read_bytes()), ("link", None), ("fsync", None)]


def test_nothing_to_record_writes_nothing(tmp_path: Path) -> None:
    assert write_record(LocalStore(tmp_path), a_window(settled=()), most_bytes=LIMIT) == {}
    assert not list(tmp_path.iterdir())


def test_a_record_that_is_too_large_is_a_doubt_and_no_file(tmp_path: Path) -> None:
    size = len(encode_record(a_record()))
    doubt = write_record(LocalStore(tmp_path), a_window(), most_bytes=size - 1)
    assert isinstance(doubt, Doubt)
    assert f"3 draws takes {size} bytes, at most {size - 1}" in doubt.why
    assert not list(tmp_path.iterdir())
    assert isinstance(write_record(LocalStore(tmp_path), a_window(), most_bytes=size), dict)


@pytest.mark.parametrize(("draws", "size"), [(2, 300_000), (2000, 4), (50, 2000)])
def test_a_record_that_is_written_is_read_with_the_same_limit(tmp_path: Path, draws: int, size: int) -> None:
    """However well it was compressed: a record that only its reader finds too large would be noticed when it is too late."""
    window = a_window(draws, size=size, settled=[(at, (1 << size) - 1) for at in range(1, draws)])
    record = record_of(window)
    assert record is not None
    exact = len(encode_record(record))
    for limit in (exact, exact + 1, 4 * exact, LIMIT):
        directory = write(tmp_path / str(limit) / "checkpoints" / "c")
        written = write_record(LocalStore(directory), window, most_bytes=limit)
        if isinstance(written, Doubt):
            continue
        publish_from_receipts(directory, manifest_of(artifacts=receipts() | written))
        store = LocalStore(tmp_path / str(limit))
        assert (
            read_record(store, open_checkpoint(store, "checkpoints/c", compatibility=None), most_bytes=limit) == record
        )
    assert isinstance(written, dict)


def test_a_checkpoint_with_a_record_loads_and_is_found_like_any_other(tmp_path: Path) -> None:
    directory, record = write_and_publish(tmp_path)
    manifest = load(directory, required_artifacts=[*CONTENT, RECORD_NAME])
    assert manifest.artifacts[RECORD_NAME] == record[RECORD_NAME]
    assert (manifest.artifacts[RECORD_NAME].rank, manifest.artifacts[RECORD_NAME].group) == (None, "")
    with pytest.raises(ArtifactUnexpectedError):
        load(directory)
    store = LocalStore(tmp_path)
    for found in (
        discover(store, compatibility=None, on_corrupt="error").chosen,
        open_checkpoint(store, "checkpoints/c", compatibility=None),
    ):
        assert found is not None
        assert read_record(store, found, most_bytes=LIMIT) == a_record()


def test_a_checkpoint_without_a_record_has_none(tmp_path: Path) -> None:
    publish(write(tmp_path / "checkpoints" / "c"))
    store = LocalStore(tmp_path)
    assert read_record(store, open_checkpoint(store, "checkpoints/c", compatibility=None), most_bytes=LIMIT) is None


def test_a_record_that_was_removed_is_a_damaged_checkpoint(tmp_path: Path) -> None:
    directory, _ = write_and_publish(tmp_path)
    store = LocalStore(tmp_path)
    found = open_checkpoint(store, "checkpoints/c", compatibility=None)
    (directory / RECORD_NAME).unlink()
    for read in (
        lambda: open_checkpoint(store, "checkpoints/c", compatibility=None),
        lambda: discover(store, compatibility=None, on_corrupt="error"),
        lambda: load(directory, required_artifacts=[*CONTENT, RECORD_NAME]),
    ):
        with pytest.raises(ArtifactMissingError) as caught:
            read()
        assert caught.value.artifacts == (RECORD_NAME,)
    # Removed after it was found.
    doubt = read_record(store, found, most_bytes=LIMIT)
    assert isinstance(doubt, Doubt)
    assert "gone" in doubt.why


def test_a_record_that_nobody_committed_is_not_taken(tmp_path: Path) -> None:
    directory = write(tmp_path / "checkpoints" / "c")
    publish(directory)
    write_record(LocalStore(directory), a_window(), most_bytes=LIMIT)
    with pytest.raises(ArtifactUnexpectedError):
        open_checkpoint(LocalStore(tmp_path), "checkpoints/c", compatibility=None)


def test_corruption_that_leaves_the_size_is_a_doubt_and_the_checkpoint_is_found(tmp_path: Path) -> None:
    directory, _ = write_and_publish(tmp_path)
    data = (directory / RECORD_NAME).read_bytes()
    # Also another record that is whole: it is not the one that was committed.
    other = encode_record(a_record(settled=((1, 0b111), (2, 0b001))))
    for corrupt in (data[:-1] + bytes([data[-1] ^ 1]), bytes(len(data)), *([other] if len(other) == len(data) else [])):
        (directory / RECORD_NAME).write_bytes(corrupt)
        store = LocalStore(tmp_path)
        found = discover(store, compatibility=None, on_corrupt="error").chosen
        assert found is not None
        doubt = read_record(store, found, most_bytes=LIMIT)
        assert isinstance(doubt, Doubt)
        assert "digest" in doubt.why
    with pytest.raises(CheckpointDamagedError):
        load(directory, required_artifacts=[*CONTENT, RECORD_NAME])


def test_another_whole_record_in_its_place_is_a_doubt(tmp_path: Path) -> None:
    first = next(
        (tmp_path / str(mask), mask, other)
        for mask in range(1, 8)
        for other in range(1, 8)
        if mask != other
        and len(encode_record(a_record(settled=((1, mask),)))) == len(encode_record(a_record(settled=((1, other),))))
    )
    run, mask, other = first
    directory, _ = write_and_publish(run, a_window(settled=((1, mask),)))
    (directory / RECORD_NAME).write_bytes(encode_record(a_record(settled=((1, other),))))
    store = LocalStore(run)
    found = open_checkpoint(store, "checkpoints/c", compatibility=None)
    assert isinstance(read_record(store, found, most_bytes=LIMIT), Doubt)


@pytest.mark.parametrize("change", [b"x", -1])
def test_another_size_is_a_damaged_checkpoint_and_afterwards_a_doubt(tmp_path: Path, change: bytes | int) -> None:
    directory, _ = write_and_publish(tmp_path)
    store = LocalStore(tmp_path)
    found = open_checkpoint(store, "checkpoints/c", compatibility=None)
    data = (directory / RECORD_NAME).read_bytes()
    (directory / RECORD_NAME).write_bytes(data[:change] if isinstance(change, int) else data + change)
    with pytest.raises(CheckpointDamagedError):
        open_checkpoint(store, "checkpoints/c", compatibility=None)
    assert isinstance(read_record(store, found, most_bytes=LIMIT), Doubt)


def test_a_digest_of_an_algorithm_that_is_not_installed_here_is_a_doubt(tmp_path: Path) -> None:
    _, record = write_and_publish(tmp_path)
    store = LocalStore(tmp_path)
    found = open_checkpoint(store, "checkpoints/c", compatibility=None)
    for digest in ("blake3:" + "00" * 32, "sha256:" + "00" * 32):
        artifact = replace(record[RECORD_NAME], digest=digest)
        manifest = replace(found.manifest, artifacts={**found.manifest.artifacts, RECORD_NAME: artifact})
        assert isinstance(read_record(store, replace(found, manifest=manifest), most_bytes=LIMIT), Doubt)


def test_a_record_larger_than_this_run_reads_is_a_doubt_before_it_is_read(tmp_path: Path) -> None:
    directory, record = write_and_publish(tmp_path)
    store = LocalStore(tmp_path)
    found = open_checkpoint(store, "checkpoints/c", compatibility=None)
    (directory / RECORD_NAME).unlink()
    doubt = read_record(store, found, most_bytes=record[RECORD_NAME].size_bytes - 1)
    assert isinstance(doubt, Doubt)
    assert "at most" in doubt.why


def test_a_record_that_cannot_be_read_is_a_doubt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_and_publish(tmp_path)
    store = LocalStore(tmp_path)
    found = open_checkpoint(store, "checkpoints/c", compatibility=None)

    def eio(path: str, *, limit: int) -> bytes:
        raise StorageUnavailableError(path=path, operation="read", cause="EIO")

    monkeypatch.setattr(store, "read", eio)
    doubt = read_record(store, found, most_bytes=LIMIT)
    assert isinstance(doubt, Doubt)
    assert "EIO" in doubt.why


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    directory, _ = write_and_publish(tmp_path)
    store = LocalStore(tmp_path)
    found = open_checkpoint(store, "checkpoints/c", compatibility=None)
    (directory / RECORD_NAME).rename(tmp_path / "elsewhere")
    (directory / RECORD_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointDamagedError):
        open_checkpoint(store, "checkpoints/c", compatibility=None)
    assert isinstance(read_record(store, found, most_bytes=LIMIT), Doubt | ReplayRecord)  # never an exception


# -- storage that fails


@pytest.mark.parametrize("call", ["open", "write", "fsync"])
def test_storage_that_fails_is_unavailable_and_no_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(StorageUnavailableError, match="ENOSPC"):
        write_record(LocalStore(tmp_path), a_window(), most_bytes=LIMIT)


def test_a_device_that_keeps_fewer_bytes_than_it_took_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:1]) and len(data))
    with pytest.raises(StorageUnavailableError):
        write_record(LocalStore(tmp_path), a_window(), most_bytes=LIMIT)


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]))
    write_record(LocalStore(tmp_path), a_window(), most_bytes=LIMIT)
    assert decode((tmp_path / RECORD_NAME).read_bytes()) == a_record()


def test_a_record_is_not_written_over_anything(tmp_path: Path) -> None:
    (tmp_path / RECORD_NAME).write_text("a rank's")
    with pytest.raises(CheckpointConflictError):
        write_record(LocalStore(tmp_path), a_window(), most_bytes=LIMIT)
    assert (tmp_path / RECORD_NAME).read_text() == "a rank's"
    assert durable._failed == set()


# -- its name


@pytest.mark.parametrize("name", [RECORD_NAME, "Window.json.Z", f"{RECORD_NAME}/x", "WINDOW.JSON.Z/a/b"])
def test_no_rank_may_declare_its_name(name: str) -> None:
    with pytest.raises(UnsafeNameError):
        _check_declared_names(("rank0.pt", name))


def test_any_other_name_may_be_declared() -> None:
    _check_declared_names(("rank0.pt", "window.json", f"policy-0/{RECORD_NAME}"))
    _check_declared_names(())


# -- size


def test_a_large_record_is_small_and_quick_to_read() -> None:
    """A hundred thousand draws, every other one settled: about a word a draw, for the identities."""
    numbers = random.Random(1)
    draws = tuple(RecordedDraw(numbers.getrandbits(64), (8,), (0xFF * (at % 2),)) for at in range(100_000))
    record = ReplayRecord("base", draws)
    data = encode_record(record)
    assert len(data) < 1_000_000
    assert decode(data, 64 * len(data)) == record
