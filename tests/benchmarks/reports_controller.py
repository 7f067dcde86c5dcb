"""The real controller in a process of a benchmark: `cosmos_ctrl.server.serve`, its ledger, a seekable sampler over short prompts.

With BENCH_PROFILE=FOLDER in the environment, what it does between "profile" orders is written there for pstats.
"""

from __future__ import annotations

import asyncio
import cProfile
import gc
import os
import tempfile
from pathlib import Path
from typing import Any

from reports_processes import obey, run_child

from cosmos_ctrl.checkpoints.adapter import ManifestAdapter
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.config import Config
from cosmos_ctrl.core.samplers import SeekableSampler
from cosmos_ctrl.core.sampling import Prompt
from cosmos_ctrl.server import Application, Ready, serve

PROMPTS = 100_000
PROFILE = os.environ.get("BENCH_PROFILE", "")


def prompt_of(index: int) -> Prompt:
    return Prompt(key=f"{index:016x}", payload=b'{"prompt":"%d + 1 = "}' % index, codec="json")


async def controller(**sections: dict[str, Any]) -> None:
    """Serve until killed; nothing is saved before the end, and there is none."""
    with tempfile.TemporaryDirectory() as directory:
        sections["run"] = {"directory": directory}
        # Between the rounds its workers say nothing.
        sections["workers"] = {"session_ttl_s": 600.0}
        config = Config.model_validate(sections)
        application = Application(
            sampler=SeekableSampler(PROMPTS, seed=1),
            prompt_of=prompt_of,
            budget_completions=1 << 40,
            adapter=ManifestAdapter(LocalStore(Path(directory)), compatibility={}),
        )
        # As `cosmos-ctrl serve` does.
        gc.freeze()
        gc.set_threshold(100_000, 20, 50)
        ready = asyncio.get_running_loop().create_future()
        serving = asyncio.ensure_future(serve(config, application, on_ready=ready.set_result))
        await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        told: Ready = serving.result() and ready.result() if serving.done() else ready.result()
        await obey({"address": told.address, "execution_id": told.execution_id}, profile=Profiler().order)


class Profiler:
    """Of the event loop's thread, where everything happens."""

    def __init__(self) -> None:
        self._running: cProfile.Profile | None = None

    async def order(self, name: str = "") -> None:
        """Begin, or end and write `name`; nothing without the variable."""
        if not PROFILE:
            return
        if self._running is None:
            self._running = cProfile.Profile()
            self._running.enable()
        else:
            self._running.disable()
            self._running.dump_stats(str(Path(PROFILE) / f"{name}.pstats"))
            self._running = None


if __name__ == "__main__":
    run_child({"controller": controller})
