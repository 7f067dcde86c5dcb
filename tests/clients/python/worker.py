"""The conformance worker over the bundled Python client; docs/conformance.md says what it does and why it is this simple."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

from cosmos_worker.errors import EXIT_ENDED, exit_code_for
from cosmos_worker.rollout import LeasedGroup, Rollout
from cosmos_worker.settings import ClientConfig, count_from

_BAD_CONFIGURATION = 2

CONFIG = ClientConfig(connect_total_s=30.0, close_s=10.0, lease_wait_s=0.5, backoff_max_s=2.0)


class Worker:
    """Does what a group's source says."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._met: set[str] = set()

    async def work(self, in_flight: int) -> None:
        """Every group, until there are no more."""
        async for group in self._rollout.groups(in_flight=in_flight):
            await self._one(group)

    async def _one(self, group: LeasedGroup) -> None:
        first = group.prompt_key not in self._met
        self._met.add(group.prompt_key)
        if group.source == "hold":
            return  # kept until this process leaves, which returns it
        if group.source == "fail":
            await self._rollout.fail(group, reason="told_to")
        elif group.source == "discard":
            await self._rollout.discard(group, reason="told_to")
        elif group.source == "return" and first:
            await self._rollout.give_back(group)
        else:
            await self._complete(group)

    async def _complete(self, group: LeasedGroup) -> None:
        # One by one: a group that is reported at once has to fit into one message.
        weights = self._rollout.weights
        for index in tuple(group.pending):
            payload = (group.payload or b"") + f"#{index}".encode()
            await self._rollout.report(
                group, index, payload, reward=float(index), versions=weights.version if weights else 0
            )


async def main() -> None:
    """One worker's life."""
    in_flight = count_from(os.environ, "COSMOS_CTRL_IN_FLIGHT", 8)
    told = asyncio.Event()

    def terminate() -> None:
        if told.is_set():
            os._exit(EXIT_ENDED)  # told twice: what is left is not waited for
        told.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    async with Rollout.from_env(group=os.environ.get("COSMOS_CTRL_GROUP", "rollout"), config=CONFIG) as rollout:
        work = asyncio.create_task(Worker(rollout).work(in_flight))
        leaving = asyncio.create_task(told.wait())
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
        elif not work.cancelled():
            work.result()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    if not os.environ.get("COSMOS_CTRL_ADDRESS"):
        print("COSMOS_CTRL_ADDRESS=host:port is not set", file=sys.stderr)
        sys.exit(_BAD_CONFIGURATION)
    try:
        asyncio.run(main())
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(exit_code_for(error))
