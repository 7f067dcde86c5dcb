"""Every number in the protos' comments, and in the page on the protocol, is the code's own; and what may be absent says when."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documented import Comments, descriptors

from cosmos_ctrl.checkpoints import names
from cosmos_ctrl.config import Config
from cosmos_ctrl.core import admission, commands, execution
from cosmos_ctrl.service import convert, messages, servicer, status

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text()
POLICY = Config.model_validate(
    {"sampling": {"prompts": "p", "epochs": 1}},
).policy()

#: Where a number stands, and what it is in the code: (file of the proto, or the page; words around it; number).
LIMITS = [
    (
        "controller_service",
        "A wait (a Duration in a request) of more than {} seconds is taken as {}",
        servicer.MAX_WAIT_S,
    ),
    ("controller_service", "or says PUBLISHING after {} seconds", servicer.MAX_WAIT_S),
    ("controller_service", "raises that to {} MiB", POLICY.max_message_bytes >> 20),
    ("controller_service", "in bytes; {} MiB by default", POLICY.max_message_bytes >> 20),
    ("controller_service", "confirmed by `acked_through`; {} by default", POLICY.max_unacknowledged_batches),
    ("controller_service", "over all its rows; {} by default", POLICY.max_batch_completions),
    ("controller_service", "too many notices ({}) unconfirmed", execution._MAX_NOTICES),
    ("controller_service", "at most {} characters, like the other texts here", execution._LONGEST_NAME),
    ("controller_service", "At most {} bytes of UTF-8 each", names.MAX_NAME_BYTES),
    ("controller_service", "and {} a part", names.MAX_PART_BYTES),
    ("controller_service", "about {} MiB, or half", servicer.PAYLOAD_CHUNK_BYTES >> 20),
    ("controller_service", "The last {} commands", commands._KEPT_COMMANDS),
    ("controller_service", "At most so many; zero: {}.", servicer._DEFAULT_PAGE),
    ("controller_service", "More than {} is taken as {}", servicer._LARGEST_PAGE),
    ("controller_service", "metadata with the details (texts, {} KiB together", status._MOST_ATTRIBUTE_BYTES >> 10),
    ("reports", "Word of each row, at most {}", convert._MOST_WORDS - 1),
    ("reports", "At most {} characters, else MALFORMED", convert._LONGEST_NAME),
    ("reports", "The {}th name of a worker", admission._MAX_METRICS + 1),
    ("reports", "at most {} and half a message", messages._MOST_NOTICES),
    ("page", "`limits.max_message_bytes`: {} MiB", POLICY.max_message_bytes >> 20),
    ("page", "`limits.max_batch_completions`: {} |", POLICY.max_batch_completions),
    ("page", "`limits.max_unacknowledged_batches`: {} |", POLICY.max_unacknowledged_batches),
    ("page", "about {} MiB (less where", servicer.PAYLOAD_CHUNK_BYTES >> 20),
    ("page", "| {}; 1,024 in one ack |", execution._MAX_NOTICES),
    ("page", "; {} in one ack |", messages._MOST_NOTICES),
    ("page", "| {} characters; an incarnation at least 32 |", execution._LONGEST_NAME),
    ("page", "| {} bytes, 240 a part |", names.MAX_NAME_BYTES),
    ("page", "bytes, {} a part |", names.MAX_PART_BYTES),
    ("page", "| {} names of 128 characters |", admission._MAX_METRICS),
    ("page", "names of {} characters |", convert._LONGEST_NAME),
    ("page", "as the request says, {} seconds at most", servicer.MAX_WAIT_S),
]


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """All comments of each file, and the page."""
    files = {Path(file.name).stem: Comments(file) for file in descriptors().file if file.package == "cosmos_ctrl.v1"}
    comments = {name: "\n".join([each.file, *each.texts()]) for name, each in files.items()}
    return {**comments, "page": re.sub(r"\s+", " ", PAGE)}


@pytest.mark.parametrize(("where", "words", "number"), LIMITS, ids=[words for _, words, _ in LIMITS])
def test_a_number_of_the_contract_is_the_codes_own(texts, where, words, number):
    assert number == int(number)
    said = f"{int(number):,}"
    spelled = {words.format(*[text] * words.count("{}")) for text in (said, said.replace(",", ""))}
    assert any(each in texts[where] for each in spelled), f"the code says {said}"


def test_every_message_that_may_be_absent_says_when():
    silent = []
    for file in descriptors().file:
        if file.package != "cosmos_ctrl.v1":
            continue
        comments = Comments(file)
        fields = [
            (message.name, field, comments[(4, n, 2, m)])
            for n, message in enumerate(file.message_type)
            for m, field in enumerate(message.field)
        ]
        for message, field, comment in fields:
            of_a_oneof = field.HasField("oneof_index") and not field.proto3_optional
            single = field.type == field.TYPE_MESSAGE and field.label != field.LABEL_REPEATED and not of_a_oneof
            if (field.proto3_optional or single) and field.name not in ("header", "worker"):
                says = re.search("[Aa]bsent|[Aa]lways present", comment)
                silent += [] if says else [f"{message}.{field.name}"]
    assert not silent
