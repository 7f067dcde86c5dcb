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
        try:
            base = key or hashlib.sha256(value["prompt"].encode()).hexdigest()[:16]
            (base + source).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{path}:{number}: half of a surrogate pair, which UTF-8 does not carry") from error
        unique = base
        while unique in seen:  # a line may have for its key what an earlier one was told apart by
            seen[base] += 1
            unique = f"{base}#{seen[base]}"
        seen[unique] = 1
        prompts.append(Prompt(key=unique, source=source, payload=bytes(line), codec="json"))
        fingerprint.update(line.strip() + b"\n")
    if not prompts:
        raise ValueError(f"{path}: holds no prompts")
    return PromptsFile(tuple(prompts), f"sha256:{fingerprint.hexdigest()}")
