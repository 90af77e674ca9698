"""Trials of cancellation: every call is cancelled at each await, immediately and a moment later.
Nothing may be torn or left behind, and everything stays usable."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any

from holdfast.drivers.conformance.place import Place
from holdfast.drivers.conformance.trials import Need, aligned, begun, bytes_of, store, trial
from holdfast.drivers.contract import Driver
from holdfast.errors import ExistsError, NotFoundError

CONTENT = bytes_of(100_000)
DELAYS_S = (0.0, 0.004)
"""Delays between suspension and cancellation: immediate, and while threads and servers are
working."""

SUSPENSIONS_MAX = 100
"""Maximum number of suspensions tried. No operation of the contract suspends more often with small
objects."""


class Interrupt:
    """Cancels an awaited call when it suspends for the ``at``-th time, after ``delay_s``."""

    def __init__(self, at: int, delay_s: float) -> None:
        self.at = at
        self.delay_s = delay_s
        self.reached = False
        """True if any call suspended that often."""

    async def __call__(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Await ``work`` and return whether it was cancelled rather than completed. Other errors
        propagate.

        Fails if the call swallowed an immediate cancellation.
        """
        suspended = _Suspended(self, work)
        task = asyncio.ensure_future(suspended)
        await asyncio.wait([task])
        if suspended.timer is not None:
            suspended.timer.cancel()
        if task.cancelled():
            return True
        task.result()
        assert not (suspended.struck and not self.delay_s), "the cancellation was swallowed"
        return False


class _Suspended(Awaitable[Any]):
    """The call. A reference cycle keeps its last error, as callers may, and with it the variables
    of the functions that the error has passed through: those must not keep anything open."""

    def __init__(self, interrupt: Interrupt, work: Coroutine[Any, Any, Any]) -> None:
        self.interrupt = interrupt
        self.work = work
        self.timer: asyncio.TimerHandle | None = None
        self.struck = False

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self.work.__await__()
        error = None
        for n in itertools.count(1):
            try:
                if error is not None:
                    waited_for = inner.throw(error)
                else:
                    waited_for = inner.send(None)
            except StopIteration as stop:
                return stop.value
            if n == self.interrupt.at:
                self._strike()
            try:
                yield waited_for
                error = None
            except BaseException as raised:  # forwarded to the call, including cancellation
                error = raised
            del waited_for  # its result may have a connection

    def _strike(self) -> None:
        self.struck = self.interrupt.reached = True
        task = asyncio.current_task()
        assert task is not None
        if self.interrupt.delay_s:
            self.timer = asyncio.get_running_loop().call_later(self.interrupt.delay_s, task.cancel)
        else:
            task.cancel()


def at_every_await(
    attempt: Callable[[Place, Driver, Interrupt, str], Coroutine[Any, Any, None]],
    needs: Sequence[Need] = (),
) -> Callable[[Place], None]:
    """Turn ``attempt`` into a trial that runs it with an interrupt at the first suspension, at the
    second, and so on, until it completes; then nothing may use space after a deletion.

    ``attempt`` receives a driver and a unique key below ``d``. It sets up, awaits calls through the
    interrupt, and checks the results.
    """

    @functools.wraps(attempt)
    async def attempts(place: Place) -> None:
        driver = place.open()
        for delay_s in DELAYS_S:
            for at in range(1, SUSPENSIONS_MAX):
                interrupt = Interrupt(at, delay_s)
                await attempt(place, driver, interrupt, f"d/{delay_s}-{at}")
                if not interrupt.reached:
                    break
        await place.looker.delete_all("d")
        await place.holds()

    vars(attempts).pop("__wrapped__")  # pytest would take its parameters for fixtures
    return trial(*needs)(attempts)


async def found(driver: Driver, key: str) -> bytes | None:
    """Return the object's content, or None if it does not exist."""
    try:
        return await driver.get(key)
    except NotFoundError:
        return None


@at_every_await
async def test_a_cancelled_put_is_whole_or_absent(
    place: Place, driver: Driver, interrupt: Interrupt, key: str
) -> None:
    """The old or the new object is there, whole, and the driver stays usable."""
    await driver.put(key, b"old")
    cancelled = await interrupt(driver.put(key, CONTENT))
    assert await driver.get(key) in ((b"old", CONTENT) if cancelled else (CONTENT,))
    await driver.put(key, b"next")
    assert await driver.get(key) == b"next"


@at_every_await
async def test_a_cancelled_exclusive_put_took_the_key_or_not(
    place: Place, driver: Driver, interrupt: Interrupt, key: str
) -> None:
    """Either the whole object exists and a second put is rejected, or the key is free."""
    cancelled = await interrupt(driver.put(key, CONTENT, exclusive=True))
    there = await found(driver, key)
    assert there in ((None, CONTENT) if cancelled else (CONTENT,))
    try:
        await driver.put(key, b"second", exclusive=True)
    except ExistsError:
        assert there == CONTENT
    else:
        assert there is None


@at_every_await
async def test_a_cancelled_read_leaves_the_buffer_alone(
    place: Place, driver: Driver, interrupt: Interrupt, key: str
) -> None:
    """Once the call has returned, the driver no longer writes to the caller's memory."""
    into = aligned(90_000)
    await driver.put(key, CONTENT)
    cancelled = await interrupt(driver.read(key, 1, into))
    if not cancelled:
        assert into == CONTENT[1:90_001]
    into[:] = b"\xaa" * len(into)
    await asyncio.sleep(0.02)
    assert into == b"\xaa" * len(into)
    assert await driver.get(key) == CONTENT


@at_every_await
async def test_cancelled_looks_change_nothing(
    place: Place, driver: Driver, interrupt: Interrupt, key: str
) -> None:
    """get, stat and list can be cancelled anywhere and repeated."""

    async def listed() -> list[str]:
        return [info.key async for info in driver.list(key)]

    await driver.put(key, CONTENT)
    for look in (lambda: driver.get(key), lambda: driver.stat(key), listed):
        await interrupt(look())
        assert await listed() == [key]
        assert (await driver.stat(key)).nbytes == len(CONTENT)
        assert await driver.get(key) == CONTENT


@at_every_await
async def test_a_cancelled_create_shows_nothing(
    place: Place, driver: Driver, interrupt: Interrupt, key: str
) -> None:
    """Nothing is visible, the key can be used, and delete_all removes any leftovers."""
    await interrupt(driver.create(key, len(CONTENT)))
    assert await found(driver, key) is None
    await store(driver, key, CONTENT)
    assert await driver.get(key) == CONTENT
    await driver.delete(key)


@at_every_await
async def test_a_cancelled_write_can_only_be_aborted(
    place: Place, driver: Driver, interrupt: Interrupt, key: str
) -> None:
    """The caller may reuse its memory at once, abort leaves nothing behind, and other uploads to
    the key still work."""
    part_nbytes = place.part_nbytes
    content = aligned(part_nbytes)
    upload = await begun(driver, key, content, 2 * part_nbytes)
    await interrupt(upload.write(part_nbytes, content))
    content[:] = b"\xaa" * part_nbytes
    await upload.abort()
    assert await found(driver, key) is None
    if place.probe is not None:
        assert place.probe.list() == []


@at_every_await
async def test_a_cancelled_commit_is_whole_or_absent(
    place: Place, driver: Driver, interrupt: Interrupt, key: str
) -> None:
    """The old or the new object is there, whole; abort is safe afterwards and leaves nothing
    unfinished."""
    await driver.put(key, b"old")
    upload = await begun(driver, key, CONTENT)
    cancelled = await interrupt(upload.commit())
    await upload.abort()
    assert await driver.get(key) in ((b"old", CONTENT) if cancelled else (CONTENT,))
    await place.holds(key)
    await driver.delete(key)


@at_every_await
async def test_a_cancelled_abort_can_be_made_again(
    place: Place, driver: Driver, interrupt: Interrupt, key: str
) -> None:
    """The second abort leaves nothing behind."""
    upload = await begun(driver, key, CONTENT)
    await interrupt(upload.abort())
    await upload.abort()
    await place.holds()


@at_every_await
async def test_cancelled_deletions_can_be_made_again(
    place: Place, driver: Driver, interrupt: Interrupt, key: str
) -> None:
    """delete, delete_all and sweep, cancelled anywhere, spare unrelated objects and complete when
    repeated."""
    keys = [f"{key}/{n}" for n in range(3)]
    for name in (*keys, "d/kept"):
        await driver.put(name, b"x")
    await interrupt(driver.sweep(key))
    await driver.sweep(key)
    assert await place.keys() == [*keys, "d/kept"]
    await interrupt(driver.delete_all(key))
    await driver.delete_all(key)
    assert await place.keys() == ["d/kept"]
    await driver.put(f"{key}/x", b"x")
    await interrupt(driver.delete(f"{key}/x"))
    await driver.delete(f"{key}/x")
    await place.holds("d/kept")


@at_every_await
async def test_a_cancelled_close_can_be_made_again(
    place: Place, driver: Driver, interrupt: Interrupt, key: str
) -> None:
    """The second close releases everything, as checked at the end of every trial."""
    driver = place.open()
    await driver.put(key, CONTENT)
    await begun(driver, key, bytes(10))
    await interrupt(driver.close())
    await driver.close()
    assert await place.looker.get(key) == CONTENT
    await place.looker.delete(key)
