"""Every client that names a linter is formatted, and clean, as its own language's tools see it. A part of `make test-clients` only."""

from __future__ import annotations

import subprocess

import pytest
from clients import ALL, BUILD_S, Client, chosen, command_of

LINT_S = 120.0

pytestmark = [
    pytest.mark.timeout(BUILD_S + LINT_S),
    pytest.mark.skipif(not ALL, reason="a part of `make test-clients` only"),
]

LINTED = [client for client in chosen() if client.lint]


@pytest.mark.parametrize("client", LINTED, ids=[client.language for client in LINTED])
def test_a_client_is_written_as_its_language_wants(client: Client) -> None:
    command_of(client)
    done = subprocess.run(
        client.lint, cwd=client.directory, capture_output=True, text=True, timeout=LINT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
