"""Nothing here, and nothing that the documentation shows, unpickles what it finds in a checkpoint."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)


def programs() -> Iterator[tuple[str, str]]:
    for package in ("cosmos_ctrl", "cosmos_worker"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path), path.read_text()
    for path in (*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"):
        for block in _BLOCK.findall(path.read_text()):
            yield str(path), block


def loads(text: str) -> list[ast.Call]:
    """Calls of ``torch.load``."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) in ("torch.load", "torch.serialization.load")]


def is_safe(call: ast.Call) -> bool:
    return any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in call.keywords)


def test_torch_loads_weights_only() -> None:
    found = [(where, call) for where, text in programs() for call in loads(text)]
    assert {Path(where).name for where, _ in found} >= {"weights.py", "train.py", "quickstart.md", "embed.md"}
    assert [f"{where}: {ast.unparse(call)}" for where, call in found if not is_safe(call)] == []


def test_an_unsafe_load_would_be_seen() -> None:
    for text in ("torch.load(f)", "x = torch.load(f, weights_only=False)", "torch.load(f, weights_only=flag)"):
        assert [is_safe(call) for call in loads(text)] == [False]
