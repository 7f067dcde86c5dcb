"""Fixtures of the service's tests."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from service_harness import House


@pytest.fixture
async def houses(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Opens controllers over the test's run directory; closes them at the end."""
    async with AsyncExitStack() as stack:

        async def open_house(**options: Any) -> House:
            house = House(tmp_path / "run", **options)
            await house.open()
            stack.push_async_callback(house.close)
            return house

        yield open_house
