"""The conformance workers, one per language: where each lies, how it is built and started.

* Every client is one directory here, and one line of `CLIENTS`: what builds it (run in its directory, offline where that can be),
  what starts one worker, and the tools that both need. What a build makes lies in the client's ``build/``.
* A client that cannot be built here is unavailable and says why: its tests are skipped, and fail with ``CI=true``.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

HERE = Path(__file__).parent

#: Whether what takes long is tested, too.
ALL = os.environ.get("COSMOS_TEST_CLIENTS") == "all"

#: Longest build, in seconds.
BUILD_S = 600.0

#: Characters of a failed build's output that are shown.
_SHOWN = 4000


class UnavailableError(Exception):
    """A client cannot be built here; the text says what is missing, and what to install."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """One language's conformance worker."""

    language: str
    """Name of the client and of its directory."""
    build: tuple[str, ...] = ()
    """Command that builds it, run in its directory; empty: there is nothing to build."""
    run: tuple[str, ...]
    """Command of one worker. A word that names a file in the client's directory (after the build) becomes its absolute path."""
    tools: tuple[str, ...] = ()
    """Programs that have to be on the PATH, as ``shutil.which`` finds them."""
    install: str = ""
    """What to install for them, for a person."""
    lint: tuple[str, ...] = ()
    """Command of the language's own formatter and linter, run in its directory after the build; empty: there is none."""
    quick: bool = True
    """Built within a minute, so `make test` has it; the others are in `make test-clients` only."""
    reports: str = "stream"
    """The RPC it reports by: "stream" (StreamReports) or "unary" (SubmitReports)."""

    @property
    def directory(self) -> Path:
        """Where its sources lie."""
        return HERE / self.language

    def command(self) -> list[str]:
        """The command of one worker, built if it was not in this process.

        Raises:
            UnavailableError: a tool is missing, or the build failed.
        """
        if missing := _missing(self):
            raise UnavailableError(missing)
        return [str(path) if (path := self.directory / word).is_file() else word for word in self.run]


CLIENTS = (
    Client(language="python", run=(sys.executable, "worker.py")),
    Client(
        language="node",
        build=("make", "--silent"),
        run=("node", "build/src/main.js"),
        tools=("make", "node", "npm"),
        install="make nodejs npm",
        lint=("npm", "run", "--silent", "lint"),
    ),
    Client(
        language="cpp",
        build=("sh", "-c", "cmake -S . -B build -DCMAKE_COMPILE_WARNING_AS_ERROR=ON && cmake --build build --parallel"),
        run=("build/worker",),
        tools=("cmake", "c++", "pkg-config", "protoc", "grpc_cpp_plugin"),
        install="cmake g++ pkg-config libgrpc++-dev protobuf-compiler protobuf-compiler-grpc",
        lint=("sh", "-c", f"{Path(sys.executable).with_name('clang-format')} --dry-run --Werror src/*"),
        reports="unary",
    ),
    Client(
        language="go",
        build=("make", "--silent"),
        run=("build/worker",),
        tools=("make", "go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc"),
        install=(
            "make golang-go golang-google-grpc-dev golang-google-protobuf-dev golang-github-golang-protobuf-1-5-dev "
            "protobuf-compiler protoc-gen-go protoc-gen-go-grpc"
        ),
        lint=("make", "--silent", "lint"),
    ),
    Client(
        language="java",
        build=("make", "--silent"),
        # The two flags save a third of the start, which is most of what a worker of the suite does.
        run=("java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-jar", "build/worker.jar"),
        tools=("make", "javac", "jar", "java", "protoc", "grpc_java_plugin"),
        install=(
            "make default-jdk-headless libgrpc-java libprotobuf-java libnetty-java libguava-java libgoogle-gson-java "
            "libperfmark-java libgeronimo-annotation-1.3-spec-java protobuf-compiler protobuf-compiler-grpc-java-plugin"
        ),
        quick=False,
    ),
)


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """The tests run in several processes, and two builds in one directory break each other."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@functools.cache
def _missing(client: Client) -> str:
    """Builds it; what is missing for that, empty if nothing is. Tried once, however it comes out."""
    missing = [tool for tool in client.tools if shutil.which(tool) is None]
    if missing:
        return f"the {client.language} client needs {', '.join(missing)}: install {client.install}"
    if not client.build:
        return ""
    try:
        with _alone_in(client.directory):
            done = subprocess.run(
                client.build, cwd=client.directory, capture_output=True, text=True, timeout=BUILD_S, check=False
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the {client.language} client is not built: {error}"
    if done.returncode == 0:
        return ""
    said = (done.stdout + done.stderr)[-_SHOWN:]
    return (
        f"the {client.language} client is not built: {' '.join(client.build)} ended with {done.returncode}; "
        f"install {client.install}.\n{said}"
    )


def chosen() -> tuple[Client, ...]:
    """The clients whose tests are run: the quick ones, or all of them with ``COSMOS_TEST_CLIENTS=all`` (`make test-clients`)."""
    return tuple(client for client in CLIENTS if client.quick or ALL)


def command_of(client: Client) -> list[str]:
    """The command of one worker; where it cannot be built, as `unavailable`."""
    try:
        return client.command()
    except UnavailableError as error:
        unavailable(str(error))


def unavailable(why: str) -> NoReturn:
    """Skips the test that asks, and says why; fails it with ``CI=true``."""
    if os.environ.get("CI") == "true":
        pytest.fail(why)
    pytest.skip(why)
