"""obstore's threads, one set for the process. They do not survive a fork, and what needs them in
the child would hang.

Nor may the interpreter end while one of them waits for its lock: such a thread is made to unwind,
Rust does not let it, and the process, whose work is done, dies of SIGABRT. A thread waits for the
lock a moment longer than the task that awaited its result takes to go on; on a busy machine, much
longer.
So the end of the process waits for them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import time
from pathlib import Path

from ...errors import StorageError

__all__ = ["settle", "use", "wake"]

_NAME = "tokio-runtime-w"  # the kernel keeps 15 letters
_SETTLE_S = 5.0
_LOOK_S = 0.005
_TASKS = Path("/proc/self/task")

_pid: int | None = None


def use(uri: str) -> None:
    """Called before anything that starts obstore's threads, or needs them.

    Raises StorageError in a process that was forked from one that had started them.
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
    """Have obstore's threads look again at what they have to do, now and a moment later.

    A connection of a store that is let go just as a thread falls asleep is otherwise closed only
    when any store is used next: about one time in fifty, after a listing. After a call that was
    cancelled a thread lets go last, later than we do.
    """
    import obstore
    from obstore.store import MemoryStore

    await obstore.list(MemoryStore()).collect_async()
    await asyncio.sleep(_LOOK_S)
    await obstore.list(MemoryStore()).collect_async()


def settle() -> None:
    """Leave the interpreter's lock to obstore's threads until none of them wants it; for a few
    seconds at most.

    A thread that waited for the lock can run as soon as this one sleeps. So when all of them sleep
    after that, twice, none waits. Where there is no /proc it sleeps for a moment.
    """
    if _pid != os.getpid():
        return
    deadline_s = time.monotonic() + _SETTLE_S
    asleep = 0
    while asleep < 2 and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S if _TASKS.is_dir() else 20 * _LOOK_S)
        if _all_sleep():
            asleep = asleep + 1
        else:
            asleep = 0


def _all_sleep() -> bool:
    for task in _TASKS.glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if name == _NAME and rest.split()[0] in "RD":
                return False
    return True
