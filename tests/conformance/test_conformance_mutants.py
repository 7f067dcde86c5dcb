"""The suite can fail: every broken relative of a passing client is caught, by the rule that is about what it does wrong."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from conformance_run import Result, run_scenario
from conformance_scenarios import load
from mutant_worker import BUGS
from runner import JOBS

pytestmark = pytest.mark.timeout(300)

#: Where a bug shows in nothing but a client that does not go on: how long that is watched, in seconds.
_NO_END_S = 3.0

WORKER = [sys.executable, str(Path(__file__).with_name("mutant_worker.py"))]

#: By bug: a scenario that catches it, and the rule that it breaks there.
CAUGHT = {
    "renumbers_resends": ("lost_reply_of_a_report", "once"),
    "changes_resends": ("lost_request_of_a_report", "same_bytes"),
    "skips_a_number": ("a_whole_run", "batch_numbers"),
    "skips_a_lease_number": ("a_whole_run", "lease_numbers"),
    "new_lease_number_on_resend": ("lost_request_of_a_lease", "lease_numbers"),
    "adopts_executions": ("another_execution_at_the_same_address", "pinned_execution"),
    "ignores_headers": ("another_header_at_a_report", "terminal"),
    "retries_stale": ("stale_at_a_report", "terminal"),
    "retries_everything": ("malformed", "terminal"),
    "ignores_retry_info": ("window_full", "retry_info"),
    "wrong_exit_code": ("superseded_at_a_lease", "exit_code"),
    "exits_10_for_everything": ("internal", "exit_code"),
    "drops_unacknowledged": ("a_new_session_has_not_applied_the_batch", "ends"),
    "new_incarnation": ("lapsed_at_a_lease", "incarnation"),
    "old_session": ("lapsed_at_a_report", "session"),
    "confirms_unheard_notices": ("a_whole_run", "notices_through"),
    "confirms_nothing": ("cancelled_leases", "notices_through"),
    "confirms_unacknowledged": ("a_whole_run", "acked_through"),
    "trusts_any_answer": ("withheld_acknowledgement", "acked_through"),
    "no_heartbeats": ("heartbeats", "ends"),
    "no_deadline": ("a_whole_run", "deadline"),
    "no_end": ("a_whole_run", "end"),
    "does_not_wait": ("the_last_acknowledgement_is_lost", "end"),
    "keeps_what_is_held": ("sigterm_returns_what_is_unfinished", "once"),
    "ignores_sigterm": ("heartbeats", "ends"),
    "ignores_masks": ("only_what_is_missing", "once"),
    "first_word_only": ("more_than_64_completions", "ends"),
    "wrong_payload": ("a_whole_run", "content"),
    "wrong_reward": ("a_whole_run", "content"),
    "wrong_version": ("newer_weights", "content"),
    "leases_too_much": ("heartbeats", "in_flight"),
    "leases_after_no_more": ("a_whole_run", "no_more"),
    "reports_twice": ("a_whole_run", "once"),
    "reports_cancelled": ("cancelled_leases", "cancelled"),
    "ignores_sources": ("every_outcome", "outcome"),
    "batches_too_large": ("small_limits", "limits"),
    "ignores_bytes": ("small_messages", "limits"),
    "final_later": ("a_reason_of_tomorrow", "exit_code"),
    "final_outage": ("another_execution_at_the_same_address", "exit_code"),
    "final_cancelled": ("cancelled", "exit_code"),
    "heartbeats_unheard": ("another_header_at_a_heartbeat", "terminal"),
    "ignores_expected": ("sequence_gap_after_batches_that_are_applied", "batch_numbers"),
    "unknown_notice_fatal": ("unknown_notices", "exit_code"),
    "unknown_refusal_fatal": ("a_refusal_of_tomorrow", "exit_code"),
    "no_address_is_an_error": ("no_address", "exit_code"),
}


@pytest.fixture(scope="module")
def found() -> dict[str, Result]:
    """What each broken client's scenario found, by bug; and that of the client without one, by scenario."""
    scenarios = {scenario.name: scenario for scenario in load()}
    turns: asyncio.Semaphore

    async def sound(name: str) -> tuple[str, Result]:
        async with turns:
            return name, await run_scenario(scenarios[name], WORKER)

    async def broken(bug: str, name: str, rule: str) -> tuple[str, Result]:
        limit_s = _NO_END_S if rule == "ends" else None
        async with turns:
            return bug, await run_scenario(scenarios[name], [*WORKER, bug], limit_s)

    async def everything() -> dict[str, Result]:
        nonlocal turns
        turns = asyncio.Semaphore(JOBS)
        bugs = [broken(bug, name, rule) for bug, (name, rule) in CAUGHT.items()]
        return dict(await asyncio.gather(*bugs, *map(sound, {name for name, _ in CAUGHT.values()})))

    return asyncio.run(everything())


def test_every_bug_has_a_scenario_that_catches_it() -> None:
    assert CAUGHT.keys() == BUGS.keys()


@pytest.mark.parametrize("bug", BUGS)
def test_a_broken_client_is_caught(found: dict[str, Result], bug: str) -> None:
    name, rule = CAUGHT[bug]
    assert rule in {broken.rule for broken in found[bug].broken}, (name, found[bug])


@pytest.mark.parametrize("name", sorted({name for name, _ in CAUGHT.values()}))
def test_the_same_client_without_the_bug_passes(found: dict[str, Result], name: str) -> None:
    assert found[name].passed, found[name]
