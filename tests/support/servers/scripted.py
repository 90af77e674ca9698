"""A web server that records requests and answers as a test says; also with TLS, and as a proxy to
itself.

It runs in threads of this process.
"""

from __future__ import annotations

import json
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from holdfast.drivers.objects.known_stores import KNOWN

_GOOGLE = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
_CLOUDS = ("AWS_", "GOOGLE_", "AZURE_", "CLOUDSDK_", "SSL_CERT")
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "x",
    "AZURE_STORAGE_ACCOUNT_NAME": "account",
    "AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0",
    "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(_GOOGLE),
}
DATE = "Sun, 22 Nov 2026 16:00:00 GMT"
PIECE_NBYTES = 64 << 10
ONCE = "retries=0&deadline=1s"
"""Options of a driver that never retries."""


def set_credentials(
    monkeypatch: pytest.MonkeyPatch, folder: Path, names: Iterable[str] = CREDENTIALS
) -> None:
    """Remove all about clouds and proxies from the environment, except worthless credentials.

    AWS's files are ``config`` and ``credentials`` in ``folder``. Stores cached by other tests are
    forgotten.
    """
    for name in list(os.environ):
        if name.startswith(_CLOUDS) or name.upper().endswith("_PROXY"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(folder / "gcloud"))
    for name in names:
        monkeypatch.setenv(name, CREDENTIALS[name])
    KNOWN.forget()


@dataclass(frozen=True)
class Request:
    """One request. Names of headers are in lower case."""

    method: str
    host: str
    """The host that the client believes it is talking to."""
    path: str
    """The path with its query."""
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """A response. ``cut`` closes the connection instead; ``pause_s`` separates pieces of 64 KiB."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: bool = False
    pause_s: float = 0.0


class ScriptedServer:
    """A server on its own port, while the ``with`` statement runs. ``log`` has all requests.

    ``authority``, one of trustme's, enables TLS: on the server's port, and, for a client that uses
    it as a proxy, in the name of any requested host. ``pause_s`` is the pause between two pieces of
    64 KiB that clients send.
    """

    def __init__(
        self,
        answer: Callable[[Request], Answer],
        authority: Any = None,
        *,
        tls: bool = False,
        pause_s: float = 0.0,
    ) -> None:
        self.log: list[Request] = []
        self.tunnels: list[str] = []
        self.pause_s = pause_s
        self.answer = answer
        self._authority = authority
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.script = self
        if tls:
            self._server.socket = self.context("localhost").wrap_socket(
                self._server.socket, server_side=True
            )
        self.port = self._server.server_address[1]
        self.url = f"https://localhost:{self.port}" if tls else f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )

    @property
    def methods(self) -> list[str]:
        """Methods of all requests so far."""
        return [request.method for request in self.log]

    def context(self, host: str) -> ssl.SSLContext:
        """Return a TLS context in the name of ``host``."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._authority.issue_cert(host).configure_cert(context)
        return context

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    script: ScriptedServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: tests make clients hang up and refuse certificates."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_CONNECT(self) -> None:
        host = self.path.partition(":")[0]
        self.server.script.tunnels.append(self.path)
        self.send_response(200)
        self.end_headers()
        self.connection = self.server.script.context(host).wrap_socket(
            self.connection, server_side=True
        )
        self.rfile = self.connection.makefile("rb")
        self.wfile = self.connection.makefile("wb", buffering=0)
        self.close_connection = False

    def finish(self) -> None:
        super().finish()
        self.connection.close()

    def _any(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        parts = urlsplit(self.path)
        path = parts._replace(scheme="", netloc="").geturl()
        host = parts.netloc or headers.get("host", "")
        request = Request(self.command, host, path, headers, self._body(headers))
        self.server.script.log.append(request)
        answer = self.server.script.answer(request)
        if answer.cut:
            self.close_connection = True
            return
        try:
            self._send(answer)
        except ConnectionError:
            self.close_connection = True

    def _send(self, answer: Answer) -> None:
        self.send_response_only(answer.status)
        usual = {
            "date": DATE,
            "last-modified": DATE,
            "etag": '"1"',
            "content-length": str(len(answer.body)),
        }
        for name, value in {**usual, **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        for start in range(0, len(answer.body), PIECE_NBYTES):
            self.wfile.write(answer.body[start : start + PIECE_NBYTES])
            time.sleep(answer.pause_s)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _any

    def _body(self, headers: Mapping[str, str]) -> bytes:
        if headers.get("transfer-encoding") != "chunked":
            return self._read(int(headers.get("content-length", 0)))
        body = b""
        while nbytes := int(self.rfile.readline().split(b";")[0], 16):
            body += self._read(nbytes)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _read(self, nbytes: int) -> bytes:
        body = bytearray()
        while len(body) < nbytes:
            piece = self.rfile.read(min(PIECE_NBYTES, nbytes - len(body)))
            if not piece:
                break
            body += piece
            time.sleep(self.server.script.pause_s)
        return bytes(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def refusal(status: int, code: str) -> Answer:
    """Return an error in the form that object stores use."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>refused</Message></Error>".encode()
    return Answer(status, body, {"content-type": "application/xml", "x-ms-error-code": code})


def s3_answer(request: Request) -> Answer:
    """Answer as an S3 server. Every object exists and has three bytes, except one that no driver
    stores. Listings are empty."""
    method, path = request.method, request.path
    xml = {"content-type": "application/xml"}
    if path.endswith("no-such-object"):
        return refusal(404, "NoSuchKey")
    if method == "POST" and "uploads" in path:
        text = (
            "<InitiateMultipartUploadResult><UploadId>u1</UploadId></InitiateMultipartUploadResult>"
        )
        return Answer(200, text.encode(), xml)
    if method == "POST" and "uploadId" in path:
        text = "<CompleteMultipartUploadResult><ETag>a</ETag></CompleteMultipartUploadResult>"
        return Answer(200, text.encode(), xml)
    if method == "POST":
        return Answer(200, b"<DeleteResult></DeleteResult>", xml)
    if method == "GET" and "list-type" in path:
        text = "<ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"
        return Answer(200, text.encode(), xml)
    if method == "GET" and "uploads" in path:
        text = "<ListMultipartUploadsResult><IsTruncated>false</IsTruncated></ListMultipartUploadsResult>"
        return Answer(200, text.encode(), xml)
    if method == "DELETE":
        return Answer(204)
    if "x-amz-copy-source" in request.headers:
        return Answer(200, b"<CopyPartResult><ETag>a</ETag></CopyPartResult>", xml)
    headers = {"etag": '"a"', "last-modified": DATE, "x-goog-generation": "1"}
    if method == "GET" and "range" in request.headers:
        start, _, last = request.headers["range"].removeprefix("bytes=").partition("-")
        piece = b"abc"[int(start) : int(last) + 1]
        return Answer(
            206,
            piece,
            headers | {"content-range": f"bytes {start}-{int(start) + len(piece) - 1}/3"},
        )
    return Answer(200, b"abc" if method in ("GET", "HEAD") else b"", headers)
