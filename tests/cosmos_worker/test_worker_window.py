"""The report window against a model that is dumber than it: a list, applied in order, each item once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_ctrl.core.errors import MessageTooLargeError, SequenceGapError, WindowFullError
from cosmos_ctrl.v1 import reports_pb2 as pb
from cosmos_worker.errors import ProtocolError
from cosmos_worker.report_items import (
    CompletionItem,
    EndItem,
    FormedBatch,
    MetricItem,
    RolloutItem,
    WeightsItem,
    form_batch,
)
from cosmos_worker.window import ReportWindow, WindowLimits


def decoded(batch: FormedBatch | None) -> pb.ReportBatch:
    """What the controller reads of it."""
    assert batch is not None
    message = pb.ReportBatch.FromString(b"".join(batch.parts))
    assert message.number == batch.number
    assert [list(block.leases) for block in message.rollouts] == list(batch.leases)
    return message


def rollout(group: int, index: int, *, lease: int = 1, payload: bytes = b"p") -> RolloutItem:
    return RolloutItem(
        outcome=pb.OUTCOME_COMPLETED,
        group=group,
        lease=lease,
        mask=1 << index,
        rewards=(float(index),),
        payload_kind="inline",
        codec="bytes",
        payloads=(payload,),
        lowest_version=index,
        highest_version=index + 1,
    )


def said(batch: pb.ReportBatch) -> list[tuple]:
    """What a batch says, one entry for each item that went in, in an order of its own within a kind."""
    entries: list[tuple] = []
    for block in batch.rollouts:
        taken = 0
        for row, mask in enumerate(block.masks):
            for bit in range(64):
                if mask >> bit & 1:
                    word = block.words[row] if block.words else 0
                    entries.append(
                        ("rollout", block.groups[row], 64 * word + bit, block.rewards[taken], block.payloads[taken])
                    )
                    taken += 1
        assert taken == len(block.rewards) == len(block.payloads)
    entries.extend(("complete", report.command) for report in batch.completions)
    entries.extend(("weights", one.version) for one in batch.weights)
    if batch.HasField("end"):
        entries.append(("end", batch.end.reason))
    return entries


def entry_of(item) -> tuple:
    if isinstance(item, RolloutItem):
        index = item.mask.bit_length() - 1
        return ("rollout", item.group, index, item.rewards[0], item.payloads[0])
    if isinstance(item, CompletionItem):
        return ("complete", item.report.command)
    return ("weights", item.version)


class Server:
    """Applies numbers once and in order; keeps each batch's bytes to tell a repeat from a conflict."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.applied: list[list[tuple]] = []

    def take(self, data: bytes) -> int:
        batch = pb.ReportBatch.FromString(data)
        if batch.number <= len(self.seen):
            assert self.seen[batch.number - 1] == data, "a number was sent again with other content"
        else:
            assert batch.number == len(self.seen) + 1, "a gap"
            self.seen.append(data)
            self.applied.append(said(batch))
        return len(self.seen)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("rollout"), st.integers(1, 5)),
        st.tuples(st.just("complete"), st.just(0)),
        st.tuples(st.just("weights"), st.just(0)),
        st.tuples(
            st.sampled_from(["send", "send", "deliver", "deliver", "ack", "ack", "old ack", "cut", "register"]),
            st.just(0),
        ),
    ),
    max_size=120,
)


class History:
    """A window, a server, and a line between them that loses and repeats."""

    def __init__(self, limits: WindowLimits) -> None:
        self.window = ReportWindow(limits)
        self.server = Server()
        self.appended: list = []
        self.sent: list[bytes] = []
        self.acks = [0]
        self.counter = 0

    def append(self, kind: str, group: int) -> None:
        self.counter += 1
        number = self.counter
        item = {
            "rollout": rollout(group, number),
            "complete": CompletionItem(pb.CompletionReport(command=number)),
            "weights": WeightsItem(number, "h"),
        }[kind]
        held = self.window.statistics()
        try:
            self.window.append(item)
            self.appended.append(item)
        except WindowFullError:
            assert held.completions + item.completions > self.window.limits.completions
            assert self.window.statistics() == held

    def step(self, kind: str) -> None:
        if kind == "send" and (batch := self.window.next_batch()) is not None:
            self.sent.append(b"".join(batch.parts))
        elif kind == "deliver" and self.sent:
            self.acks.append(self.server.take(self.sent.pop(0)))
        elif kind == "ack":
            self.window.on_ack(self.acks[-1])
        elif kind == "old ack":
            self.window.on_ack(self.acks[len(self.acks) // 2])
        elif kind in ("cut", "register"):
            self.sent = []
            self.window.on_reconnect(len(self.server.seen) if kind == "register" else None)

    def settle(self) -> None:
        """Let everything through."""
        for _ in range(400):
            if self.window.acknowledged == len(self.appended):
                return
            for kind in ("send", "deliver", "ack"):
                self.step(kind)
            if self.window.statistics().batches and not self.sent:
                self.step("cut")
        raise AssertionError("never acknowledged")


@settings(max_examples=300, deadline=None)
@given(steps, st.integers(1, 3), st.integers(1, 6))
def test_g6_every_item_is_applied_once_and_in_order(history, batches, batch_completions):
    limits = WindowLimits(batches=batches, batch_completions=batch_completions, completions=12)
    run = History(limits)
    for kind, group in history:
        if kind in ("rollout", "complete", "weights"):
            run.append(kind, group)
        else:
            run.step(kind)
        assert run.window.statistics().batches <= batches
        assert run.window.statistics().completions <= 12
    run.settle()
    # Each batch holds the next items of the list, in any order within a kind, and nothing else.
    left = [entry_of(item) for item in run.appended]
    for batch in run.server.applied:
        part, left = left[: len(batch)], left[len(batch) :]
        assert sorted(batch) == sorted(part)
        kinds = [entry[0] for entry in part]
        assert kinds == sorted(kinds, key=["rollout", "complete", "weights"].index), "the batch would change the order"
    assert left == []
    assert run.window.statistics().bytes == run.window.statistics().completions == 0


@given(st.permutations(range(130)), st.integers(1, 4))
def test_completions_reported_one_by_one_share_their_groups_rows(order, parts):
    items = [rollout(1 + index % parts, index, payload=str(index).encode()) for index in order]
    (block,) = decoded(form_batch(1, items)).rollouts
    assert sorted(said(pb.ReportBatch(rollouts=[block]))) == sorted(map(entry_of, items))
    # One row a word and group at most.
    assert len(block.groups) <= 3 * parts
    assert len(set(zip(block.groups, block.words, strict=True))) == len(block.groups)


def test_two_claims_about_one_completion_stay_two_rows():
    (block,) = decoded(form_batch(1, [rollout(1, 3), rollout(1, 3), rollout(1, 4)])).rollouts
    assert list(block.masks) == [0b1000, 0b11000]


def test_blocks_are_by_outcome_reason_codec_and_kind_of_payload():
    discarded = [
        RolloutItem(outcome=pb.OUTCOME_DISCARDED, group=1, lease=1, mask=1 << i, reason=reason)
        for i, reason in enumerate(["a", "b", "a"])
    ]
    handle = RolloutItem(
        outcome=pb.OUTCOME_COMPLETED, group=2, lease=1, mask=1, rewards=(1.0,), payload_kind="handle", payloads=("h",)
    )
    batch = decoded(form_batch(1, [*discarded, rollout(2, 1), handle]))
    assert [(block.reason, list(block.masks)) for block in batch.rollouts[:2]] == [("a", [0b101]), ("b", [0b10])]
    assert [(len(block.payloads), len(block.handles)) for block in batch.rollouts[2:]] == [(1, 0), (0, 1)]


def test_a_batch_waits_for_the_one_before_unless_it_is_full():
    window = ReportWindow(WindowLimits(batch_completions=4))
    window.append(rollout(1, 0))
    assert window.next_batch() is not None
    for index in range(1, 4):
        window.append(rollout(1, index))
    assert window.next_batch() is None
    window.append(rollout(1, 4))
    assert window.next_batch().number == 2
    window.on_ack(1)
    window.append(rollout(1, 5))
    assert window.next_batch() is None
    window.on_ack(2)
    assert window.next_batch().number == 3


def test_bytes_are_bounded_too_and_one_item_always_fits():
    window = ReportWindow(WindowLimits(total_bytes=1000, message_bytes=1 << 20))
    window.append(rollout(1, 0, payload=b"x" * 5000))
    with pytest.raises(WindowFullError):
        window.append(rollout(1, 1))
    with pytest.raises(MessageTooLargeError):
        ReportWindow(WindowLimits(message_bytes=8192)).append(rollout(1, 0, payload=b"x" * 8192))


def test_a_batch_is_no_larger_than_a_message_of_the_controllers():
    window = ReportWindow(WindowLimits(message_bytes=1 << 16))
    for index in range(40):
        window.append(rollout(1, index, payload=b"x" * 5000))
    sizes = []
    while (batch := window.next_batch()) is not None:
        sizes.append(decoded(batch).ByteSize())
        window.on_ack(batch.number)
    assert len(sizes) == 4
    assert max(sizes) < 1 << 16


def test_an_estimate_is_never_below_the_message():
    items = [rollout(1 << 60, 63, lease=1 << 60, payload=b"x" * size) for size in (0, 1, 1000)]
    batch = form_batch(1, items)
    assert decoded(batch).ByteSize() <= sum(item.size_bytes for item in items) + 64


def test_the_end_and_the_last_value_of_a_metric_travel():
    window = ReportWindow()
    for item in (
        MetricItem("a", 1.0),
        WeightsItem(1, "h"),
        MetricItem("b", 5.0),
        MetricItem("a", 2.0),
        EndItem("done"),
    ):
        window.append(item)
    batch = decoded(window.next_batch())
    assert {m.name: m.value for m in batch.metrics} == {"a": 2.0, "b": 5.0}
    assert len(batch.metrics) == 2
    assert batch.end.reason == "done"


def test_notices_are_handed_out_once_and_without_gaps():
    window = ReportWindow()

    def notices(*numbers):
        return [pb.Notice(number=n, cancelled=pb.LeasesCancelled(leases=[n])) for n in numbers]

    def handed(*numbers):
        return [heard.notice.number for heard in window.on_ack(0, notices(*numbers))]

    assert handed(1, 2) == [1, 2]
    assert handed(1, 2, 3) == [3]
    assert handed(5) == []
    assert handed(4, 5) == [4, 5]
    assert window.notices_handled == 5


def test_a_refused_row_is_heard_with_its_lease():
    window = ReportWindow()
    window.append(rollout(1, 0, lease=7))
    window.next_batch()
    refused = pb.RowRefused(batch=1, block=0, row=0, group=1, mask=1)
    (heard,) = window.on_ack(1, [pb.Notice(number=1, refused=refused)])
    assert heard.lease == 7
    (late,) = window.on_ack(1, [pb.Notice(number=2, refused=refused)])
    assert late.lease == 0


def test_a_controller_that_knows_more_or_less_than_was_said_is_refused():
    window = ReportWindow()
    window.append(rollout(1, 0))
    window.next_batch()
    with pytest.raises(ProtocolError):
        window.on_ack(2)
    window.on_ack(1)
    with pytest.raises(SequenceGapError):
        window.on_reconnect(0)
