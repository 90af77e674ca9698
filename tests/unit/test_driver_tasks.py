"""Calls of an asynchronous client: what becomes of them when the caller is cancelled, or the driver
closed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast.drivers.tasks import Tasks, side_by_side, to_the_end
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


def test_a_cancelled_caller_returns_only_after_its_call(no_leaks: None) -> None:
    """However often it is cancelled: the client uses the caller's buffer until the call has ended.
    An error of the call is then the cause of the CancelledError."""

    async def main() -> None:
        inside, go_on, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def work() -> None:
            inside.set()
            await go_on.wait()
            ended.set()
            raise OSError(5, "Input/output error")

        caller = asyncio.create_task(to_the_end(work()))
        await inside.wait()
        for _ in range(3):
            caller.cancel()
            await asyncio.sleep(0)
        assert not caller.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError) as caught:
            await caller
        assert ended.is_set()
        assert isinstance(caught.value.__cause__, OSError)

    asyncio.run(main())


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


def test_what_runs_side_by_side_returns_in_order_and_fails_as_the_first_in_order(
    no_leaks: None,
) -> None:
    """Whichever ends first. Nothing is left running, also where the caller is cancelled."""

    async def main() -> None:
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
            await side_by_side(
                work("c", 0.02, KeyError), work("d", 0.01, ValueError), work("e", 0.03)
            )
        assert ended[2:] == ["d", "c", "e"]
        caller = asyncio.create_task(side_by_side(work("f", 60), work("g", 60)))
        await asyncio.sleep(0.01)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert sorted(ended[5:]) == ["f", "g"]

    asyncio.run(main())
