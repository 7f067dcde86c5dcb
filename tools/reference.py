"""Writes the reference of the wire contract, one page a file, from the comments in proto/. Run by `make generate`.

Needs `buf` beside this interpreter, which reads the protos with their comments.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGE = "cosmos_ctrl.v1"

# Field numbers of descriptor.proto, which source locations are paths of.
_FILE_MESSAGES, _FILE_ENUMS, _FILE_SERVICES, _FILE_SYNTAX = 4, 5, 6, 12
_MESSAGE_FIELDS, _MESSAGE_ONEOFS, _ENUM_VALUES, _SERVICE_METHODS = 2, 8, 2, 2

_Path = tuple[int, ...]


def descriptors(root: Path = _ROOT) -> descriptor_pb2.FileDescriptorSet:
    """The protos below `root`, with their comments."""
    buf = Path(sys.executable).parent / "buf"
    command = [buf, "build", root / "proto", "--as-file-descriptor-set", "-o", "-"]
    return descriptor_pb2.FileDescriptorSet.FromString(
        subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    )


class Comments:
    """The comments of one file, by what they stand before."""

    def __init__(self, file: descriptor_pb2.FileDescriptorProto) -> None:
        locations = {tuple(each.path): each for each in file.source_code_info.location}
        self._texts = {path: _unwrapped(each.leading_comments) for path, each in locations.items()}
        syntax = locations[_FILE_SYNTAX,]
        self.file = _unwrapped("".join(syntax.leading_detached_comments) + syntax.leading_comments)

    def __getitem__(self, path: _Path) -> str:
        return self._texts[path]

    def texts(self) -> Iterator[str]:
        """All of them."""
        yield from self._texts.values()


def _unwrapped(comment: str) -> str:
    """Paragraphs on a line each; a line that begins with a word and a colon, such as "Retry:", is a paragraph of its own."""
    paragraphs: list[list[str]] = [[]]
    for line in comment.splitlines():
        stripped = line.strip()
        if not stripped:
            paragraphs.append([])
        elif stripped.startswith(("Retry: ", "Final: ")):
            paragraphs.append([stripped])
        else:
            paragraphs[-1].append(stripped)
    return "\n\n".join(" ".join(lines) for lines in paragraphs if lines)


def pages(root: Path = _ROOT) -> dict[str, str]:
    """The text of each page, by its file name."""
    files = [file for file in descriptors(root).file if file.package == _PACKAGE]
    places = {
        f".{_PACKAGE}.{each.name}": _page_of(file) for file in files for each in (*file.message_type, *file.enum_type)
    }
    return {_page_of(file): "\n".join(_page(file, places)) + "\n" for file in files} | {"README.md": _index(files)}


def _page_of(file: descriptor_pb2.FileDescriptorProto) -> str:
    return f"{Path(file.name).stem}.md"


def _index(files: Iterable[descriptor_pb2.FileDescriptorProto]) -> str:
    lines = [
        "# Reference of the wire contract",
        "",
        f"Package `{_PACKAGE}`, generated from the comments in `proto/` by `make generate`. [The protocol](../protocol.md) explains how the",
        "parts play together.",
        "",
        "| file | holds |",
        "|---|---|",
    ]
    for file in files:
        summary = Comments(file).file.split(". ")[0].split("\n")[0].rstrip(".")
        lines.append(f"| [{Path(file.name).name}]({_page_of(file)}) | {summary} |")
    return "\n".join(lines) + "\n"


def _page(file: descriptor_pb2.FileDescriptorProto, places: dict[str, str]) -> Iterator[str]:
    comments = Comments(file)
    here = _page_of(file)
    yield f"# {Path(file.name).name}\n\n{_escaped(comments.file)}"
    for index, service in enumerate(file.service):
        path = (_FILE_SERVICES, index)
        yield f"\n## {service.name}\n\n{_escaped(comments[path])}"
        for number, method in enumerate(service.method):
            yield from _method(method, comments[(*path, _SERVICE_METHODS, number)], places, here)
    for index, message in enumerate(file.message_type):
        yield from _message(message, (_FILE_MESSAGES, index), comments, places, here)
    for index, enum in enumerate(file.enum_type):
        path = (_FILE_ENUMS, index)
        yield f"\n## {enum.name}\n\n{_escaped(comments[path])}\n"
        values = [(v.number, f"`{v.name}`", comments[(*path, _ENUM_VALUES, n)]) for n, v in enumerate(enum.value)]
        yield from _table(("number", "value", "meaning"), values)


def _method(
    method: descriptor_pb2.MethodDescriptorProto, comment: str, places: dict[str, str], here: str
) -> Iterator[str]:
    request, response = _link(method.input_type, places, here), _link(method.output_type, places, here)
    upwards, downwards = "stream " * method.client_streaming, "stream " * method.server_streaming
    yield f"\n### {method.name}\n\n{upwards}{request} → {downwards}{response}\n\n{_escaped(comment)}"


def _message(
    message: descriptor_pb2.DescriptorProto, path: _Path, comments: Comments, places: dict[str, str], here: str
) -> Iterator[str]:
    yield f"\n## {message.name}\n\n{_escaped(comments[path])}"
    if not message.field:
        return
    yield ""
    rows = []
    for index, field in enumerate(message.field):
        meaning = comments[(*path, _MESSAGE_FIELDS, index)]
        if field.HasField("oneof_index") and not field.proto3_optional:
            oneof = message.oneof_decl[field.oneof_index].name
            meaning = f"One of `{oneof}`. {meaning}"
        rows.append((field.number, f"`{field.name}`", _type(field, places, here), meaning))
    yield from _table(("number", "field", "type", "meaning"), rows)
    for index, oneof_decl in enumerate(message.oneof_decl):
        if not oneof_decl.name.startswith("_"):
            yield f"\n`{oneof_decl.name}`: {_escaped(comments[(*path, _MESSAGE_ONEOFS, index)])}"


def _type(field: FieldDescriptorProto, places: dict[str, str], here: str) -> str:
    label = "repeated " if field.label == FieldDescriptorProto.LABEL_REPEATED else "optional " * field.proto3_optional
    if field.type_name:
        return label + _link(field.type_name, places, here)
    return label + FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _link(type_name: str, places: dict[str, str], here: str) -> str:
    place = places.get(type_name)
    if place is None:
        return type_name.removeprefix(".")
    name = type_name.rpartition(".")[2]
    return f"[{name}]({'' if place == here else place}#{name.lower()})"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(_escaped(str(cell)).replace('|', chr(92) + '|') for cell in row)} |"


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;")


def write(directory: Path) -> None:
    """Write the pages into `directory`, and nothing else may be there."""
    directory.mkdir(parents=True, exist_ok=True)
    for stale in directory.glob("*.md"):
        stale.unlink()
    for name, text in pages().items():
        (directory / name).write_text(text)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
