"""Trainers of Hugging Face, each in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from trainer_process import Trainers, require


@pytest.fixture(scope="session")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    require("transformers")
    started = Trainers(tmp_path_factory.mktemp("trainers"))
    yield started
    started.close()


@pytest.fixture(scope="session")
def undisturbed(trainers: Trainers, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of a Trainer that has no callback and is not killed."""
    return trainers.run(tmp_path_factory.mktemp("undisturbed") / "run", callback=False)
