"""A check that the run's folder on a local file system has not been unmounted.

After ``umount``, saves to the folder below the mount point succeed, and the next ``mount`` hides
them. A changed device number alone proves nothing: remounting the same file system may change it.
So an error is raised only if no checkpoint of the run is left in the folder.

Scope: object stores and folders of other drivers have no device.
"""

from __future__ import annotations

import os
from collections import deque

from ...errors import NotFoundError, StorageError
from ..format.manifest import MANIFEST_KEY
from ..operations.location import Place
from ..runtime.engine import offload

__all__ = ["RunFolder"]

_KNOWN = 16
"""Number of recent checkpoints to look for. Retention may have deleted all but the newest, and the
newest saves may have failed.
"""


class RunFolder:
    """The folder ``root``. Call ``note`` for its checkpoints, and ``check`` before a save."""

    def __init__(self, root: Place) -> None:
        self._root = root
        self._device: int | None = None
        self._known: deque[str] = deque(maxlen=_KNOWN)

    def note(self, path: str) -> None:
        """Record that a checkpoint exists, or will exist, at ``path``."""
        if path not in self._known:
            self._known.append(path)

    async def check(self) -> None:
        """Raise StorageError if the folder is on another device than before and has lost the run's
        checkpoints.
        """
        if self._root.uri.scheme not in ("file", "lustre"):
            return
        device = await offload(_device, self._root.uri.location)
        before = self._device
        if before not in (None, device) and self._known and not await self._has_known():
            raise StorageError(
                "the run's folder is on another file system than before, and none of the run's "
                f"checkpoints is in it (device {_printed(before)}, now {_printed(device)})",
                uri=self._root.uri.redacted,
                advice="Has it been unmounted? Mount it again, and saves continue. For a new run, "
                "start the job again.",
            )
        self._device = device

    async def _has_known(self) -> bool:
        async with self._root.opened() as driver:
            for path in reversed(self._known):
                try:
                    await driver.stat(f"{path}/{MANIFEST_KEY}")
                except NotFoundError:
                    continue
                return True
        return False


def _device(path: str) -> int:
    """Return the device of the folder ``path``, or of its nearest existing parent."""
    while True:
        try:
            return os.stat(path).st_dev
        except (FileNotFoundError, NotADirectoryError):
            above = os.path.dirname(path)
            if above == path:
                raise
            path = above


def _printed(device: int | None) -> str:
    assert device is not None
    return f"{os.major(device)}:{os.minor(device)}"
