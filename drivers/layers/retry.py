"""Retries of temporary failures, and a deadline for every operation.

Only an error's ``temporary`` flag decides. Which operations are retried, and why that is safe:

- read, get, stat, list, delete, delete_all, sweep: a repetition has no further effect, whatever
  became of the first attempt.
- put: likewise. An exclusive put may find the object of its own earlier attempt, and checks for
  that (:meth:`RetryLayer.put`).
- create: the remains of a failed attempt are invisible, harmless, and swept later.
- watch: until its own timeout.
- write: never. Clients of object stores retry the request of a failed part themselves; for a
  half-written part of a file, only the driver could know where to continue.
- commit: never. A repeated fsync can succeed although the first one lost the data.

On storage behind the operating system (``remote`` is false), changing operations are never retried,
because an I/O error of a device is not transient. Reading operations are retried only on request.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar, cast

from ...core.spans import count_retry, count_throttled
from ...errors import BusyError, ExistsError, HoldfastError, NotFoundError, StorageDownError
from ..contract import Driver, ObjectInfo
from .layer import Layer, Operation, deadline, end, next_batch

T = TypeVar("T")

_log = logging.getLogger(__name__)
_READING = {"read", "get", "stat", "list"}
MANY_FOLD = 10
"""Factor by which deadlines are longer for operations that take one request per object."""
_OF_MANY = {"delete_all", "sweep"}
_CHANGING = {"put", "create", "link", "delete", "delete_all", "sweep"}


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Number of retries and time limit."""

    retries: int
    """Attempts after the first; 0 for none."""
    op_timeout_s: float | None
    """Time limit of an operation, including retries and pauses; None for no limit. Ten times as
    long for delete_all and sweep, which take many requests."""
    first_pause_s: float = 0.1
    """Maximum of the first pause. The maximum doubles with every retry, up to ``pause_max_s``. The
    actual pause is a random fraction of it, so that clients that failed together do not retry
    together."""
    pause_max_s: float = 15.0


def pause_s(
    policy: RetryPolicy, tries: int, error: HoldfastError, chance: Callable[[], float]
) -> float:
    """Return the pause after ``tries`` attempts, the last of which failed with ``error``; at least
    as long as the error asks for.

    ``chance`` returns a random number in [0, 1).
    """
    longest_s = min(policy.pause_max_s, policy.first_pause_s * 2.0 ** min(tries - 1, 60))
    asked_s = None
    if isinstance(error, BusyError):
        asked_s = error.retry_after_s
    return max(0.0, asked_s or 0.0) + longest_s * chance()


class RetryLayer(Layer):
    """Retries temporary failures with exponential back-off and full jitter, and enforces a
    deadline.

    Raises the error of the last attempt, or StorageDownError at the deadline, naming the operation
    it waited for. At the deadline the running attempt is cancelled, and the driver stops using the
    caller's buffer before the error is raised.
    """

    def __init__(
        self, inner: Driver, policy: RetryPolicy, *, chance: Callable[[], float] = random.random
    ) -> None:
        super().__init__(inner)
        self._policy = policy
        self._chance = chance
        self._again = _READING | (_CHANGING if inner.remote else set())

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        if operation.name == "abort":
            return await self._abort(operation, call)
        return await self._tried(operation, call)

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        """See :meth:`Driver.put`. A failed exclusive put may have stored its object anyway. If a
        retry finds the key taken with identical bytes, it assumes they are its own and succeeds. So
        put bytes that no other process would put."""
        failed = False

        async def once() -> None:
            nonlocal failed
            try:
                await self.inner.put(key, data, exclusive=exclusive)
            except ExistsError:
                if not (failed and await self._is_ours(key, data)):
                    raise
            except BaseException:
                failed = True
                raise

        await self._tried(Operation("put", key, len(data)), once)

    async def watch(self, key: str, known: bytes | None, timeout_s: float) -> bytes | None:
        """See :meth:`Driver.watch`. Repeats it after temporary failures, whatever their number. If
        the storage has not recovered at the timeout, raises the failure of a last look."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        policy = self._policy
        tries = 0
        while True:
            tries += 1
            left_s = max(0.0, end_s - loop.time())
            most_s = None if policy.op_timeout_s is None else policy.op_timeout_s + left_s
            once = RetryLayer(self.inner, replace(policy, retries=0, op_timeout_s=most_s))
            call = partial(self.inner.watch, key, known, left_s)
            try:
                return await once._tried(Operation("watch", key), call)
            except HoldfastError as error:
                if not (error.temporary and policy.retries and loop.time() < end_s):
                    raise
                wait_s = pause_s(policy, tries, error, self._chance)
                _log.info("looking again in %.2f s: %s", wait_s, error)
            count_retry()
            await asyncio.sleep(max(0.0, min(wait_s, end_s - loop.time())))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """See :meth:`Driver.list`. A failed listing restarts and skips the entries already yielded,
        so their keys are kept in memory."""
        shown: set[str] = set()
        entries = self.inner.list(prefix)

        async def more() -> list[ObjectInfo]:
            nonlocal entries
            try:
                return await next_batch(entries, shown)
            # the generator is finished; reading on would look like the end of the listing
            except BaseException:
                entries = self.inner.list(prefix)
                raise

        try:
            while batch := await self._tried(Operation("list", prefix), more):
                shown.update(info.key for info in batch)
                for info in batch:
                    yield info
        finally:
            await end(entries)

    async def _tried(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        began_s = asyncio.get_running_loop().time()
        tries = 0
        last: HoldfastError | None = None
        try:
            async with deadline(self._timeout_s(operation)) as timeout:
                while True:
                    tries += 1
                    try:
                        return await call()
                    except HoldfastError as error:
                        last = error
                    again = operation.name in self._again and tries <= self._policy.retries
                    if not last.temporary or not again:
                        raise _counted(last, tries, began_s)
                    await self._pause(operation, tries, last, timeout)
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise self._late(operation, tries, last) from (last or error)

    def _timeout_s(self, operation: Operation) -> float | None:
        timeout_s = self._policy.op_timeout_s
        if timeout_s is not None and operation.name in _OF_MANY:
            return timeout_s * MANY_FOLD
        return timeout_s

    async def _pause(
        self, operation: Operation, tries: int, last: HoldfastError, running: asyncio.Timeout
    ) -> None:
        """Sleep before the next attempt. Raises the deadline's error if the pause would exceed
        it."""
        wait_s = pause_s(self._policy, tries, last, self._chance)
        when_s = running.when()
        late = when_s is not None and asyncio.get_running_loop().time() + wait_s >= when_s
        if late or running.expired():
            raise self._late(operation, tries, last) from last
        most = 1 + self._policy.retries
        _log.info(
            "retrying in %.2f s, after %d of at most %d attempts: %s", wait_s, tries, most, last
        )
        count_retry()
        if isinstance(last, BusyError):
            count_throttled(wait_s)
        await asyncio.sleep(wait_s)

    async def _is_ours(self, key: str, data: bytes) -> bool:
        try:
            return await self.inner.get(key) == data
        except NotFoundError as error:
            raise StorageDownError(
                "it is unknown whether an exclusive put succeeded: the key was taken, and now "
                "nothing is there",
                uri=self.uri,
                key=key,
                temporary=False,
                advice="Find out who else writes here, then save again.",
            ) from error

    def _late(
        self, operation: Operation, tries: int, last: HoldfastError | None
    ) -> StorageDownError:
        waited = f"waited for {operation.name} for {self._timeout_s(operation):g} s"
        if last is not None:
            why = f", in {_times(tries)}; the last failure: {last.message}"
        else:
            why = ", without an answer"
        advice = (last.advice if last is not None else None) or "Check the storage and the network."
        return StorageDownError(
            waited + why,
            uri=self.uri,
            key=operation.key or None,
            advice=f"{advice} The option op_timeout_s allows more time.",
        )

    async def _abort(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        try:
            async with deadline(self._policy.op_timeout_s) as timeout:
                return await call()
        except TimeoutError as error:
            if not timeout.expired():
                raise
            _log.warning(
                "%s; a later save removes the leftovers",
                self._late(operation, 1, None),
                exc_info=error,
            )
            return cast(T, None)


def _counted(error: HoldfastError, tries: int, began_s: float) -> HoldfastError:
    if tries > 1:
        seconds = asyncio.get_running_loop().time() - began_s
        error.message += f" ({_times(tries)} in {seconds:.1f} s)"
    return error


def _times(tries: int) -> str:
    if tries == 1:
        return "1 attempt"
    return f"{tries} attempts"
