"""The part of Cloud Storage's XML interface that fake-gcs-server lacks: puts and multipart
uploads.

    python gcs_front.py PORT UPSTREAM

fake-gcs-server accepts objects only through the JSON interface. It answers reads, deletes and lists
of the XML interface itself. The driver's client uses the XML interface throughout. So this process
listens in front. It turns a put into an insertion through the JSON interface, with the put's
condition, which fake-gcs-server evaluates. It passes everything else on unchanged.

This process keeps multipart uploads until they are complete. So tests of them only show that this
file understands the requests of the driver's client, not that Google's servers do.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import secrets
import sys
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import quote, unquote
from xml.sax.saxutils import escape

from aiohttp import ClientSession, web
from yarl import URL

BODY_NBYTES_MAX = 1 << 30
PASSED_ON = (
    "accept-ranges",
    "content-range",
    "content-type",
    "etag",
    "last-modified",
    "x-goog-generation",
)
"""Headers of answers."""


@dataclass
class Upload:
    """An upload that is neither complete nor aborted."""

    bucket: str
    name: str
    parts: dict[int, bytes] = field(default_factory=dict)


class Front:
    """Answers the XML interface's requests on behalf of the server at ``upstream``."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._uploads: dict[str, Upload] = {}
        self._ids = itertools.count(1)
        self._client: ClientSession

    async def client(self, _app: web.Application) -> AsyncIterator[None]:
        """Keep connections to the server open while this process runs."""
        async with ClientSession(auto_decompress=False) as self._client:
            yield

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer any request."""
        path = request.raw_path.partition("?")[0]
        bucket, _, name = path.lstrip("/").partition("/")
        name = unquote(name)
        query = request.rel_url.query
        if not name and request.method == "GET":
            return await self._list(request, bucket)
        if request.method == "POST" and "uploads" in query:
            return self._begin(bucket, name)
        if "uploadId" in query:
            return await self._upload(request, query["uploadId"])
        if request.method == "PUT":
            condition = request.headers.get("x-goog-if-generation-match")
            return await self._insert(bucket, name, await request.read(), condition)
        return await self._pass_on(request)

    def _begin(self, bucket: str, name: str) -> web.Response:
        upload_id = f"upload-{next(self._ids)}"
        self._uploads[upload_id] = Upload(bucket, name)
        named = f"<Bucket>{bucket}</Bucket><Key>{escape(name)}</Key>"
        return _xml(
            f"<InitiateMultipartUploadResult>{named}<UploadId>{upload_id}</UploadId></InitiateMultipartUploadResult>"
        )

    async def _upload(self, request: web.Request, upload_id: str) -> web.Response:
        """Take a part, or complete or abort the upload."""
        upload = self._uploads.get(upload_id)
        if upload is None:
            return _error("NoSuchUpload", 404)
        if request.method == "PUT":
            data = await request.read()
            upload.parts[int(request.rel_url.query["partNumber"])] = data
            return web.Response(headers={"etag": _etag(data)})
        if request.method == "POST":
            return await self._complete(upload_id, await request.text())
        if request.method == "DELETE":
            del self._uploads[upload_id]
            return web.Response(status=204)
        return _error("MethodNotAllowed", 405)

    async def _complete(self, upload_id: str, body: str) -> web.Response:
        upload = self._uploads[upload_id]
        content = bytearray()
        numbers = []
        for part in ET.fromstring(body):
            number = int(_child(part, "PartNumber"))
            data = upload.parts.get(number)
            if data is None or _child(part, "ETag").strip('"') != _etag(data).strip('"'):
                return _error("InvalidPart", 400)
            numbers.append(number)
            content += data
        if not numbers or numbers != sorted(set(numbers)):
            return _error("InvalidPartOrder", 400)
        inserted = await self._insert(upload.bucket, upload.name, bytes(content), None)
        if inserted.status != 200:
            return inserted
        del self._uploads[upload_id]
        etag = escape(inserted.headers["etag"])
        return _xml(
            f"<CompleteMultipartUploadResult><ETag>{etag}</ETag></CompleteMultipartUploadResult>"
        )

    async def _list(self, request: web.Request, bucket: str) -> web.StreamResponse:
        """Pass on a list; a missing bucket is 404, as on Google's servers."""
        async with self._client.get(
            f"{self._upstream}/storage/v1/b/{quote(bucket, safe='')}"
        ) as answer:
            if answer.status == 404:
                return _error("NoSuchBucket", 404)
        return await self._pass_on(request)

    async def _insert(
        self, bucket: str, name: str, data: bytes, generation: str | None
    ) -> web.Response:
        """Store an object if its generation matches; 0 means that it must not exist."""
        mark = secrets.token_hex(16)
        about = json.dumps({"name": name})
        head = (
            f"--{mark}\r\nContent-Type: "
            f"application/json\r\n\r\n{about}\r\n--{mark}\r\nContent-Type: application/octet-stream"
        )
        body = b"".join([head.encode(), b"\r\n\r\n", data, f"\r\n--{mark}--\r\n".encode()])
        query = {"uploadType": "multipart"} | (
            {"ifGenerationMatch": generation} if generation is not None else {}
        )
        async with self._client.post(
            f"{self._upstream}/upload/storage/v1/b/{bucket}/o",
            params=query,
            data=body,
            headers={"content-type": f"multipart/related; boundary={mark}"},
        ) as answer:
            content = await answer.read()
        if answer.status == 412:
            return _error("PreconditionFailed", 412)
        if answer.status == 404:
            return _error("NoSuchBucket", 404)
        if answer.status != 200:
            return web.Response(status=answer.status, body=content)
        stored = json.loads(content)
        return web.Response(
            headers={"etag": f'"{stored["etag"]}"', "x-goog-generation": str(stored["generation"])}
        )

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        headers = {"Range": request.headers["Range"]} if "Range" in request.headers else {}
        async with self._client.request(
            request.method,
            URL(self._upstream + request.raw_path, encoded=True),
            headers=headers,
            data=await request.read(),
        ) as answer:
            kept = {
                name: value for name, value in answer.headers.items() if name.lower() in PASSED_ON
            }
            if request.method == "HEAD":
                kept["content-length"] = answer.headers.get("content-length", "0")
            return web.Response(status=answer.status, headers=kept, body=await answer.read())


def _xml(content: str, status: int = 200) -> web.Response:
    return web.Response(
        text=f'<?xml version="1.0"?>{content}', status=status, content_type="application/xml"
    )


def _error(code: str, status: int) -> web.Response:
    return _xml(f"<Error><Code>{code}</Code><Message>{code}</Message></Error>", status)


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def _child(part: ET.Element, name: str) -> str:
    """Return the text of a child element, in any namespace."""
    return next(child.text or "" for child in part if child.tag.rpartition("}")[2] == name)


def main(port: int, upstream: str) -> None:
    """Serve until the process is killed."""
    front = Front(upstream)
    app = web.Application(client_max_size=BODY_NBYTES_MAX)
    app.cleanup_ctx.append(front.client)
    app.router.add_route("*", "/{path:.*}", front.answer)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
