"""G4 against power loss: tasks run for real, their system calls are recorded, and every state a crash may leave is read.

The model is in ``crash_states``, the tasks in ``crash_tasks``, what a reader may see in ``crash_scenarios``.
"""

from __future__ import annotations

from collections import Counter

import pytest
from crash_lab import NO_LINK, Lab, changing_calls, syncs, without
from crash_recording import Recording, Told
from crash_scenarios import SCENARIOS
from crash_states import crash_states
from crash_tasks import DEAD, KEPT, RETIRED

RETIRED_AT, KEPT_AT, DEAD_AT = (f"run/{path}" for path in (RETIRED, KEPT, DEAD))

#: What a reader sees in some state of each.
SEEN = {
    "script": {"nothing", "new"},
    "controller": {"old", "new"},
    "conflict": {"old"},
    "worker": {"nothing", "rank0.pt", "rank0.pt, sub/rank1.pt"},
    "whole save": {"old", "new"},
    "first claim": {"0", "1"},
    "claim twice": {"0", "1", "2"},
    "put": {"nothing", "new"},
    "uncommit": {"old", "nothing"},
    "tidy": {
        *("kept retired; unfinished", "kept retired; being swept", "kept retired; swept"),
        *("kept retiring; swept", "kept; swept"),
    },
    "publish and tidy": {
        *("retired; unfinished", "kept retired; unfinished", "kept retired; being swept", "kept retired; swept"),
        *("kept retiring; swept", "kept; swept"),
    },
    "pin a resume": {"unpinned", "pinned"},
}


@pytest.mark.parametrize("link", [True, False])
@pytest.mark.parametrize("name", SCENARIOS)
def test_g4_after_any_crash_a_reader_finds_the_old_or_the_whole_new(name: str, link: bool, lab: Lab) -> None:
    recording, outcome = lab.record(name, *(() if link else NO_LINK))
    assert ("error" in outcome) == (name == "conflict"), outcome
    assert lab.violation(name, recording) is None
    reader = lab.reader(name)
    assert {reader.see(state) for _, _, state in crash_states(recording.before, recording.steps)} == SEEN[name]


_BEFORE = "the old checkpoint's publication had made it durable; a publisher cannot know"
_FIRST = "the first claim had made the second's way durable; a claimant cannot know"
_GONE = "of what lies in a directory whose own name goes later, or in one that is synced again"

#: fsyncs that may be left out of one run without harm, each with why the code makes it all the same.
NEEDLESS: dict[str, dict[str, tuple[str, ...]]] = {
    "script": {},
    "controller": {"run": (_BEFORE,), "": (_BEFORE,)},
    "worker": {
        "run/checkpoints": ("the first rank had made the second's way durable; a rank cannot know",),
        "run": ("the same",),
    },
    "claim twice": {"runs": (_FIRST,), "runs/one": (_FIRST,), "": (_FIRST,)},
    "first claim": {},
    "put": {},
    "uncommit": {},
    "tidy": {
        "": (_BEFORE,),
        "run": (_BEFORE,),
        "run/checkpoints": (_BEFORE,),
        KEPT_AT: ("its publisher had made it durable; a deleter cannot know",),
        f"{RETIRED_AT}/sub": (_GONE,),
        RETIRED_AT: (_GONE, _GONE),
        f"{DEAD_AT}/sub": (_GONE,),
        DEAD_AT: (_GONE,),
        "run/deleting/.cosmos-ctrl-tmp-1": ("an intent counts by its name; a store cannot know",),
        "run/deleting": ("an intent that comes back is to delete what is gone",),
    },
    "pin a resume": {"": ("whoever made the run had made it durable; a store cannot know",)},
}


@pytest.mark.parametrize("name", NEEDLESS)
def test_leaving_out_any_one_fsync_is_found(name: str, lab: Lab) -> None:
    recording, _ = lab.record(name)
    made = syncs(recording)
    found = [path for place, path in made if lab.violation(name, recording, without(recording.steps, {place}))]
    # A path may be synced twice, and needlessly the second time.
    missed = [path for _, path in made]
    for path in found:
        missed.remove(path)
    assert Counter(missed) == {path: len(reasons) for path, reasons in NEEDLESS[name].items()}


def test_leaving_out_all_fsyncs_of_anything_in_a_whole_save_is_found(lab: Lab) -> None:
    """Workers and controller make the directories durable, each without the other's word: one by one they hide each other."""
    recording, _ = lab.record("whole save")
    places: dict[str, set[int]] = {}
    for place, path in syncs(recording):
        places.setdefault(path, set()).add(place)
    missed = [
        path
        for path, made in places.items()
        if not lab.violation("whole save", recording, without(recording.steps, made))
    ]
    # The run's own names were durable before.
    assert sorted(missed) == ["", "run"]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("script", "ok"),
        ("controller", "ok"),
        ("worker", "rank0.pt"),
        ("first claim", "1"),
        ("put", "ok"),
        ("uncommit", "ok"),
        ("tidy", DEAD),
        ("publish and tidy", "kept"),
        ("pin a resume", "ok"),
    ],
)
def test_telling_before_the_last_fsync_is_found(name: str, answer: str, lab: Lab) -> None:
    recording, _ = lab.record(name)
    steps = list(recording.steps)
    told = steps.index(Told(answer))
    last = max(place for place, _ in syncs(recording) if place < told)
    steps.insert(last, steps.pop(told))
    assert lab.violation(name, recording, steps)


#: Mutants of the code, and the tasks that must show each.
CODE = [
    ("files are not fsynced", "script"),
    ("files are not fsynced", "controller"),
    ("files are not fsynced", "first claim"),
    ("files are not fsynced", "put"),
    ("directories are not fsynced", "script"),
    ("directories are not fsynced", "controller"),
    ("directories are not fsynced", "first claim"),
    ("directories are not fsynced", "put"),
    ("directories are not fsynced", "uncommit"),
    ("directories of artifacts are not fsynced", "script"),
    ("directories of artifacts are not fsynced", "controller"),
    ("the way to the store is not fsynced", "script"),
    ("the way to the store is not fsynced", "controller"),
    ("the way to the store is not fsynced", "first claim"),
    ("the way to the store is not fsynced", "put"),
    ("a plain rename", "conflict"),
    ("written in place", "script"),
    ("written in place", "controller"),
    ("written in place", "conflict"),
    ("written in place", "first claim"),
    ("written in place", "put"),
    ("the worker fsyncs no file", "worker"),
    ("the worker fsyncs no file", "whole save"),
    ("the worker fsyncs no directory", "worker"),
    ("directories are not fsynced", "pin a resume"),
    ("files are not fsynced", "pin a resume"),
    ("written in place", "pin a resume"),
    ("directories are not fsynced", "tidy"),
    ("deletions are not fsynced", "tidy"),
    ("artifacts go before the manifest", "tidy"),
    ("there is no intent", "tidy"),
    ("there is no tombstone", "tidy"),
]


@pytest.mark.parametrize(("mutant", "name"), CODE)
def test_code_that_leaves_it_out_is_found(mutant: str, name: str, lab: Lab) -> None:
    recording, outcome = lab.record(name, mutant=mutant)
    assert "ok" in outcome, outcome
    assert lab.violation(name, recording)


#: Calls that change anything.
CHANGING = ("write", "fsync", "link", "mkdir", "unlink", "rmdir")

#: A task, what repeats it after a kill, and fsyncs of the repetition that no kill makes needful.
REPEATED = {
    "script": ("script again", set()),
    "controller": ("controller again", {"run", ""}),
    "first claim": ("first claim", set()),
    "put": ("put", set()),
    "uncommit": ("uncommit", set()),
    "pin a resume": ("pin a resume", {""}),
}


@pytest.mark.parametrize("name", REPEATED)
def test_g4_killed_anywhere_repeated_and_then_the_power_goes(name: str, lab: Lab) -> None:
    """What the dead process did not make durable, whoever finds it does before telling anyone."""
    repeat, spared = REPEATED[name]
    needed: set[str] = set()
    made: set[str] = set()
    for call, k in changing_calls(lab, name, CHANGING):
        recording = Recording(lab.disk(name))
        killed = lab.add(recording, name, "-e", f"inject={call}:signal=SIGKILL:when={k}")
        assert "killed" in killed, (call, k, killed)
        if name == "controller" and "receipts" not in killed["told"]:
            continue  # nobody publishes receipts that were not given
        before = len(recording.steps)
        outcome = lab.add(recording, repeat)
        assert lab.violation(name, recording) is None, (call, k)
        for place, path in syncs(recording):
            if place >= before and "ok" in outcome:
                made.add(path)
                if path not in needed and lab.violation(name, recording, without(recording.steps, {place})):
                    needed.add(path)
    assert made - needed == spared


#: By the same execution, which finds its own manifest and tombstone, and by the next, which finds another's.
TIDIED_AGAIN = [("publish and tidy", "tidy"), ("tidy", "the next tidies")]


@pytest.mark.parametrize(("name", "again"), TIDIED_AGAIN)
def test_g4_retention_killed_anywhere_taken_up_again_and_then_the_power_goes(name: str, again: str, lab: Lab) -> None:
    """A deleter relies on a manifest or a tombstone that it finds only once it has made it durable."""
    for call, k in changing_calls(lab, name, ("fsync",)):
        recording = Recording(lab.disk(name))
        killed = lab.add(recording, name, "-e", f"inject={call}:signal=SIGKILL:when={k}")
        assert "killed" in killed, (call, k, killed)
        outcome = lab.add(recording, again)
        assert not outcome["ok"]["failures"]
        assert lab.violation(name, recording) is None, (call, k)


@pytest.mark.parametrize(("name", "again"), TIDIED_AGAIN)
def test_a_deleter_that_relies_on_what_may_not_last_is_found(name: str, again: str, lab: Lab) -> None:
    found = []
    for call, k in changing_calls(lab, name, ("fsync",)):
        recording = Recording(lab.disk(name))
        lab.add(recording, name, "-e", f"inject={call}:signal=SIGKILL:when={k}")
        lab.add(recording, again, mutant="what is found is not made durable")
        found.append(lab.violation(name, recording))
    assert any(found)
