"""Blocking calls of simulated processes. Each has a thread, and only one thread runs at a time.

A caller's thread runs until it waits for a future of the engine. Then the loop runs until the
future is done. So a schedule decides the order of everything, as it does for coroutines.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any, TypeVar

from holdfast.storage.runtime.engine import EngineFuture

from .loop import PROCESS, Crashed, SimLoop

T = TypeVar("T")


class _Caller(threading.Thread):
    """A thread of a simulated process. ``waits_for``: None once it has ended."""

    def __init__(self, loop: SimLoop, call: Callable[[], object]) -> None:
        super().__init__(daemon=True, name="simulated-caller")
        self.loop = loop
        self.waits_for: tuple[Future[Any], float | None] | None = None
        self.error: BaseException | None = None
        self.result: object = None
        self.is_dead = False
        self._call = call
        self._context = copy_context()
        self._mine = threading.Semaphore(0)
        self._loops = threading.Semaphore(0)

    def go_on(self) -> None:
        """Run until the thread waits or has ended."""
        self.waits_for = None
        if self.ident is None:
            self.start()
        else:
            self._mine.release()
        self._loops.acquire()

    def run(self) -> None:
        try:
            self.result = self._context.run(self._call)
        except BaseException as error:
            self.error = error
        self._loops.release()

    def wait(self, future: Future[Any], timeout_s: float | None) -> None:
        """Run the loop until ``future`` is done. Raises Crashed if the process has died."""
        if not self.is_dead:
            self.waits_for = future, timeout_s
            self._loops.release()
            self._mine.acquire()
        if self.is_dead:
            raise Crashed


async def blocking(call: Callable[[], T]) -> T:
    """Return the result of ``call``, which makes blocking calls of the engine."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    caller = _Caller(loop, call)
    caller.go_on()
    while caller.waits_for is not None:
        future, timeout_s = caller.waits_for
        waiting = asyncio.wrap_future(future)
        try:
            await asyncio.wait([waiting], timeout=timeout_s)
            if waiting.done() and not waiting.cancelled():
                waiting.exception()  # mark it as retrieved: the caller asks for it
        except BaseException:
            caller.is_dead = True
            while caller.waits_for is not None:
                caller.go_on()
            raise
        caller.go_on()
    caller.join()
    if caller.error is not None:
        raise caller.error
    return caller.result  # type: ignore[return-value]


def start(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Replace ``runtime.engine.start``."""
    caller = threading.current_thread()
    future = EngineFuture[T]()
    if not isinstance(caller, _Caller):
        loop: Any = asyncio.get_running_loop()
    elif caller.is_dead:
        coroutine.close()
        raise Crashed
    else:
        loop = caller.loop
    task = loop.create_task(coroutine, context=copy_context())

    def ended(task: asyncio.Task[T]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            future.set_result(task.result())
        else:
            future.set_exception(error)

    task.add_done_callback(ended, context=copy_context())
    return future


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Replace ``runtime.engine.run``."""
    return start(coroutine).result()


def wait(future: Future[Any], timeout: float | None) -> None:
    """Replace ``EngineFuture._wait``."""
    if not future.done():
        caller = threading.current_thread()
        assert isinstance(caller, _Caller), "a coroutine would wait for itself"
        caller.wait(future, timeout)


def sleep(delay_s: float) -> None:
    """Let time pass."""
    run(asyncio.sleep(delay_s))


class OfProcess:
    """A module's global object. Each simulated process has its own."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._name = f"own-{id(self)}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own(), name)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own()[key] = value

    def _own(self) -> Any:
        process: Any = PROCESS.get()
        with contextlib.suppress(AttributeError):
            return getattr(process, self._name)
        own = self._make()
        setattr(process, self._name, own)
        return own
