"""Every client's connections are cut wherever it falls, again and again: all of the run is generated, and each completion trained once.

A part of `make test-clients` only. The suite loses whole messages; a cut here may fall into one.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path

import pytest
from clients import ALL, BUILD_S, Client, chosen, command_of
from controller_process import DEADLINE_S
from fault_proxy import Cut, Proxy
from fault_scene import Reporter, Scene, scene

RUN_S = 120.0

pytestmark = [
    pytest.mark.timeout(BUILD_S + RUN_S),
    pytest.mark.skipif(not ALL, reason="a part of `make test-clients` only"),
]

#: 64 groups, one at a time: some 20 KB each way, whatever a client puts together.
COMPLETIONS = 128

#: More than a run has connections.
CUTS = 200


@pytest.mark.parametrize("client", chosen(), ids=[client.language for client in chosen()])
def test_g6_connections_cut_anywhere_lose_and_repeat_nothing(client: Client, tmp_path: Path) -> None:
    command = command_of(client)
    somewhere = random.Random(6)
    lingering = {"linger_s": DEADLINE_S}
    with scene(tmp_path, COMPLETIONS, server=lingering) as house, Proxy(house.controller.address) as proxy:
        # Keeps the controller there until the client has heard that its end is known: that answer, too, may be lost.
        other = Reporter(house, replica=1)
        # After the library's own greetings, which take some 200 bytes in either direction, and mostly before a run of this size is over.
        proxy.plan(*(Cut(somewhere.choice(("up", "down")), somewhere.randrange(200, 2000)) for _ in range(CUTS)))
        environment = os.environ | house.environ(proxy.address) | {"COSMOS_CTRL_IN_FLIGHT": "1"}
        with (tmp_path / "client.log").open("w+") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
            try:
                trained = trained_by(house, process)
                code = process.wait(DEADLINE_S)
            finally:
                process.kill()
                process.wait()
        other.end()
        assert code == 0, Path(log.name).read_text()
        assert house.controller.exit_code() == 0, house.controller.log
        assert len(proxy.made) >= 5
        assert len(set(trained)) == len(trained) == COMPLETIONS


def trained_by(house: Scene, process: subprocess.Popen[bytes]) -> list[tuple[int, int]]:
    """Trains whatever comes until the end; returns the completions, as group and index."""
    trained: list[tuple[int, int]] = []
    until = time.monotonic() + RUN_S
    number = 1
    while True:
        assert process.poll() in (None, 0), f"the client ended with {process.returncode}"
        assert time.monotonic() < until, f"{len(trained)} of {COMPLETIONS} came in time"
        command = house.trainer.next(number)
        kind = command.WhichOneof("command")
        if kind == "train":
            rows = zip(command.train.groups, command.train.masks, strict=True)
            trained += [(group, bit) for group, mask in rows for bit in range(64) if mask >> bit & 1]
            house.trainer.complete(number, command.train)
        elif kind == "save":
            house.trainer.save(number, command.save)
        elif kind == "end":
            house.trainer.end()
            return trained
        number += kind is not None
