"""Object-store servers for tests: moto in a process of its own, and small ones that speak Google's and Azure's dialects."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from cosmos_ctrl.checkpoints.stores.objects import ObjectStore, Retries
from cosmos_ctrl.checkpoints.stores.opening import ObjectLocation

QUICK = Retries(total_s=3.0, first_s=0.002, most_s=0.02)

# moto looks whether a name is taken and then stores, in two steps that threads can come between; S3 does it in one.
_MOTO = """
import logging, sys, threading
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
application, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()

def one_at_a_time(environ, start_response):
    with lock:
        return [b"".join(application(environ, start_response))]

server = make_server("127.0.0.1", 0, one_at_a_time, threaded=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.port, flush=True)
sys.stdin.read()
"""

#: moto keeps private what is not signed for, and looks at no signature.
_SIGNED = "AWS4-HMAC-SHA256 Credential=key/20261130/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


class Moto:
    """moto's S3, with a bucket for each test."""

    def __init__(self, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self._numbers = count(1)

    def bucket(self) -> str:
        name = f"bucket-{next(self._numbers)}"
        self.ask("PUT", f"/{name}")
        return name

    def ask(self, method: str, path: str, data: bytes | None = None) -> bytes:
        headers = {"Content-Type": "application/octet-stream", "Authorization": _SIGNED}
        request = urllib.request.Request(f"http://{self.address}{path}", method=method, data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=20) as response:
            answer: bytes = response.read()
        return answer


@contextmanager
def moto() -> Iterator[Moto]:
    process = subprocess.Popen(
        [sys.executable, "-c", _MOTO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin
    assert process.stdout
    try:
        yield Moto(int(process.stdout.readline()))
    finally:
        process.stdin.close()
        process.stdout.close()
        process.kill()
        process.wait(20)


def s3_environment(address: str) -> dict[str, str]:
    """What a process needs to find the server."""
    return {
        "AWS_ENDPOINT_URL": f"http://{address}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }


def s3_store(
    address: str, bucket: str, prefix: str = "run", *, retries: Retries = QUICK, **options: Any
) -> ObjectStore:
    config = {"endpoint": f"http://{address}", "region": "us-east-1"} | options.pop("config", {})
    keys = {"access_key_id": "key", "secret_access_key": "secret"}
    client = {"allow_http": True} | options.pop("client_options", {})
    return ObjectStore(
        ObjectLocation("s3", bucket, prefix),
        retries=retries,
        options={"config": keys | config, "client_options": client, **options},
    )


class _Objects(BaseHTTPRequestHandler):
    """A bucket in memory. Made a dialect by its subclasses."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: _Server

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    @property
    def key(self) -> str:
        return unquote(urlsplit(self.path).path.lstrip("/").partition("/")[2])

    @property
    def query(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.path).query, keep_blank_values=True).items()}

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def put(self, data: bytes, *, only_if_absent: bool, taken: int) -> None:
        with self.server.lock:
            if only_if_absent and self.key in self.server.objects:
                self.answer(taken)
                return
            tag = f'"{next(self.server.tags)}"'
            self.server.objects[self.key] = (tag, data)
        self.answer(201, ETag=tag, x_goog_generation="1")

    def get(self) -> None:
        found = self.server.objects.get(self.key)
        if found is None:
            self.answer(404)
            return
        tag, data = found
        if self.headers.get("If-Match", tag) != tag:
            self.answer(412)
            return
        headers = {"ETag": tag, "Last_Modified": "Mon, 30 Nov 2026 12:00:00 GMT"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or self.headers.get("x-ms-range") or "")
        if wanted is None:
            self.answer(200, data, **headers)
            return
        start, end = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
        headers["Content_Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        self.answer(206, data[start:end], **headers)

    do_HEAD = get  # noqa: N815

    def listed(self) -> tuple[list[tuple[str, str, int]], list[str]]:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        files, directories = [], set()
        for key, (tag, data) in sorted(self.server.objects.items()):
            if not key.startswith(prefix):
                continue
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if found:
                directories.add(prefix + head + delimiter)
            else:
                files.append((key, tag, len(data)))
        return files, sorted(directories)


class Google(_Objects):
    """The XML dialect of Google Cloud Storage."""

    def do_PUT(self) -> None:
        self.put(self.body(), only_if_absent=self.headers.get("x-goog-if-generation-match") == "0", taken=412)

    def do_GET(self) -> None:
        if self.key:
            self.get()
            return
        files, directories = self.listed()
        when = "<LastModified>2026-11-30T12:00:00.000Z</LastModified>"
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key>{when}<ETag>{escape(tag)}</ETag><Size>{size}</Size></Contents>"
            for key, tag, size in files
        )
        prefixes = "".join(f"<CommonPrefixes><Prefix>{escape(p)}</Prefix></CommonPrefixes>" for p in directories)
        self.answer(200, f"<ListBucketResult>{contents}{prefixes}</ListBucketResult>".encode())

    def do_DELETE(self) -> None:
        self.answer(204 if self.server.objects.pop(self.key, None) else 404)


class Azure(_Objects):
    """The dialect of Azure Blob Storage."""

    def do_PUT(self) -> None:
        self.put(self.body(), only_if_absent=self.headers.get("If-None-Match") == "*", taken=409)

    def do_GET(self) -> None:
        if self.key:
            self.get()
            return
        files, directories = self.listed()
        blobs = "".join(
            f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>Mon, 30 Nov 2026 12:00:00 GMT</Last-Modified>"
            f"<Content-Length>{size}</Content-Length><Content-Type>x/y</Content-Type><Etag>{escape(tag)}</Etag></Properties></Blob>"
            for key, tag, size in files
        )
        prefixes = "".join(f"<BlobPrefix><Name>{escape(p)}</Name></BlobPrefix>" for p in directories)
        text = f"<EnumerationResults><Blobs>{blobs}{prefixes}</Blobs><NextMarker/></EnumerationResults>"
        self.answer(200, text.encode())

    def do_POST(self) -> None:
        """A batch, of deletions."""
        body = self.body().decode()
        boundary = body.partition("\r\n")[0]
        parts = []
        for number, path in enumerate(re.findall(r"^DELETE (\S+) HTTP", body, flags=re.MULTILINE)):
            key = unquote(urlsplit(path).path.lstrip("/").partition("/")[2])
            status = "202 Accepted" if self.server.objects.pop(key, None) else "404 The specified blob does not exist."
            parts.append(
                f"{boundary}\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\nHTTP/1.1 {status}\r\n\r\n"
            )
        kind = f"multipart/mixed; boundary={boundary.removeprefix('--')}"
        self.answer(202, "".join([*parts, f"{boundary}--\r\n"]).encode(), Content_Type=kind)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, dialect: type[_Objects]) -> None:
        super().__init__(("127.0.0.1", 0), dialect)
        self.objects: dict[str, tuple[str, bytes]] = {}
        self.lock, self.tags = threading.Lock(), count(1)


@contextmanager
def bucket_in_memory(dialect: type[_Objects]) -> Iterator[str]:
    """A server of one bucket; its URL."""
    server = _Server(dialect)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(20)
        server.server_close()


def google_store(url: str) -> ObjectStore:
    options = {
        "config": {"base_url": url},
        "client_options": {"allow_http": True},
        "credential_provider": lambda: {"token": "token", "expires_at": None},
    }
    return ObjectStore(ObjectLocation("gs", "bucket", "run"), retries=QUICK, options=options)


def azure_store(url: str) -> ObjectStore:
    options = {
        "config": {"endpoint": url, "account_name": "account", "skip_signature": True},
        "client_options": {"allow_http": True},
    }
    return ObjectStore(ObjectLocation("az", "container", "run"), retries=QUICK, options=options)
