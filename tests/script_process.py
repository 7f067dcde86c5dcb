"""A user's script in a process of its own, forked from a server that has imported torch and the worker library once."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["torch.distributed", "torch.nn.parallel", "cosmos_worker.state", "cosmos_worker.trainer", "cosmos_worker.rollout"]
)


def start_script(script: Path, log: Path, environment: Mapping[str, str]) -> multiprocessing.process.BaseProcess:
    """Start it as ``python SCRIPT`` would, in its directory, with `environment` beside this process's own."""
    process = _FORKS.Process(target=_run, args=(str(script), str(log), os.environ | dict(environment)))
    process.start()
    return process


def _run(script: str, log: str, environment: dict[str, str]) -> NoReturn:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(Path(script).parent)
    with Path(log).open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    sys.path.insert(0, str(Path(script).parent))
    import torch

    torch.set_num_threads(1)
    sys.argv = [script]
    names: dict[str, Any] = {"__name__": "__main__", "__file__": script}
    code = 1
    try:
        exec(compile(Path(script).read_text(), script, "exec"), names)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # While the script's names are alive: what tears DDP down may wait for a thread of gloo's for ever.
        os._exit(code)
