"""The wire contract of each release, frozen: descriptors that a later one must not break. Run by `make lint` and `make freeze`.

* `proto/frozen/VERSION.binpb` is what `buf build` made of the protos when that version was released. The first one is v1 as it began.
* One is added with each release that changed the protos, and none is ever written again.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_BUF = Path(sys.executable).parent / "buf"


def frozen(root: Path = _ROOT) -> list[Path]:
    """The frozen descriptors of the protos below `root`."""
    return sorted((root / "proto" / "frozen").glob("*.binpb"))


def check(root: Path = _ROOT) -> int:
    """Compare the protos below `root` with every frozen descriptor; 0: they break none."""
    descriptors = frozen(root)
    if not descriptors:
        print(
            f"{root / 'proto' / 'frozen'}: nothing is frozen there, expected a descriptor of each release",
            file=sys.stderr,
        )
        return 1
    commands = [[_BUF, "breaking", "--against", descriptor] for descriptor in descriptors]
    return max(subprocess.run(command, cwd=root, check=False).returncode for command in commands)


def add(version: str, root: Path = _ROOT) -> int:
    """Freeze the protos below `root` as those of `version`; 0: done, or nothing has changed since."""
    path = root / "proto" / "frozen" / f"{version}.binpb"
    command = [_BUF, "build", "--exclude-source-info", "-o", "-#format=binpb"]
    now = subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE).stdout
    if path.exists() and path.read_bytes() != now:
        print(
            f"{path}: is frozen with other content. Raise the version in pyproject.toml, then freeze that.",
            file=sys.stderr,
        )
        return 1
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(now)
    return 0


def _version() -> str:
    lines = (_ROOT / "pyproject.toml").read_text().splitlines()
    return next(line.split('"')[1] for line in lines if line.startswith("version = "))


if __name__ == "__main__":
    sys.exit(check() if sys.argv[1] == "check" else add(_version()))
