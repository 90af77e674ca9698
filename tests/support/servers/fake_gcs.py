"""fake-gcs-server: an emulator of Google Cloud Storage, with what it lacks of the XML interface
before it. It keeps objects in memory."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

from support.servers import gcs_front
from support.servers.daemon import INSTALLED, Daemon
from support.servers.ports import free_port


def find_fake_gcs() -> Path | None:
    """Its program, if it is installed."""
    program = INSTALLED / "fake-gcs/fake-gcs-server"
    return program if program.exists() else None


class FakeGcs:
    """A server with an empty bucket, ``holdfast``. Its log lies in ``folder``. Anybody may do
    anything."""

    def __init__(self, folder: Path) -> None:
        program = find_fake_gcs()
        if program is None:
            raise RuntimeError("fake-gcs-server is not installed: make test-servers")
        port, front_port = free_port(), free_port()
        self.json_endpoint = f"http://127.0.0.1:{port}"
        """Of the JSON interface, without anything before it."""
        self.endpoint = f"http://127.0.0.1:{front_port}"
        """Of the XML interface."""
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
        # Where the JSON interface is, for the probe.
        return {
            "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account),
            "STORAGE_EMULATOR_HOST": self.json_endpoint,
        }

    def start(self) -> None:
        """Start it, and make the bucket."""
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
