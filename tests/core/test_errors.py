"""The error tree is closed, typed, and survives a copy."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields
from typing import Any

import pytest

from cosmos_ctrl.core.errors import (
    ERRORS_BY_REASON,
    CheckpointError,
    CheckpointNotFoundError,
    ControlError,
    ResumeMetadataMismatch,
    RetryLaterError,
    StaleExecutionError,
    WindowFullError,
)

SAMPLES: dict[str, Any] = {"str": "text", "int": 7, "tuple[str, ...]": ("one", "two")}


def example(cls: type[ControlError]) -> ControlError:
    return cls(**{field.name: SAMPLES[str(field.type)] for field in fields(cls)})


def leaves(cls: type[ControlError]) -> set[type[ControlError]]:
    return {cls}.union(*(leaves(child) for child in cls.__subclasses__()))


def test_every_reason_is_used_once() -> None:
    named = [cls for cls in leaves(ControlError) if cls.__dict__.get("reason")]
    assert len({cls.reason for cls in named}) == len(named)
    assert set(ERRORS_BY_REASON.values()) == set(named)


@pytest.mark.parametrize("cls", ERRORS_BY_REASON.values(), ids=ERRORS_BY_REASON.keys())
def test_an_error_survives_pickling_and_copying_with_its_attributes(cls: type[ControlError]) -> None:
    error = example(cls)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is cls
        assert twin.attributes() == error.attributes()
        assert str(twin) == str(error)


@pytest.mark.parametrize("cls", ERRORS_BY_REASON.values(), ids=ERRORS_BY_REASON.keys())
def test_an_error_says_something_with_its_variables_in_it(cls: type[ControlError]) -> None:
    text = str(example(cls))
    assert text
    assert "\n" not in text
    assert not fields(cls) or any(word in text for word in ("text", "7", "one"))


@pytest.mark.parametrize("cls", ERRORS_BY_REASON.values(), ids=ERRORS_BY_REASON.keys())
def test_an_errors_variables_are_given_by_name_only(cls: type[ControlError]) -> None:
    with pytest.raises(TypeError):
        cls("positional")  # type: ignore[call-arg]


def test_a_missing_checkpoint_is_a_missing_file() -> None:
    assert issubclass(CheckpointNotFoundError, FileNotFoundError)
    assert issubclass(CheckpointNotFoundError, CheckpointError)


def test_only_what_time_mends_is_to_be_retried() -> None:
    assert issubclass(WindowFullError, RetryLaterError)
    assert not issubclass(StaleExecutionError, RetryLaterError)
    assert not issubclass(ResumeMetadataMismatch, RetryLaterError)


def test_a_stale_request_without_an_id_says_so() -> None:
    assert "no execution" in str(StaleExecutionError(stated="", current="now"))
