"""An S3 store in this process's memory. It supports the requests of drivers, and tests can change
its answers.

It checks no signatures. A test sets ``fault``, which may answer in the store's place, and ``edit``,
which may change what the store answers.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from support.servers.scripted import Answer, Request, refusal

_XML = {"content-type": "application/xml"}


def kind_of(asked: Request) -> str:
    """Return the kind of a request: put, get, head, delete, list, bulk; for multipart uploads:
    begin, part, complete, abort, uploads, parts."""
    query = parse_qs(urlsplit(asked.path).query, keep_blank_values=True)
    of_uploads = {
        "POST": "complete" if "uploadId" in query else "begin",
        "PUT": "part",
        "DELETE": "abort",
        "GET": "parts" if "uploadId" in query else "uploads",
    }
    if "uploads" in query or "uploadId" in query:
        return of_uploads[asked.method]
    if "list-type" in query:
        return "list"
    if asked.method == "POST":
        return "bulk"
    return asked.method.lower()


@dataclass
class Unfinished:
    """A multipart upload. ``began_s``: its start on the store's clock."""

    key: str
    began_s: float
    parts: dict[int, tuple[bytes, float]] = field(default_factory=dict)


@dataclass
class OddStore:
    """The answers of a store with one bucket, ``bucket``. Call it with a request."""

    fault: Callable[[Request], Answer | None] = lambda asked: None
    edit: Callable[[Request, Answer], Answer] = lambda asked, answer: answer
    initiated_s: Callable[[], float] = time.time
    """The store's clock, for the start times of uploads."""
    page: int = 1000
    """Objects per page of a listing."""
    honours_tokens: bool = True
    """True if a listing continues where a continuation token says."""
    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    uploads: dict[str, Unfinished] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    """Keys of the uploads that a client has aborted."""
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    def __call__(self, asked: Request) -> Answer:
        answer = self.fault(asked)
        if answer is not None:
            return answer
        parts = urlsplit(asked.path)
        query = {n: v[0] for n, v in parse_qs(parts.query, keep_blank_values=True).items()}
        key = unquote(parts.path).removeprefix("/bucket").removeprefix("/")
        answer = getattr(self, f"_{kind_of(asked)}")(asked, key, query)
        dated = {"date": formatdate(time.time(), usegmt=True), **answer.headers}
        return self.edit(asked, Answer(answer.status, answer.body, dated))

    def _put(self, asked: Request, key: str, query: dict[str, str]) -> Answer:
        if asked.headers.get("if-none-match") == "*" and key in self.objects:
            return refusal(412, "PreconditionFailed")
        self.objects[key] = (asked.body, time.time())
        return Answer(headers={"etag": _etag(asked.body)})

    def _head(self, asked: Request, key: str, query: dict[str, str]) -> Answer:
        if key not in self.objects:
            return Answer(404)
        return self._get(asked, key, query)

    def _get(self, asked: Request, key: str, query: dict[str, str]) -> Answer:
        if key not in self.objects:
            return refusal(404, "NoSuchKey")
        data, modified_s = self.objects[key]
        headers = {"etag": _etag(data), "last-modified": formatdate(modified_s, usegmt=True)}
        if "range" not in asked.headers:
            return Answer(200, data, headers)
        first, _, last = asked.headers["range"].removeprefix("bytes=").partition("-")
        piece = data[int(first) : int(last) + 1]
        if not piece:
            return refusal(416, "InvalidRange")
        reached = f"bytes {first}-{int(first) + len(piece) - 1}/{len(data)}"
        return Answer(206, piece, headers | {"content-range": reached})

    def _delete(self, asked: Request, key: str, query: dict[str, str]) -> Answer:
        self.objects.pop(key, None)
        return Answer(204)

    def _bulk(self, asked: Request, key: str, query: dict[str, str]) -> Answer:
        keys = [part.partition("</Key>")[0] for part in asked.body.decode().split("<Key>")[1:]]
        for one in keys:
            self.objects.pop(one, None)
        done = "".join(f"<Deleted><Key>{escape(one)}</Key></Deleted>" for one in keys)
        return Answer(200, f"<DeleteResult>{done}</DeleteResult>".encode(), _XML)

    def _list(self, asked: Request, key: str, query: dict[str, str]) -> Answer:
        after = query.get("continuation-token", "") if self.honours_tokens else ""
        keys = sorted(
            k for k in self.objects if k.startswith(query.get("prefix", "")) and k > after
        )
        more = ""
        if len(keys) > self.page:
            more = f"<NextContinuationToken>{keys[self.page - 1]}</NextContinuationToken>"
        shown = "".join(
            f"<Contents><Key>{escape(k)}</Key><Size>{len(self.objects[k][0])}</Size>"
            f"<LastModified>{_iso(self.objects[k][1])}</LastModified></Contents>"
            for k in keys[: self.page]
        )
        head = f"<IsTruncated>{str(bool(more)).lower()}</IsTruncated>{more}"
        return Answer(200, f"<ListBucketResult>{head}{shown}</ListBucketResult>".encode(), _XML)

    def _begin(self, asked: Request, key: str, query: dict[str, str]) -> Answer:
        name = f"upload{next(self._ids)}"
        self.uploads[name] = Unfinished(key, self.initiated_s())
        result = f"<UploadId>{name}</UploadId>"
        text = f"<InitiateMultipartUploadResult>{result}</InitiateMultipartUploadResult>"
        return Answer(200, text.encode(), _XML)

    def _part(self, asked: Request, key: str, query: dict[str, str]) -> Answer:
        if query["uploadId"] not in self.uploads:
            return refusal(404, "NoSuchUpload")
        data = asked.body
        if source := asked.headers.get("x-amz-copy-source"):
            name = unquote(source).removeprefix("bucket/")
            if name not in self.objects:
                return refusal(404, "NoSuchKey")
            first, _, last = asked.headers["x-amz-copy-source-range"][6:].partition("-")
            data = self.objects[name][0][int(first) : int(last) + 1]
        parts = self.uploads[query["uploadId"]].parts
        parts[int(query["partNumber"])] = (data, time.time())
        if source:
            text = f"<CopyPartResult><ETag>{_etag(data)}</ETag></CopyPartResult>"
            return Answer(200, text.encode(), _XML)
        return Answer(headers={"etag": _etag(data)})

    def _complete(self, asked: Request, key: str, query: dict[str, str]) -> Answer:
        upload = self.uploads.pop(query["uploadId"], None)
        if upload is None:
            return refusal(404, "NoSuchUpload")
        data = b"".join(upload.parts[n][0] for n in sorted(upload.parts))
        self.objects[key] = (data, time.time())
        text = f"<CompleteMultipartUploadResult><ETag>{_etag(data)}</ETag></CompleteMultipartUploadResult>"
        return Answer(200, text.encode(), _XML)

    def _abort(self, asked: Request, key: str, query: dict[str, str]) -> Answer:
        upload = self.uploads.pop(query["uploadId"], None)
        if upload is None:
            return refusal(404, "NoSuchUpload")
        self.aborted.append(upload.key)
        return Answer(204)

    def _uploads(self, asked: Request, key: str, query: dict[str, str]) -> Answer:
        shown = "".join(
            f"<Upload><Key>{escape(u.key)}</Key><UploadId>{name}</UploadId>"
            f"<Initiated>{_iso(u.began_s)}</Initiated></Upload>"
            for name, u in self.uploads.items()
            if u.key.startswith(query.get("prefix", ""))
        )
        head = "<IsTruncated>false</IsTruncated>"
        text = f"<ListMultipartUploadsResult>{head}{shown}</ListMultipartUploadsResult>"
        return Answer(200, text.encode(), _XML)

    def _parts(self, asked: Request, key: str, query: dict[str, str]) -> Answer:
        if query["uploadId"] not in self.uploads:
            return refusal(404, "NoSuchUpload")
        shown = "".join(
            f"<Part><PartNumber>{n}</PartNumber><Size>{len(data)}</Size>"
            f"<LastModified>{_iso(at_s)}</LastModified></Part>"
            for n, (data, at_s) in self.uploads[query["uploadId"]].parts.items()
        )
        text = f"<ListPartsResult><IsTruncated>false</IsTruncated>{shown}</ListPartsResult>"
        return Answer(200, text.encode(), _XML)


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def _iso(at_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(at_s))
