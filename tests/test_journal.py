"""The journal survives the death of its process: whole lines are read, a torn last one is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cosmos_ctrl.journal import Journal, JournalTail, journal_path, read_journal


@pytest.fixture
def path(tmp_path):
    return journal_path(tmp_path / "run", 7)


def test_its_place_is_in_the_run():
    assert journal_path(Path("run"), 12) == Path("run/executions/00000012.jsonl")


def test_events_come_back_in_order_with_their_time(path):
    journal = Journal(path)
    for number in range(3):
        journal.record("step", step=number, text='a "quote"\nand a line', mask=1 << 70)
    journal.close()
    events = list(read_journal(path))
    assert [event["step"] for event in events] == [0, 1, 2]
    assert all(event["event"] == "step" and event["t"] > 1e9 for event in events)
    assert events[0]["text"] == 'a "quote"\nand a line'
    assert events[0]["mask"] == 1 << 70
    assert all(set(event) == {"event", "t", "step", "text", "mask"} for event in events)


def test_a_line_is_there_at_once(path):
    journal = Journal(path)
    journal.record("a")
    assert len(list(read_journal(path))) == 1
    journal.close()


def test_what_was_recorded_survives_sigkill(path):
    code = (
        "import os, signal, sys; from pathlib import Path; from cosmos_ctrl.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "for n in range(50): journal.record('e', n=n)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], timeout=20, check=False)
    assert done.returncode == -9
    assert [event["n"] for event in read_journal(path)] == list(range(50))


def test_a_torn_last_line_is_left_out_wherever_it_is_torn(path):
    journal = Journal(path)
    journal.record("a", n=1)
    journal.record("b", text="ä" * 5)
    journal.close()
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first, len(whole)):
        path.write_bytes(whole[:end])
        assert [event["event"] for event in read_journal(path)] == ["a"]
    path.write_bytes(whole)
    assert [event["event"] for event in read_journal(path)] == ["a", "b"]


def test_damage_in_the_middle_is_an_error(path):
    path.parent.mkdir(parents=True)
    path.write_text('{"event": "a"}\n{"event": \n{"event": "c"}\n')
    with pytest.raises(json.JSONDecodeError):
        list(read_journal(path))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_never_reaches_who_records(caplog):
    journal = Journal(Path("/dev/full"))
    for _ in range(3):
        journal.record("step", step=1)
    journal.close()
    assert [record.message for record in caplog.records if "cannot be written any more" in record.message]
    assert len(caplog.records) == 1


def test_a_tail_gives_each_event_that_is_asked_for_once(path):
    tail = JournalTail(path, ("retired", "swept"))
    assert tail.take() == []
    journal = Journal(path)
    assert tail.take() == []
    journal.record("retired", path="a")
    journal.record("retired_too", path="x")
    journal.record("issue", text='{"event": "retired"}')
    assert [event["path"] for event in tail.take()] == ["a"]
    assert tail.take() == []
    with path.open("a") as torn:
        torn.write('{"event": "swept", "path"')
        torn.flush()
        assert tail.take() == []
        torn.write(': "b"}\n')
    journal.record("retired", path="c")
    assert [event["path"] for event in tail.take()] == ["b", "c"]
    journal.close()
