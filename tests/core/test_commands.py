"""The log of commands: fixed once given, committed by all, saved by exactly what was declared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core_harness import disposed_row

from cosmos_ctrl.core.commands import (
    CommandLog,
    CompletionReport,
    DisposedRows,
    End,
    Save,
    SaveState,
    ShardReceipt,
    Train,
)
from cosmos_ctrl.core.errors import (
    ArtifactForeignError,
    ArtifactMissingError,
    ArtifactUnexpectedError,
    ConflictingRetryError,
    MalformedError,
    NotAllowedError,
    UnknownWorkError,
    WrongStepError,
)
from cosmos_ctrl.core.execution import ExecutionIdentity, Place
from cosmos_ctrl.core.ledger import SamplingBoundary

LEADER, SECOND, CRITIC = (
    Place("trainer", "policy", 0, 0),
    Place("trainer", "policy", 0, 1),
    Place("trainer", "critic", 0, 0),
)
EXECUTION = ExecutionIdentity(1, "execution-1")
RANKS = (LEADER, SECOND, CRITIC)
ROWS = ((1, 0b11), (2, 0b01))
TRAINED = (disposed_row(1, 0b11, "trained"), disposed_row(2, 0b01, "trained"))


def log(*, steps: int = 0, updates: int = 0) -> CommandLog:
    return CommandLog(RANKS, LEADER, steps=steps, updates=updates)


def add_train(commands: CommandLog) -> Train:
    command = Train(commands.next_number, commands.steps + 1, ROWS, deadline=60.0)
    commands.add(command)
    return command


def add_save(commands: CommandLog, **overrides: Any) -> Save:
    values: dict[str, Any] = {
        "number": commands.next_number,
        "checkpoint_id": "c1",
        "path": "checkpoints/e0001-s1-c1",
        "steps": commands.steps,
        "updates": commands.updates,
        "boundary": SamplingBoundary(epoch=1, sampler_state=None, remaining_completions=1),
        "window_completions": 0,
        "final": False,
        "deadline": 0.0,
    }
    save = Save(**values | overrides)
    commands.add(save)
    return save


def report(command: Train, /, *, disposed: tuple[DisposedRows, ...] = (), **overrides: Any) -> CompletionReport:
    return CompletionReport(
        **{"command": command.number, "step": command.step, "optimizer_updates": 2, "disposed": disposed} | overrides
    )


def finish(commands: CommandLog, command: Train, order: tuple[Place, ...] = RANKS, updates: int = 2) -> Train | None:
    committed = None
    for place in order:
        said = report(command, disposed=TRAINED if place == LEADER else (), optimizer_updates=updates)
        commands.check_report(place, said)
        committed = commands.record_report(place, said)
    return committed


def receipt(save: Save, name: str = "a.pt", rank: int = 0, **overrides: Any) -> ShardReceipt:
    values: dict[str, Any] = {
        "name": name,
        "size_bytes": 1,
        "digest": "sha256:0",
        "completed_training_steps": save.steps,
        "completed_optimizer_updates": save.updates,
        "rank": rank,
        "execution_number": 1,
        "execution_id": "execution-1",
        "checkpoint_id": save.checkpoint_id,
    }
    return ShardReceipt(**values | overrides)


# -- numbers


def test_g6_a_command_is_the_same_for_every_rank_and_every_asking() -> None:
    commands = log()
    assert commands.get(1, LEADER) is None
    command = add_train(commands)
    assert {id(commands.get(1, place)) for place in RANKS * 2} == {id(command)}


def test_a_rank_that_has_not_completed_may_not_go_on() -> None:
    commands = log()
    command = add_train(commands)
    commands.record_report(LEADER, report(command, disposed=TRAINED))
    assert commands.get(2, LEADER) is None
    with pytest.raises(NotAllowedError):
        commands.get(2, SECOND)
    assert not commands.may_form


@pytest.mark.parametrize("number", [0, -1, 2, 3, 100])
def test_a_number_ahead_or_behind_is_unknown(number: int) -> None:
    commands = log()
    if number == 2:
        number = 1 + commands.next_number
    with pytest.raises(UnknownWorkError):
        commands.get(number, LEADER)


def test_g10_old_commands_are_forgotten_but_never_an_open_save() -> None:
    commands = log()
    save = add_save(commands)
    for _ in range(30):
        add_save(commands).state = "COMMITTED"
        assert finish(commands, add_train(commands)) is not None
    assert commands.save(save.number) is save
    assert commands.saves == [save]
    with pytest.raises(UnknownWorkError):
        commands.get(2, LEADER)
    assert len(commands._commands) < 14
    save.state = "COMMITTED"
    for _ in range(30):
        add_save(commands).state = "COMMITTED"
        finish(commands, add_train(commands))
    with pytest.raises(UnknownWorkError):
        commands.save(save.number)
    assert len(commands._commands) < 14


@pytest.mark.parametrize("state", ["COMMITTED", "ABANDONED"])
def test_a_rank_may_speak_late_of_a_save_that_is_over(state: SaveState) -> None:
    """It still writes what another rank has abandoned, or its receipts' answer was lost; it begins its next save after that."""
    commands = log()
    saves = []
    for final in (False, False, True):
        saves.append(add_save(commands, final=final))
        saves[-1].state = state
        for _ in range(0 if final else 30):
            finish(commands, add_train(commands))
    assert [commands.save(save.number) for save in saves] == saves


def test_nothing_follows_the_end() -> None:
    commands = log()
    commands.add(End(1, "STOP_REQUESTED", "maintenance", 0))
    assert not commands.may_form
    with pytest.raises(UnknownWorkError):
        commands.get(2, LEADER)


def test_a_command_of_another_kind_is_unknown() -> None:
    commands = log()
    finish(commands, add_train(commands))
    add_save(commands)
    with pytest.raises(UnknownWorkError):
        commands.save(1)
    with pytest.raises(UnknownWorkError):
        commands.train(2)


# -- steps


@pytest.mark.parametrize("order", [RANKS, RANKS[::-1], (SECOND, LEADER, CRITIC)])
def test_a_step_commits_when_the_last_rank_reports_in_any_order(order: tuple[Place, ...]) -> None:
    commands = log(steps=7, updates=20)
    command = add_train(commands)
    assert finish(commands, command, order[:2]) is None
    assert (commands.steps, commands.updates, command.committed) == (7, 20, False)
    assert finish(commands, command, order[2:]) is command
    assert (commands.steps, commands.updates, command.committed) == (8, 22, True)


def test_g6_a_step_commits_once() -> None:
    commands = log()
    command = add_train(commands)
    finish(commands, command)
    said = report(command, disposed=TRAINED)
    commands.check_report(LEADER, said)
    assert commands.record_report(LEADER, said) is None
    assert (commands.steps, commands.updates) == (1, 2)


def test_updates_may_be_none_and_are_equal_everywhere() -> None:
    commands = log()
    command = add_train(commands)
    for place, updates in ((LEADER, 0), (CRITIC, 0), (SECOND, 0)):
        said = report(command, disposed=TRAINED if place == LEADER else (), optimizer_updates=updates)
        commands.check_report(place, said)
        commands.record_report(place, said)
    assert (commands.steps, commands.updates) == (1, 0)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"command": 2}, "command 2"),
        ({"command": 0}, "command 0"),
        ({"step": 2}, "step"),
        ({"step": 0}, "step"),
        ({"optimizer_updates": 3}, "updates"),
    ],
)
def test_g3_a_rank_that_diverges_is_a_wrong_step(change: dict[str, int], what: str) -> None:
    commands = log()
    command = add_train(commands)
    commands.record_report(LEADER, report(command, disposed=TRAINED))
    with pytest.raises(WrongStepError) as caught:
        commands.check_report(SECOND, report(command, **change))
    assert what in str(caught.value)
    assert not command.committed


def test_a_save_is_not_completed_by_a_report() -> None:
    commands = log()
    save = add_save(commands)
    with pytest.raises(WrongStepError):
        commands.check_report(LEADER, CompletionReport(command=save.number, step=0, optimizer_updates=0))


def test_g6_the_same_report_again_is_fine_and_another_is_a_conflict() -> None:
    commands = log()
    command = add_train(commands)
    said = report(command, disposed=TRAINED)
    commands.record_report(LEADER, said)
    commands.check_report(LEADER, said)
    with pytest.raises(ConflictingRetryError):
        commands.check_report(LEADER, replace(said, disposed=TRAINED[::-1]))


def test_only_required_ranks_report() -> None:
    commands = log()
    with pytest.raises(NotAllowedError):
        commands.check_report(Place("trainer", "policy", 0, 2), report(add_train(commands)))


@pytest.mark.parametrize(
    "rows",
    [
        (),
        (TRAINED[0],),
        (*TRAINED, TRAINED[1]),
        (*TRAINED, disposed_row(3, 1, "trained")),
        (TRAINED[0], disposed_row(2, 0b11, "trained")),
        (TRAINED[0], disposed_row(2, 0, "trained"), TRAINED[1]),
        (TRAINED[0], disposed_row(2, -1, "trained")),
        (TRAINED[0], disposed_row(2, 1, "discarded")),
        (TRAINED[0], disposed_row(2, 1, "trained", "a reason")),
        (TRAINED[0], disposed_row(2, 1, "returned", "a reason")),
    ],
)
def test_g1_the_leader_names_every_completion_exactly_once(rows: tuple[DisposedRows, ...]) -> None:
    commands = log()
    with pytest.raises(MalformedError):
        commands.check_report(LEADER, report(add_train(commands), disposed=rows))


def test_the_leader_may_split_a_group() -> None:
    commands = log()
    rows = (
        disposed_row(1, 0b01, "returned"),
        disposed_row(2, 0b01, "payload_lost"),
        disposed_row(1, 0b10, "discarded", "dull"),
        DisposedRows("discarded", ()),
    )
    commands.check_report(LEADER, report(add_train(commands), disposed=rows))


def test_nobody_else_names_completions() -> None:
    commands = log()
    with pytest.raises(MalformedError):
        commands.check_report(SECOND, report(add_train(commands), disposed=TRAINED))


# -- saves


def test_g4_a_save_is_complete_when_every_rank_has_sent_its_set() -> None:
    commands = log()
    save = add_save(commands)
    assert not commands.record_receipts(save, SECOND, (), "ignored")
    assert not commands.record_receipts(save, LEADER, (receipt(save),), '{"run": 1}')
    assert commands.record_receipts(save, CRITIC, (receipt(save, "c.pt"),), "ignored")
    assert (save.state, save.application_note) == ("PUBLISHING", '{"run": 1}')
    assert not commands.record_receipts(save, CRITIC, (receipt(save, "c.pt"),), "")
    assert commands.saves == [save]


@pytest.mark.parametrize("state", ["PUBLISHING", "COMMITTED", "ABANDONED"])
def test_g6_receipts_again_or_late_change_nothing(state: Any) -> None:
    commands = log()
    save = add_save(commands)
    save.state = state
    assert not commands.record_receipts(save, LEADER, (receipt(save),), "note")
    assert save.receipts == {}
    assert save.state == state


def test_g4_the_set_of_artifacts_is_closed() -> None:
    commands = log()
    save = add_save(commands)
    declared = frozenset({"a.pt", "b.pt"})
    both = (receipt(save, "a.pt"), receipt(save, "b.pt"))
    commands.check_receipts(save, LEADER, both, declared, EXECUTION)
    with pytest.raises(ArtifactMissingError) as missing:
        commands.check_receipts(save, LEADER, both[:1], declared, EXECUTION)
    assert missing.value.artifacts == ("b.pt",)
    with pytest.raises(ArtifactUnexpectedError) as unexpected:
        commands.check_receipts(save, LEADER, (*both, receipt(save, "c.pt")), declared, EXECUTION)
    assert unexpected.value.artifacts == ("c.pt",)
    with pytest.raises(MalformedError):
        commands.check_receipts(save, LEADER, (both[0], *both), declared, EXECUTION)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"checkpoint_id": "c0"}, "checkpoint"),
        ({"execution_id": "execution-0"}, "execution"),
        ({"completed_training_steps": 5}, "training step"),
        ({"completed_optimizer_updates": 5}, "optimizer updates"),
        ({"rank": 1}, "rank"),
    ],
)
def test_g3_shards_of_two_attempts_do_not_mix(change: dict[str, Any], what: str) -> None:
    commands = log()
    save = add_save(commands)
    with pytest.raises(ArtifactForeignError) as caught:
        commands.check_receipts(save, LEADER, (receipt(save, **change),), frozenset({"a.pt"}), EXECUTION)
    assert caught.value.what == what


def test_g4_an_empty_artifact_is_refused() -> None:
    commands = log()
    save = add_save(commands)
    with pytest.raises(MalformedError):
        commands.check_receipts(save, LEADER, (receipt(save, size_bytes=0),), frozenset({"a.pt"}), EXECUTION)


def test_g6_other_receipts_for_the_same_save_are_a_conflict() -> None:
    commands = log()
    save = add_save(commands)
    commands.record_receipts(save, LEADER, (receipt(save),), "")
    with pytest.raises(ConflictingRetryError):
        commands.check_receipts(save, LEADER, (receipt(save, digest="sha256:1"),), frozenset({"a.pt"}), EXECUTION)
