"""The wire contract as data: every controller vector, played against the real server; and the table of what they cover."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conformance_vectors import Player, exchanges_of, load, reasons_of
from service_harness import House

from cosmos_ctrl.v1 import controller_service_pb2 as pb

PRELUDES, VECTORS = load()

#: Reasons that no client meets by what it says, and why.
WITHOUT_VECTOR = {
    "CHECKPOINT_UNCOMMITTED": "met before the port is open, by whoever starts the controller or reads a checkpoint",
    "CHECKPOINT_DAMAGED": "met before the port is open, by whoever starts the controller or reads a checkpoint",
    "CHECKPOINT_INCOMPATIBLE": "met before the port is open, by whoever starts the controller or reads a checkpoint",
    "CHECKPOINT_CONFLICT": "met at publication, which the client sees as an abandoned save",
    "CHECKPOINT_SWEPT": "met before the port is open, by whoever starts the controller or reads a checkpoint",
    "CHECKPOINT_DELETING": "met before the port is open, by whoever starts the controller or reads a checkpoint",
    "UNKNOWN_SCHEMA": "met before the port is open, by whoever starts the controller or reads a checkpoint",
    "STORAGE_UNAVAILABLE": "storage has to fail, which no request brings about",
    "INTERNAL": "a bug of the controller: no request is known that brings one about",
}


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
async def test_g12_the_controller_answers_as_the_vectors_say(vector: dict[str, Any], tmp_path: Path) -> None:
    run = {"prompts": 4, "ranks": 1} | vector.get("run", {})
    policy = run.pop("policy", {})
    house = House(tmp_path, **run, **policy)
    await house.open()
    try:
        player = Player(house)
        for exchange in exchanges_of(vector, PRELUDES):
            await player.play(exchange)
        if "state" in vector:
            await player.state(vector["state"])
    finally:
        await house.close()


def test_every_reason_has_a_vector_or_a_word_why_not() -> None:
    known = {name.removeprefix("ERROR_REASON_") for name in pb.ErrorReason.DESCRIPTOR.values_by_name} - {"UNSPECIFIED"}
    covered = set().union(*(reasons_of(exchanges_of(vector, PRELUDES)) for vector in VECTORS))
    assert covered | WITHOUT_VECTOR.keys() == known
    assert not covered & WITHOUT_VECTOR.keys()


def test_every_rpc_has_a_vector() -> None:
    called = {exchange["rpc"] for vector in VECTORS for exchange in exchanges_of(vector, PRELUDES) if "rpc" in exchange}
    assert called == {method.name for method in pb.DESCRIPTOR.services_by_name["ControllerService"].methods}


def test_every_fenced_rpc_refuses_another_execution_in_a_vector() -> None:
    fenced = {
        method.name
        for method in pb.DESCRIPTOR.services_by_name["ControllerService"].methods
        if "worker" in method.input_type.fields_by_name or method.name == "RegisterWorker"
    }
    refused = {
        exchange["rpc"]
        for vector in VECTORS
        for exchange in exchanges_of(vector, PRELUDES)
        if exchange.get("status", {}).get("reason") == "STALE_EXECUTION"
    }
    assert refused == fenced


def test_names_are_unique_and_each_says_why() -> None:
    names = [vector["name"] for vector in VECTORS]
    assert len(set(names)) == len(names)
    assert all(vector["why"].endswith(".") for vector in VECTORS)
