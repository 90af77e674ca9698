"""Azurite: Microsoft's emulator of Azure Blob Storage. It keeps blobs in memory."""

from __future__ import annotations

import base64
import secrets
from pathlib import Path

from support.servers.azure_client import AzureClient
from support.servers.daemon import INSTALLED, Daemon
from support.servers.ports import free_port

ACCOUNT = "holdfasttests"


def find_azurite() -> Path | None:
    """Return its program for blobs, if it is installed."""
    program = INSTALLED / "azurite/node_modules/.bin/azurite-blob"
    return program if program.exists() else None


class Azurite:
    """A server with one account, whose key is made up, and an empty container, ``holdfast``. Its
    log is in ``folder``."""

    def __init__(self, folder: Path) -> None:
        program = find_azurite()
        if program is None:
            raise RuntimeError("Azurite is not installed: make test-servers")
        port = free_port()
        key = base64.b64encode(secrets.token_bytes(32)).decode()
        self.port = port
        self.endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        self.client = AzureClient(self.endpoint, ACCOUNT, key)
        # Clients are newer than Azurite, and name a later interface version than it supports.
        options = [
            "--inMemoryPersistence",
            "--disableTelemetry",
            "--skipApiVersionCheck",
            "--silent",
        ]
        command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), *options]
        environment = {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{key}"}
        self._daemon = Daemon(
            command, port=port, log=folder / "azurite.log", environment=environment
        )

    @property
    def uri(self) -> str:
        """URI of the container."""
        return f"az://holdfast?endpoint={self.endpoint}"

    def environment(self) -> dict[str, str]:
        """Return the variables that clients need."""
        return {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": self.client.key}

    def start(self) -> None:
        """Start it, and create the container."""
        self._daemon.start()
        self.client.create_container("holdfast")

    def stop(self) -> None:
        """End its process."""
        self._daemon.stop()
