"""What becomes of the tests of a client that cannot be built: they say so, and none of them passes."""

from __future__ import annotations

import sys
from pathlib import Path

import clients
import pytest
from clients import CLIENTS, Client, UnavailableError, command_of, unavailable

ROOT = Path(__file__).resolve().parents[2]


def client(**changes: object) -> Client:
    return Client(**{"language": "python", "run": (sys.executable, "worker.py"), "install": "it"} | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tools": ("no-such-tool", "sh")}, "needs no-such-tool: install it"),
        ({"build": ("sh", "-c", "echo half; echo way >&2; exit 3")}, r"ended with 3; install it\.\nhalf\nway"),
        ({"build": ("no-such-build",)}, "is not built: .*no-such-build"),
    ],
)
@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_a_client_that_cannot_be_built_is_skipped_and_fails_in_ci(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], why: str, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match=why):
        command_of(client(**changes))
    with pytest.raises(UnavailableError, match=why):
        client(**changes).command()


def test_nobody_goes_on_with_a_client_that_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "")
    with pytest.raises(pytest.skip.Exception, match="why"):
        unavailable("why")
    assert command_of(client()) == [sys.executable, str(clients.HERE / "python" / "worker.py")]


def test_ci_installs_what_every_client_needs() -> None:
    listed = (ROOT / ".ci" / "run").read_text().split("packages=(")[1].split("\n)")[0].split()
    # Node may come from elsewhere.
    needed = {package for client in CLIENTS for package in client.install.split()} - {"nodejs", "npm"}
    assert needed <= set(listed)
    assert "packages+=(nodejs npm)" in (ROOT / ".ci" / "run").read_text()
