"""Controller vectors as they stand in ``vectors/controller/*.json``, played through the stubs against the real servicer.

* A value "$name" stands for what is not known beforehand: in an expected answer it is noted the first time and compared from then on, in
  a request it is what was noted. "$execution" is the execution's ID; "$zeros:N" in a request is N zero bytes.
* What is expected is a part of what comes: fields that are not named may be anything, a field that is null has its zero value (or is
  absent), lists are whole.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf import json_format, message_factory
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from service_harness import House, soon

from cosmos_ctrl.service.status import DOMAIN
from cosmos_ctrl.v1 import controller_service_pb2 as pb

DIRECTORY = Path(__file__).parent / "vectors" / "controller"

_SERVICE = pb.DESCRIPTOR.services_by_name["ControllerService"]
KEYS = {"name", "why", "run", "after", "exchanges", "state"}
EXCHANGE_KEYS = {
    "rpc",
    "request",
    "requests",
    "request_bytes",
    "response",
    "responses",
    "status",
    "pass_time_s",
    "write",
}

#: Given, and written where a part of a message is not as expected.
_ABSENT = object()


def load() -> tuple[dict[str, list[Any]], list[dict[str, Any]]]:
    """The preludes by name, and all vectors in order of their files."""
    preludes = json.loads((DIRECTORY / "preludes.json").read_text())["preludes"]
    found = [
        vector
        for path in sorted(DIRECTORY.glob("*.json"))
        if path.name != "preludes.json"
        for vector in json.loads(path.read_text())["vectors"]
    ]
    for vector in found:
        if unknown := vector.keys() - KEYS:
            raise ValueError(f"vector {vector['name']}: unknown {sorted(unknown)}; known are {sorted(KEYS)}")
    return preludes, found


def exchanges_of(vector: dict[str, Any], preludes: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """The vector's exchanges, its preludes first."""
    found = [exchange for name in vector.get("after", []) for exchange in preludes[name]] + vector["exchanges"]
    for exchange in found:
        if unknown := exchange.keys() - EXCHANGE_KEYS:
            raise ValueError(f"vector {vector['name']}: unknown {sorted(unknown)}; known are {sorted(EXCHANGE_KEYS)}")
    return found


class Player:
    """Plays exchanges against one controller."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._known: dict[str, Any] = {"$execution": house.core.identity.id}

    async def play(self, exchange: dict[str, Any]) -> None:
        """One exchange; raises AssertionError with the place where what came is not what is expected."""
        if "pass_time_s" in exchange:
            self._house.pass_time(exchange["pass_time_s"])
            return
        if "write" in exchange:
            artifact = self._filled(exchange["write"])
            path = self._house.run / artifact["path"] / artifact["name"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(artifact["size_bytes"]))
            return
        where = exchange["rpc"]
        if "status" in exchange:
            try:
                came = await self._call(exchange)
            except grpc.aio.AioRpcError as error:
                self._match(_status(error), exchange["status"], f"{where}.status")
            else:
                raise AssertionError(f"{where}: expected {exchange['status']}, came {came}")
            return
        came = await self._call(exchange)
        wanted = exchange["responses"] if "responses" in exchange else [exchange["response"]]
        self._match(came, wanted, where)

    async def state(self, wanted: dict[str, Any]) -> None:
        """The run's state, as WatchRun gives it, is as wanted."""
        ((response),) = await self._call({"rpc": "WatchRun", "request": {}, "responses": [{}]})
        self._match(response["state"], wanted, "state")

    async def _call(self, exchange: dict[str, Any]) -> list[dict[str, Any]]:
        method = _SERVICE.methods_by_name[exchange["rpc"]]
        request = message_factory.GetMessageClass(method.input_type)
        response = message_factory.GetMessageClass(method.output_type)
        encoded = [
            base64.b64decode(exchange["request_bytes"])
            if "request_bytes" in exchange
            else json_format.ParseDict(self._filled(one), request()).SerializeToString()
            for one in exchange.get("requests", [exchange.get("request", {})])
        ]
        path, channel = f"/{_SERVICE.full_name}/{method.name}", self._house.channel
        most = len(exchange["responses"]) if "responses" in exchange else 1
        if method.client_streaming:
            call = channel.stream_stream(path, response_deserializer=response.FromString)(iter(encoded))
        elif method.server_streaming:
            call = channel.unary_stream(path, response_deserializer=response.FromString)(encoded[0])
        else:
            return [
                _plain(await soon(channel.unary_unary(path, response_deserializer=response.FromString)(encoded[0])))
            ]
        return [_plain(one) for one in await soon(_first(call, most, to_the_end="status" in exchange))]

    def _filled(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._filled(one) for key, one in value.items()}
        if isinstance(value, list):
            return [self._filled(one) for one in value]
        if isinstance(value, str) and value.startswith("$zeros:"):
            return base64.b64encode(bytes(int(value.removeprefix("$zeros:")))).decode()
        return self._known[value] if isinstance(value, str) and value.startswith("$") else value

    def _match(self, came: Any, wanted: Any, where: str) -> None:
        if isinstance(wanted, str) and wanted.startswith("$"):
            assert came is not _ABSENT, f"{where}: expected {wanted}, and there is nothing"
            wanted = self._known.setdefault(wanted, came)
        if isinstance(wanted, dict):
            assert isinstance(came, dict), f"{where}: expected {wanted}, came {came}"
            for key, value in wanted.items():
                self._match(came.get(key, _ABSENT), value, f"{where}.{key}")
        elif isinstance(wanted, list):
            assert isinstance(came, list), f"{where}: expected {wanted}, came {came}"
            assert len(came) == len(wanted), f"{where}: expected {wanted}, came {came}"
            for index, (one, value) in enumerate(zip(came, wanted, strict=True)):
                self._match(one, value, f"{where}[{index}]")
        elif wanted is None:
            assert came is _ABSENT or not came or came == "0" or str(came).endswith("_UNSPECIFIED"), (
                f"{where}: expected nothing, came {came}"
            )
        else:
            assert came == wanted, f"{where}: expected {wanted!r}, came {came!r}"


async def _first(call: Any, most: int, *, to_the_end: bool) -> list[Any]:
    found = []
    async for response in call:
        found.append(response)
        if len(found) == most and not to_the_end:
            call.cancel()
            break
    return found


def _plain(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return found


def _status(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    found: dict[str, Any] = {"code": error.code().name, "retry": False}
    status = rpc_status.from_call(error)
    for packed in status.details if status is not None else ():
        info, violated = error_details_pb2.ErrorInfo(), error_details_pb2.PreconditionFailure()
        if packed.Unpack(info) and info.domain == DOMAIN:
            found |= {"reason": info.reason, "metadata": dict(info.metadata)}
        elif packed.Unpack(violated):
            found["violations"] = [{"type": one.type, "subject": one.subject} for one in violated.violations]
        else:
            found["retry"] |= packed.Is(error_details_pb2.RetryInfo.DESCRIPTOR)
    return found


def reasons_of(exchanges: Iterable[dict[str, Any]]) -> set[str]:
    """The reasons that the exchanges expect."""
    return {exchange["status"]["reason"] for exchange in exchanges if "status" in exchange}
