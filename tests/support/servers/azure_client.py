"""A client of Azure Blob Storage's REST interface. It uses only the standard library, so it shares
no code with the driver.

It supports what tests need: containers, blobs, uncommitted blocks, and signatures (SAS) to pass on.
The conformance kit's probe uses it.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import os
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, unquote, urlencode, urlsplit

from holdfast.drivers.objects.names import encoded
from holdfast.drivers.uri import Uri

_VERSION = "2021-08-06"


@dataclass(frozen=True)
class AzureClient:
    """One account at ``endpoint``, whose path names the account. Each request has its own
    connection."""

    endpoint: str
    account: str
    key: str = field(repr=False)

    def create_container(self, container: str, *, public: bool = False) -> None:
        """Create a container; anybody can read and list a public one."""
        headers = {"x-ms-blob-public-access": "container"} if public else {}
        self._request("PUT", container, {"restype": "container"}, headers)

    def put(self, container: str, name: str, data: bytes) -> None:
        """Store a blob."""
        self._request("PUT", f"{container}/{name}", {}, {"x-ms-blob-type": "BlockBlob"}, data)

    def get(self, container: str, name: str) -> bytes:
        """Return a blob. Raises FileNotFoundError."""
        return self._request("GET", f"{container}/{name}", {})

    def list(self, container: str, prefix: str = "", *, page: int = 5000) -> Iterator[str]:
        """Yield the names of all blobs with this prefix. Skip blobs that only have uncommitted
        blocks."""
        marker = ""
        while True:
            query = {"restype": "container", "comp": "list", "prefix": prefix}
            query |= {"maxresults": str(page)} | ({"marker": marker} if marker else {})
            found = ET.fromstring(self._request("GET", container, query))
            for blob in found.iter("Blob"):
                yield blob.findtext("Name") or ""
            marker = found.findtext("NextMarker") or ""
            if not marker:
                return

    def sas(
        self, permissions: str, *, starts_s: float, expires_s: float, container: str = ""
    ) -> str:
        """Return a signature for one container, or for the account's blobs, as a query.

        ``permissions`` are letters such as ``rl``, valid between two times of Unix.
        """
        start, end = (
            time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s)) for at_s in (starts_s, expires_s)
        )
        query = {"sv": _VERSION, "sp": permissions, "st": start, "se": end}
        if container:
            resource = f"/blob/{self.account}/{container}"
            fields = [permissions, start, end, resource, "", "", "", _VERSION, "c", *[""] * 7]
            query |= {"sr": "c"}
        else:
            fields = [self.account, permissions, "b", "sco", start, end, "", "", _VERSION, "", ""]
            query |= {"ss": "b", "srt": "sco"}
        digest = hmac.new(
            base64.b64decode(self.key), "\n".join(fields).encode(), hashlib.sha256
        ).digest()
        return urlencode({**query, "sig": base64.b64encode(digest).decode()})

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        headers: Mapping[str, str] | None = None,
        data: bytes = b"",
    ) -> bytes:
        at, now_s = urlsplit(self.endpoint), time.time()
        signature = self.sas("rwdlac", starts_s=now_s - 600, expires_s=now_s + 600)
        target = f"{at.path}/{quote(path, safe='/')}?{urlencode({**query})}&{signature}"
        sent = {"x-ms-version": _VERSION, **(headers or {})}
        connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=30)
        with contextlib.closing(connection):
            connection.request(method, target, data, sent)
            answer = connection.getresponse()
            content = answer.read()
        if answer.status == 404:
            raise FileNotFoundError(path)
        if answer.status >= 300:
            raise OSError(f"{method} {path}: {answer.status} {content[:300]!r}")
        return content


class AzureProbe:
    """Blobs below the location of a URI whose endpoint is an option; account and key come from the
    environment."""

    def __init__(self, uri: Uri) -> None:
        self._container, _, root = uri.location.partition("/")
        self._root = root.rstrip("/") + "/"
        account, key = (
            os.environ["AZURE_STORAGE_ACCOUNT_NAME"],
            os.environ["AZURE_STORAGE_ACCOUNT_KEY"],
        )
        self._client = AzureClient(uri.options["endpoint"], account, key)

    def write(self, key: str, data: bytes) -> None:
        """See the kit's Probe."""
        self._client.put(self._container, self._root + encoded(key), data)

    def read(self, key: str) -> bytes:
        """See the kit's Probe."""
        return self._client.get(self._container, self._root + encoded(key))

    def list(self) -> list[str]:
        """See the kit's Probe. Uncommitted blocks do not count: they have no name of their own, and
        the store drops them by itself, on which the driver relies."""
        found = self._client.list(self._container, self._root)
        return sorted(unquote(name.removeprefix(self._root)) for name in found)
