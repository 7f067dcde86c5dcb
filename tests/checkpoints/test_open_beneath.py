"""Opening below a directory: one call where there is `openat2`, part by part elsewhere, and nothing to tell them apart by."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoint_helpers import REPOSITORY, unavailable

from cosmos_ctrl.checkpoints.stores import beneath
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.core.errors import CheckpointDamagedError, StorageUnavailableError


@pytest.fixture(params=["openat2", "part by part"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    chosen = str(request.param)
    if chosen == "openat2" and not beneath.has_openat2():
        pytest.skip("this kernel has no openat2, or a filter forbids it")
    monkeypatch.setattr(beneath, "has_openat2", lambda: chosen == "openat2")
    return chosen


def link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def bind_socket(path: Path) -> None:
    # Its name is longer than a socket's may be.
    here = Path.cwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path.name)
    os.chdir(here)


def device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o644, os.makedev(1, 3))
        os.close(os.open(path, os.O_RDONLY))
    except PermissionError:
        pytest.skip("making a device, or opening it, is not permitted here")


#: What stands at a place, and what opening ``sub/deep/x`` says was found.
OBSTACLES = {
    "a link": ("sub/deep/x", link("y"), "symbolic link"),
    "a dangling link": ("sub/deep/x", link("nowhere"), "symbolic link"),
    "a link to itself": ("sub/deep/x", link("x"), "symbolic link"),
    "an absolute link": ("sub/deep/x", link("/etc/hostname"), "symbolic link"),
    "a link that leads out": ("sub/deep/x", link("../../../secret"), "symbolic link"),
    "a magic link": ("sub/deep/x", link("/proc/self/fd/0"), "symbolic link"),
    "a linked directory": ("sub/deep", link("../aside/deep"), "symbolic link sub/deep"),
    "a first directory that is linked": ("sub", link("aside"), "symbolic link sub"),
    "a link up": ("sub", link(".."), "symbolic link sub"),
    "a directory that is a file": ("sub/deep", lambda path: path.write_bytes(b""), "file sub/deep"),
    "a first directory that is a file": ("sub", lambda path: path.write_bytes(b""), "file sub"),
    "a directory that is a FIFO": ("sub/deep", os.mkfifo, "other sub/deep"),
    "a directory": ("sub/deep/x", Path.mkdir, "directory"),
    "a FIFO": ("sub/deep/x", os.mkfifo, "other"),
    "a socket": ("sub/deep/x", bind_socket, "other"),
    "a device": ("sub/deep/x", device, "other"),
}


def lay_out(base: Path) -> Path:
    root = base / "root"
    for directory in ("sub/deep", "aside/deep"):
        (root / directory).mkdir(parents=True)
        for name in "xy":
            (root / directory / name).write_bytes(b"right")
    for outside in (base, base / "deep"):
        outside.mkdir(exist_ok=True)
        (outside / "x").write_bytes(b"secret")
    (base / "secret").write_bytes(b"secret")
    return root


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_what_is_no_file_below_the_root_is_damage_and_says_what_it_is(obstacle: str, way: str, tmp_path: Path) -> None:
    place, make, found = OBSTACLES[obstacle]
    root = lay_out(tmp_path)
    remove(root / place)
    make(root / place)
    with pytest.raises(CheckpointDamagedError) as caught:
        LocalStore(root).open("sub/deep/x")
    error = caught.value
    assert (error.path, error.artifact, error.what) == (str(root), "sub/deep/x", "kind")
    assert (error.expected, error.found) == ("a regular file", found)


@pytest.mark.parametrize("place", ["sub/deep/x", "sub/deep", "sub", "."])
def test_absent_is_none(place: str, way: str, tmp_path: Path) -> None:
    root = lay_out(tmp_path)
    remove(root / place)
    assert LocalStore(root).open("sub/deep/x") is None


def test_a_root_that_is_a_file_is_damage(way: str, tmp_path: Path) -> None:
    (tmp_path / "root").write_bytes(b"")
    with pytest.raises(CheckpointDamagedError) as caught:
        LocalStore(tmp_path / "root").open("sub/x")
    assert caught.value.found == "ENOTDIR (Not a directory)"


def test_the_root_may_be_a_link_and_nothing_is_left_open(way: str, tmp_path: Path) -> None:
    root = lay_out(tmp_path)
    (tmp_path / "linked").symlink_to(root)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for name in ("sub/deep/x", "aside/deep/y"):
        file = LocalStore(tmp_path / "linked").open(name)
        assert file
        with file:
            assert file.read() == b"right"
            assert not os.get_inheritable(file.fileno())
    (root / "sub/deep/x").unlink()
    (root / "sub/deep/x").symlink_to("y")
    with pytest.raises(CheckpointDamagedError):
        LocalStore(root).open("sub/deep/x")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EPERM, errno.EINVAL, errno.EAGAIN])
def test_any_other_error_is_neither_absence_nor_damage(number: int, way: str, tmp_path: Path) -> None:
    root = lay_out(tmp_path)

    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*((beneath, "_openat2") if way == "openat2" else (os, "open")), fail)
        with pytest.raises(StorageUnavailableError, match=errno.errorcode[number]) as caught:
            LocalStore(root).open("sub/deep/x")
    assert caught.value.path == str(root / "sub/deep/x")
    assert caught.value.operation == "open"


#: Puts, by turns, what is right and each link in the place of a name, until its standard input ends.
RENAMER = """
import itertools, os, select, sys
place, *targets = sys.argv[1:]
for number, target in enumerate(targets):
    os.symlink(target, f"{place}-link{number}")
links = [f"{place}-link{number}" for number in range(len(targets))]
for link in itertools.cycle(links):
    os.rename(place, place + "-right")
    os.rename(link, place)
    os.rename(place, link)
    os.rename(place + "-right", place)
    if select.select([0], [], [], 0)[0]:
        break
"""


@pytest.fixture
def renaming() -> Iterator[Callable[..., None]]:
    processes: list[subprocess.Popen[bytes]] = []

    def start(place: Path, *targets: str) -> None:
        command = [sys.executable, "-S", "-E", "-c", RENAMER, str(place), *targets]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE))

    yield start
    for process in processes:
        process.communicate(timeout=20)
        assert process.returncode == 0


@pytest.mark.parametrize("place", ["sub", "sub/deep", "sub/deep/x"])
def test_a_racing_renamer_leads_nobody_out(place: str, way: str, tmp_path: Path, renaming: Callable[..., None]) -> None:
    root = lay_out(tmp_path)
    up = "../" * place.count("/")
    targets = {
        "sub": ("..", str(tmp_path)),
        "sub/deep": ("..", f"{up}..", str(tmp_path / "deep")),
        "sub/deep/x": (f"{up}../x", str(tmp_path / "secret")),
    }[place]
    if place == "sub/deep":
        (root / "x").write_bytes(b"secret")  # a link to ".." stays below the root, and is none the better
    renaming(root / place, *targets)
    store, seen, opens = LocalStore(root), set(), 0
    deadline = time.monotonic() + 30
    while opens < 3000 or not {"right", "damaged", "absent"} <= seen:
        assert time.monotonic() < deadline, f"{opens} opens saw only {seen}"
        opens += 1
        try:
            file = store.open("sub/deep/x")
        except CheckpointDamagedError:
            seen.add("damaged")
            continue
        if file is None:
            seen.add("absent")
            continue
        with file:
            seen.add(file.read().decode())
    assert seen == {"right", "damaged", "absent"}


PROBE = """
import sys
from pathlib import Path
from cosmos_ctrl.checkpoints.stores import beneath
from cosmos_ctrl.checkpoints.stores.local import LocalStore
for _ in range(3):
    file = LocalStore(Path(sys.argv[1])).open("sub/deep/x")
    print(beneath.has_openat2(), file.read().decode())
"""


@pytest.mark.parametrize("error", ["ENOSYS", "EPERM", "EINVAL", "EINTR", ""])
def test_where_it_is_forbidden_or_unknown_that_is_found_out_once(error: str, tmp_path: Path) -> None:
    if not beneath.has_openat2():
        pytest.skip("this kernel has no openat2, or a filter forbids it")
    if shutil.which("strace") is None:
        unavailable("strace is not installed (Debian package strace)")
    root, log = lay_out(tmp_path), tmp_path / "log"
    inject = ["-e", f"inject=openat2:error={error}" + (":when=1..2" if error == "EINTR" else "")] if error else []
    done = subprocess.run(
        ["strace", "-o", str(log), "-e", "trace=openat2", *inject, sys.executable, "-c", PROBE, str(root)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    if "attach" in done.stderr or "PTRACE" in done.stderr:
        unavailable(f"strace cannot trace: {done.stderr.strip()}")
    works = error in ("", "EINTR")
    assert done.stdout.splitlines() == [f"{works} right"] * 3, done.stderr
    calls = [line for line in log.read_text().splitlines() if line.startswith("openat2(")]
    # Found out once; then it, or never again.
    assert len(calls) == (1 if not works else 4 if not error else 6)
    for line in calls[1:]:
        assert "resolve=RESOLVE_NO_MAGICLINKS|RESOLVE_NO_SYMLINKS|RESOLVE_BENEATH" in line


@pytest.mark.parametrize("machine", ["mips64", "alpha", "", "AMD64"])
def test_a_machine_whose_number_of_the_call_is_not_known_does_without(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beneath.platform, "machine", lambda: machine)
    monkeypatch.setattr(beneath, "_openat2", lambda *_: pytest.fail("it was called"))
    assert beneath.has_openat2.__wrapped__() is False


def test_other_systems_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beneath.sys, "platform", "darwin")
    monkeypatch.setattr(beneath, "_openat2", lambda *_: pytest.fail("it was called"))
    assert beneath.has_openat2.__wrapped__() is False
