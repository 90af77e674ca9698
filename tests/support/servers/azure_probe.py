"""What a container holds below a root, seen without the driver's client: the probe of the
conformance kit."""

from __future__ import annotations

import os
from urllib.parse import unquote

from holdfast.drivers.objects.names import encoded
from holdfast.drivers.uri import Uri
from support.servers.azure_client import AzureClient


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
        """See the kit's Probe. Blocks that are not committed have no name of their own, and the
        store forgets them by itself, which is what the driver relies on: they are not counted."""
        found = self._client.list(self._container, self._root)
        return sorted(
            unquote(blob.name.removeprefix(self._root)) for blob in found if blob.committed
        )
