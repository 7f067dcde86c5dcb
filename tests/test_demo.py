"""The demonstration keeps its promises for any order of results."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cosmos_ctrl import demo


@pytest.mark.parametrize("first", range(0, 50, 10))
def test_nothing_is_skipped_and_repeats_stay_in_the_window(first):
    for seed in range(first, first + 10):
        report = demo.crash_and_resume(seed)
        assert report.skipped == 0, seed
        assert 0 <= report.repeated <= report.window_at_checkpoint, seed
        assert report.live_cursor_would_skip > 0, seed
        assert report.stale_reports_refused == 1, seed
        assert report.remaining_completions == 0, seed
        assert [execution.number for execution in report.executions] == [1, 2], seed
        assert report.executions[1].resumed_from is not None, seed
        assert report.redone > 0, seed
        assert report.completed_training_steps == report.completed_optimizer_updates, seed


def test_the_same_seed_has_the_same_history():
    assert demo.crash_and_resume(3) == demo.crash_and_resume(3)


def test_the_command_says_what_was_lost_and_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; from cosmos_ctrl.cli import main; sys.exit(main(['demo']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert "this run skipped                                    0 completions" in done.stdout
    assert "execution 2  resumed from the checkpoint of step 6" in done.stdout
