"""The wire contract of other versions, as messages without generated code.

* An older one is a frozen descriptor in `proto/frozen`: what a client built with that release speaks.
* The newer one is today's with something added wherever the evolution rules let something be added: a field in every message, a value in
  every enum, a member in every oneof.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from cosmos_ctrl.v1 import checkpoint_pb2, controller_service_pb2, reports_pb2

PACKAGE = "cosmos_ctrl.v1"
SERVICE = f"{PACKAGE}.ControllerService"
FROZEN = sorted((Path(__file__).resolve().parents[2] / "proto" / "frozen").glob("*.binpb"))

#: What the newer version adds, by name and number.
ADDED_FIELD, ADDED_MEMBER, ADDED_VALUE = ("added", 900), ("added_kind", 901), 99


class Version:
    """The messages and RPCs of one version."""

    def __init__(self, files: descriptor_pb2.FileDescriptorSet) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        for file in files.file:
            self._pool.Add(file)
        self.rpcs = {method.name: method for method in self._pool.FindServiceByName(SERVICE).methods}

    def type(self, name: str) -> type[Message]:
        """The message of that name."""
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))

    def new(self, name: str, **fields: Any) -> Any:
        """A message. Messages inside are dicts, values of enums names."""
        return self.type(name)(**fields)

    def request(self, rpc: str, **fields: Any) -> Any:
        """A request of `rpc`."""
        return self.new(self.rpcs[rpc].input_type.name, **fields)

    def response_type(self, rpc: str) -> type[Message]:
        """What `rpc` answers with."""
        return self.type(self.rpcs[rpc].output_type.name)


def older(frozen: Path) -> Version:
    """The version of a frozen descriptor."""
    return Version(descriptor_pb2.FileDescriptorSet.FromString(frozen.read_bytes()))


def newer() -> Version:
    """Today's version with something added everywhere."""
    files = descriptor_pb2.FileDescriptorSet()
    for module in (duration_pb2, checkpoint_pb2, reports_pb2, controller_service_pb2):
        module.DESCRIPTOR.CopyToProto(files.file.add())
    for file in files.file:
        if file.package == PACKAGE:
            for message in file.message_type:
                _extend(message)
            for enum in file.enum_type:
                prefix = enum.value[0].name.removesuffix("UNSPECIFIED")
                enum.value.add(name=f"{prefix}ADDED", number=ADDED_VALUE)
    return Version(files)


def _extend(message: descriptor_pb2.DescriptorProto) -> None:
    field = descriptor_pb2.FieldDescriptorProto
    real = [n for n, oneof in enumerate(message.oneof_decl) if not oneof.name.startswith("_")]
    message.field.add(name=ADDED_FIELD[0], number=ADDED_FIELD[1], type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    for index in real:
        message.field.add(
            name=ADDED_MEMBER[0],
            number=ADDED_MEMBER[1],
            type=field.TYPE_BYTES,
            label=field.LABEL_OPTIONAL,
            oneof_index=index,
        )


def filled(message: Any) -> Any:
    """`message` of the newer version, with the added field set in it and in every message inside."""
    for each in _messages_in(message):
        setattr(each, ADDED_FIELD[0], "what an older reader does not know")
    return message


def _messages_in(message: Message) -> Iterator[Message]:
    if not message.DESCRIPTOR.full_name.startswith(f"{PACKAGE}."):
        return
    yield message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for each in [value] if isinstance(value, Message) else value:
                yield from _messages_in(each)


def enums_of(version: Version) -> list[EnumDescriptor]:
    """Its enums."""
    files = {version.type(name).DESCRIPTOR.file for name in ("ReportAck", "Checkpoint", "RunState")}
    return [enum for file in files for enum in file.enum_types_by_name.values()]
