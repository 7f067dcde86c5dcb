"""Tasks with a verifiable answer, from a prompts file in JSON Lines.

- A task's key depends on its content and on how many equal lines stand before it, not on its line number: the
  same file gives the same keys, and lines that are added or moved leave the others' keys alone.
- A file is either read whole or refused with the file, the line and the reason.
- Reward is a function of the answer and the completion alone.

The bundled file is made from `reasoning-gym` (https://github.com/open-thought/reasoning-gym), with a fixed seed.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

BUNDLED_SOURCE = "reasoning-gym/chain_sum"
_BUNDLED_SEED = 20_261
_EXAMPLES_SEED = 7_000_003
_DRAWS = 40_000
"""Rows of the generator that are looked at: enough to meet nearly all of its 4,000 distinct prompts."""


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt and the answer that earns its reward."""

    key: str
    """Stable name of the prompt in ledgers and reports."""
    prompt: str
    answer: str
    source: str = ""
    """Where the task comes from; empty when its line does not say."""


class PromptsFileError(ValueError):
    """A prompts file cannot be used. `path` and `line` (from 1; 0 for the whole file) say where."""

    def __init__(self, *, path: Path, line: int, reason: str) -> None:
        super().__init__(f"{path}:{line}: {reason}" if line else f"{path}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason


def reward(task: Task, completion: str) -> float:
    """1.0 when `completion` is the answer, blanks at its ends aside; else 0.0."""
    return 1.0 if completion.strip() == task.answer.strip() else 0.0


def ensure_bundled_prompts(path: Path, *, prompts: int = 640) -> Path:
    """Write the bundled prompts file to `path` unless something is there already; returns `path`."""
    if path.exists():
        return path
    rows = [
        {"prompt": prompt, "answer": answer, "source": BUNDLED_SOURCE}
        for prompt, answer in islice(_arithmetic(_BUNDLED_SEED), prompts)
    ]
    if len(rows) < prompts:
        raise ValueError(f"there are only {len(rows)} distinct bundled prompts, not {prompts}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=path.name, delete=False) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fchmod(file.fileno(), 0o644)
        os.fsync(file.fileno())
    Path(file.name).replace(path)
    return path


def bundled_family_examples(exclude: Collection[str]) -> Iterator[tuple[str, str]]:
    """Distinct (prompt, answer) pairs of the bundled tasks' kind, none with a prompt in `exclude`."""
    return (pair for pair in _arithmetic(_EXAMPLES_SEED) if pair[0] not in exclude)


def load_prompts(path: Path, *, max_prompt_chars: int | None = None, max_answer_chars: int | None = None) -> list[Task]:
    """Read every task of a prompts file.

    Each line is a JSON object with the strings `prompt` and `answer`, optionally `source`; other fields are
    allowed and left alone, blank lines are skipped. A prompt longer than `max_prompt_chars` is refused, not
    cut: a cut question may have another answer. So is an answer that the model could never give: longer than
    `max_answer_chars`, or with a character that is not printable ASCII.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise PromptsFileError(path=path, line=line, reason="not UTF-8") from error
    tasks: list[Task] = []
    seen: Counter[str] = Counter()
    for number, line_text in enumerate(text.split("\n"), start=1):
        if not line_text.strip():
            continue
        try:
            prompt, answer, source = _parse(line_text, max_prompt_chars, max_answer_chars)
        except ValueError as error:
            raise PromptsFileError(path=path, line=number, reason=str(error)) from error
        digest = hashlib.sha256(json.dumps([prompt, answer]).encode()).hexdigest()[:16]
        seen[digest] += 1
        key = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        tasks.append(Task(key=key, prompt=prompt, answer=answer, source=source))
    if not tasks:
        raise PromptsFileError(path=path, line=0, reason="holds no prompts")
    return tasks


def _parse(line: str, max_prompt_chars: int | None, max_answer_chars: int | None) -> tuple[str, str, str]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError('a line must be an object like {"prompt": "1 + 1", "answer": "2"}')
    prompt, answer = _text(row, "prompt"), _text(row, "answer")
    if max_prompt_chars is not None and len(prompt) > max_prompt_chars:
        raise ValueError(
            f"the prompt has {len(prompt)} characters and this model reads at most {max_prompt_chars}; "
            "raise model.context_tokens or shorten it"
        )
    if max_answer_chars is not None and len(answer) > max_answer_chars:
        raise ValueError(
            f"the answer has {len(answer)} characters and a completion at most {max_answer_chars}; raise max_new_tokens"
        )
    if unwritable := sorted({character for character in answer if not " " <= character <= "~"}):
        raise ValueError(f"the answer holds {unwritable}; the model writes printable ASCII only")
    source = row.get("source", "")
    if not isinstance(source, str):
        raise ValueError(f'"source" must be a string, not {type(source).__name__}')
    return prompt, answer, source


def _text(row: dict[str, Any], field: str) -> str:
    if field not in row:
        raise ValueError(f'"{field}" is missing')
    value = row[field]
    if not isinstance(value, str):
        raise ValueError(f'"{field}" must be a string, not {type(value).__name__}')
    if not value.strip():
        raise ValueError(f'"{field}" is blank')
    return value


def _arithmetic(seed: int) -> Iterator[tuple[str, str]]:
    """Distinct sums and differences of three digits and their values, such as `5 - 3 + 9 =` and `11`."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            "the bundled tasks come from reasoning-gym: install it with "
            "`pip install 'cosmos-ctrl[demo]'`, or give a prompts file of your own"
        ) from error
    dataset = reasoning_gym.create_dataset(
        "chain_sum", seed=seed, size=_DRAWS, min_terms=3, max_terms=3, min_digits=1, max_digits=1
    )
    seen: set[str] = set()
    for index in range(_DRAWS):
        row = dataset[index]
        prompt = f"{row['metadata']['expression']} ="
        if prompt not in seen:
            seen.add(prompt)
            yield prompt, row["answer"]
