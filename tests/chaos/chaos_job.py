"""The job that ckpt-chaos kills and resumes: one execution of a run, from its start to its end.

    python -I chaos_job.py OUT ARMED RANKS

ARMED is ``controller`` or ``trainer-R``: the process that ckpt-chaos counts and kills. This one only looks after the others, and
being isolated (``-I``) is not armed itself.

* When a process is killed or fails, all others are killed at once, as with the node they share. Then the job fails.
* It says from which step it resumed. When it has ended by its budget, ``OUT/result`` has the digests of every rank's last saved state.
* ``OUT/steps/step-N`` leads to the checkpoint of step N, whose own name has random parts, so that two runs can be compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

DEADLINE_S = 60.0

_STEP = re.compile(r"checkpoints/e(\d{4})-s(\d{8})-[0-9a-f]{8}")

_CONFIG = {
    "SERVER__LINGER_S": "5.0",
    "ROLLOUT__N_GENERATION": "3",
    "ROLLOUT__MAX_OUTSTANDING_GROUPS": "6",
    "TRAIN__GROUPS_PER_STEP": "2",
    "SAMPLING__COMPLETIONS": "18",
    "SAMPLING__SEED": "1",
    "CHECKPOINTS__EVERY_STEPS": "1",
}


class JobError(Exception):
    """The job cannot go on."""


class Process:
    """A process that the nursery forked for this job."""

    def __init__(self, name: str, request: Mapping[str, object]) -> None:
        self.name = name
        self.exit_code: int | None = None
        self.said: dict[str, object] = {}
        self._rest = b""
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(os.environ["CHAOS_NURSERY"])
        self.connection.sendall(json.dumps(request).encode() + b"\n")

    def hear(self) -> None:
        """What it says now; a killed process ends without a word."""
        data = self.connection.recv(65536)
        if not data:
            raise JobError(f"{self.name} was killed")
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self.said |= json.loads(line)
        code = self.said.get("exit")
        if code:
            raise JobError(f"{self.name} ended with code {code}")
        if code == 0:
            self.exit_code = 0

    def wait_for(self, key: str) -> str:
        """What it says of `key`, in time."""
        deadline = time.monotonic() + DEADLINE_S
        while key not in self.said:
            ready, _, _ = select.select([self.connection], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise JobError(f"{self.name} did not say {key} in {DEADLINE_S:.0f} s")
            self.hear()
        return str(self.said[key])

    def end(self) -> None:
        """It dies, if it lives, and is gone when this returns.

        Raises:
            JobError: it does not.
        """
        self.connection.settimeout(DEADLINE_S)
        try:
            self.connection.shutdown(socket.SHUT_WR)
            while self.connection.recv(65536):
                pass
        except TimeoutError as error:
            raise JobError(f"{self.name} does not die") from error
        except OSError:
            return  # it was gone


class Job:
    """One execution of the run below `out`."""

    def __init__(self, out: Path, armed: str, ranks: int) -> None:
        self.out, self.armed, self.ranks = out, armed, ranks
        self.processes: list[Process] = []
        out.mkdir(parents=True, exist_ok=True)
        self.prompts = out / "prompts.jsonl"
        if not self.prompts.exists():
            self.prompts.write_text(
                "".join(json.dumps({"prompt": f"{n} =", "answer": f"{n}"}) + "\n" for n in range(6))
            )

    def run(self) -> None:
        """To the end.

        Raises:
            JobError: a process was killed, failed or hangs, or the run ended before its budget did.
        """
        config = {f"COSMOS_CTRL__{key}": value for key, value in _CONFIG.items()} | {
            "COSMOS_CTRL__RUN__DIRECTORY": str(self.out / "run"),
            "COSMOS_CTRL__SAMPLING__PROMPTS": str(self.prompts),
            "COSMOS_CTRL__TRAIN__TRAINERS": f"{{policy = {self.ranks}}}",
        }
        store = self.start("store", {})
        controller = self.start("controller", config)
        address = {
            "COSMOS_CTRL_ADDRESS": controller.wait_for("address"),
            "COSMOS_CTRL_EXECUTION_ID": controller.wait_for("execution_id"),
        }
        resumed = _STEP.fullmatch(controller.wait_for("resumed_from"))
        print(f"resumed from step {int(resumed[2]) if resumed else 0}", flush=True)
        meeting = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.wait_for("port"),
            "WORLD_SIZE": str(self.ranks),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        ranks = [self.start(f"trainer-{rank}", address | meeting | {"RANK": str(rank)}) for rank in range(self.ranks)]
        # A run that was at its end when it started is so for its ranks; it does not wait for rollout workers.
        rollouts = [] if controller.wait_for("end") else [self.start("rollout", address)]
        self.watch([controller, *ranks, *rollouts])
        ends = {str(rank.said["end"]) for rank in ranks}
        if not all("budget exhausted" in end for end in ends):
            raise JobError(f"it ended early: {', '.join(sorted(ends))}")

    def start(self, name: str, environment: dict[str, str]) -> Process:
        """A process of this job; the armed one gets what ckpt-chaos says."""
        keep = ("PATH", "HOME", "TMPDIR", *(("CKPT_CHAOS_",) if name == self.armed else ()))
        inherited = {key: value for key, value in os.environ.items() if key.startswith(keep)}
        request = {
            "role": name.split("-")[0],
            "prompts": str(self.prompts),
            "log": str(self.out.parent / f"{name}.log"),
            "environment": inherited | {"GRPC_VERBOSITY": "NONE"} | environment,
        }
        process = Process(name, request)
        self.processes.append(process)
        return process

    def watch(self, processes: list[Process]) -> None:
        """Until all have ended well."""
        deadline = time.monotonic() + DEADLINE_S
        while running := [process for process in processes if process.exit_code is None]:
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([process.connection for process in running], [], [], left)
            if not ready:
                raise JobError(f"{', '.join(process.name for process in running)} did not end in {DEADLINE_S:.0f} s")
            for process in running:
                if process.connection in ready:
                    process.hear()

    def checkpoints(self) -> dict[int, Path]:
        """The newest execution's directory of each step."""
        found: dict[int, Path] = {}
        for path in sorted((self.out / "run").glob("checkpoints/*")):
            match = _STEP.fullmatch(f"checkpoints/{path.name}")
            if match:
                found[int(match[2])] = path
        return found

    def link_steps(self) -> None:
        """See the module."""
        steps = self.out / "steps"
        steps.mkdir(exist_ok=True)
        for step, path in self.checkpoints().items():
            link = steps / f"step-{step}"
            link.unlink(missing_ok=True)
            link.symlink_to(path)

    def write_result(self) -> None:
        """See the module.

        Raises:
            JobError: there is no last checkpoint.
        """
        found = self.checkpoints()
        step = max(found, default=0)
        if not step or not (found[step] / "manifest.json").exists():
            raise JobError(f"the run has ended, and its checkpoint of step {step} is not committed")
        states = [found[step] / f"policy-{rank}" / "state.pt" for rank in range(self.ranks)]
        lines = [hashlib.sha256(state.read_bytes()).hexdigest() for state in states]
        (self.out / "result").write_text("\n".join([f"step {step}", *lines]))


def main() -> int:
    """Run the job; 1 when it has failed."""
    out, armed, ranks = sys.argv[1:]
    job = Job(Path(out), armed, int(ranks))
    try:
        try:
            job.run()
        finally:
            for process in job.processes:
                process.end()
            job.link_steps()
        job.write_result()
    except JobError as error:
        print(error, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
