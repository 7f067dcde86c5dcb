"""Names of artifacts and of a run's own files.

* A name is a relative path with "/" between its parts: nothing in it can leave the directory it is meant for, and it means
  the same on every file system and object store.
* A set of names has no two that one file system takes for the same: no duplicates, none that differ only in case, and
  none that is both a file and a directory.
* ``manifest.json`` and temporary names belong to this package.
* A save's directory says which execution, step and checkpoint it is for; any other name is somebody else's.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from cosmos_ctrl.core.errors import UnsafeNameError

MANIFEST_NAME = "manifest.json"

#: Where a run's checkpoints lie, a directory each.
CHECKPOINTS = "checkpoints"

#: Begins the name of every temporary file; what is left of one after a kill is no artifact.
TEMPORARY_PREFIX = ".cosmos-ctrl-tmp-"

#: Longest name, and longest part of one, in bytes of UTF-8: below PATH_MAX, S3's 1,024 and NAME_MAX, with room for a prefix.
MAX_NAME_BYTES = 768
MAX_PART_BYTES = 240

#: Controls, format characters (zero-width, direction overrides), surrogates, unassigned, line and paragraph separators.
_REFUSED_CATEGORIES = {"Cc", "Cf", "Cs", "Cn", "Zl", "Zp"}


#: What a controller calls the directory of a save.
_SAVE = re.compile(r"e([0-9]{4,20})-s([0-9]{8,20})-([0-9a-f]{8})")


@dataclass(frozen=True, slots=True)
class SaveName:
    """What the name of a save's directory says."""

    execution: int
    """Execution number."""
    steps: int
    """Completed training steps."""
    id_prefix: str
    """The first characters of the checkpoint's ID."""

    @property
    def path(self) -> str:
        """The directory, relative to the run."""
        return f"{CHECKPOINTS}/e{self.execution:04d}-s{self.steps:08d}-{self.id_prefix}"


def parse_save_name(name: str) -> SaveName | None:
    """What a directory's name says of its save; None for a name that no controller gives."""
    match = _SAVE.fullmatch(name)
    return SaveName(int(match[1]), int(match[2]), match[3]) if match else None


def check_store_name(name: str, *, path: str) -> str:
    """`name`, if it is a safe relative path; `path` is where it was to be used, for the error.

    Raises:
        UnsafeNameError: it is not.
    """
    why = _flaw(name)
    if why:
        raise UnsafeNameError(path=path, name=name, why=why)
    return name


def check_artifact_name(name: str, *, path: str) -> str:
    """`name`, if it is a safe relative path that an artifact may have.

    Raises:
        UnsafeNameError: it is not, or it is reserved.
    """
    check_store_name(name, path=path)
    parts = [part.casefold() for part in name.split("/")]
    if parts[0] == MANIFEST_NAME:
        raise UnsafeNameError(path=path, name=name, why=f"{MANIFEST_NAME} is the manifest's own name")
    if any(part.startswith(TEMPORARY_PREFIX) for part in parts):
        raise UnsafeNameError(path=path, name=name, why=f"{TEMPORARY_PREFIX} begins temporary names")
    return name


def check_artifact_names(names: Iterable[str], *, path: str) -> tuple[str, ...]:
    """The names, sorted, if each is safe and no two collide on any file system.

    Raises:
        UnsafeNameError: one is not safe, comes twice, differs from another only in case, or is also a directory of another.
    """
    # A str is an iterable of one-letter names: a caller's slip that would otherwise be reported as missing letters.
    if isinstance(names, str):
        raise TypeError(f"artifact names must be an iterable of names, not the str {names!r}")
    checked = sorted(check_artifact_name(name, path=path) for name in names)
    files: dict[str, str] = {}
    directories: dict[str, str] = {}
    for name in checked:
        key = _fold(name)
        if key in files:
            why = "it comes twice" if files[key] == name else f"it differs from {files[key]!r} only in case"
            raise UnsafeNameError(path=path, name=name, why=why)
        files[key] = name
        for parent in parents_of(name):
            other = directories.setdefault(_fold(parent), parent)
            if other != parent:
                raise UnsafeNameError(path=path, name=name, why=f"its directory differs from {other!r} only in case")
    for key in sorted(files.keys() & directories.keys()):
        raise UnsafeNameError(path=path, name=files[key], why="it would be both a file and a directory")
    return tuple(checked)


def parents_of(name: str) -> list[str]:
    """Directories that `name` lies in, the outermost first: ``a`` and ``a/b`` for ``a/b/c``."""
    parts = name.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def _fold(name: str) -> str:
    # The form in which a case-insensitive file system compares; folding can leave normal form, so normalise again.
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def _flaw(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a name must be a str, not {type(name).__name__}: {name!r}")
    if not name:
        return "it is empty"
    if name.startswith("/"):
        return "it is absolute"
    if "\\" in name:
        return "it has a backslash"
    for character in name:
        if unicodedata.category(character) in _REFUSED_CATEGORIES:
            return f"it has the control or format character U+{ord(character):04X}"
    if unicodedata.normalize("NFC", name) != name:
        return "it is not in Unicode normal form C"
    parts = name.split("/")
    for part in parts:
        if part in ("", ".", ".."):
            return f"it has the part {part!r}"
        if len(part.encode()) > MAX_PART_BYTES:
            return f"a part of it is longer than {MAX_PART_BYTES} bytes"
    if len(name.encode()) > MAX_NAME_BYTES:
        return f"it is longer than {MAX_NAME_BYTES} bytes"
    return ""
