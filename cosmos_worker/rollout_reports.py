"""From what a user says about a leased group to a report item.

* Completions are taken from the lease book first, so nothing is said twice; an item that cannot be queued gives them back.
* Versions are the lowest and the highest of all tokens; where weights are announced they have to be stated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from cosmos_ctrl.v1 import reports_pb2
from cosmos_worker.errors import UsageError
from cosmos_worker.lease_book import LeasedGroup
from cosmos_worker.payloads import Encoded, encode_payload
from cosmos_worker.report_items import RolloutItem

Versions: TypeAlias = int | Sequence[int] | None
"""One weight version, or all that were used, or None where the run announces no weights."""


def span_of(versions: Versions, *, announced: bool) -> tuple[int, int]:
    """Lowest and highest version.

    Raises:
        UsageError: none is stated although the run announces weights.
    """
    if versions is None:
        if announced:
            raise UsageError(
                "this run announces weights: say versions=, the weight version(s) the tokens were sampled with"
            )
        return 0, 0
    if isinstance(versions, int):
        return versions, versions
    if not versions:
        raise UsageError("versions= is empty; give at least one")
    return min(versions), max(versions)


def completed(
    group: LeasedGroup,
    mask: int,
    payloads: Sequence[Any],
    rewards: Sequence[float],
    span: tuple[int, int],
    codec: str | None,
) -> RolloutItem:
    """The item for generated completions; `payloads` and `rewards` in the order of the mask's bits."""
    encoded = [encode_payload(payload, codec) for payload in payloads] or [Encoded("none", b"", "")]
    first = encoded[0]
    if any((one.kind, one.codec) != (first.kind, first.codec) for one in encoded):
        raise UsageError("payloads that are reported together are all bytes, all values, all handles, or all None")
    return RolloutItem(
        outcome=reports_pb2.OUTCOME_COMPLETED,
        group=group.group_id,
        lease=group.lease,
        mask=mask,
        lowest_version=span[0],
        highest_version=span[1],
        rewards=tuple(map(float, rewards)),
        payload_kind=first.kind,
        codec=first.codec,
        payloads=() if first.kind == "none" else tuple(one.data for one in encoded),
    )


def require_reason(outcome: reports_pb2.Outcome.ValueType, reason: str) -> None:
    """Raises UsageError: a reason is due, and none is given."""
    if outcome != reports_pb2.OUTCOME_RETURNED and not reason:
        raise UsageError("say why: reason= is a short stable token such as 'too_long'")


def given_up(group: LeasedGroup, mask: int, outcome: reports_pb2.Outcome.ValueType, reason: str) -> RolloutItem:
    """The item for completions that were not generated."""
    return RolloutItem(outcome=outcome, group=group.group_id, lease=group.lease, mask=mask, reason=reason)
