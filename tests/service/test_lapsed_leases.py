"""A worker that comes back after its session had lapsed does not go on with what is somebody else's."""

from __future__ import annotations

from service_harness import refusal

from cosmos_ctrl.core.errors import NotRegisteredError


async def test_a_worker_whose_session_lapsed_is_told_that_its_leases_are_lost_and_not_given_them_again(houses):
    house = await houses(ranks=1)
    (trainer,) = await house.trainers()
    rollout = await house.rollout()
    groups = (await rollout.lease(2)).groups
    for _ in range(3):
        house.pass_time(6)
        await trainer.submit()
    assert isinstance(await refusal(rollout.submit()), NotRegisteredError)
    await rollout.register()
    # The reply was lost with the session, say, and is asked for again.
    assert not (await rollout.lease(2, number=1)).groups
    (notice,) = (await rollout.submit()).notices
    assert list(notice.cancelled.leases) == [group.lease for group in groups]
    assert {group.group for group in (await rollout.lease(2)).groups} == {group.group for group in groups}
