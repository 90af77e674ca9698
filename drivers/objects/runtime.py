"""obstore's threads, one set for the process. They do not survive a fork, and what needs them in the child would hang."""

from __future__ import annotations

import os

from ...errors import StorageError

__all__ = ["use"]

_pid: int | None = None


def use(uri: str) -> None:
    """Called before anything that starts obstore's threads, or needs them.

    Raises StorageError in a process that was forked from one that had started them.
    """
    global _pid  # noqa: PLW0603 - as global as the threads are
    if _pid is None:
        _pid = os.getpid()
    if _pid != os.getpid():
        raise StorageError(
            "object stores cannot be used in a process forked from one that used them",
            uri=uri,
            advice='Start processes with the method "spawn" or "forkserver", or fork before the first use.',
        )
