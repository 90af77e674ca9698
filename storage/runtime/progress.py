"""Calls a user's progress callback on a separate thread, never on the engine's.

A callback may take long, and it may call Holdfast. On the engine's thread, the former would delay
every save and load of the process, and the latter would wait for itself.

Scope: one callback of one operation. The caller decides what to display.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Self

from ...errors import UsageError

ProgressCallback = Callable[[int, int], None]
"""Called with the bytes done so far, and the total bytes."""

EVERY_S = 0.1
"""Minimum interval between two calls."""


class ProgressReporter:
    """Reports progress to ``callback``; a context manager around the operation, sync or async.

    :meth:`report` may be called from any thread, and does not wait for the callback. Calls of the
    callback never overlap, and arrive in the order of the reports. Reports during a call, or within
    ``EVERY_S`` of the last one, are replaced by the newest.

    After a successful operation, the last report is always delivered. The end of the block waits
    for a running call; afterwards the callback is not called again. An error of the callback ends
    the operation: the next :meth:`report` raises it, or else the end of the block.

    The callback sees the context variables of the thread that created the reporter. Without a
    callback, there is no thread, and nothing happens.
    """

    def __init__(self, callback: ProgressCallback | None) -> None:
        self._callback = callback
        self._context = contextvars.copy_context()
        self._changed = threading.Condition()
        self._latest: tuple[int, int] | None = None
        self._closed = False
        self._error: BaseException | None = None
        self._ended: Future[None] | None = None
        self._has_thread = False

    def report(self, done_nbytes: int, total_nbytes: int) -> None:
        """Record the operation's progress. Raises the callback's error; or UsageError in place of
        an error that is not an Exception, such as SystemExit, which would end the engine."""
        if self._callback is None:
            return
        with self._changed:
            self._raise_error()
            if self._closed:
                return
            self._latest = (done_nbytes, total_nbytes)
            self._changed.notify_all()
            if self._ended is None:
                self._ended = Future()
                thread = threading.Thread(target=self._run, name="holdfast-progress", daemon=True)
                # While the interpreter shuts down, no thread starts: the end of the block reports.
                with contextlib.suppress(RuntimeError):
                    thread.start()
                    self._has_thread = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ended = self._close(deliver=error is None)
        if ended is not None:
            ended.result()
        # Unless the operation has failed for another reason.
        if self._error is not None and (error is None or error.__cause__ is self._error):
            raise self._error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ended = self._close(deliver=error is None)
        if ended is not None:
            await asyncio.shield(asyncio.wrap_future(ended))
        if error is None:
            self._raise_error()

    def _close(self, *, deliver: bool) -> Future[None] | None:
        """Tell the thread to end; return the future of its end, if there is a thread."""
        with self._changed:
            self._closed = True
            if not deliver:
                self._latest = None
            self._changed.notify_all()
        if self._ended is not None and not self._has_thread:
            self._run()
        return self._ended

    def _raise_error(self) -> None:
        if isinstance(self._error, Exception):
            raise self._error
        if self._error is not None:
            raise UsageError(
                f"the progress callback raised {type(self._error).__name__}"
            ) from self._error

    def _run(self) -> None:
        assert self._ended is not None
        assert self._callback is not None
        try:
            while (report := self._next()) is not None:
                self._context.run(self._callback, *report)
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, EVERY_S)
        except BaseException as error:
            with self._changed:
                self._error = error
        finally:
            self._ended.set_result(None)

    def _next(self) -> tuple[int, int] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._latest is not None)
            report = self._latest
            self._latest = None
            return report
