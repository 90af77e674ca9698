"""Test calls of blocking and of asynchronous clients, and their cancellation."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future, wait
from contextlib import nullcontext
from pathlib import Path

import pytest
from support.asynchronous import DictDriver
from support.conformance_run import run_conformance
from support.drivers import asynchronous
from support.given import install

from holdfast.drivers.tasks import Tasks
from holdfast.drivers.threads import Threads
from holdfast.drivers.uri import parse
from holdfast.errors import StorageDownError, StorageError

pytestmark = pytest.mark.clocked


@asynchronous
async def test_a_cancelled_task_returns_only_after_its_thread(no_leaks: None) -> None:
    """A cancelled task waits for its thread, which uses its buffer, and keeps the error."""
    inside, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        inside.set()
        assert go_on.wait(30)
        time.sleep(0.05)
        ended.set()
        raise OSError(5, "Input/output error")

    threads = Threads(1, uri="x")
    task = asyncio.ensure_future(threads.run(work))
    await asyncio.to_thread(inside.wait, 10)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.01)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert ended.is_set()
    assert isinstance(caught.value.__cause__, OSError)
    await threads.close(1)


@asynchronous
async def test_close_waits_for_running_calls_and_queued_ones_can_be_cancelled(
    no_leaks: None,
) -> None:
    """A queued call that is cancelled is never made; a running one makes close wait, or fail."""
    inside, go_on = threading.Event(), threading.Event()
    made: list[int] = []

    def work() -> None:
        inside.set()
        assert go_on.wait(30)

    threads = Threads(1, uri="file:///x")
    running = asyncio.ensure_future(threads.run(work))
    await asyncio.to_thread(inside.wait, 10)
    queued = asyncio.ensure_future(threads.run(made.append, 2))
    await asyncio.sleep(0)
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued
    assert not running.done()
    with pytest.raises(StorageDownError, match=r"1 operations still run 0.01 s.*file:///x"):
        await threads.close(0.01)
    with pytest.raises(StorageError, match="closed"):
        await threads.run(work)
    go_on.set()
    await threads.close(10)
    await running
    assert made == []


@asynchronous
async def test_calls_may_end_while_close_looks_at_them(
    no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Close waits for all calls, even if some end while it counts them."""
    go_on = threading.Event()
    wrap = asyncio.wrap_future

    def wrapped(work: Future[bool]) -> asyncio.Future[bool]:
        go_on.set()
        wait([work], 10)
        time.sleep(0.01)  # those who wait for a future hear of it just before its callbacks do
        return wrap(work)

    threads = Threads(3, uri="x")
    calls = [asyncio.ensure_future(threads.run(go_on.wait, 10)) for _ in range(3)]
    await asyncio.sleep(0)
    monkeypatch.setattr(asyncio, "wrap_future", wrapped)
    await threads.close(5)
    assert await asyncio.gather(*calls) == [True] * 3


# Calls of an asynchronous client


URI = "sftp://host/x"


def tasks_of_a_driver() -> Tasks:
    """Return tasks with a short grace period."""
    return Tasks(uri=URI, errors=lambda *about: nullcontext(), grace_s=0.05)


@asynchronous
async def test_a_call_that_does_not_end_is_cancelled_after_the_grace(no_leaks: None) -> None:
    """A cancelled caller waits for its call for the grace period, and then cancels the call."""
    inside, cancelled = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        inside.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    tasks = tasks_of_a_driver()
    caller = asyncio.create_task(tasks.run("read", "a", hang))
    await inside.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(caller), 30)
    assert cancelled.is_set()
    await tasks.close(1)


@asynchronous
async def test_close_waits_for_what_runs_and_takes_nothing_new(no_leaks: None) -> None:
    """A running call completes, a new one is refused, and closing twice is allowed."""
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def work() -> str:
        inside.set()
        await go_on.wait()
        return "done"

    tasks = tasks_of_a_driver()
    caller = asyncio.create_task(tasks.run("read", "a", work))
    await inside.wait()
    closing = asyncio.create_task(tasks.close(30))
    await asyncio.sleep(0)
    with pytest.raises(StorageError, match="closed") as caught:
        await tasks.run("read", "b", work)
    assert (caught.value.uri, caught.value.key) == (URI, "b")
    assert not closing.done()
    go_on.set()
    await closing
    assert await caller == "done"
    await tasks.close(30)


@asynchronous
async def test_close_cancels_what_does_not_end(no_leaks: None) -> None:
    """After its timeout, close cancels the calls, whose callers get a StorageError, and fails."""
    inside, before = asyncio.Event(), asyncio.all_tasks()

    async def hang() -> None:
        inside.set()
        await asyncio.Event().wait()

    tasks = tasks_of_a_driver()
    caller = asyncio.create_task(tasks.run("read", "a", hang))
    await inside.wait()
    with pytest.raises(StorageDownError, match=r"1 operations still ran 0.01 s.*sftp://host/x"):
        await tasks.close(0.01)
    with pytest.raises(StorageDownError, match="read failed: the driver was closed"):
        await caller
    assert asyncio.all_tasks() == before


# A driver of an asynchronous client


@pytest.mark.nightly(7)
@pytest.mark.timeout(240)  # on a busy machine
@pytest.mark.heavy
def test_a_driver_of_an_asynchronous_client_keeps_the_contract(tmp_path: Path) -> None:
    """A driver on the base class passes every trial with nothing but calls of its client."""
    site = install(tmp_path / "site", "dict = support.asynchronous:DictDriver")
    output = run_conformance("dict://here", cwd=tmp_path, path=[site])
    assert "deviations      0 declared, 0 cases deviated" in output


@asynchronous
async def test_close_drops_what_is_unfinished_though_the_client_fails(no_leaks: None) -> None:
    """An upload that cannot be dropped does not stop close from dropping the others."""
    driver = DictDriver(parse("dict://close"))
    driver.stuck = {"b"}
    for key in ("a", "b", "c"):
        await driver.create(key, 3)
    await driver.close()
    assert sorted(driver.dropped) == ["a", "c"]
    with pytest.raises(StorageError, match="closed"):
        await driver.get("a")
