"""Names: what is refused, and that what is accepted stays inside on any file system."""

from __future__ import annotations

import os.path
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_ctrl.checkpoints.names import (
    MAX_NAME_BYTES,
    MAX_PART_BYTES,
    TEMPORARY_PREFIX,
    check_artifact_name,
    check_artifact_names,
)
from cosmos_ctrl.core.errors import UnsafeNameError

PARTS = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=20)
HOSTILE = st.lists(
    st.one_of(PARTS, st.sampled_from(["", ".", "..", "\\", "\0", "~", "\u202e", "e\u0301", "manifest.json"])),
    max_size=5,
).map("/".join)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "empty"),
        ("/etc/passwd", "absolute"),
        ("../up", "part '..'"),
        ("a/../b", "part '..'"),
        ("a/./b", "part '.'"),
        ("a//b", "part ''"),
        ("a/", "part ''"),
        ("a\\b", "backslash"),
        ("a\0b", "U+0000"),
        ("a\nb", "U+000A"),
        ("a\u202eb", "U+202E"),
        ("a\ud800b", "U+D800"),
        ("e\u0301.pt", "normal form C"),
        ("manifest.json", "own name"),
        ("MANIFEST.json", "own name"),
        (TEMPORARY_PREFIX + "1", "temporary"),
        ("sub/" + TEMPORARY_PREFIX + "1", "temporary"),
        ("a" * (MAX_PART_BYTES + 1), "longer"),
        ("/".join(["é" * 100] * 5), "longer"),
    ],
)
def test_an_unsafe_name_is_refused_with_its_reason(name: str, why: str) -> None:
    with pytest.raises(UnsafeNameError) as caught:
        check_artifact_name(name, path="run/c")
    assert why in caught.value.why
    assert caught.value.path == "run/c"


@pytest.mark.parametrize(
    "name",
    ["model.pt", "a/b/c.safetensors", ".metadata", "__0_0.distcp", "naïve.pt", "sub/manifest.json", "a b", "..."],
)
def test_ordinary_names_pass(name: str) -> None:
    assert check_artifact_name(name, path="") == name


@pytest.mark.parametrize(
    "names",
    [
        ["a", "a"],
        ["Model.pt", "model.pt"],
        ["a/x", "A/y"],
        ["a", "a/b"],
        ["A", "a/b"],
        ["straße", "STRASSE"],
        ["x/é", "x/É"],
    ],
)
def test_colliding_names_are_refused(names: list[str]) -> None:
    for order in (names, names[::-1]):
        with pytest.raises(UnsafeNameError):
            check_artifact_names(order, path="")


def test_a_single_text_is_not_a_set_of_letters() -> None:
    with pytest.raises(TypeError):
        check_artifact_names("model.pt", path="")


@given(HOSTILE)
def test_what_is_accepted_stays_inside_and_means_one_thing(name: str) -> None:
    try:
        check_artifact_name(name, path="")
    except UnsafeNameError:
        return
    assert os.path.normpath(os.path.join("/run", name)) == "/run/" + name  # noqa: PTH118
    assert unicodedata.normalize("NFC", name) == name
    assert 0 < len(name.encode()) <= MAX_NAME_BYTES
    assert name.isprintable() or any(unicodedata.category(c) in ("Zs", "Co") for c in name)


@given(st.lists(PARTS, max_size=6))
def test_accepted_sets_have_no_two_that_fold_together(names: list[str]) -> None:
    try:
        checked = check_artifact_names(names, path="")
    except UnsafeNameError:
        return
    assert list(checked) == sorted(names)
    assert len({unicodedata.normalize("NFC", name).casefold() for name in checked}) == len(names)
    assert len({name.upper() for name in checked}) == len(names)
