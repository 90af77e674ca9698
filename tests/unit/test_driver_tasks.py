"""Calls of an asynchronous client: what becomes of them when the caller is cancelled, or the driver
closed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast.drivers.tasks import Tasks
from holdfast.errors import NotFoundError, StorageDownError, StorageError, UriError

URI = "sftp://host/x"


@contextmanager
def errors(doing: str, uri: str, key: str) -> Iterator[None]:
    """What a client raises, as Holdfast's."""
    try:
        yield
    except LookupError as error:
        raise NotFoundError(f"{doing} failed", uri=uri, key=key) from error


def tasks_of_a_driver() -> Tasks:
    """With short waits."""
    return Tasks(uri=URI, errors=errors, grace_s=0.05)


def test_results_and_errors_come_back(no_leaks: None) -> None:
    """The caller gets what the call returned, and Holdfast's error, with URI and key, for what the
    client raised."""

    async def find(things: dict[str, int], name: str) -> int:
        await asyncio.sleep(0)
        return things[name]

    async def main() -> None:
        tasks = tasks_of_a_driver()
        assert await tasks.run("get", "a", find, {"a": 1}, name="a") == 1
        with pytest.raises(NotFoundError, match="get failed") as caught:
            await tasks.run("get", "b", find, {"a": 1}, "b")
        assert (caught.value.uri, caught.value.key) == (URI, "b")
        assert isinstance(caught.value.__cause__, KeyError)
        await tasks.close(1)

    asyncio.run(main())


def test_an_unsafe_key_is_refused_before_the_call(no_leaks: None) -> None:
    """No call is made for a key that leads outside, nor for the empty one; None is the whole root."""
    made: list[str | None] = []

    async def call(key: str | None) -> None:
        made.append(key)

    async def main() -> None:
        tasks = tasks_of_a_driver()
        for key in ("../x", "", "a//b"):
            with pytest.raises(UriError) as caught:
                await tasks.run("get", key, call, key)
            assert (caught.value.uri, caught.value.key) == (URI, key)
        await tasks.run("list", None, call, None)
        await tasks.close(1)

    asyncio.run(main())
    assert made == [None]


def test_a_call_that_does_not_end_is_cancelled_after_the_grace(no_leaks: None) -> None:
    """A server that never answers does not hold up a cancelled caller for longer; the call has
    ended by then."""

    async def main() -> None:
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

    asyncio.run(main())


def test_close_waits_for_what_runs_and_takes_nothing_new(no_leaks: None) -> None:
    """A call under way ends in peace; the next one is refused. Closing twice is once."""

    async def main() -> None:
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

    asyncio.run(main())


def test_close_cancels_what_does_not_end(no_leaks: None) -> None:
    """After the time that was given it says so, leaves no task behind, and whoever waited gets a
    StorageError."""

    async def main() -> None:
        inside = asyncio.Event()

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
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
