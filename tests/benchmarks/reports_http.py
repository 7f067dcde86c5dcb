"""The baseline of a benchmark: reports as JSON over HTTP, by FastAPI and uvicorn in one process, and a client that costs little.

The ledger behind it is the simple design's: a dictionary of draws with a set of settled completions in each. A report settles
at once, so the baseline commits no steps.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import uvicorn
from bench_ledger import GROUP, SimpleBoundary, SimpleLedger
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel
from reports_processes import obey, run_child


class Report(BaseModel):
    """One completion: what a row and a reward of ours say."""

    group: int
    lease: int
    completion: int
    reward: float
    lowest_version: int
    highest_version: int


class Batch(BaseModel):
    """Several at once."""

    reports: list[Report]


class SimpleController:
    """Leases by number, rewards by completion, and the simple ledger."""

    def __init__(self) -> None:
        self.left = 1 << 40
        self.ledger = SimpleLedger(SimpleBoundary(1, {"position": 0}, self.left))
        self.leases: dict[int, int] = {}
        self.rewards: dict[tuple[int, int], float] = {}
        self.settled = 0

    def lease(self, groups: int) -> int:
        """Issue so many groups; returns the first. The lease number is one more than the group's."""
        first = self.ledger.next
        for _ in range(groups):
            self.left -= GROUP
            group = self.ledger.issue(SimpleBoundary(1, {"position": self.left}, self.left), GROUP)
            self.leases[group] = group + 1
        return first

    def apply(self, report: Report) -> None:
        """Settle one completion."""
        if self.leases.get(report.group) != report.lease or report.lowest_version > report.highest_version:
            raise HTTPException(409, "the lease is lost")
        if not self.ledger.settle(report.group, report.completion):
            raise HTTPException(409, "it was reported before")
        self.rewards[report.group, report.completion] = report.reward
        self.settled += 1


def application(controller: SimpleController) -> FastAPI:
    """Its routes."""
    app = FastAPI()

    @app.post("/report")
    async def report(report: Report) -> dict[str, int]:
        controller.apply(report)
        return {"applied": controller.settled}

    @app.post("/reports")
    async def reports(batch: Batch) -> dict[str, int]:
        for report in batch.reports:
            controller.apply(report)
        return {"applied": controller.settled}

    return app


async def server() -> None:
    """Serve until killed."""
    controller = SimpleController()
    # It binds by itself: a socket of ours would lack its protocol number, and asyncio then leaves Nagle's algorithm on.
    config = uvicorn.Config(application(controller), host="127.0.0.1", port=0, log_level="warning", access_log=False)
    served = uvicorn.Server(config)
    serving = asyncio.ensure_future(served.serve())
    while not served.started and not serving.done():  # noqa: ASYNC110  # uvicorn has no event for it
        await asyncio.sleep(0.01)

    async def lease(groups: int) -> int:
        return controller.lease(groups)

    async def settled() -> int:
        return controller.settled

    await obey({"port": served.servers[0].sockets[0].getsockname()[1]}, lease=lease, settled=settled)


async def client(port: int, connections: int) -> None:
    """Requests over plain sockets, made beforehand; a connection's next one follows its last answer."""
    requests: list[bytes] = []

    async def prepare(first: int, reports: int, batch: int, keep: bool) -> None:
        """`batch` 0: one report a request."""
        said = [
            {
                "group": first + number // GROUP,
                "lease": first + number // GROUP + 1,
                "completion": number % GROUP,
                "reward": number / reports,
                "lowest_version": 0,
                "highest_version": 0,
            }
            for number in range(reports)
        ]
        bodies: list[Any] = [{"reports": said[at : at + batch]} for at in range(0, reports, batch)] if batch else said
        requests[:] = [_request("/reports" if batch else "/report", body, keep) for body in bodies]

    async def send(keep: bool) -> Any:
        todo = iter(requests)
        began = time.monotonic()
        await asyncio.gather(*((_kept if keep else _anew)(port, todo) for _ in range(connections)))
        return {"began": began, "ended": time.monotonic()}

    await obey(connections, prepare=prepare, send=send)


def _request(path: str, body: Any, keep: bool) -> bytes:
    content = json.dumps(body, separators=(",", ":")).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: controller\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: {'keep-alive' if keep else 'close'}\r\n\r\n"
    )
    return head.encode() + content


async def _kept(port: int, todo: Any) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for request in todo:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        _check(head)
        length = head.lower().split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0]
        await reader.readexactly(int(length))
    writer.close()


async def _anew(port: int, todo: Any) -> None:
    for request in todo:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        _check(await reader.read())
        writer.close()


def _check(answer: bytes) -> None:
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"the baseline refuses: {answer[:200]!r}")


if __name__ == "__main__":
    run_child({"server": server, "client": client})
