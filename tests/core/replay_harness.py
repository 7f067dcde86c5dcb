"""Executions that go on from a save and from what it recorded of its window."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from core_harness import Clock, House, LoadState, Worker, counted_ids, make_policy, metadata_of, prompt_of

from cosmos_ctrl.core.agreement import Resumed
from cosmos_ctrl.core.commands import Save, Train
from cosmos_ctrl.core.controller import Controller
from cosmos_ctrl.core.execution import ExecutionIdentity
from cosmos_ctrl.core.groups import Lease
from cosmos_ctrl.core.replay import Doubt, Replay, ReplayRecord, record_of, restore
from cosmos_ctrl.core.samplers import SeekableSampler
from cosmos_ctrl.core.sampling import Prompt, Sampling

#: Use what the save's window gives.
RECORDED: Any = object()


class Batches:
    """Lists of up to `batch` indices, in order, epoch after epoch; the last of an epoch may be shorter."""

    deterministic = True

    def __init__(self, length: int, batch: int) -> None:
        self.length, self.batch, self.position = length, batch, 0

    def set_epoch(self, epoch: int) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[list[int]]:
        while self.position < self.length:
            first, self.position = self.position, min(self.length, self.position + self.batch)
            yield list(range(first, self.position))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class ReplayHouse(House):
    """The next execution, restored as the server does it."""

    def __init__(
        self,
        save: Save,
        *,
        record: ReplayRecord | Doubt | None = RECORDED,
        number: int = 2,
        prompts: int = 6,
        n: int = 2,
        sampler: Any = None,
        batch_sampler: Any = None,
        prompt_by_key: Callable[[str], Prompt] | None = None,
        adapter: Any = None,
        clock: Clock | None = None,
        make_prompt: Callable[[Any], Prompt] = prompt_of,
        **overrides: Any,
    ) -> None:
        if record is RECORDED:
            assert save.window is not None
            record = record_of(save.window)
        self.clock = clock or Clock()
        self.events = []
        self.sampler = sampler or SeekableSampler(prompts, shuffle=False)
        sampling = Sampling(self.sampler, batch_sampler, prompt_of=make_prompt, completions_per_prompt=n)
        metadata = metadata_of(save, sampling_owner=sampling.owner_name)
        resumed = Resumed(
            metadata=metadata,
            manifest_digest=f"sha256:{save.checkpoint_id}",
            repeat_bound_completions=save.window_completions,
        )
        start, self.replay = restore(sampling, adapter or LoadState(), metadata, record, prompt_by_key=prompt_by_key)
        self._incarnations = itertools.count(number * 1000)
        ids = counted_ids()
        self.controller = Controller(
            make_policy(**{"records_window": "settled"} | overrides),
            ExecutionIdentity(number, f"execution-{number}"),
            sampling,
            start,
            resumed,
            replay=self.replay,
            clock=self.clock,
            new_id=lambda: f"{number:04x}{ids()[4:]}",
            record=lambda event, **values: self.events.append((event, values)),
        )


def replay_of(house: House) -> Replay:
    assert isinstance(house, ReplayHouse)
    return house.replay


def recorded(house: House) -> list[tuple[int, int]]:
    """What an execution did not generate again: (group, mask)."""
    return [
        row
        for event, values in house.events
        if event == "settle" and values["outcome"] == "recorded"
        for row in values["rows"]
    ]


def keys_of(leases: list[Lease]) -> list[str]:
    return [lease.prompt.key for lease in leases]


def train(trainer: Worker, number: int, **parts: Any) -> Train:
    """Command `number`, which is a step, done as told."""
    command = trainer.command(number)
    assert isinstance(command, Train), command
    trainer.trained(command, **parts)
    return command


def cut(house: House, trainer: Worker, number: int) -> Save:
    """The SAVE that is command `number`: written, published; its window is kept for the test."""
    save = trainer.command(number)
    assert isinstance(save, Save), save
    window = save.window
    trainer.saved(save)
    assert save in house.publish()
    assert save.window is None  # what lay in the window is let go of once the save is over
    save.window = window
    return save


def journal(house: House) -> list[dict[str, Any]]:
    """What the execution would have written to its journal, for the audit."""
    return [{"event": event, "t": float(at), **values} for at, (event, values) in enumerate(house.events)]
