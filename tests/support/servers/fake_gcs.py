"""fake-gcs-server, an emulator of Google Cloud Storage, behind a front that adds missing parts of
the XML interface. It keeps objects in memory. The conformance kit's probe uses the JSON interface.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote, unquote, urlencode

from holdfast.drivers.objects.names import encoded
from holdfast.drivers.uri import Uri
from support.servers import gcs_front
from support.servers.daemon import INSTALLED, Daemon
from support.servers.ports import free_port


def find_fake_gcs() -> Path | None:
    """Return its program, if it is installed."""
    program = INSTALLED / "fake-gcs/fake-gcs-server"
    return program if program.exists() else None


class FakeGcs:
    """A server with an empty bucket, ``holdfast``. Its log is in ``folder``. Everybody
    has all permissions."""

    def __init__(self, folder: Path) -> None:
        program = find_fake_gcs()
        if program is None:
            raise RuntimeError("fake-gcs-server is not installed: make test-servers")
        port, front_port = free_port(), free_port()
        self.json_endpoint = f"http://127.0.0.1:{port}"
        """Endpoint of the JSON interface, without the front."""
        self.endpoint = f"http://127.0.0.1:{front_port}"
        """Endpoint of the XML interface."""
        at = ("-host", "127.0.0.1", "-port", str(port), "-public-host", f"127.0.0.1:{port}")
        command = [program, "-scheme", "http", "-backend", "memory", "-log-level", "warn", *at]
        self._server = Daemon(command, port=port, log=folder / "fake-gcs-server.log")
        front = [sys.executable, gcs_front.__file__, str(front_port), self.json_endpoint]
        self._front = Daemon(front, port=front_port, log=folder / "front.log")

    @property
    def uri(self) -> str:
        """URI of the bucket."""
        return f"gs://holdfast?endpoint={self.endpoint}"

    def environment(self) -> dict[str, str]:
        """Return the variables that clients need: a service account without tokens."""
        account = {"client_email": "", "private_key": "", "private_key_id": ""}
        account |= {"gcs_base_url": self.endpoint, "disable_oauth": True}  # type: ignore[dict-item]
        # The endpoint of the JSON interface, for the probe.
        return {
            "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account),
            "STORAGE_EMULATOR_HOST": self.json_endpoint,
        }

    def start(self) -> None:
        """Start it, and create the bucket."""
        self._server.start()
        self._front.start()
        request = urllib.request.Request(
            f"{self.json_endpoint}/storage/v1/b",
            data=b'{"name": "holdfast"}',
            headers={"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=30).close()

    def stop(self) -> None:
        """End its processes."""
        self._front.stop()
        self._server.stop()


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
        """See the kit's Probe. Parts of unfinished uploads do not count: a life-cycle rule removes
        them."""
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
