"""What lies on an SFTP server of this host, seen as files: the probe of the conformance kit."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from holdfast.drivers.conformance.probes import FolderProbe
from holdfast.drivers.uri import Uri

__all__ = ["SftpProbe"]


class SftpProbe(FolderProbe):
    """Files below the location of a URI that names the host. What it makes belongs to the server's
    account."""

    def __init__(self, uri: Uri) -> None:
        super().__init__(Uri("file", "/" + uri.location.partition("/")[2]))
        username = uri.options.get("username") or uri.location.partition("@")[0]
        self._account = pwd.getpwnam(username) if os.geteuid() == 0 else None

    def write(self, key: str, data: bytes) -> None:
        """See the kit's Probe."""
        super().write(key, data)
        if self._account is not None:
            for path in self._made(key):
                os.chown(path, self._account.pw_uid, self._account.pw_gid)

    def _made(self, key: str) -> list[Path]:
        """The file, its folders below the root, and the root."""
        path = self._folder / key
        return [path, *path.parents[: len(Path(key).parts)]]
