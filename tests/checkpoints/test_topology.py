"""The topology in the compatibility record: a change is refused with both values named, unless it may be resharded. G3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoint_helpers import COMPATIBILITY, commit
from hypothesis import given
from hypothesis import strategies as st

from cosmos_ctrl.checkpoints.adapter import ManifestAdapter
from cosmos_ctrl.checkpoints.compatibility import TOPOLOGY, Topology, differences
from cosmos_ctrl.checkpoints.discovery import OnCorrupt, discover, explain, open_checkpoint
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.core.errors import CheckpointIncompatibleError
from cosmos_ctrl.core.sampling import ResumeRequest

TREES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 1) | st.sampled_from([0.0, 1.0, "", "1"]) | st.lists(st.integers(0, 1)),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


def places(tree: Any, place: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Every value in `tree` by its place."""
    found = {place: tree}
    for name, inner in tree.items() if isinstance(tree, dict) else ():
        found |= places(inner, (*place, name))
    return found


@given(TREES, TREES)
def test_g3_what_differs_is_named_where_it_differs_and_nowhere_else(recorded: Any, present: Any) -> None:
    left, right = places(recorded), places(present)

    def parted(place: tuple[str, ...]) -> bool:
        """Whether there are not two objects, to be looked into."""
        return not (isinstance(left.get(place), dict) and isinstance(right.get(place), dict))

    def text(side: dict[tuple[str, ...], Any], place: tuple[str, ...]) -> str:
        told = json.dumps(side[place], sort_keys=True, separators=(",", ":")) if place in side else "nothing"
        return told if len(told) <= 80 else f"{told[:80]}…"

    wanted = {
        ".".join(place): f"the checkpoint has {text(left, place)}, this run has {text(right, place)}"
        for place in left.keys() | right.keys()
        if not any(parted(place[:depth]) for depth in range(len(place)))
        and parted(place)
        and (place in left, json.dumps(left.get(place), sort_keys=True))
        != (place in right, json.dumps(right.get(place), sort_keys=True))
    }
    assert differences(recorded, present) == wanted


GROUP: dict[str, Any] = {"world_size": 4, "mesh": [["dp_shard", 2], ["tp", 2]], "sharding": "fsdp2"}
RECORDED: dict[str, Any] = {"policy": GROUP, "critic": {"world_size": 1}}

LAYOUTS: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"policy": GROUP | {"world_size": 2}},
        ["topology.policy.world_size: the checkpoint has 4, this run has 2"],
    ),
    (
        {"policy": GROUP | {"mesh": [["tp", 2], ["dp_shard", 2]]}},
        [
            'topology.policy.mesh: the checkpoint has [["dp_shard",2],["tp",2]], this run has [["tp",2],["dp_shard",2]]',
        ],
    ),
    (
        {"policy": GROUP | {"sharding": "replicated"}},
        ['topology.policy.sharding: the checkpoint has "fsdp2", this run has "replicated"'],
    ),
    (
        {"policy": {"world_size": 4}},
        [
            'topology.policy.mesh: the checkpoint has [["dp_shard",2],["tp",2]], this run has nothing',
            'topology.policy.sharding: the checkpoint has "fsdp2", this run has nothing',
        ],
    ),
    (
        {"critic": {"world_size": 2}},
        ["topology.critic.world_size: the checkpoint has 1, this run has 2"],
    ),
]


def committed(run: Path, topology: Any = RECORDED) -> LocalStore:
    record = COMPATIBILITY if topology is None else {**COMPATIBILITY, TOPOLOGY: topology}
    commit(run, "c", step=2, compatibility=record)
    return LocalStore(run)


def refusal(store: LocalStore, on_corrupt: OnCorrupt = "error", **compared: Any) -> CheckpointIncompatibleError:
    """The same by discovery, its explanation and name."""
    found = explain(store, on_corrupt=on_corrupt, **compared)
    assert [candidate.verdict for candidate in found.candidates] == ["incompatible"]
    texts = {str(found.failure), found.candidates[0].explanation}
    errors = []
    for attempt in (
        lambda: discover(store, on_corrupt=on_corrupt, **compared),
        lambda: open_checkpoint(store, "checkpoints/c", **compared),
    ):
        with pytest.raises(CheckpointIncompatibleError) as caught:
            attempt()
        errors.append(caught.value)
    assert texts == {str(error) for error in errors}
    return errors[0]


@pytest.mark.parametrize("on_corrupt", ["error", "previous"])
@pytest.mark.parametrize(("change", "told"), LAYOUTS)
def test_g3_another_topology_is_refused_with_both_named_unless_it_may_be_resharded(
    change: dict[str, Any], told: list[str], on_corrupt: OnCorrupt, tmp_path: Path
) -> None:
    store, present = committed(tmp_path), RECORDED | change
    error = refusal(store, on_corrupt, compatibility=COMPATIBILITY, topology=Topology(present))
    assert list(error.differences) == told
    assert list(error.keys) == [text.partition(":")[0] for text in told]
    assert "checkpoints.reshard = true" in str(error)
    # Whatever an adapter compares besides.
    assert refusal(store, compatibility=None, topology=Topology(present)).differences == error.differences
    for compatibility in (COMPATIBILITY, None):
        topology = Topology(present, reshard=True)
        assert discover(store, compatibility=compatibility, on_corrupt=on_corrupt, topology=topology).chosen
        assert open_checkpoint(store, "checkpoints/c", compatibility=compatibility, topology=topology)
    assert Topology(present).changes({TOPOLOGY: RECORDED}).keys() == set(error.keys)
    assert Topology(present).other_groups({TOPOLOGY: RECORDED}) == tuple(change)


@pytest.mark.parametrize("reshard", [False, True])
def test_the_same_topology_is_the_same_resharded_or_not(reshard: bool, tmp_path: Path) -> None:
    store, topology = committed(tmp_path), Topology(dict(reversed(RECORDED.items())), reshard=reshard)
    assert discover(store, compatibility=COMPATIBILITY, on_corrupt="error", topology=topology).chosen
    assert topology.changes({TOPOLOGY: RECORDED}) == {}
    assert topology.other_groups({TOPOLOGY: RECORDED}) == ()


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ({"policy": GROUP}, 'topology.critic: the checkpoint has {"world_size":1}, this run has nothing'),
        (
            RECORDED | {"reference": {"world_size": 3}},
            'topology.reference: the checkpoint has nothing, this run has {"world_size":3}',
        ),
    ],
)
def test_g3_a_trainer_group_too_few_or_too_many_is_not_resharded(
    groups: dict[str, Any], told: str, tmp_path: Path
) -> None:
    groups = groups | {"policy": {"world_size": 8}}
    error = refusal(committed(tmp_path), compatibility=None, topology=Topology(groups, reshard=True))
    assert error.differences == (told,)


@pytest.mark.parametrize("recorded", [None, "four", 4, []])
def test_g3_a_checkpoint_that_records_no_topology_needs_the_declaration(recorded: Any, tmp_path: Path) -> None:
    store = committed(tmp_path, recorded)
    error = refusal(store, compatibility=COMPATIBILITY, topology=Topology(RECORDED))
    assert error.keys == ("topology",)
    had = "nothing" if recorded is None else json.dumps(recorded)
    assert error.differences[0].startswith(f"topology: the checkpoint has {had}, this run has {{")
    declared = Topology(RECORDED, reshard=True)
    assert discover(store, compatibility=COMPATIBILITY, on_corrupt="error", topology=declared).chosen
    assert declared.other_groups({} if recorded is None else {TOPOLOGY: recorded}) == ("policy", "critic")


def test_g3_what_is_not_the_topology_is_compared_whatever_is_resharded(tmp_path: Path) -> None:
    store = committed(tmp_path)
    other = {**COMPATIBILITY, "world_size": 3}
    error = refusal(store, compatibility=other, topology=Topology({"policy": GROUP}, reshard=True))
    assert error.keys == ("topology.critic", "world_size")
    # Without a controller's word on it, the record is compared as it is.
    assert refusal(store, compatibility=COMPATIBILITY).keys == ("topology",)
    assert discover(store, compatibility={**COMPATIBILITY, TOPOLOGY: RECORDED}, on_corrupt="error").chosen


def test_an_adapter_that_compares_nothing_compares_the_topology_it_is_told(tmp_path: Path) -> None:
    adapter = ManifestAdapter(committed(tmp_path))
    assert adapter.load_metadata(ResumeRequest())
    adapter.topology = Topology({"policy": {"world_size": 4}})
    with pytest.raises(CheckpointIncompatibleError):
        adapter.load_metadata(ResumeRequest())
    assert adapter.found is None
