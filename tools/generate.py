"""Generates the stubs and their types from proto/ into DIRECTORY/cosmos_ctrl/v1. Run by `make generate`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_PROTOS = ("checkpoint", "reports", "controller_service")
_WITH_SERVICE = ("controller_service",)


def generate(directory: Path) -> None:
    """Write the generated files below `directory`."""
    # The type plugins are looked up on PATH; they lie beside this interpreter.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    for names, outputs in ((_PROTOS, ("python", "mypy")), (_WITH_SERVICE, ("grpc_python", "mypy_grpc"))):
        files = [str(_ROOT / f"proto/cosmos_ctrl/v1/{name}.proto") for name in names]
        flags = [f"--{output}_out={directory}" for output in outputs]
        command = [sys.executable, "-W", "ignore", "-m", "grpc_tools.protoc", f"-I{_ROOT / 'proto'}", *flags, *files]
        subprocess.run(command, check=True, env=environment, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
