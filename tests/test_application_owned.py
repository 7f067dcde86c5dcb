"""An application that commits checkpoints in its own format: saved, killed, resumed; no manifest is written."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import own_format_run
import pytest
from own_format import OwnFormat
from own_format_run import DEATHS, GROUPS_PER_STEP, PROMPTS, execute

from cosmos_ctrl.core.resume import ControllerResumeMetadata, ResumeSettings
from cosmos_worker.commands import SaveWork

ALL = sorted(f"prompt-{index}" for index in range(PROMPTS))


def stored(directory: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((directory / "mine.json").read_text().partition("\n")[2])
    return values


async def test_g1_a_foreign_format_is_saved_and_resumed_and_no_manifest_is_written(tmp_path: Path) -> None:
    first = await execute(tmp_path / "run", max_steps=2)
    second = await execute(tmp_path / "run", max_steps=99)
    assert (first.ready.resumed_from, second.ready.resumed_from) == ("", str(tmp_path / "mine.json"))
    assert (first.ready.execution_number, second.ready.execution_number) == (1, 2)
    assert len(first.trained) == 4
    # Nothing was out of order, so nothing repeats: what was trained before and after is every prompt, once.
    assert sorted(first.trained + second.trained) == ALL
    assert set(first.saves + second.saves) == {"COMMITTED"}
    assert stored(tmp_path)["info"]["remain_samples_num"] == 0
    assert not list((tmp_path / "run").rglob("manifest.json"))


class Forgetful(OwnFormat):
    """One that was written before there was anything to keep beside the metadata."""

    def load_metadata(self, config: ResumeSettings) -> ControllerResumeMetadata | None:
        found = super().load_metadata(config)
        for name in ("repeat_bound_completions", "horizon_training_steps"):
            self.__dict__.pop(name, None)
        return found


@pytest.mark.parametrize("form", [OwnFormat, Forgetful])
async def test_g2_g8_what_a_foreign_format_does_not_keep_is_bounded_and_not_called_nothing(
    form: type[OwnFormat], tmp_path: Path
) -> None:
    first = await execute(tmp_path / "run", max_steps=2, form=form)
    assert (first.repeat_bound_completions, first.horizon_training_steps) == (0, 2)
    kept = stored(tmp_path)["repeats"]
    assert kept < 24
    second = await execute(tmp_path / "run", max_steps=4, form=form)
    bounds = second.repeat_bound_completions, second.horizon_training_steps
    # What remains is all that can have been issued, then and later; a plan that was not kept is made anew.
    assert bounds == ((24, 4) if form is Forgetful else (kept, 2))
    assert (stored(tmp_path)["repeats"] == 16) is (form is Forgetful)


async def test_a_bound_that_is_no_count_is_refused(tmp_path: Path) -> None:
    class Wrong(OwnFormat):
        def load_metadata(self, config: ResumeSettings) -> ControllerResumeMetadata | None:
            found = super().load_metadata(config)
            self.repeat_bound_completions = True
            return found

    await execute(tmp_path / "run", max_steps=2)
    with pytest.raises(TypeError, match="the adapter's repeat_bound_completions"):
        await execute(tmp_path / "run", max_steps=4, form=Wrong)


@pytest.mark.parametrize("death", DEATHS)
async def test_g1_killed_with_a_foreign_format_nothing_is_skipped_and_the_repeats_are_those_stated(
    death: str, tmp_path: Path
) -> None:
    *_, saved = DEATHS[death]
    root = Path(__file__).parents[1]
    killed = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, own_format_run.__file__, str(tmp_path / "run"), death],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    steps = [line.split() for line in killed.stdout.splitlines()]
    assert [int(step) for step, *_ in steps] == list(range(1, len(steps) + 1))
    before = [key for step, *keys in steps for key in keys if int(step) <= saved]
    assert len(before) == saved * GROUPS_PER_STEP
    assert stored(tmp_path)["info"]["step"] == saved
    repeats = stored(tmp_path)["repeats"]
    second = await execute(tmp_path / "run", max_steps=99)
    assert second.restored_steps == saved
    assert second.repeat_bound_completions == repeats
    assert sorted(before + second.trained) == ALL
    assert not list((tmp_path / "run").rglob("manifest.json"))


async def test_g4_a_foreign_save_that_fails_is_abandoned_and_the_one_before_stands(tmp_path: Path) -> None:
    def fails(adapter: OwnFormat, command: SaveWork) -> None:
        if command.step != 4:
            adapter.save(command)
            return
        assert stored(tmp_path)["info"]["step"] == 2
        raise OSError(errno.ENOSPC, "No space left on device")

    def look(step: int, keys: list[str]) -> None:
        if step in (5, 6):
            assert stored(tmp_path)["info"]["step"] == 2

    execution = await execute(tmp_path / "run", max_steps=99, saving=fails, training=look)
    assert execution.saves[:3] == ["COMMITTED", "ABANDONED", "COMMITTED"]
    assert sorted(execution.trained) == ALL
    assert stored(tmp_path)["info"]["remain_samples_num"] == 0
