"""Test users' callbacks: on a thread of their own, in order, and never on the engine's."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import fresh_uri, saved

import holdfast
from holdfast.storage.runtime.engine import start
from holdfast.storage.runtime.progress import ProgressReporter

pytestmark = pytest.mark.clocked

Calls = list[tuple[int, int]]
Progress = Callable[[int, int], None]
NBYTES = 17 << 20
STATE = {"x": torch.zeros(NBYTES, dtype=torch.uint8)}


@pytest.fixture(scope="module")
def uri() -> str:
    """Save a checkpoint; return its URI."""
    uri = saved(STATE)
    return uri


def verify(uri: str, progress: Progress) -> None:
    """Verify a checkpoint."""
    with holdfast.open(uri) as checkpoint:
        checkpoint.verify(progress=progress)


def copy(uri: str, progress: Progress) -> None:
    """Copy a checkpoint."""
    holdfast.copy(uri, fresh_uri(), progress=progress)


@pytest.mark.parametrize("operate", [copy, verify])
def test_slow_callback_delays_no_save(uri: str, operate: Callable[[str, Progress], None]) -> None:
    """While a progress callback hangs, other saves and loads of the process continue."""
    entered, leave = threading.Event(), threading.Event()

    def stand_still(done: int, total: int) -> None:
        entered.set()
        assert leave.wait(60)

    worker = threading.Thread(target=operate, args=(uri, stand_still))
    worker.start()
    assert entered.wait(60)
    holdfast.save(other := fresh_uri(), {"y": 1})
    assert holdfast.load(other) == {"y": 1}
    leave.set()
    worker.join(60)
    assert not worker.is_alive()


@pytest.mark.parametrize(
    "error", [KeyError("mine"), SystemExit(3), holdfast.UsageError("mine")], ids=repr
)
def test_error_of_a_callback_ends_the_operation(
    uri: str, error: BaseException, no_leaks: None
) -> None:
    """The caller gets the callback's exception; the engine stays usable, and no thread is left."""

    def fail(done: int, total: int) -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        copy(uri, fail)
    assert raised.value is error
    if isinstance(error, KeyError):
        with pytest.raises(KeyError, match="mine"):
            holdfast.save(fresh_uri(), STATE, progress=fail)
    assert holdfast.load(uri)["x"].numel() == NBYTES


def test_reports_arrive_rarely_in_order_and_one_at_a_time() -> None:
    """A thousand reports from several threads are few calls; the last report is always delivered."""
    calls: Calls = []
    running, overlaps = 0, set[int]()

    def callback(done: int, total: int) -> None:
        nonlocal running
        running += 1
        overlaps.add(running)
        calls.append((done, total))
        running -= 1

    with ProgressReporter(callback) as reporter:
        threads = [threading.Thread(target=reporter.report, args=(0, 1000)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for done in range(1001):
            reporter.report(done, 1000)
    assert calls == sorted(calls)
    assert calls[-1] == (1000, 1000)
    assert len(calls) < 100
    ended = list(calls)
    reporter.report(1000, 1000)
    assert calls == ended
    assert overlaps == {1}


def test_failed_operation_raises_its_own_error() -> None:
    """A callback's error does not hide the failure, and no last report is delivered."""
    calls: Calls = []
    blocked = threading.Event()

    def callback(done: int, total: int) -> None:
        calls.append((done, total))
        assert blocked.wait(60)
        raise KeyError("hidden")

    def operate() -> None:
        with ProgressReporter(callback) as reporter:
            while not calls:
                reporter.report(1, 2)
            reporter.report(2, 2)
            blocked.set()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        operate()
    assert calls == [(1, 2)]


def test_reporter_in_a_coroutine_of_the_engine() -> None:
    """A reporter in a coroutine does not block the loop, and turns SystemExit into a UsageError."""
    calls: Calls = []

    async def operation(callback: Progress) -> None:
        async with ProgressReporter(callback) as reporter:
            reporter.report(1, 2)
            reporter.report(2, 2)
            await asyncio.sleep(0)

    def calling(done: int, total: int) -> None:
        calls.append((done, total))
        holdfast.save(fresh_uri(), {"x": 1})

    start(operation(calling)).result(60)
    assert calls[-1] == (2, 2)
    with pytest.raises(holdfast.UsageError, match="SystemExit"):
        start(operation(lambda done, total: sys.exit(3))).result(60)


def test_callback_runs_in_the_context_of_its_caller(uri: str) -> None:
    """A callback sees its caller's context variables, such as the fields of a log."""
    who = contextvars.ContextVar("who", default="nobody")
    who.set("the caller")
    seen: set[str] = set()
    copy(uri, lambda done, total: seen.add(who.get()))
    assert seen == {"the caller"}


def test_without_a_callback_there_is_no_thread() -> None:
    """Without a callback, the reporter starts no thread."""
    before = set(threading.enumerate())
    with ProgressReporter(None) as reporter:
        reporter.report(1, 2)
        assert set(threading.enumerate()) == before


WAITING = {
    "save": lambda uri, opened: holdfast.save(fresh_uri(), {"x": 1}),
    "async_save": lambda uri, opened: holdfast.async_save(fresh_uri(), {"x": 1}),
    "wait": lambda uri, opened: holdfast.async_save(fresh_uri(), {"x": 1}, lazy=True).wait(),
    "load": lambda uri, opened: holdfast.load(uri),
    "load into": lambda uri, opened: holdfast.load(uri, into={"x": torch.zeros(NBYTES)}),
    "open": lambda uri, opened: holdfast.open(uri),
    "list": lambda uri, opened: holdfast.list_checkpoints(uri),
    "copy": lambda uri, opened: holdfast.copy(uri, fresh_uri()),
    "diff": lambda uri, opened: holdfast.diff(uri, uri),
    "export": lambda uri, opened: holdfast.export(uri, fresh_uri()),
    "import": lambda uri, opened: holdfast.import_(fresh_uri(), uri),
    "fence": lambda uri, opened: (
        holdfast.async_save(fresh_uri(), {"x": torch.ones(10)}, lazy=True),
        holdfast.fence(),
    ),
    "prune": lambda uri, opened: holdfast.prune(uri, keep_last=1),
    "verify": lambda uri, opened: opened.verify(),
    "read": lambda uri, opened: opened.read("x"),
    "read_bytes": lambda uri, opened: opened.read_bytes("x"),
}


@pytest.mark.parametrize("name", WAITING)
def test_blocking_call_on_the_engines_thread_is_refused(uri: str, name: str) -> None:
    """A blocking call there would wait for itself, and block every other save of the process.

    Only close() is allowed, since the garbage collector may call it on any thread.
    """
    opened = holdfast.open(uri)

    async def call() -> None:
        WAITING[name](uri, opened)

    async def close() -> None:
        opened.close()

    with pytest.raises(holdfast.UsageError, match="wait for itself"):
        start(call()).result(60)
    start(close()).result(60)
    assert holdfast.load(uri)["x"].numel() == NBYTES


def test_coroutine_can_be_cancelled() -> None:
    """The future of a cancelled coroutine is done only after the coroutine's cleanup."""
    began, heard, cleaned = threading.Event(), threading.Event(), threading.Event()

    async def endless() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            heard.set()
            await asyncio.to_thread(cleaned.wait, 60)

    future = start(endless())
    assert began.wait(60)
    assert future.cancel()
    assert heard.wait(60)
    assert not future.done()
    cleaned.set()
    with pytest.raises(CancelledError):
        future.result(60)
    assert not future.cancel()


class Heard:
    """The calls of a progress callback, and the threads that made them."""

    def __init__(self) -> None:
        self.calls: Calls = []
        self.threads: set[str] = set()

    def __call__(self, done: int, total: int) -> None:
        self.calls.append((done, total))
        self.threads.add(threading.current_thread().name)

    def check(self) -> None:
        """Fail unless the calls describe one finished operation; blocks are read whole."""
        done = [done for done, _ in self.calls]
        (total_nbytes,) = {total for _, total in self.calls}
        assert done == sorted(done)
        assert done[-1] == total_nbytes
        assert 0 <= total_nbytes - NBYTES < 1 << 20
        assert self.threads == {"holdfast-progress"}


def test_a_load_says_how_far_it_is(uri: str) -> None:
    """A load reports progress, with or without a target, on a thread that may call Holdfast."""
    for into in (dict(STATE), None):
        heard = Heard()

        def progress(done: int, total: int, heard: Heard = heard) -> None:
            heard(done, total)
            with holdfast.open(uri) as checkpoint:
                assert checkpoint.nbytes == NBYTES

        holdfast.load(uri, into=into, progress=progress)
        heard.check()


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_a_save_says_how_far_it_is(compression: Any) -> None:
    """A save reports the bytes written, in the foreground and in the background."""
    for save in (holdfast.save, holdfast.async_save):
        heard = Heard()
        done = save(fresh_uri(), STATE, progress=heard, compression=compression)
        if isinstance(done, holdfast.SaveHandle):
            done.wait()
        heard.check()


def test_a_failure_that_is_raised_is_not_logged_as_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A save raises its error without logging it; a Checkpointer continues and logs it once."""
    (tmp_path / "file").touch()
    state = {"w": torch.ones(10)}
    with pytest.raises(holdfast.HoldfastError):
        holdfast.save(tmp_path / "file" / "c", state)
    assert caplog.records == []
    holdfast.save(tmp_path / "run" / "step-00000001", state, step=1)
    checkpoints = holdfast.Checkpointer(tmp_path / "run", grace_s=None)
    with checkpoints:
        assert checkpoints.resume(state) == 1
        checkpoints.save(2, state)
        checkpoints.wait()
        caplog.clear()
        (tmp_path / "run" / "step-00000003").touch()
        checkpoints.save(3, state)
        checkpoints.wait()
    assert len([record for record in caplog.records if "not saved" in record.getMessage()]) == 1
    assert not [record for record in caplog.records if "the save to" in record.getMessage()]
