"""The store contract in buckets, and what lost replies, refusals and servers that ignore conditions make of it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from checkpoint_helpers import REPOSITORY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from object_faults import Faults, faulty
from object_servers import (
    QUICK,
    Azure,
    Google,
    Moto,
    azure_store,
    bucket_in_memory,
    google_store,
    s3_environment,
    s3_store,
)

from cosmos_ctrl.checkpoints.names import TEMPORARY_PREFIX
from cosmos_ctrl.checkpoints.stores import VISIBLE_NOT_DURABLE, Store, objects
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.checkpoints.stores.objects import ObjectStore, Retries
from cosmos_ctrl.checkpoints.stores.opening import (
    ObjectLocation,
    open_store,
    parse_location,
    probe_conditional_puts,
)
from cosmos_ctrl.core.errors import (
    CheckpointConflictError,
    CheckpointDamagedError,
    StorageUnavailableError,
)
from cosmos_ctrl.testing import StoreContractError, check_store

PUBLISHERS, ROUNDS = 6, 200
HURRIED = Retries(total_s=0.2, first_s=0.002, most_s=0.02)


@pytest.fixture
def store(s3: Moto) -> ObjectStore:
    return s3_store(s3.address, s3.bucket())


@pytest.fixture
def proxy(s3: Moto) -> Iterator[Faults]:
    with faulty(s3.address) as faults:
        yield faults


# -- the contract


def test_the_contract_on_a_file_system(tmp_path: Path) -> None:
    check_store(lambda: LocalStore(tmp_path / "run"), listed=200)


def test_the_contract_on_s3(s3: Moto) -> None:
    bucket = s3.bucket()
    check_store(lambda: s3_store(s3.address, bucket))


@pytest.mark.parametrize(("dialect", "make"), [(Google, google_store), (Azure, azure_store)])
def test_the_contract_in_the_dialects_of_other_providers(dialect: Any, make: Callable[[str], ObjectStore]) -> None:
    with bucket_in_memory(dialect) as url:
        check_store(lambda: make(url), rounds=5, listed=50)


def test_the_whole_bucket_may_be_a_run(s3: Moto) -> None:
    bucket = s3.bucket()
    check_store(lambda: s3_store(s3.address, bucket, prefix=""), rounds=2, listed=10)


class _Replaces(LocalStore):
    def put_if_absent(self, name: str, data: bytes) -> bool:
        self.delete(name)
        return super().put_if_absent(name, data)


class _LooksFirst(LocalStore):
    def put_if_absent(self, name: str, data: bytes) -> bool:
        there = self.read(name, limit=len(data) + 1 << 20)
        if there is None:
            path = self.path_of(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        elif there != data:
            raise CheckpointConflictError(path=name, what="it is there")
        return there is None


class _Forgets(LocalStore):
    def list(self, prefix: str) -> tuple[str, ...]:
        return super().list(prefix)[:1000]


class _ShowsAll(LocalStore):
    def list(self, prefix: str) -> tuple[str, ...]:
        return tuple(sorted(entry.name + "/" * entry.is_dir() for entry in os.scandir(self.path_of(prefix))))


class _Strings(LocalStore):
    def list(self, prefix: str) -> tuple[str, ...]:
        head, _, last = prefix.rpartition("/")
        beside = [name for name in super().list(head) if last and name.startswith(last) and name != f"{last}/"]
        return tuple(sorted((*super().list(prefix), *beside)))


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (_Replaces, "one put"),
        (_LooksFirst, "races"),
        (_Forgets, "long listing"),
        (_ShowsAll, "temporary names"),
        (_Strings, "listings"),
    ],
)
def test_a_store_that_breaks_the_contract_is_told_which_rule(kind: type[LocalStore], rule: str, tmp_path: Path) -> None:
    with pytest.raises(StoreContractError) as caught:
        check_store(lambda: kind(tmp_path), listed=1100 if kind is _Forgets else 5)
    assert any(broken.startswith(f"{rule}: ") for broken in caught.value.broken), caught.value


NAMES = st.sampled_from(["a", "b", "d/a", "d/b", "d/e/a", "e/a", "f/f"])
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "read", "head", "delete", "list", "scan"]), NAMES, st.binary(max_size=2)
    ),
    max_size=25,
)


class _Model:
    """What a store is: names and their bytes."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> Any:
        return self.files.setdefault(name, data) == data or "conflict"

    def read(self, name: str, _: bytes) -> Any:
        return self.files.get(name)

    def head(self, name: str, _: bytes) -> Any:
        return len(self.files[name]) if name in self.files else None

    def delete(self, name: str, _: bytes) -> Any:
        return self.files.pop(name, None) is not None

    def list(self, name: str, _: bytes) -> Any:
        below = [path[len(name[:1]) + 1 :] for path in self.files if path.startswith(f"{name[:1]}/")]
        return tuple(sorted({head + found for head, found, _ in (path.partition("/") for path in below)}))

    def scan(self, name: str, _: bytes) -> Any:
        return tuple(sorted((path, len(data)) for path, data in self.files.items()))


def _real(store: Store, operation: str, name: str, data: bytes) -> Any:
    if operation == "put":
        try:
            return store.put_if_absent(name, data) in (True, False)
        except CheckpointConflictError:
            return "conflict"
    if operation == "read":
        return store.read(name, limit=2)
    if operation == "list":
        return store.list(name[:1])
    if operation == "scan":
        return tuple((entry.name, entry.size_bytes) for entry in store.scan(""))
    return getattr(store, operation)(name)


@given(OPERATIONS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_history_of_calls_is_a_dictionarys(s3: Moto, operations: list[tuple[str, str, bytes]]) -> None:
    model, store = _Model(), s3_store(s3.address, s3.bucket())
    for operation, name, data in operations:
        assert _real(store, operation, name, data) == getattr(model, operation)(name, data), (operation, name)


# -- races


@pytest.mark.parametrize("identical", [False, True])
def test_g4_of_racing_publishers_one_wins_each_round(identical: bool, s3: Moto) -> None:
    bucket = s3.bucket()
    stores = [s3_store(s3.address, bucket) for _ in range(PUBLISHERS)]
    barrier = threading.Barrier(PUBLISHERS)

    def publish(who: int) -> list[str]:
        told = []
        for number in range(ROUNDS // 4 if identical else ROUNDS):
            data = b"the same" if identical else f"from {who}".encode()
            barrier.wait(60)
            try:
                told.append("created" if stores[who].put_if_absent(f"{number}/manifest.json", data) else "identical")
            except CheckpointConflictError:
                told.append("conflict")
        return told

    with ThreadPoolExecutor(PUBLISHERS) as pool:
        outcomes = list(pool.map(publish, range(PUBLISHERS)))
    other = "identical" if identical else "conflict"
    for number, told in enumerate(zip(*outcomes, strict=True)):
        assert Counter(told) == {"created": 1, other: PUBLISHERS - 1}, number
        if not identical:
            winner = f"from {told.index('created')}".encode()
            assert stores[0].read(f"{number}/manifest.json", limit=100) == winner


# -- replies that do not come, or say something else


def through(proxy: Faults, bucket: str, retries: Retries = QUICK, **options: Any) -> ObjectStore:
    return s3_store(proxy.address, bucket, retries=retries, **options)


def test_a_lost_reply_is_resolved_by_what_is_there(proxy: Faults, s3: Moto) -> None:
    store = through(proxy, s3.bucket())
    proxy.add("lose the reply")
    assert (
        store.put_if_absent("manifest.json", b"mine") is False
    )  # it was there already: by the very try whose reply was lost
    assert store.read("manifest.json", limit=9) == b"mine"
    assert proxy.count("PUT") == 1


def test_a_lost_reply_of_a_put_that_lost_its_race_is_a_conflict(proxy: Faults, s3: Moto) -> None:
    bucket = s3.bucket()
    s3_store(s3.address, bucket).put_if_absent("manifest.json", b"another's")
    proxy.add("lose the reply")
    with pytest.raises(CheckpointConflictError):
        through(proxy, bucket).put_if_absent("manifest.json", b"mine")
    assert s3_store(s3.address, bucket).read("manifest.json", limit=9) == b"another's"


@pytest.mark.parametrize("status", [500, 502, 503, 504, 429, 408, 409])
@pytest.mark.parametrize("fault", ["answer", "answer after it"])
def test_a_status_that_may_pass_is_tried_again_whatever_came_of_the_put(
    fault: Any, status: int, proxy: Faults, s3: Moto
) -> None:
    store = through(proxy, s3.bucket())
    proxy.add(fault, status=status, times=3)
    created = store.put_if_absent("manifest.json", b"mine")
    assert created is (fault == "answer")
    assert store.read("manifest.json", limit=9) == b"mine"
    assert proxy.count("PUT") == (4 if fault == "answer" else 1)


@pytest.mark.parametrize("fault", ["lose the request", "lose the reply", "cut the body"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE"])
def test_readers_try_again(method: str, fault: Any, proxy: Faults, s3: Moto) -> None:
    bucket = s3.bucket()
    store, data = through(proxy, bucket), os.urandom(5000)
    s3_store(s3.address, bucket).put_if_absent("d/a", data)
    proxy.add(fault, method=method, times=2)
    assert store.list("d") == ("a",)
    assert store.head("d/a") == 5000
    assert store.read("d/a", limit=5000) == data
    assert store.delete("d/a") is True
    assert store.read("d/a", limit=5000) is None


def test_a_server_that_never_answers_is_given_up(proxy: Faults, s3: Moto) -> None:
    store = through(proxy, s3.bucket(), HURRIED, config={"timeout": "300 ms"})
    proxy.add("hang", method="GET", times=100)
    with pytest.raises(StorageUnavailableError, match="read failed"):
        store.read("a", limit=1)


@pytest.mark.parametrize("status", [429, 503])
def test_throttling_without_end_is_given_up_within_the_limit_and_nothing_is_visible(
    status: int, proxy: Faults, s3: Moto
) -> None:
    store = through(proxy, s3.bucket(), HURRIED)
    proxy.add("answer", status=status, times=10_000)
    with pytest.raises(StorageUnavailableError, match=str(status)) as caught:
        store.put_if_absent("manifest.json", b"mine")
    assert caught.value.operation == "put"
    assert 1 <= proxy.count("PUT") <= 100


@pytest.mark.parametrize("fault", ["lose the reply", "answer after it"])
def test_a_put_of_which_nothing_can_be_learnt_may_be_visible_and_says_so(fault: Any, proxy: Faults, s3: Moto) -> None:
    bucket = s3.bucket()
    proxy.add(fault, times=10_000)
    proxy.add("answer", method="GET", status=503, times=10_000)
    with pytest.raises(StorageUnavailableError) as caught:
        through(proxy, bucket, HURRIED).put_if_absent("manifest.json", b"mine")
    assert caught.value.operation == VISIBLE_NOT_DURABLE
    # As it indeed is.
    assert s3_store(s3.address, bucket).read("manifest.json", limit=9) == b"mine"


def test_a_request_that_was_never_answered_may_be_carried_out_later(proxy: Faults, s3: Moto) -> None:
    proxy.add("lose the request", times=10_000)
    with pytest.raises(StorageUnavailableError) as caught:
        through(proxy, s3.bucket(), HURRIED).put_if_absent("manifest.json", b"mine")
    assert caught.value.operation == VISIBLE_NOT_DURABLE


def test_a_server_that_is_not_there_has_nothing_visible(s3: Moto) -> None:
    store = s3_store("127.0.0.1:9", "bucket", retries=HURRIED)
    with pytest.raises(StorageUnavailableError) as caught:
        store.put_if_absent("manifest.json", b"mine")
    assert caught.value.operation == "put"


def test_pauses_grow_and_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pauses = [0.0], []

    def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        now[0] += pause_s

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    state = random.getstate()
    tries = sum(1 for _ in Retries(total_s=60, first_s=0.1, most_s=5).tries())
    assert random.getstate() == state  # it is the application's
    assert now[0] <= 60
    assert now[0] > 54
    assert 12 <= tries <= 40
    for number, pause_s in enumerate(pauses):
        longest = min(0.1 * 2**number, 5)
        assert longest / 2 <= pause_s <= longest
    assert len(set(pauses)) == len(pauses)


# -- a server that ignores the condition


def test_a_store_that_replaces_is_refused_at_the_start(proxy: Faults, s3: Moto) -> None:
    bucket = s3.bucket()
    store = through(proxy, bucket)
    probe_conditional_puts(store)
    proxy.add("hide the condition", times=2)
    with pytest.raises(StorageUnavailableError, match="honours If-None-Match"):
        probe_conditional_puts(store)
    assert s3_store(s3.address, bucket, prefix="").scan("") == ()
    assert TEMPORARY_PREFIX not in s3.ask("GET", f"/{bucket}?list-type=2").decode()


def test_a_store_without_conditional_puts_is_refused_without_trying_again(proxy: Faults, s3: Moto) -> None:
    store = through(proxy, s3.bucket())
    proxy.add("answer", status=501, times=10)
    with pytest.raises(StorageUnavailableError, match="no conditional puts"):
        probe_conditional_puts(store)
    assert proxy.count("PUT") == 1


# -- absent, or unavailable


def every_reader(store: Store) -> dict[str, Callable[[], object]]:
    return {
        "read": lambda: store.read("a", limit=1),
        "head": lambda: store.head("a"),
        "open": lambda: store.open("a"),
        "list": lambda: store.list(""),
        "scan": lambda: store.scan("checkpoints"),
        "delete": lambda: store.delete("a"),
        "put": lambda: store.put_if_absent("a", b""),
    }


def test_g7_a_bucket_that_is_not_there_is_not_an_empty_run(s3: Moto) -> None:
    for call in every_reader(s3_store(s3.address, "no-such-bucket")).values():
        with pytest.raises(StorageUnavailableError, match="There is no bucket or container no-such-bucket"):
            call()


@pytest.mark.parametrize(
    ("status", "body", "advice"),
    [
        (403, b"<Error><Code>AccessDenied</Code></Error>", "AWS_SECRET_ACCESS_KEY"),
        (401, b"", "AWS_ACCESS_KEY_ID"),
        (301, b"<Error><Code>PermanentRedirect</Code></Error>", "another region than AWS_REGION"),
        (400, b"<Error><Code>AuthorizationHeaderMalformed</Code>the region is wrong</Error>", "AWS_REGION"),
        (404, b"<Error><Code>NoSuchBucket</Code></Error>", "There is no bucket"),
    ],
)
def test_g7_what_is_refused_is_neither_absent_nor_tried_again(
    status: int, body: bytes, advice: str, proxy: Faults, s3: Moto
) -> None:
    store = through(proxy, s3.bucket())
    for method in ("GET", "HEAD", "PUT", "DELETE"):
        proxy.add("answer", method=method, status=status, body=body, times=10_000)
    for name, call in every_reader(store).items():
        before = len(proxy.asked)
        with pytest.raises(StorageUnavailableError) as caught:
            call()
        assert advice in str(caught.value) or (status == 400 and name in ("head", "open", "delete")), (
            name
        )  # HEAD has no body
        assert len(proxy.asked) - before <= 2, name
        assert "Debug source" not in str(caught.value)
        assert "X-Amz-Signature" not in str(caught.value)


def test_no_credentials_say_where_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    # Whatever answers at the metadata service's address here is asked for credentials, in vain.
    config = {"metadata_endpoint": "http://127.0.0.1:9"}
    where = ObjectLocation("s3", "bucket", "run")
    store = ObjectStore(where, retries=HURRIED, options={"config": config, "client_options": {"allow_http": True}})
    with pytest.raises(StorageUnavailableError, match=r"There are no credentials.*AWS_ACCESS_KEY_ID"):
        store.list("")


def test_an_error_carries_no_signature(proxy: Faults) -> None:
    config = {"endpoint": f"http://{proxy.address}", "account_name": "account", "sas_key": "sv=2026-01-01&sig=SECRET"}
    options = {"config": config, "client_options": {"allow_http": True}}
    store = ObjectStore(ObjectLocation("az", "container", "run"), retries=HURRIED, options=options)
    for method in ("GET", "HEAD", "PUT", "DELETE"):
        proxy.add("answer", method=method, status=403, times=10_000)
    for call in every_reader(store).values():
        with pytest.raises(StorageUnavailableError, match="403") as caught:
            call()
        assert "SECRET" not in str(caught.value)
    assert "SECRET" in proxy.asked[-1]


# -- what consoles and other writers leave


def test_empty_objects_that_stand_for_directories_are_no_files(store: ObjectStore, s3: Moto) -> None:
    for marker in ("run/", "run/checkpoints/", "run/checkpoints/c/"):
        s3.ask("PUT", f"/{store.where.bucket}/{marker}", b"")
    store.put_if_absent("checkpoints/c/x", b"x")
    assert [entry.name for entry in store.scan("")] == ["checkpoints/c/x"]
    assert [entry.name for entry in store.scan("checkpoints/c")] == ["x"]
    assert store.list("") == ("checkpoints/",)
    assert store.list("checkpoints/c") == ("x",)


def test_a_name_that_cannot_be_listed_is_an_error_and_not_left_out(store: ObjectStore, s3: Moto) -> None:
    store.put_if_absent("a", b"")
    s3.ask("PUT", f"/{store.where.bucket}/run/bad//key", b"x")
    with pytest.raises(StorageUnavailableError, match="empty path segment"):
        store.scan("")


def test_an_open_object_is_read_in_pieces_and_stays_the_one_that_was_opened(
    store: ObjectStore, s3: Moto, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "FETCH_BYTES", 1000)
    data = os.urandom(4567)
    store.put_if_absent("a", data)
    file = store.open("a")
    assert file is not None
    with pytest.raises(OSError, match="fileno"):
        file.fileno()
    parts = []
    while part := file.read(777):
        parts.append(part)
    assert b"".join(parts) == data
    file.seek(0)
    assert file.read(10) == data[:10]
    s3.ask("PUT", f"/{store.where.bucket}/run/a", data[::-1])
    file.seek(2000)
    with pytest.raises(CheckpointDamagedError, match="another, or none"):
        file.read(1)


def test_reading_goes_on_after_a_cut(proxy: Faults, s3: Moto, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "FETCH_BYTES", 1000)
    store, data = through(proxy, s3.bucket()), os.urandom(5000)
    store.put_if_absent("a", data)
    proxy.add("cut the body", method="GET", times=2)
    proxy.add("answer", method="GET", status=503, times=2)
    file = store.open("a")
    assert file is not None
    assert file.read(5000)[:1000] == data[:1000]
    file.seek(0)
    assert b"".join(iter(lambda: file.read(1000), b"")) == data


# -- from a URI


@pytest.mark.parametrize(
    ("location", "what"),
    [
        ("ftp://host/run", "unknown scheme ftp://"),
        ("s3://", "names no bucket"),
        ("s3:///run", "names no bucket"),
        ("s3://bucket/a//b", "''"),
        ("s3://bucket/../x", "'..'"),
        ("s3://bucket/" + "p" * 161, "longer than 160"),
        ("file://otherhost/run", "no directory of this machine"),
        ("file:run/x://", "unknown scheme"),
    ],
)
def test_a_location_that_cannot_be_is_refused(location: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        open_store(location)


def test_locations_are_directories_or_buckets(tmp_path: Path) -> None:
    assert parse_location("s3://bucket/a/b/") == ObjectLocation("s3", "bucket", "a/b")
    assert parse_location("gs://bucket") == ObjectLocation("gs", "bucket", "")
    assert parse_location("runs/demo") == Path("runs/demo")
    assert parse_location("file:///a%20b/c") == parse_location("file://localhost/a%20b/c") == Path("/a b/c")
    opened = open_store(str(tmp_path))
    assert isinstance(opened, LocalStore)
    assert opened.uri == str(tmp_path)
    assert ObjectLocation("gs", "bucket", "").uri == "gs://bucket"


def test_a_uri_is_opened_with_the_providers_own_environment(s3: Moto, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_environment(s3.address).items():
        monkeypatch.setenv(name, value)
    bucket = s3.bucket()
    store = open_store(f"s3://{bucket}/deep/run/")
    assert store.put_if_absent("a", b"1")
    assert store.uri == f"s3://{bucket}/deep/run"
    assert store.location("a") == f"s3://{bucket}/deep/run/a"
    assert s3.ask("GET", f"/{bucket}/deep/run/a") == b"1"


def test_without_the_extra_the_error_names_it() -> None:
    code = (
        "import sys; sys.modules['obstore'] = None\n"
        "from cosmos_ctrl.checkpoints.stores.opening import open_store\n"
        "open_store('runs/demo')\n"
        "try: open_store('s3://bucket/run')\n"
        "except ModuleNotFoundError as error: print(error)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert "pip install 'cosmos-ctrl[objects]'" in done.stdout, done.stderr
