"""Retention in the runtime: its turn comes after a publication, no save waits for it, and nothing it meets fails the execution."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from service_harness import House, soon, until

from cosmos_ctrl.checkpoints.claims import pin_resume
from cosmos_ctrl.checkpoints.retention import KEEP_ALL, Failure, RetentionPolicy, Round
from cosmos_ctrl.core.errors import StorageUnavailableError
from cosmos_ctrl.service import runtime as runtime_module


async def saving(houses: Any, policy: RetentionPolicy = KEEP_ALL) -> tuple[House, Any, Any]:
    house: House = await houses(save_every_steps=1)
    house.runtime.info = replace(house.runtime.info, retention=policy)
    pin_resume(house.store, 1, execution_id=house.core.identity.id, checkpoint=None)
    return house, await house.trainers(), await house.rollout()


async def step(house: House, trainers: Any, rollout: Any, number: int) -> None:
    await house.train_one(trainers, rollout, 2 * number - 1)
    await house.save(trainers, 2 * number)


async def test_no_save_waits_for_retention_and_one_round_follows_for_all_that_came_meanwhile(
    houses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, trainers, rollout = await saving(houses, RetentionPolicy(keep_last=1))
    go_on, rounds = threading.Event(), []
    retain = runtime_module.retain

    def slow(*arguments: Any, **keywords: Any) -> Round:
        rounds.append(len(list(house.run.glob("checkpoints/*/manifest.json"))))
        assert go_on.wait(20)
        return retain(*arguments, **keywords)

    monkeypatch.setattr(runtime_module, "retain", slow)
    for number in (1, 2, 3):
        await soon(step(house, trainers, rollout, number))
    assert len(list(house.run.glob("checkpoints/*/manifest.json"))) == 3
    go_on.set()
    await soon(house.runtime.finish_effects())
    # The second one found what the first, of three, had left.
    assert rounds == [1, 1]
    assert house.core.lifecycle.failure is None


@pytest.mark.parametrize(
    "error",
    [StorageUnavailableError(path="x", operation="list", cause="EIO"), ValueError("a mistake"), OSError(5, "EIO")],
)
async def test_retention_that_fails_is_a_warning_and_tried_again(
    houses: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    house, trainers, rollout = await saving(houses)
    rounds = []

    def failing(*_: Any, **__: Any) -> Round:
        rounds.append(1)
        raise error

    monkeypatch.setattr(runtime_module, "retain", failing)
    for number in (1, 2):
        await soon(step(house, trainers, rollout, number))
        await until(lambda number=number: len(rounds) == number and house.runtime._retaining.done())
    assert house.core.lifecycle.failure is None
    assert caplog.text.count("retention could not look at the run") == 2


async def test_what_is_not_deleted_is_told_and_with_all_kept_nothing_is_looked_for_twice(
    houses: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    house, trainers, rollout = await saving(houses)
    answers = [Round(failures=(Failure("checkpoints/y", "EIO"),)), Round(swept=("checkpoints/x",))]
    monkeypatch.setattr(runtime_module, "retain", lambda *_, **__: answers.pop(0))
    for number in (1, 2, 3):
        await soon(step(house, trainers, rollout, number))
        await until(lambda: house.runtime._retaining.done())
    assert not answers
    assert caplog.text.count("checkpoints/y is not deleted") == 1
    assert "could not look" not in caplog.text


async def test_an_execution_that_leaves_ends_the_round_between_two_steps(
    houses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, trainers, rollout = await saving(houses)
    monkeypatch.setattr(runtime_module, "_RETENTION_S", 0.01)
    ended = threading.Event()

    def endless(*_: Any, may_go_on: Any, **__: Any) -> Round:
        while may_go_on():
            pass
        ended.set()
        return Round()

    monkeypatch.setattr(runtime_module, "retain", endless)
    await soon(step(house, trainers, rollout, 1))
    await asyncio.wait_for(house.runtime.finish_effects(), 10)
    assert ended.is_set()
