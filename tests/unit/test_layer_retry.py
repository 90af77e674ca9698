"""Test which operations are retried, how often, after which pauses, and until when."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from support.clock import in_virtual_time, run_virtual
from support.drivers import keys, stored
from support.flaky import Flaky, Step

from holdfast.drivers.contract import Driver
from holdfast.drivers.layers.retry import RetryLayer, RetryPolicy
from holdfast.drivers.layers.throttle import LimitLayer, ThrottleLayer, TokenBucket
from holdfast.errors import (
    AccessError,
    BusyError,
    DamagedError,
    ExistsError,
    FullError,
    NotFoundError,
    StorageDownError,
    StorageError,
    UriError,
)

pytestmark = pytest.mark.clocked

POLICY = RetryPolicy(retries=5, op_timeout_s=1000.0, first_pause_s=1.0, pause_max_s=10.0)
HASTY = replace(POLICY, op_timeout_s=30.0)
HANG = 1e9
DOWN = StorageDownError


OPERATIONS: dict[str, Callable[[Driver], Awaitable[Any]]] = {
    "read": lambda d: d.read("k", 0, memoryview(bytearray(3))),
    "fetch": lambda d: d.fetch("k", 0, 3),
    "read_pieces": lambda d: d.read_pieces("k", 0, 3, lambda piece: None),
    "get": lambda d: d.get("k"),
    "stat": lambda d: d.stat("k"),
    "list": keys,
    "put": lambda d: d.put("new", b"x"),
    "create": lambda d: d.create("new", 1),
    "delete": lambda d: d.delete("k"),
    "delete_all": lambda d: d.delete_all("k"),
    "sweep": lambda d: d.sweep("k"),
}
READING = ("read", "fetch", "read_pieces", "get", "stat", "list")


def outcome(
    operation: Callable[[Driver], Awaitable[Any]],
    script: list[Step],
    policy: RetryPolicy = POLICY,
    *,
    after: bool = False,
    remote: bool = True,
) -> tuple[Flaky, Any, float]:
    """Perform one operation; return the driver below, the result, and the time at its end."""
    below = Flaky(script, after=after, remote=remote)

    async def run() -> tuple[Any, float]:
        await below.inner.put("k", b"abc")
        try:
            result = await operation(RetryLayer(below, policy, chance=lambda: 0.5))
        except Exception as error:
            result = error
        return result, asyncio.get_running_loop().time()

    return below, *run_virtual(run())


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_temporary_failure_is_tried_again(name: str) -> None:
    """An operation is retried until it succeeds, after a random part of 1, 2, 4 … seconds."""
    below, result, _ = outcome(OPERATIONS[name], [DOWN("a"), DOWN("b"), DOWN("c")])
    assert not isinstance(result, Exception)
    # A driver that hands over nothing makes a read of it.
    reached = "read" if name in ("fetch", "read_pieces") else name
    assert below.tried == [(reached, 0.0), (reached, 0.5), (reached, 1.5), (reached, 3.5)]


@pytest.mark.parametrize("name", OPERATIONS)
def test_local_storage_is_never_changed_twice(name: str) -> None:
    """On local storage only reading operations are retried, since device errors are permanent."""
    below, result, _ = outcome(OPERATIONS[name], [DOWN("EIO")], remote=False)
    assert isinstance(result, StorageDownError) == (name not in READING)
    assert len(below.tried) == (2 if name in READING else 1)


@pytest.mark.parametrize(
    "raised",
    [
        NotFoundError("no"), AccessError("no"), FullError("no"), StorageError("no"),
        DamagedError("no"), UriError("no"), ExistsError("no"), KeyError("a bug of the driver"),
        DOWN("dead", temporary=False),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_a_permanent_failure_is_not(raised: Exception) -> None:
    """Only errors marked as temporary are retried; others arrive as they were raised."""
    below, result, ended_s = outcome(OPERATIONS["get"], [raised])
    assert (result, len(below.tried), ended_s) == (raised, 1, 0.0)


def test_after_the_last_try_its_error_is_raised() -> None:
    """The last error is raised, with the number of attempts and the time in its message."""
    script = [DOWN(f"cut {n}", key="k", uri="x://y") for n in range(9)]
    below, result, ended_s = outcome(OPERATIONS["get"], script)
    assert (result, len(below.tried)) == (script[5], 6)
    assert ended_s == 0.5 + 1 + 2 + 4 + 5
    assert str(result) == "cut 5 (6 attempts in 12.5 s) (key k, in x://y)"


def test_a_busy_storage_is_left_alone_for_as_long_as_it_asks() -> None:
    """The pause that a busy storage asks for is added to the random one."""
    script = [BusyError("slow down", retry_after_s=7.0), BusyError("still")]
    below, _, _ = outcome(OPERATIONS["get"], script)
    assert below.tried == [("get", 0.0), ("get", 7.5), ("get", 8.5)]


def test_what_takes_too_long_is_an_error_that_names_it() -> None:
    """A hanging operation is cancelled at its deadline and not retried."""
    below, result, ended_s = outcome(OPERATIONS["read"], [HANG], HASTY)
    assert (ended_s, below.cancelled, len(below.tried)) == (30.0, 1, 1)
    assert isinstance(result, StorageDownError)
    assert "waited for read for 30 s, without an answer" in str(result)
    assert "key k" in str(result)
    assert "op_timeout_s" in str(result)


@pytest.mark.parametrize("name", ["delete_all", "sweep"])
def test_what_is_many_requests_may_take_ten_times_as_long(name: str) -> None:
    """Operations of one request per object have ten times the deadline."""
    _, result, ended_s = outcome(OPERATIONS[name], [299.0], HASTY)
    assert (result, ended_s) == (None, 299.0)
    _, result, ended_s = outcome(OPERATIONS[name], [HANG], HASTY)
    assert (ended_s, f"waited for {name} for 300 s" in str(result)) == (300.0, True)


def test_the_deadline_is_of_the_whole_operation() -> None:
    """The deadline includes all attempts and pauses; its error has the last failure as cause."""
    last = DOWN("reset by peer", advice="Name the other server.")
    below, result, ended_s = outcome(OPERATIONS["get"], [20.0, HANG], HASTY)
    assert (result, ended_s) == (b"abc", 20.0)
    below, result, ended_s = outcome(OPERATIONS["get"], [last, HANG], HASTY)
    assert (ended_s, result.__cause__, below.cancelled) == (30.0, last, 1)
    assert "in 2 attempts; the last failure: reset by peer" in str(result)
    assert str(result).endswith("Name the other server. The option op_timeout_s allows more time.")


def test_a_pause_for_which_there_is_no_time_is_not_begun() -> None:
    """A pause that would exceed the deadline raises the error at once."""
    busy = BusyError("later", retry_after_s=60.0)
    _, result, ended_s = outcome(OPERATIONS["get"], [busy], HASTY)
    assert (type(result), ended_s) == (StorageDownError, 0.0)
    assert isinstance(result.__cause__, BusyError)


def test_an_exclusive_put_that_finds_its_own_earlier_try_has_succeeded() -> None:
    """An exclusive put succeeds if its first attempt stored the object and lost the answer."""
    below, result, _ = outcome(
        lambda d: d.put("fate", b"commit", exclusive=True), [DOWN("cut")], after=True
    )
    assert (result, [name for name, _ in below.tried]) == (None, ["put", "put", "get"])


def test_an_exclusive_put_whose_first_try_finds_the_key_taken_is_refused() -> None:
    """Equal bytes that were there before the first attempt are somebody else's."""
    below, result, _ = outcome(lambda d: d.put("k", b"abc", exclusive=True), [])
    assert isinstance(result, ExistsError)
    assert [name for name, _ in below.tried] == ["put"]


def test_an_exclusive_put_that_cannot_be_told_says_so() -> None:
    """If the key was taken and is free again, the outcome is unknown, and the error says so."""
    script = [DOWN("cut"), ExistsError("taken"), NotFoundError("gone")]
    _, result, _ = outcome(lambda d: d.put("fate", b"commit", exclusive=True), script)
    assert "it is unknown whether" in str(result)
    assert (type(result), result.temporary) == (StorageDownError, False)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ([None, DOWN("cut")], r"^cut$"),
        ([None, None, DOWN("fsync")], r"^fsync$"),
        ([None, None, HANG], "waited for commit for 30 s"),
    ],
    ids=["write", "commit", "hanging commit"],
)
@in_virtual_time
async def test_neither_a_part_nor_a_commit_is_sent_again(script: list[Step], says: str) -> None:
    """Writes and commits are never retried, which could lose data unseen, but have a deadline."""
    below = Flaky(script)
    driver = RetryLayer(below, HASTY)
    with pytest.raises(StorageDownError, match=says):
        await stored(driver, "u", b"abc")
    assert [name for name, _ in below.tried] == ["create", "write", "commit"][: len(script)]


def test_an_abort_that_hangs_is_given_up_without_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """A hanging abort ends at its deadline with a warning and without an error."""

    async def run() -> float:
        below = Flaky([None, HANG])
        upload = await RetryLayer(below, HASTY).create("u", 3)
        await upload.abort()
        return asyncio.get_running_loop().time()

    with caplog.at_level(logging.WARNING):
        assert run_virtual(run()) == 30.0
    assert "a later save removes the leftovers" in caplog.text


@in_virtual_time
async def test_a_listing_that_breaks_goes_on_without_showing_anything_twice() -> None:
    """A failed listing restarts and omits the entries that it already yielded."""
    below = Flaky()
    for n in range(2500):
        await below.inner.put(f"k{n:04}", b"")
    below.script = iter([None] * 1500 + [DOWN("cut")] + [None] * 2100 + [DOWN("cut"), DOWN("cut")])
    driver = RetryLayer(below, POLICY, chance=lambda: 0.1)
    assert [info.key async for info in driver.list()] == [f"k{n:04}" for n in range(2500)]


@in_virtual_time
async def test_waiting_for_a_turn_does_not_count() -> None:
    """The deadline is paused while a throttle or a limit makes the operation wait."""
    below = Flaky([20.0] * 8)
    slow = ThrottleLayer(LimitLayer(below, 1), TokenBucket(1))  # a byte a second, one at a time
    driver = RetryLayer(slow, RetryPolicy(0, 30.0))
    await asyncio.gather(*(driver.put(f"k{n}", b"x" * 50) for n in range(8)))
    assert asyncio.get_running_loop().time() == pytest.approx(7 * 50 + 20, abs=0.2)
    assert len(below.tried) == 8


@in_virtual_time
async def test_a_deadline_holds_after_waiting_for_a_turn() -> None:
    """A paused deadline continues with the time that was left."""
    below = Flaky([1.0, HANG])
    driver = RetryLayer(LimitLayer(below, 1), RetryPolicy(0, 30.0))
    puts = (driver.put("a", b""), driver.put("b", b""))
    first, second = await asyncio.gather(*puts, return_exceptions=True)
    assert first is None
    assert isinstance(second, StorageDownError)
    assert asyncio.get_running_loop().time() == 31.0


def test_cancelling_is_not_a_failure() -> None:
    """A cancelled operation is not retried, whether it runs or pauses."""

    async def run(script: list[Step], after_s: float) -> int:
        below = Flaky(script)
        task = asyncio.ensure_future(RetryLayer(below, POLICY, chance=lambda: 1.0).put("k", b""))
        await asyncio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return len(below.tried)

    assert run_virtual(run([HANG], 5.0)) == 1
    assert run_virtual(run([DOWN("x")], 0.5)) == 1


# watch


def test_a_watch_outlasts_temporary_failures() -> None:
    """More failures than retries do not end a watch, nor does a storage that hangs for a while."""
    script = [DOWN("x")] * 8
    below, result, at_s = outcome(lambda d: d.watch("k", b"old", 100.0), [*script, None])
    assert (result, len(below.tried)) == (b"abc", 9)
    assert at_s == 0.5 + 1 + 2 + 4 + 5 * 4


@pytest.mark.parametrize(
    ("script", "policy", "kind", "end_s"),
    [
        ([DOWN("x")] * 99, POLICY, StorageDownError, 12.0),
        ([DOWN("x")] * 99, replace(POLICY, retries=0), StorageDownError, 0.0),
        ([AccessError("x")], POLICY, AccessError, 0.0),
        ([HANG], HASTY, StorageDownError, 42.0),
        ([DOWN("x"), None], POLICY, type(None), 12.0),
    ],
)
def test_a_watch_ends_at_its_timeout(
    script: list[Step], policy: RetryPolicy, kind: type, end_s: float
) -> None:
    """At the timeout of 12 s, a storage that has not recovered is an error, and an unchanged object
    is None. Permanent failures are raised at once, without retries all are. A look that hangs has
    the time limit of any operation."""
    _, result, at_s = outcome(lambda d: d.watch("k", b"abc", 12.0), script, policy)
    assert type(result) is kind
    assert at_s == end_s
