"""Waiting out a cancellation, and groups of coroutines: nothing is left behind."""

from __future__ import annotations

import asyncio

import pytest
from support.drivers import asynchronous

from holdfast.core.aio import all_or_none, at_most, side_by_side

pytestmark = pytest.mark.clocked


@asynchronous
async def test_side_by_side_returns_and_fails_in_order(no_leaks: None) -> None:
    """The order of ends does not matter. Nothing is left running, also after a cancellation."""
    ended: list[str] = []

    async def work(name: str, pause_s: float, error: type[Exception] | None = None) -> str:
        try:
            await asyncio.sleep(pause_s)
        finally:
            ended.append(name)
        if error is not None:
            raise error(name)
        return name

    assert await side_by_side(work("a", 0.02), work("b", 0.01)) == ["a", "b"]
    assert ended == ["b", "a"]
    with pytest.raises(KeyError, match="c"):
        await side_by_side(work("c", 0.02, KeyError), work("d", 0.01, ValueError), work("e", 0.03))
    assert ended[2:] == ["d", "c", "e"]
    caller = asyncio.create_task(side_by_side(work("f", 60), work("g", 60)))
    await asyncio.sleep(0.01)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert sorted(ended[5:]) == ["f", "g"]


def test_at_most_runs_all_and_raises_the_first_error_at_the_end() -> None:
    """The others are not abandoned."""
    running, most, done = 0, 0, []

    async def one(i: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        done.append(i)
        if i in (3, 5):
            raise OSError(f"number {i}")

    with pytest.raises(OSError, match="number 3"):
        asyncio.run(at_most(4, (one(i) for i in range(20))))
    assert sorted(done) == list(range(20))
    assert most == 4


@asynchronous
async def test_at_most_closes_coroutines_that_never_started(no_leaks: None) -> None:
    """Python would warn of a coroutine that was never awaited."""
    begun: list[int] = []

    async def work(number: int) -> None:
        begun.append(number)
        await asyncio.sleep(60)

    caller = asyncio.create_task(at_most(2, (work(number) for number in range(5))))
    await asyncio.sleep(0.01)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert begun == [0, 1]


@pytest.mark.parametrize("cancels_itself", [False, True])
@asynchronous
async def test_first_failure_cancels_the_others(cancels_itself: bool) -> None:
    """The others are awaited. A coroutine that cancels itself counts as a failure."""
    ended = []

    async def fails() -> None:
        await asyncio.sleep(0)
        if cancels_itself:
            raise asyncio.CancelledError
        raise OSError(5, "Input/output error")

    async def waits() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            ended.append("waits")

    with pytest.raises(asyncio.CancelledError if cancels_itself else OSError):
        await all_or_none([waits(), fails(), waits()])
    assert ended == ["waits", "waits"]


@asynchronous
async def test_cancelled_caller_cancels_all() -> None:
    """Each is cancelled once, and has ended when the caller returns."""
    ended = []

    async def waits() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            ended.append("waits")
            raise

    caller = asyncio.create_task(all_or_none([waits(), waits()]))
    await asyncio.sleep(0)
    for _ in range(3):
        caller.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended == ["waits", "waits"]
