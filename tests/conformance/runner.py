"""Drives a client binary through every scenario: ``python tests/conformance/runner.py [options] -- COMMAND…``.

COMMAND is started once for each scenario, as one worker; docs/conformance.md says what it has to do. Ends with 0 when every scenario
passed, with 1 when one did not, and with 2 when there is nothing to run, or no such program.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
_TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(_TESTS.parent), str(_TESTS / "service"), str(_TESTS / "conformance")]

from conformance_run import Result, run_scenario  # noqa: E402
from conformance_scenarios import Scenario, load  # noqa: E402

#: Scenarios at a time: they wait more than they work.
JOBS = 4


async def run_all(scenarios: Sequence[Scenario], command: Sequence[str], jobs: int = JOBS) -> list[Result]:
    """Every scenario with `command`, in order."""
    turns = asyncio.Semaphore(jobs)

    async def one(scenario: Scenario) -> Result:
        async with turns:
            return await run_scenario(scenario, command)

    return list(await asyncio.gather(*map(one, scenarios)))


def report(results: Sequence[Result]) -> Iterator[str]:
    """The lines of a report for a person."""
    for result in results:
        yield f"{'pass' if result.passed else 'FAIL'}  {result.scenario} ({result.seconds:.1f} s)"
        for broken in result.broken:
            yield f"      rule {broken.rule}: expected {broken.expected}"
            yield f"        by {broken.message}"
        if not result.passed and result.said.strip():
            yield "      the client said:"
            yield from (f"        {line}" for line in result.said.rstrip().splitlines()[-12:])
    failed = sum(not result.passed for result in results)
    yield f"{len(results) - failed} passed, {failed} failed"


def main(arguments: Sequence[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(usage="runner.py [--only NAME]… [--slow] [--jobs N] [--json FILE] -- COMMAND…")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this scenario; may be repeated")
    parser.add_argument("--slow", action="store_true", help="also those that take long by what they check")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"scenarios at a time ({JOBS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    parser.add_argument("command", nargs="+", help="one worker; started once for each scenario")
    options = parser.parse_args(arguments)
    program = options.command[0]
    if shutil.which(program) is None:
        parser.error(
            f"{program!r} is no program: expected an executable file or a name on the PATH; build the client first"
        )
    scenarios = load()
    if unknown := set(options.only) - {scenario.name for scenario in scenarios}:
        parser.error(f"no scenario is called {', '.join(sorted(unknown))}; there are {[s.name for s in scenarios]}")
    chosen = [
        scenario
        for scenario in scenarios
        if (scenario.name in options.only if options.only else options.slow or not scenario.slow)
    ]
    results = asyncio.run(run_all(chosen, options.command, options.jobs))
    print("\n".join(report(results)))
    if options.json is not None:
        found = [dataclasses.asdict(result) | {"passed": result.passed} for result in results]
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
