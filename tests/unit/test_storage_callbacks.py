"""Callbacks of users: on a thread of their own, in order, and never on the engine's."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError

import pytest
import torch
from support.bits import fresh_uri

import holdfast
from holdfast.storage.runtime import engine
from holdfast.storage.runtime.engine import start
from holdfast.storage.runtime.progress import ProgressReporter

pytestmark = pytest.mark.clocked

Calls = list[tuple[int, int]]


def verified(uri: str, progress: Callable[[int, int], None]) -> None:
    """Verify a checkpoint."""
    with holdfast.open(uri) as checkpoint:
        checkpoint.verify(progress=progress)


WITH_PROGRESS = [
    pytest.param(lambda uri, f: holdfast.copy(uri, fresh_uri(), progress=f), id="copy"),
    pytest.param(verified, id="verify"),
]
Operation = Callable[[str, Callable[[int, int], None]], object]


NBYTES = 17 << 20


@pytest.fixture(scope="module")
def uri() -> str:
    """A checkpoint."""
    uri = fresh_uri()
    holdfast.save(uri, {"x": torch.zeros(NBYTES, dtype=torch.uint8)})
    return uri


@pytest.mark.parametrize("operate", WITH_PROGRESS)
def test_a_slow_progress_callback_holds_up_no_save(uri: str, operate: Operation) -> None:
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


@pytest.mark.nightly(4)
@pytest.mark.parametrize(
    "error", [KeyError("mine"), SystemExit(3), holdfast.UsageError("mine")], ids=repr
)
@pytest.mark.parametrize("operate", WITH_PROGRESS)
def test_what_a_progress_callback_raises_ends_the_operation(
    uri: str, operate: Operation, error: BaseException
) -> None:
    """The caller gets the exception that the callback raised, and the engine stays usable."""

    def fail(done: int, total: int) -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        operate(uri, fail)
    assert raised.value is error
    assert holdfast.load(uri)["x"].numel() == NBYTES


def test_reports_arrive_in_order_seldom_and_the_last_one_always() -> None:
    """A thousand reports are few calls, and end with the last one."""
    calls: Calls = []
    with ProgressReporter(lambda done, total: calls.append((done, total))) as reporter:
        for done in range(1001):
            reporter.report(done, 1000)
    assert calls == sorted(calls)
    assert calls[-1] == (1000, 1000)
    assert len(calls) < 100


def test_calls_of_one_callback_do_not_overlap_and_end_with_the_operation() -> None:
    """Whoever reports from many threads gets one call at a time, and none after the block."""
    running, overlaps, calls = 0, list[int](), 0

    def callback(done: int, total: int) -> None:
        nonlocal running, calls
        running += 1
        overlaps.append(running)
        calls += 1
        running -= 1

    with ProgressReporter(callback) as reporter:
        threads = [threading.Thread(target=reporter.report, args=(i, 8)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    ended = calls
    reporter.report(8, 8)
    assert set(overlaps) == {1}
    assert calls == ended


def test_a_failed_operation_raises_its_own_error_and_delivers_no_last_report() -> None:
    """A callback's error does not hide the failure."""
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


def test_a_reporter_serves_a_coroutine_of_the_engine_too() -> None:
    """A reporter in a coroutine does not block the loop, and turns SystemExit into a UsageError."""
    calls: Calls = []

    async def operation(callback: Callable[[int, int], None]) -> None:
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


def test_a_callback_sees_the_context_of_its_caller(uri: str) -> None:
    """A callback sees its caller's context variables, such as the fields of a log."""
    who = contextvars.ContextVar("who", default="nobody")
    who.set("the caller")
    seen: set[str] = set()
    holdfast.copy(uri, fresh_uri(), progress=lambda done, total: seen.add(who.get()))
    assert seen == {"the caller"}


def test_without_a_callback_there_is_no_thread() -> None:
    """Without a callback, the reporter starts no thread."""
    before = set(threading.enumerate())
    with ProgressReporter(None) as reporter:
        reporter.report(1, 2)
        assert set(threading.enumerate()) == before


def test_no_thread_outlives_its_operation(uri: str, no_leaks: None) -> None:
    """No thread outlives its operation, even if the callback raised."""
    holdfast.copy(uri, fresh_uri(), progress=lambda done, total: None)
    with pytest.raises(ZeroDivisionError):
        holdfast.copy(uri, fresh_uri(), progress=lambda done, total: 1 // 0)


WAITING = {
    "save": lambda uri: holdfast.save(fresh_uri(), {"x": 1}),
    "async_save": lambda uri: holdfast.async_save(fresh_uri(), {"x": 1}),
    "wait": lambda uri: holdfast.async_save(fresh_uri(), {"x": 1}, lazy=True).wait(),
    "load": holdfast.load,
    "load into": lambda uri: holdfast.load(uri, into={"x": torch.zeros(NBYTES, dtype=torch.uint8)}),
    "open": holdfast.open,
    "list": holdfast.list_checkpoints,
    "copy": lambda uri: holdfast.copy(uri, fresh_uri()),
    "diff": lambda uri: holdfast.diff(uri, uri),
    "export": lambda uri: holdfast.export(uri, fresh_uri()),
    "import": lambda uri: holdfast.import_(fresh_uri(), uri),
    "fence": lambda uri: (
        holdfast.async_save(fresh_uri(), {"x": torch.ones(10)}, lazy=True),
        holdfast.fence(),
    ),
    "prune": lambda uri: holdfast.prune(uri, keep_last=1),
}


@pytest.mark.nightly(6)
@pytest.mark.parametrize("name", WAITING)
def test_a_call_that_waits_is_refused_on_the_engines_thread(uri: str, name: str) -> None:
    """A blocking call on the engine's thread is refused.

    It would wait for itself, and block every other save of the process.
    """

    async def call() -> None:
        WAITING[name](uri)

    with pytest.raises(holdfast.UsageError, match="wait for itself"):
        start(call()).result(60)
    assert holdfast.load(uri)["x"].numel() == NBYTES


@pytest.mark.parametrize("name", ["verify", "read", "read_bytes", "close"])
def test_an_open_checkpoint_refuses_to_be_read_on_the_engines_thread(uri: str, name: str) -> None:
    """An open checkpoint cannot be read on the engine's thread, but may be closed there.

    The garbage collector may close it on any thread.
    """
    checkpoint = holdfast.open(uri)

    async def call() -> None:
        getattr(checkpoint, name)(*["x"] * name.startswith("read"))

    if name == "close":
        start(call()).result(60)
        return
    with checkpoint, pytest.raises(holdfast.UsageError, match="wait for itself"):
        start(call()).result(60)


def test_a_log_handler_that_saves_gets_an_error_and_no_deadlock(uri: str) -> None:
    """A log handler that saves on the engine's thread gets a UsageError instead of a deadlock."""
    outcomes: list[object] = []

    class Saving(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not engine.on_engine():
                return
            try:
                holdfast.save(fresh_uri(), {"x": 1})
            except holdfast.UsageError as error:
                outcomes.append(error.message)

    handler = Saving()
    logger = logging.getLogger("holdfast")
    logger.addHandler(handler)
    try:

        async def speak() -> None:
            logger.warning("something that is worth a line")

        start(speak()).result(60)
    finally:
        logger.removeHandler(handler)
    assert len(outcomes) == 1


def test_a_started_coroutine_can_be_cancelled() -> None:
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
