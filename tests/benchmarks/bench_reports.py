"""What reports cost over the wire: throughput, latency, server CPU, payloads, and a thousand workers.

Prints a table and, last, one JSON line. The real controller with the real ledger, its clients and the baselines are processes of
their own on this machine; they run in turns in every round, and a ratio is of one round. A figure is the median of the rounds.
Groups are leased before the clock starts, messages are made beforehand; the clock stops when every report is acknowledged and
settled by a committed step, and what the controller counts has to be what was sent.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from bench_ledger import GROUP
from reports_processes import MIB, Child, quantile

ROUNDS = 5
WORKERS = 2
"""That send batches, each on a stream of its own."""
ROWS = 256
"""Groups of one batch: 4,096 completions."""
BATCHES = 48
"""Of one worker in a round."""
WINDOW = 8
"""Batches of one worker that are unacknowledged in a closed loop."""
OPEN_WINDOW = 48
"""The same in an open loop; the controller allows 64."""
STEP_GROUPS = 1024
CLIENT_GROUPS = 4096
"""Reported in a round by the product's own client."""
SINGLE_WORKERS = 2
SINGLE_WINDOW = 32
SINGLE_GROUPS = 128
"""Of one worker in a round, one completion a message."""
SINGLE_STEP_GROUPS = 64
HTTP_CONNECTIONS = 16
HTTP_REPORTS = {"post": 1000, "keepalive": 3000, "batch256": 256 * 300}
"""In a round."""
PAYLOADS = {"64 KiB": (64 << 10, 16), "4 MiB": (4 << 20, 4)}
"""Bytes of a payload, completions of a group."""
PAYLOAD_ROUNDS = 3
PAYLOAD_MESSAGE = 4 * MIB
PAYLOAD_STEP = 32 * MIB
PAYLOAD_STEPS = 12
"""In a round."""
PAYLOAD_BUFFER = 128 * MIB
"""rollout.max_buffered_bytes."""
CROWD_PROCESSES = 4
CROWD = 250
"""Workers of one process."""
CROWD_SECONDS = 10
CROWD_GROUP = 5
CROWD_STEP_GROUPS = 500


@dataclass(frozen=True, slots=True)
class Measured:
    """One timed part."""

    per_s: float
    """Completions, acknowledged and settled."""
    cpu_us: float
    """Of the server, per completion."""
    busy: float
    """Cores of the server."""
    p99_ms: float
    """From when a message was sent, or due, to its ack."""


class Service:
    """A controller and its trainer."""

    def __init__(self, processes: ExitStack, label: str, train: dict[str, Any], rollout: dict[str, Any]) -> None:
        self.label, self._processes = label, processes
        self.controller = child(processes, "reports_controller", "controller", train=train, rollout=rollout)
        self._trained = 0
        self._trainer: Child | None = None

    def client(self, script: str, role: str, **settings: Any) -> Child:
        """A process that knows the controller's address."""
        return child(self._processes, script, role, address=self.controller.ready["address"], **settings)

    @property
    def trainer(self) -> Child:
        """Its trainer, from the first use on."""
        if self._trainer is None:
            self._trainer = self.client("reports_clients", "trainer")
        return self._trainer

    def measure(self, clients: Iterable[Child], completions: int, **send: Any) -> Measured:
        """Let `clients` send what they have prepared, and the trainer settle it.

        Raises:
            RuntimeError: what was acknowledged is not what was settled.
        """
        clients = list(clients)
        self.controller.ask("profile")
        cpu = self.controller.cpu_s
        self.trainer.start("settle", completions=completions)
        for one in clients:
            one.start("send", **send)
        sent = [one.answer() for one in clients]
        settled = self.trainer.answer()
        cpu = self.controller.cpu_s - cpu
        self.controller.ask("profile", name=self.label)
        state = self.trainer.ask("state")
        self._trained += completions
        if state != {"trained": self._trained, "lost": 0, "ready": 0} or settled["over"]:
            raise RuntimeError(f"{self.label}: {self._trained} completions were acknowledged, and the run says {state}")
        latencies = [latency for answer in sent for latency in answer.get("latencies", [0.0])]
        began = min(answer["began"] for answer in sent)
        took = max(settled["ended"], *(answer["ended"] for answer in sent)) - began
        return Measured(completions / took, cpu / completions * 1e6, cpu / took, quantile(latencies, 0.99) * 1e3)


def child(processes: ExitStack, script: str, role: str, **settings: Any) -> Child:
    """A process that ends with `processes`."""
    one = Child(script, role, **settings)
    processes.callback(one.close)
    return one


def rates() -> dict[str, float]:
    """Batches, the product's client, single reports and the HTTP baseline, in turns."""
    leased = {"n_generation": GROUP, "max_outstanding_groups": 1 << 20}
    with ExitStack() as processes:
        batched = Service(processes, "batched", {"groups_per_step": STEP_GROUPS}, leased)
        single = Service(processes, "single", {"groups_per_step": SINGLE_STEP_GROUPS}, leased)
        server = child(processes, "reports_http", "server")
        many = batched.client("reports_clients", "workers", sessions=WORKERS)
        product = batched.client("reports_clients", "rollout_client")
        some = single.client("reports_clients", "workers", sessions=SINGLE_WORKERS)
        http = child(processes, "reports_http", "client", port=server.ready["port"], connections=HTTP_CONNECTIONS)
        assert batched.trainer.ready == batched.controller.ready["execution_id"]  # confirmed, so that groups are leased
        assert single.trainer.ready
        return medians(dict(one_round(batched, many, product, single, some, server, http)) for _ in range(ROUNDS))


def one_round(
    batched: Service, many: Child, product: Child, single: Service, some: Child, server: Child, http: Child
) -> Iterator[tuple[str, float]]:
    """Every figure of one round."""
    whole = {"shape": "whole groups", "batches": BATCHES, "rows": ROWS, "groups": BATCHES * ROWS}
    completions = WORKERS * BATCHES * ROWS * GROUP
    many.ask("prepare", window=WINDOW, **whole)
    peak = batched.measure([many], completions, window=WINDOW)
    yield "batched_completions_per_s", peak.per_s
    yield "server_us_per_completion", peak.cpu_us
    yield "batched_server_cores", peak.busy
    many.ask("prepare", window=OPEN_WINDOW, **whole)
    half = peak.per_s / 2 / (ROWS * GROUP)
    yield "batched_p99_ms", batched.measure([many], completions, window=OPEN_WINDOW, per_s=half).p99_ms
    product.ask("prepare", groups=CLIENT_GROUPS)
    yield "client_completions_per_s", batched.measure([product], CLIENT_GROUPS * GROUP).per_s

    ones = {"shape": "single", "batches": SINGLE_GROUPS * GROUP, "rows": GROUP, "groups": SINGLE_GROUPS}
    completions = SINGLE_WORKERS * SINGLE_GROUPS * GROUP
    some.ask("prepare", window=SINGLE_WINDOW, **ones)
    alone = single.measure([some], completions, window=SINGLE_WINDOW)
    yield "single_reports_per_s", alone.per_s
    yield "single_server_us", alone.cpu_us
    some.ask("prepare", window=OPEN_WINDOW, **ones)
    yield "single_p99_ms", single.measure([some], completions, window=OPEN_WINDOW, per_s=alone.per_s / 2).p99_ms

    for kind, reports in HTTP_REPORTS.items():
        rate, cpu_us = post(server, http, reports, kind)
        yield f"http_{kind}_per_s", rate
        yield f"http_{kind}_us", cpu_us
        yield f"ratio_http_{kind}", peak.per_s / rate
        if kind == "keepalive":
            yield "single_ratio_http_keepalive", alone.per_s / rate


def post(server: Child, http: Child, reports: int, kind: str) -> tuple[float, float]:
    """Completions a second, and CPU of the server in µs per completion."""
    first, before = server.ask("lease", groups=-(-reports // GROUP)), server.ask("settled")
    keep = kind != "post"
    http.ask("prepare", first=first, reports=reports, batch=256 if kind == "batch256" else 0, keep=keep)
    cpu = server.cpu_s
    sent = http.ask("send", keep=keep)
    cpu = server.cpu_s - cpu
    if server.ask("settled") - before != reports:
        raise RuntimeError(f"{kind}: the baseline settled something else than {reports} completions")
    return reports / (sent["ended"] - sent["began"]), cpu / reports * 1e6


def payloads() -> dict[str, float]:
    """Payloads through the controller and bytes through the relay, in turns; the worst of the sizes."""
    found: dict[str, float] = {}
    for name, (size, group) in PAYLOADS.items():
        with ExitStack() as processes:
            figures = payload_rounds(processes, size, group)
        found |= {f"payload_{name.replace(' ', '_')}_{key}": value for key, value in figures.items()}
    for worst in ("ratio_to_bare_stream", "peak_rss_mib"):
        found[f"payload_{worst}"] = max(value for key, value in found.items() if key.endswith(worst))
    return found


def payload_rounds(processes: ExitStack, size: int, group: int) -> dict[str, float]:
    """One size of payloads. First a trainer that fetches nothing, so that the controller holds all that it will."""
    groups = PAYLOAD_STEP // size // group
    rollout = {"n_generation": group, "max_outstanding_groups": 1 << 20, "max_buffered_bytes": PAYLOAD_BUFFER}
    service = Service(processes, "payloads", {"groups_per_step": groups}, rollout)
    relay = child(processes, "reports_payloads", "relay", queue=PAYLOAD_BUFFER // PAYLOAD_MESSAGE)
    worker = service.client("reports_payloads", "worker", size=size, leased=groups)
    trainer = service.client("reports_payloads", "trainer", size=size)
    bare = {"address": relay.ready["address"]}
    pusher = child(processes, "reports_payloads", "bare_worker", **bare)
    puller = child(processes, "reports_payloads", "bare_trainer", **bare)
    assert trainer.ready
    assert worker.ready

    controller, most = service.controller, PAYLOAD_STEP * PAYLOAD_STEPS
    base = controller.rss_mib
    controller.forget_peak()
    held = worker.ask("push", completions=1 << 40, wait_s=1)["completions"]
    trainer.ask("fetch", completions=held - held % (groups * group))  # whole steps

    def one_round() -> Iterator[tuple[str, float]]:
        controller.ask("profile")
        trainer.start("fetch", completions=most // size)
        ours = worker.ask("push", completions=most // size), trainer.answer()
        controller.ask("profile", name=f"payloads-{size}")
        said = {"messages": most // PAYLOAD_MESSAGE, "size": PAYLOAD_MESSAGE}
        puller.start("pull", **said)
        theirs = pusher.ask("push", **said), puller.answer()
        took, bare_took = (pulled["ended"] - pushed["began"] for pushed, pulled in (ours, theirs))
        yield "mib_per_s", most / MIB / took
        yield "bare_mib_per_s", most / MIB / bare_took
        yield "ratio_to_bare_stream", took / bare_took

    figures = medians(dict(one_round()) for _ in range(PAYLOAD_ROUNDS))
    return figures | {"held_mib": held * size / MIB, "peak_rss_mib": controller.peak_rss_mib - base}


def crowd() -> dict[str, float]:
    """A thousand workers with a connection each, a batch of ten reports a second from each."""
    with ExitStack() as processes:
        rollout = {"n_generation": CROWD_GROUP, "max_outstanding_groups": 1 << 20}
        service = Service(processes, "crowd", {"groups_per_step": CROWD_STEP_GROUPS}, rollout)
        assert service.trainer.ready
        alone = service.controller.rss_mib
        settings = [{"sessions": CROWD, "first": number * CROWD} for number in range(CROWD_PROCESSES)]
        clients = [service.client("reports_clients", "workers", **each) for each in settings]
        groups = 10 * (CROWD_SECONDS // CROWD_GROUP)
        shape = {"shape": "ten", "batches": CROWD_SECONDS, "rows": CROWD_GROUP, "groups": groups}
        for one in clients:
            one.ask("prepare", window=OPEN_WINDOW, **shape)
        completions = CROWD_PROCESSES * CROWD * CROWD_SECONDS * 10
        measured = service.measure(clients, completions, window=OPEN_WINDOW, per_s=CROWD)
        return {
            "workers_1000_p99_ms": measured.p99_ms,
            "workers_1000_cpu": measured.busy,
            "workers_1000_rss_mib": service.controller.rss_mib,
            "workers_1000_rss_alone_mib": alone,
        }


def medians(rounds: Iterable[dict[str, float]]) -> dict[str, float]:
    """Of each figure over the rounds."""
    all_rounds = list(rounds)
    return {name: statistics.median(one[name] for one in all_rounds) for name in all_rounds[0]}


def main() -> None:
    began = time.monotonic()
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start; groups of {GROUP}, steps of {STEP_GROUPS:,} groups"
    )
    found = rates()
    print(f"\n{'reports: acknowledged and settled':44} {'completions/s':>14} {'server µs each':>15} {'p99 ack ms':>11}")
    for name, rate, cpu_us, p99 in (
        (
            f"batches of {ROWS * GROUP:,}, stubs",
            "batched_completions_per_s",
            "server_us_per_completion",
            "batched_p99_ms",
        ),
        ("batches of the product's client", "client_completions_per_s", "", ""),
        ("one a message, stubs", "single_reports_per_s", "single_server_us", "single_p99_ms"),
        ("HTTP, a POST and a connection each", "http_post_per_s", "http_post_us", ""),
        ("HTTP, a POST each, keep-alive", "http_keepalive_per_s", "http_keepalive_us", ""),
        ("HTTP, batches of 256, keep-alive", "http_batch256_per_s", "http_batch256_us", ""),
    ):
        ratio = f"{found['batched_completions_per_s'] / found[rate]:8.1f} x" if "http" in rate else ""
        print(
            f"  {name:42} {found[rate]:14,.0f} {found[cpu_us] if cpu_us else float('nan'):15.2f} "
            f"{found[p99] if p99 else float('nan'):11.1f} {ratio}".replace("nan", "  –")
        )
    found |= payloads()
    print(f"\n{'payloads: worker, controller, trainer':44} {'MiB/s':>14} {'bare stream':>15} {'ratio':>11}")
    for name in PAYLOADS:
        key = f"payload_{name.replace(' ', '_')}_"
        values = (found[key + part] for part in ("mib_per_s", "bare_mib_per_s", "ratio_to_bare_stream"))
        print("  {:42} {:14.0f} {:15.0f} {:11.1f}".format(name, *values))
    print(
        f"  peak memory {found['payload_peak_rss_mib']:.0f} MiB with a queue of {PAYLOAD_BUFFER // MIB} MiB configured"
    )
    found |= crowd()
    print(
        f"\n{CROWD_PROCESSES * CROWD:,} workers, ten reports a second each: p99 {found['workers_1000_p99_ms']:.1f} ms, "
        f"{found['workers_1000_cpu']:.2f} cores, {found['workers_1000_rss_mib']:.0f} MiB "
        f"({found['workers_1000_rss_alone_mib']:.0f} without them)"
    )
    print(f"took {time.monotonic() - began:.0f} s\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
