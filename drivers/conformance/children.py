"""Child processes on the same storage, which race or die in the middle of an upload.

Run as ``python -m holdfast.drivers.conformance.children URI TASK NAME``. Prints the results of the
task.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable

from ...errors import ExistsError, NotFoundError
from ..checks.ground import begun, store
from ..contract import Driver
from ..registry import opened_driver
from .place import Place

CHILD_TIMEOUT_S = 60.0
"""Time limit of one child in seconds, including interpreter start."""


async def child_of(place: Place, task: str, name: str, *, dies: bool = False) -> str:
    """Run ``task`` at this place in another process and return its output. With ``dies``, the child
    is expected to kill itself."""
    command = [
        sys.executable,
        "-m",
        "holdfast.drivers.conformance.children",
        str(place.uri),
        task,
        name,
    ]
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(CHILD_TIMEOUT_S):
            printed, _ = await child.communicate()
    except TimeoutError:
        child.kill()
        await child.wait()
        raise
    assert child.returncode == (-signal.SIGKILL if dies else 0), (
        f"{task} {name}: exit status {child.returncode}"
    )
    return printed.decode()


async def sees_children(place: Place) -> bool:
    """Return whether this process sees objects stored by another one here. Removes its test
    object."""
    await child_of(place, "show", "seen")
    driver = place.open()
    try:
        await driver.get("seen")
    except NotFoundError:
        return False
    await driver.delete("seen")
    return True


async def _show(driver: Driver, name: str) -> None:
    await driver.put(name, b"seen")


async def _race(driver: Driver, name: str) -> None:
    for n in range(20):
        try:
            await driver.put(f"race/{n}", name.encode() * 1000, exclusive=True)
        except ExistsError:
            continue
        print(f"race/{n}")


async def _die_writing(driver: Driver, name: str) -> None:
    part_nbytes = max(driver.traits.part_min_nbytes, 64 << 10)
    await begun(driver, name, bytes(part_nbytes), part_nbytes + 1000)
    _die()


async def _die_committed(driver: Driver, name: str) -> None:
    await store(driver, name, b"c" * 100_000)
    await driver.put(f"{name}-put", b"p" * 1000)
    _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


_TASKS: dict[str, Callable[[Driver, str], Awaitable[None]]] = {
    "show": _show,
    "race": _race,
    "die-writing": _die_writing,
    "die-committed": _die_committed,
}


async def main() -> None:
    """Run the task given on the command line."""
    uri, task, name = sys.argv[1:4]
    async with opened_driver(uri) as driver:
        await _TASKS[task](driver, name)


if __name__ == "__main__":
    asyncio.run(main())
