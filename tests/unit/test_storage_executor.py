"""The shell around the scheduler."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import numpy as np
import pytest

from holdfast.storage.runtime.engine import offload, start
from holdfast.storage.runtime.executor import Pipeline, Stage
from holdfast.storage.runtime.scheduler import Budget

STAGES = (("read", "io"), ("hash", "cpu"), ("write", "io"))
Perform = Callable[[str, int], Awaitable[None]]


class Work:
    """Stages that take random times, and fail where told to; what happened is recorded."""

    def __init__(
        self, rng: np.random.Generator, fail: dict[tuple[int, str], BaseException] | None = None
    ) -> None:
        self.rng, self.fail = rng, fail or {}
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.done: list[tuple[int, str]] = []
        self.released: list[int] = []
        self.raised: list[BaseException] = []
        self.held: set[int] = set()

    async def perform(self, stage: str, job: int) -> None:
        self.held.add(job)
        self.running[stage] += 1
        self.most[stage] = max(self.most[stage], self.running[stage])
        try:
            await asyncio.sleep(float(self.rng.random()) * 0.003)
            if (job, stage) in self.fail:
                self.raised.append(self.fail[job, stage])
                raise self.fail[job, stage]
        finally:
            self.running[stage] -= 1
        self.done.append((job, stage))

    def release(self, job: int) -> None:
        assert job in self.held
        self.released.append(job)


def pipeline(perform: Perform, release: Callable[[int], None]) -> Pipeline[int]:
    """Three stages over two lanes, with memory for four jobs of 10 bytes."""
    stages = [Stage(name, lane, partial(perform, name)) for name, lane in STAGES]
    return Pipeline(stages, Budget(40, {"io": 3, "cpu": 2}), release=release)


def run(perform: Perform, release: Callable[[int], None], jobs: int) -> Coroutine[Any, Any, None]:
    """That pipeline, with so many jobs of 10 bytes."""
    return pipeline(perform, release).run(range(jobs), [10] * jobs)


def test_everything_is_performed_and_released(rng: np.random.Generator) -> None:
    """Each stage of each job once, in order; each job released once."""
    work = Work(rng)
    asyncio.run(run(work.perform, work.release, 20))
    assert sorted(work.done) == sorted((job, name) for job in range(20) for name, _lane in STAGES)
    assert sorted(work.released) == list(range(20))
    assert work.most["read"] <= 3
    assert work.most["hash"] <= 2


def test_no_jobs_are_no_work(rng: np.random.Generator) -> None:
    """It returns at once."""
    work = Work(rng)
    asyncio.run(run(work.perform, work.release, 0))
    assert work.done == []


@pytest.mark.parametrize("stage", ["read", "hash", "write"])
def test_the_first_error_is_raised_after_what_runs_has_ended(
    stage: str, rng: np.random.Generator
) -> None:
    """Buffers are in use until then."""
    work = Work(
        rng,
        {(7, stage): OSError("7")} | {(job, "write"): OSError(f"{job}") for job in range(9, 20)},
    )
    with pytest.raises(OSError, match=r"\d+") as caught:
        asyncio.run(run(work.perform, work.release, 20))
    assert caught.value is work.raised[0]
    assert sum(work.running.values()) == 0
    assert sorted(work.released) == sorted(work.held)
    assert len(work.held) < 20


@pytest.mark.parametrize("after", [0, 1, 5, 12])
def test_cancelled_it_waits_for_what_runs(after: int, rng: np.random.Generator) -> None:
    """Stages in worker threads cannot be interrupted."""
    busy: set[int] = set()
    released: list[int] = []
    begun: set[int] = set()

    async def perform(stage: str, job: int) -> None:
        begun.add(job)
        await offload(in_thread, job)

    def in_thread(job: int) -> None:
        busy.add(job)
        time.sleep(float(rng.random()) * 0.01)
        busy.remove(job)

    def release(job: int) -> None:
        assert job not in busy
        released.append(job)

    async def cancelled() -> None:
        task = asyncio.ensure_future(run(perform, release, 30))
        while len(begun) < after:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert busy == set()
        assert sorted(released) == sorted(begun)
        assert len(begun) < 30

    asyncio.run(cancelled())


def test_cancelled_twice_it_still_waits(rng: np.random.Generator) -> None:
    """An impatient caller does not get memory back that a thread is writing to."""
    busy = threading.Event()
    ended = threading.Event()

    def in_thread() -> None:
        busy.set()
        time.sleep(0.15)
        ended.set()

    released: list[bool] = []

    async def perform(stage: str, job: int) -> None:
        await offload(in_thread)

    async def cancelled() -> None:
        task = asyncio.ensure_future(run(perform, lambda job: released.append(ended.is_set()), 1))
        while not busy.is_set():
            await asyncio.sleep(0.001)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert released == [True]


def test_it_may_be_cancelled_at_the_moment_when_its_last_stage_ends() -> None:
    """It has not been told of that end yet, and waits for it without holding up the event loop."""

    async def cancelled() -> None:
        async def perform(stage: str, job: int) -> None:
            if stage == "write":
                task.cancel()

        task = asyncio.ensure_future(run(perform, lambda job: None, 1))
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())


def test_an_error_of_any_type_is_raised(rng: np.random.Generator) -> None:
    """A lack of memory ends the pipeline as an I/O error does."""
    work = Work(rng, {(3, "hash"): MemoryError("none left")})
    with pytest.raises(MemoryError):
        asyncio.run(run(work.perform, work.release, 10))
    assert sorted(work.released) == sorted(work.held)


def test_offload_returns_what_its_function_does() -> None:
    """Or raises it."""

    def fails() -> None:
        raise KeyError("x")

    assert start(offload(divmod, 7, 3)).result() == (2, 1)
    with pytest.raises(KeyError):
        start(offload(fails)).result()


@pytest.mark.parametrize("jobs", range(2, 9))
@pytest.mark.parametrize("drain", [False, True])
def test_jobs_begin_a_stage_in_order_where_it_asks_for_that(jobs: int, drain: bool) -> None:
    """Also where several stages end at one moment, and whoever ended one goes on with the next."""
    for cpu, io in itertools.product((1, 2, 3), (1, 2, 3)):
        begun: list[int] = []

        async def work(job: int) -> None:
            await asyncio.sleep(0)

        async def write(job: int, begun: list[int] = begun) -> None:
            begun.append(job)
            await asyncio.sleep(0)

        stages = [
            Stage("capture", "cpu", work),
            Stage("hash", "cpu", work),
            Stage("write", "io", write, in_order=True),
        ]
        budget = Budget(100, {"cpu": cpu, "io": io})
        asyncio.run(Pipeline(stages, budget, drain=drain).run(range(jobs), [10] * jobs))
        assert begun == list(range(jobs))
