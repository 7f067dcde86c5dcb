"""Client scenarios as they stand in ``vectors/client/*.json``: read strictly, so that a typing error is not a check that never fires."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parent / "vectors" / "client"

#: What a client's messages are called in `when`. A batch with an end report is both "report" and "end".
MESSAGES = ("register", "lease", "report", "heartbeat", "end")

#: Interventions that need no value, and those that do. docs/conformance.md says what each does.
PLAIN = frozenset(
    {
        "lose_request",
        "lose_reply",
        "hang",
        "withhold_ack",
        "unknown_fields",
        "unknown_notice",
        "unknown_refusal",
        "foreign_header",
        "lapse",
        "cancel_leases",
        "sigterm",
        "outage",
        "new_execution",
        "takeover",
        "fail_run",
        "stop_run",
        "open_gate",
    }
)
VALUED = frozenset({"status", "delay_ms"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A status that the controller is made to answer with."""

    code: str
    """As in gRPC: "UNAVAILABLE", say."""
    reason: str = ""
    """Of our ErrorInfo; empty: there is none, so the status looks like the library's own."""
    metadata: dict[str, str]
    retry_ms: int | None = None
    """Of RetryInfo; None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is done when a message arrives."""

    message: str
    nth: int
    """The how-manieth of its kind, from 1."""
    times: int
    """For it and so many after it, all told."""
    do: tuple[str, ...]
    delay_s: float = 0.0
    status: Status | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """How a scenario ends."""

    exit: int
    end: bool
    """Whether the worker's end report is applied."""
    state: dict[str, Any]
    """Fields of RunState, as WatchRun gives them (proto3 JSON)."""
    at_least: dict[str, int]
    """Messages of a kind that the client sends."""
    notices: int
    """Notices that it is told, and confirms, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One client scenario."""

    name: str
    why: str
    sources: tuple[str, ...]
    """Source of each prompt; the sampler's order is its own."""
    n_generation: int
    prompt_bytes: int
    """Of each prompt, at least."""
    policy: dict[str, Any]
    partly: int
    """So many groups have their completion 0 already, from another worker."""
    gate: str
    """"open", or "closed" until the script opens it."""
    execution_id: str
    """Given to the client: "given", "none" or "other"."""
    address: str
    """Given to the client: "served", "dead" (nobody listens there) or "absent"."""
    in_flight: int
    script: tuple[Step, ...]
    expect: Expectation
    slow: bool
    """Takes seconds by what it checks; run with ``--slow``."""

    def prompt_of(self, key: str) -> bytes:
        """The payload of a prompt, by its key."""
        return f"prompt {key}".encode().ljust(self.prompt_bytes, b".")


def load() -> list[Scenario]:
    """All scenarios, in order of their files.

    Raises:
        ValueError: a scenario holds what is not known, or a name twice.
    """
    found = [
        _scenario(entry, path.name)
        for path in sorted(DIRECTORY.glob("*.json"))
        for entry in json.loads(path.read_text())["scenarios"]
    ]
    names = [scenario.name for scenario in found]
    if len(set(names)) != len(names):
        raise ValueError(f"two scenarios have one name: {sorted(name for name in names if names.count(name) > 1)}")
    return found


def _scenario(entry: dict[str, Any], where: str) -> Scenario:
    where = f"{where}: {entry.get('name')}"
    _only(entry, {"name", "why", "run", "launch", "script", "expect", "slow"}, where)
    run, launch, expect = entry.get("run", {}), entry.get("launch", {}), entry["expect"]
    _only(run, {"sources", "n_generation", "prompt_bytes", "policy", "partly", "gate"}, where)
    _only(launch, {"execution_id", "address", "in_flight"}, where)
    _only(expect, {f.name for f in fields(Expectation)}, where)
    return Scenario(
        name=entry["name"],
        why=entry["why"],
        sources=tuple(run.get("sources", ["plain"] * 4)),
        n_generation=run.get("n_generation", 2),
        prompt_bytes=run.get("prompt_bytes", 0),
        policy=run.get("policy", {}),
        partly=run.get("partly", 0),
        gate=_one_of(run.get("gate", "open"), ("open", "closed"), where),
        execution_id=_one_of(launch.get("execution_id", "given"), ("given", "none", "other"), where),
        address=_one_of(launch.get("address", "served"), ("served", "dead", "absent"), where),
        in_flight=launch.get("in_flight", 8),
        script=tuple(_step(step, where) for step in entry.get("script", [])),
        expect=Expectation(
            exit=expect["exit"],
            end=expect.get("end", expect["exit"] == 0),
            state=expect.get("state", {}),
            at_least=expect.get("at_least", {}),
            notices=expect.get("notices", 0),
        ),
        slow=entry.get("slow", False),
    )


def _step(step: dict[str, Any], where: str) -> Step:
    _only(step, {"when", "do"}, where)
    when, values = step["when"], {}
    _only(when, {"message", "nth", "times"}, where)
    names = []
    for action in step["do"]:
        if isinstance(action, str):
            names.append(_one_of(action, PLAIN, where))
            continue
        ((name, value),) = action.items()
        names.append(_one_of(name, VALUED, where))
        values[name] = value
    status = values.get("status")
    if status is not None:
        _only(status, {f.name for f in fields(Status)}, where)
    return Step(
        message=_one_of(when["message"], MESSAGES, where),
        nth=when.get("nth", 1),
        times=when.get("times", 1),
        do=tuple(names),
        delay_s=values.get("delay_ms", 0) / 1000,
        status=None if status is None else Status(**{"metadata": {}} | status),
    )


def _only(entry: dict[str, Any], known: set[str], where: str) -> None:
    if unknown := entry.keys() - known:
        raise ValueError(f"{where}: unknown {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}")


def _one_of(value: str, known: Any, where: str) -> str:
    if value not in known:
        raise ValueError(f"{where}: {value!r} is none of {', '.join(sorted(known))}")
    return value
