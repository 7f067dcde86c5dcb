"""Every client, in whatever language, passes the conformance suite.

``CLIENTS=all`` is for those too that take more than a minute to build, for the scenarios that take long, and for the formatters and
linters of the languages.
"""

from __future__ import annotations

import asyncio
import os
import subprocess

import pytest
from clients import BUILD_S, CLIENTS, Client, UnavailableError, must_be_available
from conformance_scenarios import load
from runner import report, run_all

ALL = os.environ.get("CLIENTS") == "all"

#: Longest suite of one client, in seconds.
SUITE_S = 300.0

pytestmark = pytest.mark.timeout(BUILD_S + SUITE_S)

every_client = pytest.mark.parametrize(
    "client", [client for client in CLIENTS if ALL or client.quick], ids=lambda client: client.language
)


def command_of(client: Client) -> list[str]:
    """The client's command; skips what cannot be built here, except on CI."""
    try:
        return client.command()
    except UnavailableError as error:
        if must_be_available():
            pytest.fail(str(error))
        pytest.skip(str(error))


@every_client
def test_it_passes_the_conformance_suite(client: Client) -> None:
    command = command_of(client)
    scenarios = [scenario for scenario in load() if ALL or not scenario.slow]
    results = asyncio.run(run_all(scenarios, command))
    assert all(result.passed for result in results), "\n".join(report(results))
    # What it states in the registry is what was tested.
    assert {rpc for result in results for rpc in result.reports_by} == {client.reports}


@every_client
def test_it_is_written_as_its_language_wants(client: Client) -> None:
    if not (ALL and client.lint):
        pytest.skip(
            "run with CLIENTS=all" if client.lint else f"the {client.language} client has no linter of its own here"
        )
    command_of(client)
    done = subprocess.run(
        client.lint, cwd=client.directory, capture_output=True, text=True, timeout=SUITE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
