from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from checkpoint_helpers import Zygote, unavailable
from object_servers import Moto, moto

from cosmos_ctrl.checkpoints import durable


@pytest.fixture(autouse=True)
def no_remembered_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "_failed", set())


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    if shutil.which("strace") is None:
        unavailable("strace is not installed (Debian package strace)")
    process = Zygote()
    yield process
    process.close()


@pytest.fixture(scope="session")
def s3() -> Iterator[Moto]:
    with moto() as server:
        yield server
