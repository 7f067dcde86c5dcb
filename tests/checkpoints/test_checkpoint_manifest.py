"""The manifest as bytes: round trip, determinism, strictness, compatibility."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_helpers import COMPATIBILITY, load, manifest_of, metadata, publish, receipts, write
from hypothesis import given
from hypothesis import strategies as st

from cosmos_ctrl.checkpoints.artifacts import Artifact
from cosmos_ctrl.checkpoints.digests import digest_bytes
from cosmos_ctrl.checkpoints.document import MAX_NOTE_BYTES, Parent, sealed
from cosmos_ctrl.checkpoints.manifest import CheckpointManifest, located, parse_manifest
from cosmos_ctrl.core.errors import (
    CheckpointDamagedError,
    CheckpointIncompatibleError,
    UnknownSchemaError,
    UnsafeNameError,
)
from cosmos_ctrl.core.resume import ControllerResumeMetadata
from cosmos_ctrl.core.state import EncodedState, same_value

COUNTS = st.integers(0, (1 << 64) - 1)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
DIGESTS = st.binary(min_size=32, max_size=32).map(lambda data: f"sha256:{data.hex()}")
STATES = st.binary(max_size=50) | JSON | st.builds(EncodedState, st.binary(max_size=20), st.just("zstd+pickle5"))
METADATA = st.builds(
    ControllerResumeMetadata,
    completed_training_steps=COUNTS,
    completed_optimizer_updates=COUNTS,
    remaining_completions=COUNTS,
    epoch=st.integers(1, (1 << 64) - 1),
    sampling_owner=st.sampled_from(["sampler", "batch_sampler"]),
    sampler_state=STATES,
    checkpoint_path=TEXT,
    checkpoint_id=TEXT,
)
ARTIFACTS = st.dictionaries(
    st.from_regex(r"[a-z]{1,8}(/[a-z]{1,8}\.pt)?", fullmatch=True),
    st.builds(Artifact, st.integers(1, (1 << 64) - 1), DIGESTS, st.none() | COUNTS, TEXT),
    min_size=1,
    max_size=4,
)


@given(
    METADATA,
    ARTIFACTS,
    st.dictionaries(TEXT, JSON, max_size=4),
    COUNTS,
    st.none() | st.builds(Parent, TEXT, DIGESTS),
    COUNTS,
)
def test_a_manifest_comes_back_as_it_was(
    metadata: ControllerResumeMetadata,
    artifacts: dict[str, Artifact],
    compatibility: dict[str, Any],
    number: int,
    parent: Parent | None,
    window: int,
) -> None:
    try:
        manifest = CheckpointManifest(
            metadata=metadata,
            artifacts=artifacts,
            compatibility=compatibility,
            execution_number=number,
            execution_id="id" if number else "",
            parent=parent,
            repeat_bound_completions=window,
        )
    except UnsafeNameError:
        return
    data = manifest.to_bytes()
    again = parse_manifest(data, path=metadata.checkpoint_path)
    assert again == manifest
    assert again.to_bytes() == data
    assert same_value(dict(again.compatibility), compatibility)
    assert same_value(again.metadata.values(), metadata.values())
    shuffled = replace(
        manifest, artifacts=dict(reversed(artifacts.items())), compatibility=dict(reversed(compatibility.items()))
    )
    assert shuffled.to_bytes() == data


def test_nothing_absolute_is_inside(tmp_path: Path) -> None:
    manifest = manifest_of()
    moved = replace(manifest, metadata=located(manifest.metadata, str(tmp_path)))
    assert moved.to_bytes() == manifest.to_bytes()
    assert str(tmp_path).encode() not in publish(write(tmp_path)).to_bytes()


def test_the_sampler_state_is_readable_where_it_can_be() -> None:
    document = json.loads(manifest_of().to_bytes())
    assert document["metadata"]["sampler_state"] == {"codec": "json", "data": '{"seed":7,"position":3}'}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tuple", (1, 2)),
        ("set", {1}),
        ("bytes", b"x"),
        ("nan", float("nan")),
        ("infinity", float("inf")),
        ("nested", {"deep": [1, {"x": (1,)}]}),
        ("number_key", {1: "x"}),
        ("path", Path("x")),
        ("surrogate", "\ud800"),
        ("depth", json.loads("[" * 70 + "]" * 70)),
    ],
)
def test_compatibility_that_json_would_change_is_refused_by_key(key: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=rf"compatibility\['{key}'\]"):
        publish(write(tmp_path), compatibility={"fine": 1, key: value})
    assert not (tmp_path / "manifest.json").exists()
    with pytest.raises(TypeError, match="has the key 1"):
        publish(tmp_path, compatibility={1: "x"})


def test_fields_that_a_reader_would_refuse_are_refused_when_written() -> None:
    for fields, error in [
        ({"metadata": metadata(1 << 64)}, ValueError),
        ({"repeat_bound_completions": 1 << 64}, ValueError),
        ({"metadata": metadata(checkpoint_id="\ud800")}, TypeError),
    ]:
        with pytest.raises(error):
            manifest_of(**fields).to_bytes()
    for fields, error in [
        ({"repeat_bound_completions": True}, TypeError),
        ({"repeat_bound_completions": -1}, ValueError),
        ({"artifacts": {}}, ValueError),
        ({"artifacts": {"../x": receipts()["rank0.pt"]}}, UnsafeNameError),
        ({"execution_id": ""}, ValueError),
        ({"number": 0, "execution_id": "x"}, ValueError),
        ({"application_note": "[1]"}, ValueError),
        ({"application_note": '{"a": 1, "a": 2}'}, ValueError),
        ({"application_note": '{"a": NaN}'}, ValueError),
        ({"application_note": '{"a": "' + "x" * MAX_NOTE_BYTES + '"}'}, ValueError),
        ({"application_note": {}}, TypeError),
    ]:
        with pytest.raises(error):
            manifest_of(**fields)
    for size, digest in [
        (0, "sha256:" + "0" * 64),
        (1, "sha256:" + "0" * 63),
        (1, "md5:" + "0" * 32),
        (1, "SHA256:" + "0" * 64),
    ]:
        with pytest.raises(ValueError, match=r"size_bytes|digest"):
            Artifact(size, digest)


def _changed(**changes: Any) -> bytes:
    document = json.loads(manifest_of().to_bytes())
    for place, value in changes.items():
        *parents, last = place.split("__")
        inner = document
        for parent in parents:
            inner = inner[parent]
        if value is _changed:
            del inner[last]
        else:
            inner[last] = value
    if "self_digest" not in changes:
        del document["self_digest"]
        return sealed(json.dumps(document).encode() + b"\n")
    return json.dumps(document).encode()


GOOD = manifest_of().to_bytes()


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "Expecting value"),
        (GOOD[:-100], ""),
        (GOOD + b"{}", "Extra data"),
        (b"\xff" + GOOD, "UTF-8"),
        (b"\xef\xbb\xbf" + GOOD, "BOM"),
        (b"null", "no schema_version"),
        (b"[]", "no schema_version"),
        (GOOD.replace(b'"epoch":1', b'"epoch":1,"epoch":1'), "twice"),
        (GOOD.replace(b'"epoch":1', b'"epoch":NaN'), "not JSON"),
        (GOOD.replace(b'"epoch":1', b'"epoch":1e999'), "finite"),
        (b"[" * 100_000, "nested"),
        (_changed(extra=1), "extra: Extra inputs"),
        (_changed(metadata__checkpoint_path="/x"), "metadata.checkpoint_path"),
        (_changed(parent=_changed), "parent: Field required"),
        (_changed(metadata__epoch=True), "metadata.epoch"),
        (_changed(metadata__epoch=1.0), "metadata.epoch"),
        (_changed(metadata__epoch="1"), "metadata.epoch"),
        (_changed(metadata__epoch=0), "metadata.epoch"),
        (_changed(metadata__schema_version=2), "metadata.schema_version"),
        (_changed(metadata__sampling_owner="me"), "metadata.sampling_owner"),
        (_changed(metadata__sampler_state={"codec": "bytes", "data": "%"}), "base64"),
        (_changed(metadata__sampler_state={"codec": "json", "data": "{"}), "Expecting"),
        (_changed(artifacts={}), "at least one"),
        (
            _changed(artifacts={"a": {"size_bytes": 0, "digest": "sha256:" + "0" * 64, "rank": None, "group": ""}}),
            "size_bytes",
        ),
        (_changed(artifacts={"a": {"size_bytes": 1, "digest": "sha256:0", "rank": None, "group": ""}}), "digest"),
        (_changed(execution_number=-1), "execution_number"),
        (_changed(schema_version=True), "no schema_version"),
        (_changed(application_note="1"), "object"),
        (_changed(self_digest=_changed), "no self_digest at its end"),
        (_changed(self_digest=1), "no self_digest at its end"),
        (GOOD.removesuffix(b"\n"), "no self_digest at its end"),
        (GOOD + b"\n", "no self_digest at its end"),
    ],
)
def test_what_is_no_manifest_is_damaged(data: bytes, found: str) -> None:
    with pytest.raises(CheckpointDamagedError) as caught:
        parse_manifest(data, path="c")
    assert found in caught.value.found
    assert caught.value.artifact == "manifest.json"


def test_a_manifest_knows_its_own_digest() -> None:
    body, separator, seal = GOOD.rpartition(b',"self_digest":"')
    right = digest_bytes(body + b"}\n")
    assert seal == right.encode() + b'"}\n'
    wrong = digest_bytes(b"")
    with pytest.raises(CheckpointDamagedError) as caught:
        parse_manifest(body + separator + wrong.encode() + b'"}\n', path="c")
    assert (caught.value.what, caught.value.expected, caught.value.found) == ("digest", wrong, right)


def test_an_unknown_schema_is_unknown_whatever_else_is_in_it() -> None:
    with pytest.raises(UnknownSchemaError) as caught:
        parse_manifest(_changed(schema_version=2, new_field=1), path="c")
    assert caught.value.found == "2"


def test_an_unsafe_name_in_a_manifest_is_refused_as_such() -> None:
    entry = {"size_bytes": 1, "digest": "sha256:" + "0" * 64, "rank": None, "group": ""}
    for name in ("../x", "/x", "a//b", "manifest.json"):
        with pytest.raises(UnsafeNameError):
            parse_manifest(_changed(artifacts={name: entry}), path="c")


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 7))
def test_a_flipped_bit_is_refused_or_changes_the_digest(position: int, bit: int) -> None:
    data = bytearray(GOOD)
    data[position] ^= 1 << bit
    try:
        manifest = parse_manifest(bytes(data), path="anywhere")
    except (CheckpointDamagedError, UnknownSchemaError, UnsafeNameError):
        return
    # White space at the end is all that may change without changing the meaning.
    assert manifest.digest() != manifest_of().digest() or bytes(data).rstrip() == GOOD.rstrip()


DATASET = '{"digest":"sha256:aa","rows":10}'


@pytest.mark.parametrize(
    ("other", "differences"),
    [
        ({**COMPATIBILITY, "world_size": 4}, {"world_size": ("2", "4")}),
        ({**COMPATIBILITY, "world_size": 2.0}, {"world_size": ("2", "2.0")}),
        ({**COMPATIBILITY, "world_size": True}, {"world_size": ("2", "true")}),
        ({"world_size": 2}, {"dataset": (DATASET, "nothing")}),
        ({**COMPATIBILITY, "more": None}, {"more": ("nothing", "null")}),
        ({"x": 1}, {"dataset": (DATASET, "nothing"), "world_size": ("2", "nothing"), "x": ("nothing", "1")}),
        (
            {**COMPATIBILITY, "dataset": {"digest": "sha256:bb", "rows": 10}},
            {"dataset.digest": ('"sha256:aa"', '"sha256:bb"')},
        ),
        (
            {**COMPATIBILITY, "dataset": {}},
            {"dataset.digest": ('"sha256:aa"', "nothing"), "dataset.rows": ("10", "nothing")},
        ),
        ({**COMPATIBILITY, "dataset": "x" * 1000}, {"dataset": (DATASET, '"' + "x" * 79 + "…")}),
    ],
)
def test_g3_what_differs_is_named_with_both_values(
    other: dict[str, Any], differences: dict[str, tuple[str, str]], tmp_path: Path
) -> None:
    publish(write(tmp_path))
    with pytest.raises(CheckpointIncompatibleError) as caught:
        load(tmp_path, compatibility=other)
    assert caught.value.keys == tuple(differences)
    assert caught.value.differences == tuple(
        f"{key}: the checkpoint has {there}, this run has {here}" for key, (there, here) in differences.items()
    )
    assert "; ".join(caught.value.differences) in str(caught.value)
    assert "reshard" not in str(caught.value)
    load(tmp_path, compatibility=dict(reversed(COMPATIBILITY.items())))
