"""Blocking calls for asyncio: what becomes of them when the task that waits is cancelled."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future, wait

import pytest

from holdfast.drivers.threads import Threads
from holdfast.errors import StorageDownError, StorageError

pytestmark = pytest.mark.clocked


def test_results_and_errors_come_back(no_leaks: None) -> None:
    """The caller gets what the call returned or raised."""

    async def main() -> None:
        threads = Threads(2, uri="x")
        assert await threads.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await threads.run(divmod, 7, 0)
        await threads.close(1)

    asyncio.run(main())


def test_a_cancelled_task_returns_only_after_its_thread(no_leaks: None) -> None:
    """However often it is cancelled: the thread uses the caller's buffer until it ends."""
    inside, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        inside.set()
        assert go_on.wait(30)
        time.sleep(0.05)
        ended.set()

    async def main() -> None:
        threads = Threads(1, uri="x")
        task = asyncio.ensure_future(threads.run(work))
        await asyncio.to_thread(inside.wait, 10)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()
        await threads.close(1)

    asyncio.run(main())


def test_the_error_of_a_cancelled_call_is_kept(no_leaks: None) -> None:
    """A failure that nobody waited for is the cause of the CancelledError, not lost."""
    inside, go_on = threading.Event(), threading.Event()

    def work() -> None:
        inside.set()
        assert go_on.wait(30)
        raise OSError(5, "Input/output error")

    async def main() -> None:
        threads = Threads(1, uri="x")
        task = asyncio.ensure_future(threads.run(work))
        await asyncio.to_thread(inside.wait, 10)
        task.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert isinstance(caught.value.__cause__, OSError)
        await threads.close(1)

    asyncio.run(main())


def test_a_call_that_waits_for_a_thread_is_never_made(no_leaks: None) -> None:
    """Cancelled in the queue, it returns at once, although the thread before it still works."""
    inside, go_on = threading.Event(), threading.Event()
    made: list[int] = []

    def work() -> None:
        inside.set()
        assert go_on.wait(30)

    async def main() -> None:
        threads = Threads(1, uri="x")
        first = asyncio.ensure_future(threads.run(work))
        await asyncio.to_thread(inside.wait, 10)
        second = asyncio.ensure_future(threads.run(made.append, 2))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert not first.done()
        go_on.set()
        await first
        await threads.close(1)

    asyncio.run(main())
    assert made == []


def test_close_waits_and_then_says_so(no_leaks: None) -> None:
    """What runs is waited for, as long as was asked; nothing new begins."""
    inside, go_on = threading.Event(), threading.Event()

    def work() -> None:
        inside.set()
        assert go_on.wait(30)

    async def main() -> None:
        threads = Threads(1, uri="file:///x")
        task = asyncio.ensure_future(threads.run(work))
        await asyncio.to_thread(inside.wait, 10)
        with pytest.raises(StorageDownError, match=r"1 operations still run 0.01 s.*file:///x"):
            await threads.close(0.01)
        with pytest.raises(StorageError, match="closed"):
            await threads.run(work)
        go_on.set()
        await threads.close(10)
        await task

    asyncio.run(main())


def test_calls_may_end_while_close_looks_at_them(
    no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs is counted while threads take from it: close waits for all of it, and does not
    fail."""
    go_on = threading.Event()
    wrap = asyncio.wrap_future

    def wrapped(work: Future[bool]) -> asyncio.Future[bool]:
        go_on.set()
        wait([work], 10)
        time.sleep(0.01)  # those who wait for a future hear of it just before its callbacks do
        return wrap(work)

    async def main() -> None:
        threads = Threads(3, uri="x")
        calls = [asyncio.ensure_future(threads.run(go_on.wait, 10)) for _ in range(3)]
        await asyncio.sleep(0)
        monkeypatch.setattr(asyncio, "wrap_future", wrapped)
        await threads.close(5)
        assert await asyncio.gather(*calls) == [True] * 3

    asyncio.run(main())
