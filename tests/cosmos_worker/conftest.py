"""Fixtures of the worker's tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from fake_controller import QUICK, FakeController

from cosmos_worker.settings import ClientConfig


@pytest.fixture
def controller() -> Iterator[FakeController]:
    fake = FakeController().start()
    yield fake
    fake.close()


@pytest.fixture
def environ(controller: FakeController) -> dict[str, str]:
    return {"COSMOS_CTRL_ADDRESS": controller.address, "COSMOS_CTRL_EXECUTION_ID": controller.execution_id}


@pytest.fixture
def quick() -> ClientConfig:
    return QUICK


@pytest.fixture
def exits() -> list[int]:
    """Exit codes that the client's thread would have ended the process with."""
    return []


@pytest.fixture
def options(environ: dict[str, str], quick: ClientConfig, exits: list[int]) -> Callable[..., dict[str, Any]]:
    """Arguments for ``from_env`` of either face."""

    def make(**more: Any) -> dict[str, Any]:
        return {"environ": environ, "config": quick, "exit_process": exits.append} | more

    return make
