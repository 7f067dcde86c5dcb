"""Metadata v1 is strict, and the agreement compares typed values and names keys only."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from cosmos_ctrl.core.errors import ResumeMetadataMismatch
from cosmos_ctrl.core.resume import SCHEMA_VERSION, ControllerResumeMetadata, check_agreement

VALUES: dict[str, Any] = {
    "completed_training_steps": 3,
    "completed_optimizer_updates": 6,
    "remaining_completions": 10,
    "epoch": 2,
    "sampling_owner": "sampler",
    "sampler_state": {"position": 1},
    "checkpoint_path": "checkpoints/x",
    "checkpoint_id": "abc",
}
COUNTS = ["completed_training_steps", "completed_optimizer_updates", "remaining_completions", "epoch", "schema_version"]


def metadata(**overrides: Any) -> ControllerResumeMetadata:
    return ControllerResumeMetadata(**VALUES | overrides)


@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("wrong", [True, False, "1", 1.0, None, [1]])
def test_g3_a_count_is_an_int_and_nothing_that_looks_like_one(field: str, wrong: Any) -> None:
    with pytest.raises(TypeError, match=field):
        metadata(**{field: wrong})


@pytest.mark.parametrize("field", COUNTS)
def test_g3_a_negative_count_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        metadata(**{field: -1})


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("epoch", 0), ("schema_version", 0), ("schema_version", 2), ("sampling_owner", "both"), ("sampling_owner", None)],
)
def test_g3_an_unknown_version_or_owner_is_refused(field: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=field):
        metadata(**{field: wrong})


@pytest.mark.parametrize("field", ["checkpoint_path", "checkpoint_id"])
def test_g3_texts_are_texts(field: str) -> None:
    with pytest.raises(TypeError, match=field):
        metadata(**{field: b"x"})


def test_g3_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError):
        metadata(learning_rate=1)


def test_metadata_is_frozen_and_its_state_a_fresh_copy() -> None:
    found = metadata()
    with pytest.raises(FrozenInstanceError):
        found.epoch = 3  # type: ignore[misc]
    found.sampler_state["position"] = 9
    assert found.sampler_state == {"position": 1}
    assert found == metadata()
    assert hash(found) == hash(metadata())


def test_the_six_keys_that_trainers_know() -> None:
    assert metadata().to_checkpoint_extra_info() == {
        "step": 3,
        "optimizer_updates": 6,
        "remain_samples_num": 10,
        "checkpoint_path": "checkpoints/x",
        "checkpoint_id": "abc",
        "controller_resume_schema_version": SCHEMA_VERSION,
    }


def test_the_agreement_sees_all_nine_fields() -> None:
    assert set(metadata().values()) == {*VALUES, "schema_version"}
    assert len(metadata().values()) == 9


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("completed_training_steps", 4),
        ("completed_optimizer_updates", 7),
        ("remaining_completions", 9),
        ("epoch", 3),
        ("sampling_owner", "batch_sampler"),
        ("sampler_state", {"position": True}),
        ("sampler_state", {"position": 1.0}),
        ("checkpoint_path", "checkpoints/y"),
        ("checkpoint_id", "abd"),
    ],
)
def test_g3_a_disagreement_names_the_key_and_never_the_value(field: str, other: Any) -> None:
    expected = metadata(checkpoint_id="secret-1", checkpoint_path="secret-2").values()
    found = metadata(**{"checkpoint_id": "secret-1", "checkpoint_path": "secret-2", field: other}).values()
    with pytest.raises(ResumeMetadataMismatch) as caught:
        check_agreement("rank 1", expected, found)
    assert (caught.value.missing, caught.value.unexpected, caught.value.changed) == ((), (), (field,))
    assert "secret" not in str(caught.value)
    assert "position" not in str(caught.value)


def test_g3_missing_unexpected_and_changed_are_told_apart() -> None:
    with pytest.raises(ResumeMetadataMismatch) as caught:
        check_agreement("rank 1", {"a": 1, "b": 1, "c": 1}, {"b": 1, "c": True, "d": 1, "e": 1})
    error = caught.value
    assert (error.missing, error.unexpected, error.changed) == (("a",), ("d", "e"), ("c",))
    assert "rank 1" in str(error)


def test_g3_fresh_is_a_value_of_its_own() -> None:
    check_agreement("rank 1", None, None)
    zero = metadata(completed_training_steps=0, completed_optimizer_updates=0).values()
    with pytest.raises(ResumeMetadataMismatch) as caught:
        check_agreement("rank 1", zero, None)
    assert caught.value.missing == ("checkpoint",)
    with pytest.raises(ResumeMetadataMismatch) as caught:
        check_agreement("rank 1", None, zero)
    assert caught.value.unexpected == ("checkpoint",)


def test_g3_equal_values_agree_whatever_the_order_of_a_states_keys() -> None:
    check_agreement(
        "rank 1", metadata(sampler_state={"a": 1, "b": 2}).values(), metadata(sampler_state={"b": 2, "a": 1}).values()
    )
