"""The conformance kit's probe of an HDFS. It uses only hdfs-native."""

from __future__ import annotations

import hdfs_native

from holdfast.drivers.hdfs.names import path_name
from holdfast.drivers.uri import Uri


class HdfsProbe:
    """Files below the location of a URI that names host and port."""

    def __init__(self, uri: Uri) -> None:
        authority, _, root = uri.location.partition("/")
        self._root = "/" + root.rstrip("/")
        self._client = hdfs_native.Client(f"hdfs://{authority}")

    def write(self, key: str, data: bytes) -> None:
        """See the kit's Probe."""
        options = hdfs_native.WriteOptions(overwrite=True, create_parent=True)
        with self._client.create(self._path(key), options) as file:
            file.write(data)

    def read(self, key: str) -> bytes:
        """See the kit's Probe."""
        reader = self._client.read(self._path(key))
        return reader.read_range(0, len(reader))

    def list(self) -> list[str]:
        """See the kit's Probe."""
        try:
            found = [
                status.path
                for status in self._client.list_status(self._root, True)
                if not status.isdir
            ]
        except FileNotFoundError:
            return []
        return sorted(
            path.removeprefix(self._root + "/").replace("%3A", ":").replace("%25", "%")
            for path in found
        )

    def _path(self, key: str) -> str:
        return "/".join([self._root, *map(path_name, key.split("/"))])
