"""The conformance kit's probe of a bucket below a root. It uses only botocore."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from holdfast.drivers.objects.names import encoded
from holdfast.drivers.uri import Uri


@lru_cache(maxsize=4)
def _client(endpoint: str | None) -> Any:
    """Return one client for all probes, because making one takes a while."""
    import botocore.session
    from botocore.config import Config

    config = Config(
        s3={"addressing_style": "path" if endpoint else "auto"}, retries={"total_max_attempts": 5}
    )
    session = botocore.session.Session()
    return session.create_client(
        "s3", region_name="us-east-1", endpoint_url=endpoint, config=config
    )


class S3Probe:
    """Objects below the location of an ``s3://`` or ``fsspec+s3://`` URI, and unfinished uploads."""

    def __init__(self, uri: Uri) -> None:
        self._bucket, _, root = uri.location.partition("/")
        self._root = root.rstrip("/") + "/"
        self._endpoint = uri.options.get("endpoint") or uri.options.get("endpoint_url")
        # fsspec's file system uses a key as it is. The driver for s3:// encodes it so that a
        # listing can carry it.
        self._encode, self._decode = (
            (str, str) if uri.scheme.startswith("fsspec+") else (encoded, unquote)
        )

    def write(self, key: str, data: bytes) -> None:
        """See the kit's Probe."""
        with self._asking() as client:
            client.put_object(Bucket=self._bucket, Key=self._root + self._encode(key), Body=data)

    def read(self, key: str) -> bytes:
        """See the kit's Probe."""
        with self._asking() as client:
            found: bytes = client.get_object(
                Bucket=self._bucket, Key=self._root + self._encode(key)
            )["Body"].read()
            return found

    def list(self) -> list[str]:
        """See the kit's Probe. Unfinished uploads are named after their keys."""
        with self._asking() as client:
            found = self._found(client, "list_objects_v2", "Contents")
            parts = self._found(client, "list_multipart_uploads", "Uploads")
        return sorted(found + [f"unfinished: {key}" for key in parts])

    def _found(self, client: Any, operation: str, what: str) -> list[str]:
        pages = client.get_paginator(operation).paginate(Bucket=self._bucket, Prefix=self._root)
        return [
            self._decode(entry["Key"].removeprefix(self._root))
            for page in pages
            for entry in page.get(what, ())
        ]

    @contextmanager
    def _asking(self) -> Iterator[Any]:
        """Yield a client that is closed afterwards, because the kit counts connections."""
        client = _client(self._endpoint)
        try:
            yield client
        finally:
            client.close()
