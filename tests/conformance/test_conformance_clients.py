"""Every client passes every scenario: the Python one and those of other languages, as the registry has them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from clients import ALL, CLIENTS, Client, chosen, command_of
from conformance_run import Result
from conformance_scenarios import Scenario, load
from runner import run_all

pytestmark = pytest.mark.timeout(900 if ALL else 300)  # the first test of a client builds it and runs all its scenarios

SCENARIOS = [scenario for scenario in load() if ALL or not scenario.slow]

_found: dict[str, dict[str, Result]] = {}


def results_of(client: Client) -> dict[str, Result]:
    """What every scenario found of a client, by name; run once."""
    if client.language not in _found:
        command = command_of(client)
        _found[client.language] = {result.scenario: result for result in asyncio.run(run_all(SCENARIOS, command))}
    return _found[client.language]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[scenario.name for scenario in SCENARIOS])
@pytest.mark.parametrize("client", chosen(), ids=[client.language for client in chosen()])
def test_g12_a_client_keeps_the_protocol(client: Client, scenario: Scenario) -> None:
    result = results_of(client)[scenario.name]
    assert result.passed, result


@pytest.mark.parametrize("client", chosen(), ids=[client.language for client in chosen()])
def test_a_client_reports_by_the_rpc_that_it_states(client: Client) -> None:
    used = {rpc for result in results_of(client).values() for rpc in result.reports_by}
    assert used == {client.reports}


def test_every_client_is_in_the_registry() -> None:
    clients = Path(__file__).parent.parent / "clients"
    directories = {path.name for path in clients.iterdir() if path.is_dir() and not path.name.startswith((".", "__"))}
    assert directories - {"googleapis"} == {client.language for client in CLIENTS}
