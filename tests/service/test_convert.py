"""Messages and core values mean the same; what a message cannot mean is MALFORMED."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import get_args

import pytest
from google.protobuf import duration_pb2
from hypothesis import given
from hypothesis import strategies as st

from cosmos_ctrl.checkpoints import discovery
from cosmos_ctrl.core.commands import DisposedRows, End, Save, Train
from cosmos_ctrl.core.controller import GroupPayloads
from cosmos_ctrl.core.errors import MalformedError
from cosmos_ctrl.core.execution import Notice, Place
from cosmos_ctrl.core.groups import CompletionPayload, Lease, LeasesCancelled, PayloadsFreed
from cosmos_ctrl.core.ledger import SamplingBoundary
from cosmos_ctrl.core.resume import ControllerResumeMetadata
from cosmos_ctrl.core.sampling import Prompt
from cosmos_ctrl.core.state import EncodedState
from cosmos_ctrl.service import convert, messages
from cosmos_ctrl.service.metadata import metadata_from_message, metadata_to_message
from cosmos_ctrl.v1 import checkpoint_pb2, reports_pb2
from cosmos_ctrl.v1 import controller_service_pb2 as pb

COUNTS = st.integers(0, 2**64 - 1)
MASKS = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5).map(
    lambda words: sum(word << 64 * i for i, word in enumerate(words))
)


def from_words(groups, words, masks) -> dict[int, int]:
    found: dict[int, int] = {}
    for group, word, mask in zip(groups, words or [0] * len(groups), masks, strict=True):
        assert 0 < mask < 2**64
        assert not found.get(group, 0) & mask << 64 * word
        found[group] = found.get(group, 0) | mask << 64 * word
    return found


@given(st.dictionaries(st.integers(1, 2**64 - 1), MASKS.filter(bool), max_size=8))
def test_masks_of_any_size_go_through_words_and_come_back(rows):
    groups, words, masks = messages.to_words(rows.items())
    assert from_words(groups, words, masks) == rows
    assert bool(words) == any(mask >> 64 for mask in rows.values())
    assert list(dict.fromkeys(groups)) == list(rows)


@given(MASKS)
def test_mask_words_are_low_first_without_trailing_zeros(mask):
    words = messages.mask_words(mask)
    assert sum(word << 64 * i for i, word in enumerate(words)) == mask
    assert not words or words[-1]


metadata = st.builds(
    ControllerResumeMetadata,
    checkpoint_path=st.text(max_size=20),
    checkpoint_id=st.text(max_size=20),
    completed_training_steps=COUNTS,
    completed_optimizer_updates=COUNTS,
    remaining_completions=COUNTS,
    epoch=st.integers(1, 2**64 - 1),
    sampling_owner=st.sampled_from(["sampler", "batch_sampler"]),
    sampler_state=st.one_of(
        st.binary(max_size=50),
        st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=4),
    ),
)


@given(metadata)
def test_metadata_crosses_the_wire_unchanged(value):
    data = metadata_to_message(value).SerializeToString()
    assert metadata_from_message(checkpoint_pb2.ResumeMetadata.FromString(data)) == value


def message(**overrides) -> checkpoint_pb2.ResumeMetadata:
    values = {
        "schema_version": 1,
        "checkpoint_path": "checkpoints/x",
        "epoch": 1,
        "sampling_owner": checkpoint_pb2.SAMPLING_OWNER_SAMPLER,
        "sampler_state": checkpoint_pb2.SamplerState(data=b"{}", codec="json"),
    }
    return checkpoint_pb2.ResumeMetadata(**values | overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        {"schema_version": 0},
        {"schema_version": 2},
        {"epoch": 0},
        {"sampling_owner": 0},
        {"sampling_owner": 77},
        {"sampler_state": None},
        {"sampler_state": checkpoint_pb2.SamplerState(data=b"{}", codec="")},
        {"sampler_state": checkpoint_pb2.SamplerState(data=b"{not json", codec="json")},
        {"sampler_state": checkpoint_pb2.SamplerState(data=b"\xff\xfe\x00", codec="json")},
        {"sampler_state": checkpoint_pb2.SamplerState(data=b"[" * 100_000, codec="json")},
    ],
    ids=lambda overrides: str(overrides)[:60],
)
def test_metadata_that_is_not_version_1_is_malformed(overrides):
    with pytest.raises(MalformedError):
        metadata_from_message(message(**overrides))


def test_a_confirmation_without_content_is_malformed():
    with pytest.raises(MalformedError):
        convert.restored_from_message(pb.ConfirmResumeRequest())


def test_fresh_is_a_value_of_its_own():
    fresh = convert.restored_from_message(pb.ConfirmResumeRequest(fresh=pb.FreshStart(), artifact_names=["a"]))
    assert fresh.metadata is None
    assert fresh.values() is None
    assert fresh.artifact_names == ("a",)


@pytest.mark.parametrize("role", [0, 3, 99])
def test_an_unknown_role_is_malformed(role):
    with pytest.raises(MalformedError, match="role"):
        convert.worker_from_message(pb.RegisterWorkerRequest(role=role, group="g", world_size=1, incarnation="0" * 32))


@pytest.mark.parametrize(
    "overrides",
    [
        {"group": ""},
        {"incarnation": "0" * 31},
        {"rank": 1},
        {"world_size": 0},
        {"dp_rank": 1},
        {"dp_rank": 4, "dp_size": 4},
    ],
    ids=str,
)
def test_an_impossible_worker_is_malformed(overrides):
    values = {"role": pb.ROLE_ROLLOUT, "group": "g", "world_size": 1, "incarnation": "0" * 32}
    with pytest.raises(MalformedError):
        convert.worker_from_message(pb.RegisterWorkerRequest(**values | overrides))


def test_a_data_parallel_size_of_zero_is_one():
    request = pb.RegisterWorkerRequest(role=pb.ROLE_TRAINER, group="g", world_size=1, incarnation="0" * 32)
    assert convert.worker_from_message(request).dp_size == 1


@pytest.mark.parametrize("outcome", [0, 5, 1000])
def test_an_unknown_outcome_is_malformed(outcome):
    rows = reports_pb2.RolloutRows(outcome=outcome)
    with pytest.raises(MalformedError, match="outcome"):
        convert.batch_from_message(reports_pb2.ReportBatch(number=1, rollouts=[rows]))


@pytest.mark.parametrize(
    "block",
    [
        reports_pb2.DisposedRows(disposition=0),
        reports_pb2.DisposedRows(disposition=9),
        reports_pb2.DisposedRows(disposition=1, groups=[1]),
        reports_pb2.DisposedRows(disposition=1, groups=[1], masks=[1, 2]),
        reports_pb2.DisposedRows(disposition=1, groups=[1, 2], masks=[1, 2], words=[0]),
        reports_pb2.DisposedRows(disposition=1, masks=[1]),
        reports_pb2.DisposedRows(disposition=1, groups=[1], masks=[1], words=[2**32 - 1]),
    ],
    ids=lambda block: str(block).replace("\n", " "),
)
def test_disposed_rows_that_cannot_mean_anything_are_malformed(block):
    report = reports_pb2.CompletionReport(command=1, rows=[block])
    with pytest.raises(MalformedError):
        convert.batch_from_message(reports_pb2.ReportBatch(number=1, completions=[report]))


def test_disposed_rows_come_in_order_with_their_words():
    block = reports_pb2.DisposedRows(disposition=2, reason="long", groups=[5, 5, 6], words=[0, 1, 2], masks=[3, 1, 4])
    report = reports_pb2.CompletionReport(command=4, completed_training_step=9, optimizer_updates=2, rows=[block])
    (back,) = convert.batch_from_message(reports_pb2.ReportBatch(number=1, completions=[report])).completions
    assert (back.command, back.step, back.optimizer_updates) == (4, 9, 2)
    assert back.disposed == (DisposedRows("discarded", ((5, 3), (5, 1 << 64), (6, 4 << 128)), "long"),)


def test_a_batch_is_told_from_another_by_any_part_of_its_content():
    base = reports_pb2.ReportBatch(
        number=3,
        rollouts=[reports_pb2.RolloutRows(outcome=1, groups=[1], leases=[1], masks=[1], rewards=[0.5])],
        weights=[reports_pb2.WeightAnnouncement(version=1, handle="h")],
        metrics=[reports_pb2.Metric(name="m", value=1)],
        end=reports_pb2.EndReport(reason="r"),
    )
    same = reports_pb2.ReportBatch.FromString(base.SerializeToString())
    assert convert.batch_from_message(base).digest == convert.batch_from_message(same).digest
    digests = {convert.batch_from_message(base).digest}
    for change in (
        lambda b: b.rollouts[0].rewards.__setitem__(0, 0.25),
        lambda b: b.rollouts[0].groups.__setitem__(0, 2),
        lambda b: b.weights[0].__setattr__("handle", "other"),
        lambda b: b.metrics[0].__setattr__("value", 2),
        lambda b: b.end.__setattr__("reason", ""),
        lambda b: b.ClearField("end"),
    ):
        other = reports_pb2.ReportBatch.FromString(base.SerializeToString())
        change(other)
        digests.add(convert.batch_from_message(other).digest)
    assert len(digests) == 7


def test_the_absence_of_an_end_is_not_an_empty_end():
    assert convert.batch_from_message(reports_pb2.ReportBatch(number=1)).end is None
    assert convert.batch_from_message(reports_pb2.ReportBatch(number=1, end=reports_pb2.EndReport())).end == ""


# -- commands


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_a_train_command_gives_each_row_one_share(dp_size):
    rows = [(1, 0b11), (2, 1 << 64 | 1), (3, 1 << 130), (4, 5)]
    message = messages.train_to_message(Train(7, 3, tuple(rows), deadline=60.0), dp_size)
    assert message.step == 3
    assert from_words(message.groups, message.words, message.masks) == dict(rows)
    shares = dict(zip(message.groups, message.dp_ranks, strict=True))
    assert shares == {group: index % dp_size for index, (group, _) in enumerate(rows)}


def test_a_train_command_of_small_groups_has_no_words():
    message = messages.train_to_message(Train(1, 1, ((1, 3), (2, 3)), deadline=60.0), 1)
    assert not message.words
    assert list(message.groups) == [1, 2]


def test_a_save_command_carries_the_boundary_as_metadata():
    boundary = SamplingBoundary(epoch=2, sampler_state={"position": 5}, remaining_completions=9)
    save = Save(3, "id", "checkpoints/p", 4, 8, boundary, 6, True, 0.0)
    message = messages.save_to_message(save, "batch_sampler", execution_number=12, horizon_training_steps=40)
    back = metadata_from_message(message.metadata)
    assert (back.checkpoint_path, back.checkpoint_id, back.sampling_owner) == ("checkpoints/p", "id", "batch_sampler")
    assert (back.completed_training_steps, back.completed_optimizer_updates) == (4, 8)
    assert (back.epoch, back.remaining_completions, back.sampler_state) == (2, 9, {"position": 5})
    assert (message.completed_training_steps, message.completed_optimizer_updates) == (4, 8)
    assert (message.execution_number, message.horizon_training_steps, message.final) == (12, 40, True)


@pytest.mark.parametrize("reason", ["BUDGET_EXHAUSTED", "STEP_LIMIT", "STOP_REQUESTED", "FAILURE"])
def test_every_reason_to_end_has_a_value(reason):
    message = messages.end_command_to_message(End(1, reason, "why", 5))
    assert pb.EndReason.Name(message.reason) == f"END_REASON_{reason}"
    assert (message.message, message.completed_training_steps) == ("why", 5)


def test_notices_of_each_kind():
    freed = messages._notice_to_message(Notice(1, PayloadsFreed(((5, 1 << 70 | 1), (6, 2)))))
    assert from_words(freed.freed.groups, freed.freed.words, freed.freed.masks) == {5: 1 << 70 | 1, 6: 2}
    cancelled = messages._notice_to_message(Notice(2, LeasesCancelled((4, 9))))
    assert (cancelled.number, list(cancelled.cancelled.leases)) == (2, [4, 9])


def test_a_lease_of_a_large_group_names_what_is_to_be_generated():
    lease = Lease(9, 4, Prompt("k", "s", b"", "raw"), 130, 1 << 129 | 0b101, 2.5)
    message = messages.lease_to_message(lease)
    assert list(message.masks) == [0b101, 0, 0b10]
    assert (message.group, message.lease, message.completions, message.prompt_key) == (9, 4, 130, "k")
    assert message.HasField("payload")
    assert message.deadline.ToMilliseconds() == 2500
    without = messages.lease_to_message(Lease(9, 4, Prompt("k"), 1, 1, None))
    assert not without.HasField("payload")
    assert not without.HasField("deadline")


# -- payloads


def completion(index: int, payload: bytes | None = None, handle: str | None = None) -> CompletionPayload:
    return CompletionPayload(index, index / 2, 1, 2, "raw" if payload is not None else "", payload, handle)


def chunks_of(groups: list[GroupPayloads], most_bytes: int) -> Iterator[list]:
    encoded = (b"".join(parts) for parts in messages.payload_parts(groups, most_bytes))
    return (list(pb.FetchPayloadsResponse.FromString(response).groups) for response in encoded)


def reassembled(chunks) -> dict[int, list]:
    found: dict[int, list] = {}
    for chunk in chunks:
        for part in chunk:
            found.setdefault(part.group, []).extend(part.completions)
    return found


def test_an_empty_share_is_one_message_without_groups():
    assert list(chunks_of([], 100)) == [[]]


def test_a_group_without_completions_is_still_named():
    (chunk,) = chunks_of([GroupPayloads(1, Prompt("k"), ())], 100)
    assert [part.group for part in chunk] == [1]


def test_the_prompt_counts_in_every_message_that_its_group_continues_in():
    group = GroupPayloads(1, Prompt("k", payload=b"p" * 200), tuple(completion(i, b"x" * 100) for i in range(9)))
    encoded = [b"".join(parts) for parts in messages.payload_parts([group], 600)]
    assert len(encoded) > 2
    assert all(len(message) <= 620 for message in encoded)
    assert sum(map(len, reassembled(chunks_of([group], 600)).values())) == 9


def test_absent_payload_empty_payload_and_handle_are_told_apart():
    group = GroupPayloads(1, Prompt("k"), (completion(0), completion(1, b""), completion(2, None, "")))
    ((part,),) = chunks_of([group], 1000)
    assert [c.WhichOneof("payload") for c in part.completions] == [None, "inline", "handle"]


def test_a_group_larger_than_a_message_goes_on_in_the_next():
    group = GroupPayloads(
        8, Prompt("key", "src", b"PP", "raw"), tuple(completion(i, bytes([i]) * 300) for i in range(10))
    )
    chunks = list(chunks_of([group], 1000))
    assert len(chunks) >= 4
    for (part,) in chunks:
        assert part.completions
        assert (part.prompt_key, part.source, part.prompt, part.prompt_codec) == ("key", "src", b"PP", "raw")
        assert part.ByteSize() < 1200
    assert [c.completion for c in reassembled(chunks)[8]] == list(range(10))


@given(st.integers(0, 2**32))
def test_chunks_hold_everything_once_in_order_and_stay_small(seed):
    choice = random.Random(seed)
    groups = []
    for number in range(choice.randrange(6)):
        payloads = [choice.randbytes(choice.choice([0, 1, 50, 400, 2500])) for _ in range(choice.randrange(5))]
        prompt = Prompt(f"k{number}", payload=choice.randbytes(choice.choice([0, 100, 1500])))
        groups.append(GroupPayloads(number, prompt, tuple(completion(i, data) for i, data in enumerate(payloads))))
    chunks = list(chunks_of(groups, 1000))
    assert chunks
    assert all(chunks) or chunks == [[]]
    back = reassembled(chunks)
    assert list(back) == [group.group for group in groups]
    for group in groups:
        assert [c.inline for c in back[group.group]] == [c.payload for c in group.completions]
    for chunk in chunks:
        completions = sum(len(part.completions) for part in chunk)
        largest = max((len(c.inline) for part in chunk for c in part.completions), default=0)
        prompts = sum(len(part.prompt) for part in chunk)
        size = sum(part.ByteSize() for part in chunk)
        assert completions <= 1 or size <= 1000 + prompts + largest + 200


# -- notes, places, durations


@pytest.mark.parametrize("note", ["", "{}", '{"wandb": "run-1"}', '{"x": "%s"}' % ("y" * 60_000)], ids=len)
def test_a_note_that_is_an_object_is_kept(note):
    assert convert.note_from_message(pb.ShardReceipts(application_note=note)) == note


@pytest.mark.parametrize(
    "note",
    ["[]", "1", "null", '"x"', "{", "nonsense", '{"x": "%s"}' % ("y" * 65_536), '{"ä": "%s"}' % ("ü" * 33_000)],
    ids=len,
)
def test_any_other_note_is_malformed(note):
    with pytest.raises(MalformedError):
        convert.note_from_message(pb.ShardReceipts(application_note=note))


@given(st.floats(0, 1e9))
def test_durations_keep_their_nanoseconds(value):
    assert convert.seconds(messages.duration(value)) == pytest.approx(value, abs=1e-9, rel=1e-12)


def test_a_negative_duration_is_malformed():
    for message in (duration_pb2.Duration(seconds=-1), duration_pb2.Duration(nanos=-1)):
        with pytest.raises(MalformedError):
            convert.seconds(message)


def test_the_place_is_as_stated():
    request = pb.RegisterWorkerRequest(
        role=pb.ROLE_TRAINER, group="critic", replica=1, rank=3, world_size=4, dp_rank=1, dp_size=2,
        incarnation="a" * 40, host="h", pid=9,
    )  # fmt: skip
    info = convert.worker_from_message(request)
    assert info.place == Place("trainer", "critic", 1, 3)
    assert (info.world_size, info.dp_rank, info.dp_size, info.host, info.pid) == (4, 1, 2, "h", 9)
    assert info.incarnation == "a" * 40


def test_rewards_that_are_no_number_cross_as_they_are():
    nan = struct.unpack("<d", b"\x01\x00\x00\x00\x00\x00\xf8\x7f")[0]
    rows = reports_pb2.RolloutRows(outcome=1, groups=[1], leases=[1], masks=[1], rewards=[nan])
    first, second = (
        convert.batch_from_message(reports_pb2.ReportBatch.FromString(data)).digest
        for data in [reports_pb2.ReportBatch(number=1, rollouts=[rows]).SerializeToString()] * 2
    )
    assert first == second


def test_a_state_that_is_not_json_may_be_anything():
    value = metadata_from_message(message(sampler_state=checkpoint_pb2.SamplerState(data=b"\xff", codec="bytes")))
    assert value.encoded_state == EncodedState(b"\xff", "bytes")


def test_every_verdict_of_discovery_is_one_of_the_wire():
    assert set(messages._VERDICTS) == set(get_args(discovery.Verdict))
    sent = set(messages._VERDICTS.values()) | {checkpoint_pb2.VERDICT_UNSPECIFIED}
    assert sent == set(checkpoint_pb2.Verdict.values())
