"""What the replay ledger costs: throughput, one issue, one snapshot, memory.

Prints a table and, last, one JSON line. The baseline is a plain re-creation of the simple design: a deep-copied boundary
per issue, a set of settled indices per token. Both sides run in turns, so a ratio is of one moment of one machine.
"""

from __future__ import annotations

import copy
import gc
import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cosmos_ctrl.core.ledger import SamplingBoundary, SamplingReplayLedger

GROUP = 16
"""Completions of a group."""
WINDOW = 1024
"""Groups outstanding at any time, settled in random order."""
DRAW = 64
"""Groups of one draw, as a batch sampler gives them."""
BATCH = 256
"""Groups of one batch of reports."""
ROUNDS = 7
CALLS = 20_000
"""Issues, or snapshots, that one figure is the mean of."""
LARGE_WINDOW = 10**6
MEASURED_GROUPS = 200_000
"""Groups that memory is measured over."""

WHOLE = (1 << GROUP) - 1


@dataclass
class SimpleBoundary:
    epoch: int
    sampler_state: dict[str, Any]
    remaining: int


class SimpleLedger:
    """The simple design."""

    def __init__(self, start: SimpleBoundary) -> None:
        self.safe, self.cursor = copy.deepcopy(start), copy.deepcopy(start)
        self.draws: dict[int, tuple[SimpleBoundary, int, set[int]]] = {}
        self.base = self.next = 0

    def issue(self, after: SimpleBoundary, completions: int) -> int:
        if after.remaining != self.cursor.remaining - completions or after.epoch < self.cursor.epoch:
            raise ValueError("the budget or the epoch is wrong")
        self.cursor = copy.deepcopy(after)
        token, self.next = self.next, self.next + 1
        self.draws[token] = (self.cursor, completions, set())
        return token

    def settle(self, token: int, completion: int) -> bool:
        draw = self.draws.get(token)
        if draw is None or completion >= draw[1] or completion in draw[2]:
            return False
        draw[2].add(completion)
        while self.base in self.draws and len(self.draws[self.base][2]) == self.draws[self.base][1]:
            self.safe = self.draws.pop(self.base)[0]
            self.base += 1
        return True

    def snapshot(self) -> SimpleBoundary:
        return copy.deepcopy(self.safe)


def sampler_state(position: int) -> dict[str, Any]:
    return {"epoch": 1, "position": position, "length": 100_000, "seed": 0, "shuffle": True}


def schedule(groups: int, draw: int) -> list[list[int]]:
    """After each draw, the numbers of the groups that come back: in random order, and `WINDOW` stay out. Made beforehand, so that
    picking them costs neither side anything."""
    choice, out, back = random.Random(0), list[int](), list[list[int]]()
    for first in range(0, groups, draw):
        out += range(first, first + draw)
        back.append([])
        while len(out) > WINDOW:
            at = choice.randrange(len(out))
            out[at], out[-1] = out[-1], out[at]
            back[-1].append(out.pop())
    return back


def run_ledger(back: list[list[int]], draw: int) -> SamplingBoundary:
    left, rows = len(back) * draw * GROUP, list[tuple[int, int]]()
    ledger, sizes = SamplingReplayLedger(boundary(left), first_token=0), (GROUP,) * draw
    for position, tokens in enumerate(back):
        left -= draw * GROUP
        ledger.issue_draw(
            SamplingBoundary(epoch=1, sampler_state=sampler_state(position), remaining_completions=left), sizes
        )
        rows += [(token, WHOLE) for token in tokens]
        if len(rows) >= BATCH:
            ledger.settle_rows(rows)
            rows.clear()
    ledger.settle_rows(rows)
    return ledger.snapshot()


def run_simple(back: list[list[int]]) -> SimpleBoundary:
    left = len(back) * GROUP
    ledger = SimpleLedger(SimpleBoundary(1, sampler_state(0), left))
    for position, tokens in enumerate(back):
        left -= GROUP
        ledger.issue(SimpleBoundary(1, sampler_state(position), left), GROUP)
        for token in tokens:
            for completion in range(GROUP):
                ledger.settle(token, completion)
    return ledger.snapshot()


def boundary(left: int, state: bytes = b"0123456789") -> SamplingBoundary:
    return SamplingBoundary(epoch=1, sampler_state=state, remaining_completions=left)


def seconds(run: Callable[[], object]) -> float:
    gc.collect()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def throughput() -> dict[str, float]:
    """Completions a second, and ratios: median of rounds in which all run in turn."""
    of_draws, of_groups = schedule(40 * WINDOW, DRAW), schedule(8 * WINDOW, 1)
    rounds = []
    for _ in range(ROUNDS):
        simple = seconds(lambda: run_simple(of_groups)) / len(of_groups)
        batched = seconds(lambda: run_ledger(of_draws, DRAW)) / (len(of_draws) * DRAW)
        single = seconds(lambda: run_ledger(of_groups, 1)) / len(of_groups)
        rounds.append((GROUP / batched, simple / batched, GROUP / single, simple / single, GROUP / simple))
    names = ("completions_per_s", "ratio_to_simple", "single_draws_per_s", "single_draws_ratio", "simple_per_s")
    return {name: statistics.median(values) for name, values in zip(names, zip(*rounds, strict=True), strict=True)}


def one_call(state_bytes: int, window: int) -> tuple[float, float]:
    """µs of one issue (with the boundary made for it) and of one snapshot, with `window` draws outstanding."""
    issues, state = CALLS, bytes(state_bytes)
    left = (window + issues * ROUNDS) * GROUP
    ledger = SamplingReplayLedger(boundary(left, state), max_draws=1 << 62, max_bytes=1 << 62)
    for _ in range(window):
        left -= GROUP
        ledger.issue(boundary(left, state), GROUP)
    settled, issued_us, snapshot_us = 1, [], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(issues):
            left -= GROUP
            ledger.issue(boundary(left, state), GROUP)
        issued_us.append((time.perf_counter() - start) / issues * 1e6)
        start = time.perf_counter()
        for _ in range(issues):
            ledger.snapshot()
        snapshot_us.append((time.perf_counter() - start) / issues * 1e6)
        ledger.settle_rows([(token, WHOLE) for token in range(settled, settled + issues)])
        settled += issues
    return statistics.median(issued_us), statistics.median(snapshot_us)


def memory() -> tuple[float, float]:
    """Bytes a group beyond its draw's state: none settled, and half of each settled. One group a draw is the worst."""
    groups = MEASURED_GROUPS
    left = groups * GROUP
    states = [b"%010d" % number for number in range(groups)]
    own = sum(map(len, states))
    states.clear()
    gc.collect()
    tracemalloc.start()
    ledger = SamplingReplayLedger(boundary(left))
    for number in range(groups):
        left -= GROUP
        ledger.issue(boundary(left, b"%010d" % number), GROUP)
    whole = tracemalloc.get_traced_memory()[0]
    ledger.settle_rows([(token, random.getrandbits(GROUP) & (WHOLE >> 1)) for token in range(1, groups + 1)])
    half = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return (whole - own) / groups, (half - own) / groups


def main() -> None:
    figures: dict[str, Any] = throughput()
    print(f"groups of {GROUP}, settled in random order in a window of {WINDOW:,} groups, small states")
    print(f"  {'simple design, a call per completion':52} {figures['simple_per_s'] / 1e6:8.2f} M completions/s")
    for name, rate, ratio in (
        (f"ledger, draws of {DRAW} groups, rows in batches of {BATCH}", "completions_per_s", "ratio_to_simple"),
        (f"ledger, draws of one group, rows in batches of {BATCH}", "single_draws_per_s", "single_draws_ratio"),
    ):
        print(f"  {name:52} {figures[rate] / 1e6:8.2f} M completions/s {figures[ratio]:6.1f} x")
    print(f"\n{'one call, in µs':54} {'issue':>8} {'snapshot':>9}")
    issue_us, snapshot_us = {}, {}
    for key, label, size, window in (
        ("10B", "state of 10 B, window of 10 draws", 10, 10),
        ("1MB", "state of 1 MB, window of 10 draws", 10**6, 10),
        ("100MB", "state of 100 MB, window of 10 draws", 10**8, 10),
        ("w10", "state of 10 B, window of 10 draws, again", 10, 10),
        ("w1M", f"state of 10 B, window of {LARGE_WINDOW:,} draws", 10, LARGE_WINDOW),
    ):
        issue_us[key], snapshot_us[key] = one_call(size, window)
        print(f"  {label:52} {issue_us[key]:8.2f} {snapshot_us[key]:9.3f}")
    whole, half = memory()
    print(f"\n{'memory of an outstanding group beyond its state':54} {whole:8.0f} B, partly settled {half:.0f} B")
    print(f"{'10 million outstanding completions':54} {half * 10**7 / GROUP / 1e6:8.0f} MB\n")
    figures |= {"issue_us": issue_us, "snapshot_us": snapshot_us, "bytes_per_group": half}
    print(json.dumps(figures, default=float))


if __name__ == "__main__":
    main()
