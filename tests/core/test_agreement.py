"""The gate: it opens when every rank has confirmed the same, and one disagreement is fatal for all (G3)."""

from __future__ import annotations

from typing import Any

import pytest
from core_harness import House, Worker, resume_from

from cosmos_ctrl.core.commands import Save, Train
from cosmos_ctrl.core.errors import (
    AwaitingAgreementError,
    ConflictingRetryError,
    MalformedError,
    NotAllowedError,
    NotRegisteredError,
    ResumeMetadataMismatch,
)

TWO = (("policy", 2),)


def saved_at_one(**overrides: Any) -> Save:
    """A save of step 1, from a run of two ranks."""
    house = House(trainer_groups=TWO, groups_per_step=1, save_every_steps=1, **overrides)
    trainers = house.open_gate()
    worker = house.rollout()
    worker.complete(*worker.lease())
    for trainer in trainers:
        command = trainer.command(1)
        assert isinstance(command, Train)
        trainer.trained(command)
    save = trainers[0].command(2)
    assert isinstance(save, Save)
    return save


def resumed(**overrides: Any) -> tuple[House, Worker, Worker]:
    house = resume_from(saved_at_one(), trainer_groups=TWO, **overrides)
    return house, house.trainer(0), house.trainer(1)


def test_g3_no_command_before_every_rank_has_confirmed() -> None:
    house, first, second = resumed()
    assert first.confirm() == ("trainer policy/1",)
    with pytest.raises(AwaitingAgreementError) as caught:
        first.command(1)
    assert caught.value.missing == ("trainer policy/1",)
    assert house.controller.lifecycle.phase == "AWAITING_AGREEMENT"
    assert second.confirm() == ()
    assert house.controller.lifecycle.phase == "RUNNING"
    assert first.command(1) is None


def test_g3_no_lease_before_the_gate_opens() -> None:
    house, first, second = resumed()
    worker = house.rollout()
    first.confirm()
    assert worker.lease() == []
    second.confirm()
    assert len(worker.lease()) == 1


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"training_steps": 2}, "restored_training_steps"),
        ({"optimizer_updates": 2}, "restored_optimizer_updates"),
        ({"manifest_digest": "sha256:other"}, "manifest_digest"),
        ({"training_steps": True}, "restored_training_steps"),
    ],
)
def test_g3_one_disagreement_is_fatal_at_once_and_for_everyone(change: dict[str, Any], key: str) -> None:
    house, first, second = resumed()
    worker = house.rollout()
    first.confirm()
    with pytest.raises(ResumeMetadataMismatch) as caught:
        second.confirm(**change)
    assert caught.value.changed == (key,)
    assert house.controller.lifecycle.phase == "FAILED"
    for call in (first.confirm, first.heartbeat, worker.heartbeat, worker.lease, lambda: first.command(1)):
        with pytest.raises(ResumeMetadataMismatch):
            call()
    with pytest.raises(ResumeMetadataMismatch):
        house.rollout(5)


def test_g3_equal_counters_with_another_identity_disagree() -> None:
    house, first, _ = resumed()
    assert house.controller.resumed is not None
    mine = house.controller.resumed.metadata
    values = mine.values() | {"checkpoint_id": "another"}
    with pytest.raises(ResumeMetadataMismatch) as caught:
        first.confirm(metadata=type(mine)(**values))
    assert caught.value.changed == ("checkpoint_id",)


@pytest.mark.parametrize("steps", [0, 1])
def test_g3_a_fresh_rank_in_a_resumed_run_is_fatal(steps: int) -> None:
    house, first, _ = resumed()
    with pytest.raises(ResumeMetadataMismatch):
        first.confirm(metadata=None, manifest_digest="", training_steps=steps, optimizer_updates=steps)
    assert house.controller.lifecycle.phase == "FAILED"


def test_g3_a_rank_that_resumed_in_a_fresh_run_is_fatal() -> None:
    donor, _, _ = resumed()
    assert donor.controller.resumed is not None
    house = House(trainer_groups=TWO)
    with pytest.raises(ResumeMetadataMismatch):
        house.trainer(0).confirm(metadata=donor.controller.resumed.metadata)


@pytest.mark.parametrize("counts", [{"training_steps": 1}, {"optimizer_updates": 1}])
def test_g3_a_rank_that_calls_itself_fresh_and_counts_is_fatal(counts: dict[str, int]) -> None:
    house = House()
    with pytest.raises(ResumeMetadataMismatch):
        house.trainer().confirm(**counts)


def test_g6_confirming_again_changes_nothing_and_otherwise_is_a_conflict() -> None:
    house, first, second = resumed()
    first.confirm()
    revision = house.controller.lifecycle.revision
    assert first.confirm() == ("trainer policy/1",)
    assert house.controller.lifecycle.revision == revision
    with pytest.raises(ConflictingRetryError):
        first.confirm(artifact_names=("other.pt",))
    second.confirm()
    assert second.confirm() == ()


def test_an_artifact_has_one_writer() -> None:
    house, first, second = resumed()
    with pytest.raises(MalformedError):
        first.confirm(artifact_names=("a", "a"))
    first.confirm(artifact_names=("model.pt",))
    with pytest.raises(MalformedError):
        second.confirm(artifact_names=("model.pt",))
    assert not house.controller.lifecycle.gate_open


def test_rollout_workers_confirm_nothing() -> None:
    house = House()
    worker = house.rollout()
    with pytest.raises(NotAllowedError):
        worker.confirm()
    with pytest.raises(NotAllowedError):
        worker.command(1)


def test_g9_the_gate_has_a_deadline_that_names_who_is_missing() -> None:
    house, first, _ = resumed(gate_timeout_s=100.0, session_ttl_s=1000.0)
    first.confirm()
    house.clock.advance(101)
    house.controller.tick()
    assert house.controller.lifecycle.phase == "FAILED"
    assert "trainer policy/1" in str(house.controller.lifecycle.failure)


def test_g9_a_rank_that_dies_after_confirming_does_not_open_the_gate() -> None:
    house, first, second = resumed(gate_timeout_s=100.0)
    first.confirm()
    house.clock.advance(16)
    second.heartbeat()
    house.controller.tick()  # the first rank is silent: what it confirmed is gone with it
    assert second.confirm() == ("trainer policy/0",)
    assert not house.controller.lifecycle.gate_open
    for _ in range(10):
        house.clock.advance(10)
        second.heartbeat()
        house.controller.tick()
        if house.controller.lifecycle.over:
            break
    assert "trainer policy/0" in str(house.controller.lifecycle.failure)


def test_a_rank_that_was_only_paused_confirms_again() -> None:
    house, first, second = resumed()
    first.confirm()
    house.clock.advance(16)
    house.controller.tick()
    with pytest.raises(NotRegisteredError):
        first.confirm()
    first.register()
    second.register()
    first.confirm()
    assert second.confirm() == ()
    assert house.controller.lifecycle.phase == "RUNNING"


def test_a_replaced_rank_confirms_for_itself_before_the_gate_opens() -> None:
    house, first, second = resumed()
    first.confirm()
    replacement = house.trainer(0)
    assert second.confirm() == ("trainer policy/0",)
    assert replacement.confirm() == ()
    assert house.controller.lifecycle.phase == "RUNNING"


def test_g7_damage_is_recorded_and_ends_the_execution() -> None:
    house, first, _ = resumed()
    house.controller.report_damage(first.execution, first.session, "policy0.pt", "digest differs")
    (effect,) = house.controller.take_effects()
    assert house.controller.resumed is not None
    assert effect.checkpoint_path == house.controller.resumed.metadata.checkpoint_path  # type: ignore[union-attr]
    assert effect.artifact == "policy0.pt"  # type: ignore[union-attr]
    assert house.controller.lifecycle.phase == "FAILED"
    fresh = House()
    trainer = fresh.trainer()
    with pytest.raises(NotAllowedError):
        fresh.controller.report_damage(trainer.execution, trainer.session, "x", "y")


def test_g11_legacy_ranks_agree_with_each_other() -> None:
    donor, _, _ = resumed()
    assert donor.controller.resumed is not None
    metadata = donor.controller.resumed.metadata
    house = House(execution_id="", number=0, trainer_groups=TWO)
    first, second = house.trainer(0), house.trainer(1)
    first.confirm(metadata=metadata, training_steps=1, optimizer_updates=1)
    with pytest.raises(ResumeMetadataMismatch):
        second.confirm()
    agreed = House(execution_id="", number=0, trainer_groups=TWO)
    first, second = agreed.trainer(0), agreed.trainer(1)
    first.confirm(metadata=metadata, training_steps=1, optimizer_updates=1)
    assert second.confirm(metadata=metadata, training_steps=1, optimizer_updates=1) == ()


def test_g4_a_gate_behind_which_nothing_could_be_saved_does_not_open() -> None:
    house = House(trainer_groups=TWO)
    first, second = house.trainer(0), house.trainer(1)
    first.confirm(artifact_names=())
    with pytest.raises(MalformedError, match="no trainer rank declares an artifact"):
        second.confirm(artifact_names=())
    assert house.controller.lifecycle.phase == "AWAITING_AGREEMENT"
    second.confirm(artifact_names=("policy-1/state.pt",))
    assert house.controller.lifecycle.phase == "RUNNING"
