"""A client of Azure Blob Storage's REST interface, on the standard library alone: it shares no code
with the driver.

It knows what tests need: containers, blobs, blocks that are not committed yet, and signatures (SAS)
to be handed on.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from urllib.parse import quote, urlencode, urlsplit

__all__ = ["AzureClient", "Listed"]

_VERSION = "2021-08-06"
_SIGNED_HEADERS = ("if-modified-since", "if-match", "if-none-match", "if-unmodified-since", "range")


@dataclass(frozen=True, slots=True)
class Listed:
    """One blob of a listing."""

    name: str
    committed: bool
    """Whether the blob exists; otherwise only blocks of it do."""


@dataclass(frozen=True)
class AzureClient:
    """One account at ``endpoint``, whose path names the account. Each request has a connection of
    its own."""

    endpoint: str
    account: str
    key: str = field(repr=False)

    def create_container(self, container: str, *, public: bool = False) -> None:
        """Make a container; a public one can be read, and listed, by anybody."""
        headers = {"x-ms-blob-public-access": "container"} if public else {}
        self._request("PUT", container, {"restype": "container"}, headers)

    def put(self, container: str, name: str, data: bytes) -> None:
        """Store a blob."""
        self._request("PUT", f"{container}/{name}", {}, {"x-ms-blob-type": "BlockBlob"}, data)

    def get(self, container: str, name: str) -> bytes:
        """All of a blob. Raises FileNotFoundError where there is none."""
        return self._request("GET", f"{container}/{name}", {})

    def list(self, container: str, prefix: str = "", *, page: int = 5000) -> Iterator[Listed]:
        """All blobs whose names begin so, and those of which there are uncommitted blocks only."""
        marker = ""
        while True:
            query = {
                "restype": "container",
                "comp": "list",
                "prefix": prefix,
                "include": "uncommittedblobs",
            }
            query |= {"maxresults": str(page)} | ({"marker": marker} if marker else {})
            found = ET.fromstring(self._request("GET", container, query))
            for blob in found.iter("Blob"):
                yield _listed(blob)
            marker = found.findtext("NextMarker") or ""
            if not marker:
                return

    def sas(self, container: str, permissions: str, *, starts_s: float, expires_s: float) -> str:
        """A signature for one container, as a query: ``permissions`` such as ``rl``, between two
        times of Unix."""
        start, end = _iso(starts_s), _iso(expires_s)
        resource = f"/blob/{self.account}/{container}"
        fields = [
            permissions,
            start,
            end,
            resource,
            "",
            "",
            "",
            _VERSION,
            "c",
            "",
            "",
            "",
            "",
            "",
            "",
            "",
        ]
        signature = self._sign("\n".join(fields))
        return urlencode(
            {"sp": permissions, "st": start, "se": end, "sv": _VERSION, "sr": "c", "sig": signature}
        )

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        headers: Mapping[str, str] | None = None,
        data: bytes = b"",
    ) -> bytes:
        at = urlsplit(self.endpoint)
        target = f"{at.path}/{quote(path, safe='/')}"
        sent = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _VERSION, **(headers or {})}
        sent["Authorization"] = (
            f"SharedKey "
            f"{self.account}:{self._sign(self._canonical(method, target, query, sent, data))}"
        )
        connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=30)
        try:
            connection.request(
                method, f"{target}?{urlencode(query)}" if query else target, data, sent
            )
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status == 404:
            raise FileNotFoundError(path)
        if answer.status >= 300:
            raise OSError(f"{method} {path}: {answer.status} {content[:300]!r}")
        return content

    def _canonical(
        self,
        method: str,
        target: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        data: bytes,
    ) -> str:
        """What Shared Key signs of a request."""
        lines = [
            method,
            "",
            "",
            str(len(data)) if data else "",
            "",
            "",
            "",
            *([""] * len(_SIGNED_HEADERS)),
        ]
        lines += [f"{name}:{headers[name]}" for name in sorted(headers) if name.startswith("x-ms-")]
        lines.append(f"/{self.account}{target}")
        lines += [f"{name}:{query[name]}" for name in sorted(query)]
        return "\n".join(lines)

    def _sign(self, text: str) -> str:
        digest = hmac.new(base64.b64decode(self.key), text.encode(), hashlib.sha256).digest()
        return base64.b64encode(digest).decode()


def _listed(blob: ET.Element) -> Listed:
    # Blocks that are not committed have no ETag yet.
    committed = bool(blob.findtext("Properties/Etag"))
    return Listed(blob.findtext("Name") or "", committed)


def _iso(at_s: float) -> str:
    import datetime

    return datetime.datetime.fromtimestamp(at_s, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
