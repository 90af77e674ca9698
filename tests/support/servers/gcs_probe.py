"""What a bucket of fake-gcs-server holds below a root, seen by its JSON interface: the probe of the
conformance kit."""

from __future__ import annotations

import json
import os
import urllib.request
from urllib.error import HTTPError
from urllib.parse import quote, unquote, urlencode

from holdfast.drivers.objects.names import encoded
from holdfast.drivers.uri import Uri


class GcsProbe:
    """Objects below the location of a URI. STORAGE_EMULATOR_HOST names the server, as for Google's
    own clients."""

    def __init__(self, uri: Uri) -> None:
        self._bucket, _, root = uri.location.partition("/")
        self._root = root.rstrip("/") + "/"
        self._server = os.environ["STORAGE_EMULATOR_HOST"]

    def write(self, key: str, data: bytes) -> None:
        """See the kit's Probe."""
        name = urlencode(
            {"uploadType": "media", "name": self._root + encoded(key)}, quote_via=quote
        )
        self._ask("POST", f"/upload/storage/v1/b/{self._bucket}/o?{name}", data)

    def read(self, key: str) -> bytes:
        """See the kit's Probe."""
        name = quote(self._root + encoded(key), safe="")
        return self._ask("GET", f"/storage/v1/b/{self._bucket}/o/{name}?alt=media")

    def list(self) -> list[str]:
        """See the kit's Probe. Parts of unfinished uploads are left to a life-cycle rule: they are
        not counted."""
        query = urlencode({"prefix": self._root}, quote_via=quote)
        found = json.loads(self._ask("GET", f"/storage/v1/b/{self._bucket}/o?{query}"))
        assert "nextPageToken" not in found, (
            "more than one page: what is read here would not be all"
        )
        return sorted(
            unquote(item["name"].removeprefix(self._root)) for item in found.get("items", ())
        )

    def _ask(self, method: str, path: str, data: bytes | None = None) -> bytes:
        headers = {} if data is None else {"Content-Type": "application/octet-stream"}
        request = urllib.request.Request(
            self._server + path, data=data, headers=headers, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                content: bytes = answer.read()
        except HTTPError as error:
            with error:
                if error.code == 404:
                    raise FileNotFoundError(path) from error
                raise
        return content
