from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from checkpoint_helpers import Zygote, unavailable
from crash_lab import Lab
from object_servers import Moto, moto

from cosmos_ctrl.checkpoints import durable


@pytest.fixture(autouse=True)
def no_remembered_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "_failed", set())


@pytest.fixture(scope="session")
def untraced() -> Iterator[Zygote]:
    """For children that are only to be somebody else; where strace may not attach to another user's they run all the same."""
    process = Zygote()
    yield process
    process.close()


@pytest.fixture(scope="session")
def zygote(untraced: Zygote) -> Zygote:
    if shutil.which("strace") is None:
        unavailable("strace is not installed (Debian package strace)")
    return untraced


@pytest.fixture(scope="session")
def lab(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(zygote, tmp_path_factory.mktemp("crashes"))


@pytest.fixture(scope="session")
def s3() -> Iterator[Moto]:
    with moto() as server:
        yield server
