"""The rollout worker's loop: lease prompts, generate, score, report."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

import torch

from cosmos_worker.grpo.config import GrpoSettings
from cosmos_worker.grpo.engine import Engine
from cosmos_worker.grpo.payload import CODEC, encode_completion
from cosmos_worker.grpo.tasks import Task, reward
from cosmos_worker.lease_book import LeasedGroup
from cosmos_worker.rollout import Rollout


async def roll_out(settings: GrpoSettings, *, in_flight: int) -> None:
    """Generate for the execution until nothing more is leased.

    Args:
        settings: the application's.
        in_flight: groups generated in one batch.
    """
    torch.set_num_threads(1)
    engine = Engine(settings)
    async with Rollout.from_env(on_weights=engine.load) as rollout:
        waiting: asyncio.Queue[LeasedGroup | None] = asyncio.Queue()

        async def lease() -> None:
            async for group in rollout.groups(in_flight=2 * in_flight):
                waiting.put_nowait(group)
            waiting.put_nowait(None)

        async def generate() -> None:
            while batch := await _take(waiting, in_flight):
                await _generate_and_report(rollout, engine, batch)

        # The next groups are leased while these are generated.
        working = {asyncio.create_task(lease()), asyncio.create_task(generate())}
        done, running = await asyncio.wait(working, return_when=asyncio.FIRST_EXCEPTION)
        for task in running:
            task.cancel()
        for task in done:
            task.result()


async def _take(waiting: asyncio.Queue[LeasedGroup | None], most: int) -> list[LeasedGroup]:
    """At least one group, and what else is there, up to `most`; empty when there are no more."""
    batch: list[LeasedGroup] = []
    while not batch or (len(batch) < most and not waiting.empty()):
        group = await waiting.get()
        if group is None:
            waiting.put_nowait(None)
            break
        batch.append(group)
    return batch


async def _generate_and_report(rollout: Rollout, engine: Engine, batch: Sequence[LeasedGroup]) -> None:
    tasks = [_task(group) for group in batch]
    counts = [len(group.pending) for group in batch]
    prompts = [task.prompt for task in tasks]
    generated = await asyncio.to_thread(engine.generate, prompts, counts, secrets.randbits(62))
    # As generated: newer weights may have been loaded meanwhile.
    version = generated[0][0].version
    rollout.metric("weights_version", version)
    for group, task, completions in zip(batch, tasks, generated, strict=True):
        await rollout.report_group(
            group,
            rewards=[reward(task, completion.text) for completion in completions],
            payloads=[encode_completion(completion.tokens, completion.logprobs) for completion in completions],
            versions=version,
            codec=CODEC,
        )


def _task(group: LeasedGroup) -> Task:
    row = group.prompt()
    return Task(key=group.prompt_key, prompt=row["prompt"], answer=row["answer"], source=group.source)
