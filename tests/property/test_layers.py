"""Layers under any sequence of events, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import random

from hypothesis import given
from hypothesis import strategies as st
from support.clock import run_virtual
from support.flaky import Flaky

from holdfast.drivers.layers.faults import FaultPlan, FaultsLayer
from holdfast.drivers.layers.hedge import HedgeLayer
from holdfast.drivers.layers.retry import RetryLayer, RetryPolicy, pause_s
from holdfast.drivers.layers.throttle import BURST_S, LimitLayer, ThrottleLayer, TokenBucket
from holdfast.drivers.memory import MemoryDriver
from holdfast.errors import BusyError, DamagedError, ExistsError, HoldfastError, StorageDownError

seconds = st.floats(0, 60, allow_nan=False)


@given(
    tries=st.integers(1, 5000),
    chance=st.floats(0, 1, exclude_max=True),
    asked_s=st.none() | st.floats(-10, 1e6),
    first_s=st.floats(0.001, 10),
    max_s=st.floats(0.001, 100),
)
def test_pauses_are_bounded(
    tries: int, chance: float, asked_s: float | None, first_s: float, max_s: float
) -> None:
    """A pause lasts at least as long as the server requires, plus at most the maximum pause.

    Otherwise its upper bound doubles with each try, up to the maximum.
    """
    policy = RetryPolicy(9, None, first_pause_s=first_s, pause_max_s=max_s)
    asked = max(0.0, asked_s or 0.0)
    waited_s = pause_s(policy, tries, BusyError("x", retry_after_s=asked_s), lambda: chance)
    assert asked <= waited_s <= asked + max_s
    assert pause_s(policy, tries, StorageDownError("x"), lambda: 1.0) == min(
        max_s, first_s * 2.0 ** min(tries - 1, 60)
    )


@given(
    steps=st.lists(
        st.one_of(st.none(), seconds, st.sampled_from(["down", "busy", "bad"])), max_size=20
    ),
    retries=st.integers(0, 8),
    op_timeout_s=st.none() | st.floats(0.1, 200),
    chance=st.floats(0, 1, exclude_max=True),
)
def test_an_operation_ends_in_time_and_after_the_tries_it_may_take(
    steps: list[float | str | None], retries: int, op_timeout_s: float | None, chance: float
) -> None:
    """An operation makes at most 1 + retries tries and ends by its deadline.

    It succeeds exactly if a try succeeded, and never returns a wrong result.
    """
    errors = {
        "down": StorageDownError("x"),
        "busy": BusyError("y", retry_after_s=3.0),
        "bad": DamagedError("z"),
    }
    below = Flaky([errors[s] if isinstance(s, str) else s for s in steps])

    async def run() -> tuple[bytes | None, float]:
        await below.inner.put("k", b"abc")
        try:
            got = await RetryLayer(
                below, RetryPolicy(retries, op_timeout_s), chance=lambda: chance
            ).get("k")
        except HoldfastError:
            got = None
        return got, asyncio.get_running_loop().time()

    got, ended_s = run_virtual(run())
    assert len(below.tried) <= 1 + retries
    if op_timeout_s is not None:
        assert ended_s <= op_timeout_s + 1e-6
    last = steps[len(below.tried) - 1] if len(below.tried) <= len(steps) else None
    assert (got == b"abc") == (not isinstance(last, str) and not below.cancelled)


@given(
    rate=st.integers(1, 10**6),
    requests=st.lists(st.tuples(seconds, st.integers(0, 10**6)), min_size=1, max_size=40),
)
def test_a_bucket_never_lets_more_through_than_its_rate(
    rate: int, requests: list[tuple[float, int]]
) -> None:
    """A bucket never exceeds its rate, keeps the order, and delays nobody without need.

    Between two starts, at most the bytes of that interval, a burst and one operation pass.
    """
    bucket, now_s, begun = TokenBucket(rate), 0.0, []
    for gap_s, nbytes in requests:
        now_s += gap_s
        begun.append((now_s + bucket.take(nbytes, now_s), nbytes, now_s))
    starts = [start_s for start_s, _, _ in begun]
    assert all(
        a <= b + 1e-6 for a, b in itertools.pairwise(starts)
    )  # equal ones are sums of different numbers
    for i, (first_s, _, _) in enumerate(begun):
        passed = 0
        for last_s, nbytes, _ in begun[
            i:
        ]:  # operations before the last one; and that one may begin at all
            assert passed <= rate * (last_s - first_s + BURST_S) * (1 + 1e-9) + 1e-3
            passed += nbytes
    total = sum(nbytes for _, nbytes, _ in begun[:-1])
    assert (
        begun[-1][0]
        <= max(begun[-1][2], begun[0][0] + total / rate + sum(gap for gap, _ in requests)) + 1e-6
    )


@given(cancelled=st.lists(st.booleans(), min_size=1, max_size=12), rate=st.integers(1, 1000))
def test_who_gives_up_waiting_leaves_no_debt(cancelled: list[bool], rate: int) -> None:
    """A cancelled operation returns its bytes to the bucket.

    The next one waits only for the bytes of completed operations.
    """

    async def run() -> float:
        bucket = TokenBucket(rate)
        driver = ThrottleLayer(MemoryDriver(), bucket)
        await driver.put("first", bytes(1000))
        tasks = [
            asyncio.ensure_future(driver.put(f"k{n}", bytes(1000))) for n in range(len(cancelled))
        ]
        await asyncio.sleep(0)
        for task, cancel in zip(tasks, cancelled, strict=True):
            if cancel:
                task.cancel()
        await asyncio.sleep(0)
        return bucket.take(0, asyncio.get_running_loop().time())

    passed = 1000 + 1000 * cancelled.count(False)
    assert abs(run_virtual(run()) - max(0.0, passed / rate - BURST_S)) < 1e-6


@given(
    limit=st.integers(1, 5),
    durations=st.lists(seconds, min_size=1, max_size=30),
    seed=st.integers(),
)
def test_a_limit_holds_and_loses_no_slot(limit: int, durations: list[float], seed: int) -> None:
    """Never more than the limit at once, also when operations fail or are cancelled; afterwards all
    slots are free."""
    rng, running, most = random.Random(seed), 0, 0

    class Counting(Flaky):
        async def around(self, operation, call):  # type: ignore[no-untyped-def]
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                return await super().around(operation, call)
            finally:
                running -= 1

    async def run() -> None:
        below = Counting([StorageDownError("x") if rng.random() < 0.2 else d for d in durations])
        driver = LimitLayer(below, limit)
        tasks = [asyncio.ensure_future(driver.put(f"k{n}", b"")) for n in range(len(durations))]
        await asyncio.sleep(rng.random() * 10)
        for task in tasks:
            if rng.random() < 0.2:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        below.script = iter([1.0] * limit)
        began_s = asyncio.get_running_loop().time()
        await asyncio.gather(*(driver.put(f"l{n}", b"") for n in range(limit)))
        assert asyncio.get_running_loop().time() - began_s < 1.5  # all at once

    run_virtual(run())
    assert most <= limit


@given(seed=st.integers(0, 2**32), rate=st.floats(0, 0.4), writers=st.integers(1, 4))
def test_of_exclusive_puts_exactly_one_is_told_that_it_won(
    seed: int, rate: float, writers: int
) -> None:
    """At most one of several exclusive puts succeeds, under failures and retries.

    A winner's bytes are stored. Without a winner, the writer of the stored bytes only lost its last
    answer, and gets no ExistsError.
    """

    async def run() -> tuple[list[object], bytes | None]:
        storage = MemoryDriver()
        drivers = [
            RetryLayer(
                FaultsLayer(storage, FaultPlan(seed + n, error=rate, unsure=rate, delay=rate)),
                RetryPolicy(10, 300.0),
                chance=random.Random(seed).random,
            )
            for n in range(writers)
        ]
        outcomes = await asyncio.gather(
            *(d.put("fate", b"%d" % n, exclusive=True) for n, d in enumerate(drivers)),
            return_exceptions=True,
        )
        return list(outcomes), (
            await storage.get("fate") if [i async for i in storage.list()] else None
        )

    outcomes, stored = run_virtual(run())
    winners = [b"%d" % n for n, o in enumerate(outcomes) if o is None]
    assert winners in ([stored], [])
    assert all(o is None or isinstance(o, ExistsError | StorageDownError) for o in outcomes)
    if not winners and stored is not None:
        assert not isinstance(outcomes[int(stored)], ExistsError)


@given(durations=st.lists(st.floats(0, 30), min_size=60, max_size=200), percent=st.integers(1, 50))
def test_hedged_reads_return_the_right_bytes_within_the_account(
    durations: list[float], percent: int
) -> None:
    """Every hedged read returns the stored bytes, and second reads stay within the budget."""

    async def run() -> int:
        below = Flaky(durations)
        await below.inner.put("k", bytes(range(256)))
        driver = HedgeLayer(below, percent)
        for n in range(len(durations) // 2):
            into = bytearray(16)
            await driver.read("k", n % 200, memoryview(into))
            assert bytes(into) == bytes(range(n % 200, n % 200 + 16))
        return len(below.tried) - len(durations) // 2

    assert 0 <= run_virtual(run()) <= len(durations) // 2 * percent / 100 + 1
