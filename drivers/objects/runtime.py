"""Guards for obstore's threads, one set per process. They do not survive a fork: a child that needs
them would hang.

The interpreter must not exit while one of them waits for the GIL either. Such a thread is forcibly
unwound, Rust does not allow that, and the process dies of SIGABRT after its work is done. A thread
may wait for the GIL a moment longer than the task that awaited its result, and much longer on a
busy machine. So process exit waits for these threads.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import time
from pathlib import Path

from ...errors import StorageError

_NAME = "tokio-runtime-w"  # the kernel keeps 15 characters
_SETTLE_S = 5.0
_LOOK_S = 0.005
_TASKS = Path("/proc/self/task")

_pid: int | None = None


def use(uri: str) -> None:
    """Record the use of obstore's threads. Called before anything that starts or needs them.

    Raises StorageError in a process forked from one that had started them.
    """
    global _pid  # noqa: PLW0603 - as global as the threads are
    if _pid is None:
        _pid = os.getpid()
        atexit.register(settle)
    if _pid != os.getpid():
        raise StorageError(
            "object stores cannot be used in a process forked from one that used them",
            uri=uri,
            advice=(
                'Start processes with the method "spawn" or "forkserver", or fork before the '
                "first use."
            ),
        )


async def wake() -> None:
    """Wake obstore's threads now and a moment later, so that they close dropped connections.

    If a store is dropped just as a thread falls asleep (about once in fifty listings), its
    connection would otherwise stay open until any store is used again. After a cancelled call, a
    thread releases it later than we do, hence the second time.
    """
    import obstore
    from obstore.store import MemoryStore

    await obstore.list(MemoryStore()).collect_async()
    await asyncio.sleep(_LOOK_S)
    await obstore.list(MemoryStore()).collect_async()


def settle() -> None:
    """Release the GIL to obstore's threads until none is waiting for it, for a few seconds at most.

    A thread waiting for the GIL can run as soon as this one sleeps. So if all of them are asleep
    twice in a row, none is waiting. Without /proc, this just sleeps for a moment.
    """
    if _pid != os.getpid():
        return
    deadline_s = time.monotonic() + _SETTLE_S
    asleep = 0
    while asleep < 2 and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S if _TASKS.is_dir() else 20 * _LOOK_S)
        if _all_sleep():
            asleep += 1
        else:
            asleep = 0


def _all_sleep() -> bool:
    for task in _TASKS.glob("*"):
        with contextlib.suppress(OSError):  # the thread has ended
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if name == _NAME and rest.split()[0] in "RD":
                return False
    return True
