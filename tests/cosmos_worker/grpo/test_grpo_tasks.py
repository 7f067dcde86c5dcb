from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cosmos_worker.grpo.tasks import (
    BUNDLED_SOURCE,
    PromptsFileError,
    Task,
    bundled_family_examples,
    ensure_bundled_prompts,
    load_prompts,
    reward,
)

GOOD = {"prompt": "1 + 1 =", "answer": "2"}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_tasks_come_in_the_files_order_and_extra_fields_are_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", GOOD | {"level": 3}, "", {"prompt": "2?", "answer": "3", "source": "mine"})

    tasks = load_prompts(path)

    assert [(task.prompt, task.answer, task.source) for task in tasks] == [("1 + 1 =", "2", ""), ("2?", "3", "mine")]


def test_keys_are_distinct_and_do_not_depend_on_other_lines(tmp_path: Path) -> None:
    other = {"prompt": "1 + 1 =", "answer": "two"}

    alone = load_prompts(write(tmp_path / "a.jsonl", GOOD))
    together = load_prompts(write(tmp_path / "b.jsonl", other, GOOD, GOOD))

    assert together[1].key == alone[0].key
    assert len({task.key for task in together}) == 3


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "must be an object"),
        ({"answer": "2"}, '"prompt" is missing'),
        ({"prompt": "1"}, '"answer" is missing'),
        ({"prompt": "1", "answer": 2}, '"answer" must be a string, not int'),
        ({"prompt": " ", "answer": "2"}, '"prompt" is blank'),
        (GOOD | {"source": 1}, '"source" must be a string'),
        (GOOD | {"answer": "né"}, "printable ASCII only"),
        (GOOD | {"prompt": "x" * 11}, "at most 10"),
        (GOOD | {"answer": "x" * 6}, "at most 5"),
    ],
)
def test_a_bad_line_is_refused_with_file_and_line(tmp_path: Path, row: Any, reason: str) -> None:
    path = write(tmp_path / "p.jsonl", GOOD, row)

    with pytest.raises(PromptsFileError, match=reason) as caught:
        load_prompts(path, max_prompt_chars=10, max_answer_chars=5)

    assert str(caught.value).startswith(f"{path}:2: ")
    assert (caught.value.path, caught.value.line) == (path, 2)


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\n")

    with pytest.raises(PromptsFileError, match=r"p\.jsonl:2: not UTF-8"):
        load_prompts(path)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptsFileError, match="holds no prompts"):
        load_prompts(write(tmp_path / "p.jsonl", ""))


def test_reward_is_for_the_answer_alone() -> None:
    task = Task(key="k", prompt="1 + 1 =", answer="2")

    assert reward(task, " 2 ") == 1.0
    assert [reward(task, text) for text in ("", "22", "2.", "two")] == [0.0] * 4


def test_bundled_prompts_are_the_same_each_time_distinct_and_right(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    first = ensure_bundled_prompts(tmp_path / "deep" / "a.jsonl", prompts=200)
    second = ensure_bundled_prompts(tmp_path / "b.jsonl", prompts=200)
    tasks = load_prompts(first)

    assert first.read_bytes() == second.read_bytes()
    assert len({task.prompt for task in tasks}) == len(tasks) == 200
    assert {task.source for task in tasks} == {BUNDLED_SOURCE}
    assert all(eval(task.prompt.rstrip("= ")) == int(task.answer) for task in tasks)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.jsonl"]


def test_an_existing_file_is_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", GOOD)

    assert ensure_bundled_prompts(path) == path
    assert len(load_prompts(path)) == 1


def test_more_bundled_prompts_than_there_are_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match="distinct bundled prompts"):
        ensure_bundled_prompts(tmp_path / "p.jsonl", prompts=5_000)


def test_family_examples_leave_the_excluded_prompts_out(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    excluded = {task.prompt for task in load_prompts(ensure_bundled_prompts(tmp_path / "p.jsonl", prompts=640))}
    examples = [prompt for prompt, _ in bundled_family_examples(excluded)]

    assert len(set(examples)) == len(examples) > 3_256
    assert not excluded & set(examples)


def test_prompts_are_read_without_torch() -> None:
    code = "import sys, cosmos_worker.grpo.tasks, cosmos_worker.grpo.config; sys.exit('torch' in sys.modules)"

    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_a_missing_reasoning_gym_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)

    with pytest.raises(ImportError, match=r"cosmos-ctrl\[demo\]"):
        ensure_bundled_prompts(tmp_path / "p.jsonl")
    assert not list(tmp_path.iterdir())
