"""A prompts file as the run's dataset: JSON Lines, one object a line with ``prompt`` and anything else.

* A prompt's key is the line's ``key``, or a digest of its ``prompt``; equal ones are told apart by a counter, so that a key
  names one prompt in every execution.
* The fingerprint is over the lines in order: a dataset that became shorter, longer or permuted is another one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from cosmos_ctrl.core.sampling import Prompt


@dataclass(frozen=True, slots=True)
class PromptsFile:
    """All prompts of a file, in order."""

    prompts: tuple[Prompt, ...]
    fingerprint: str
    """``sha256:hex`` over the lines in order."""


def read_prompts(path: Path) -> PromptsFile:
    """Read and check the whole file.

    Raises:
        OSError: it cannot be read.
        ValueError: a line is not an object with a string ``prompt``, or there is none; the message names file and line.
    """
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    fingerprint = hashlib.sha256()
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
            raise ValueError(f'{path}:{number}: expected an object with a string "prompt"')
        key, source = value.get("key"), value.get("source", "")
        if not isinstance(key, str | None) or not isinstance(source, str):
            raise ValueError(f'{path}:{number}: "key" and "source" are strings')
        base = key or hashlib.sha256(value["prompt"].encode()).hexdigest()[:16]
        seen[base] = seen.get(base, 0) + 1
        unique = base if seen[base] == 1 else f"{base}#{seen[base]}"
        prompts.append(Prompt(key=unique, source=source, payload=bytes(line), codec="json"))
        fingerprint.update(line.strip() + b"\n")
    if not prompts:
        raise ValueError(f"{path}: holds no prompts")
    return PromptsFile(tuple(prompts), f"sha256:{fingerprint.hexdigest()}")
