"""The shell around the scheduler: it performs what it is told, waits for what runs, and raises what
failed first."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from holdfast.storage.runtime.engine import offload, start
from holdfast.storage.runtime.executor import execute
from holdfast.storage.runtime.scheduler import Budget, Scheduler, Stage

STAGES = (Stage("read", "io"), Stage("hash", "cpu"), Stage("write", "io"))


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

    async def perform(self, job: int, stage: str) -> None:
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


def scheduler(memory_nbytes: int = 40, io: int = 3, cpu: int = 2) -> Scheduler:
    """Three stages over two lanes."""
    return Scheduler(STAGES, Budget(memory_nbytes, {"io": io, "cpu": cpu}))


def test_everything_is_performed_and_released(rng: np.random.Generator) -> None:
    """Each stage of each job once, in order; each job released once."""
    work = Work(rng)
    asyncio.run(execute(scheduler(), [10] * 20, work.perform, work.release))
    assert sorted(work.done) == sorted((job, s.name) for job in range(20) for s in STAGES)
    assert sorted(work.released) == list(range(20))
    assert work.most["read"] <= 3
    assert work.most["hash"] <= 2


def test_no_jobs_are_no_work(rng: np.random.Generator) -> None:
    """It returns at once."""
    work = Work(rng)
    asyncio.run(execute(scheduler(), [], work.perform, work.release))
    assert work.done == []


@pytest.mark.parametrize("stage", ["read", "hash", "write"])
def test_the_first_error_is_raised_after_what_runs_has_ended(
    stage: str, rng: np.random.Generator
) -> None:
    """Buffers are in use until then; each that was taken is given back, and nothing is begun any
    more."""
    work = Work(
        rng,
        {(7, stage): OSError("7")} | {(job, "write"): OSError(f"{job}") for job in range(9, 20)},
    )
    with pytest.raises(OSError, match=r"\d+") as caught:
        asyncio.run(execute(scheduler(), [10] * 20, work.perform, work.release))
    assert caught.value is work.raised[0]
    assert sum(work.running.values()) == 0
    assert sorted(work.released) == sorted(work.held)
    assert len(work.held) < 20


@pytest.mark.parametrize("after", [0, 1, 5, 12])
def test_cancelled_it_waits_for_what_runs(after: int, rng: np.random.Generator) -> None:
    """Stages in worker threads cannot be interrupted: their buffers are released after they have
    ended, each once."""
    busy: set[int] = set()
    released: list[int] = []
    begun: set[int] = set()

    async def perform(job: int, stage: str) -> None:
        begun.add(job)
        await offload(in_thread, job)

    def in_thread(job: int) -> None:
        busy.add(job)
        time.sleep(float(rng.random()) * 0.01)
        busy.remove(job)

    def release(job: int) -> None:
        assert job not in busy
        released.append(job)

    async def run() -> None:
        task = asyncio.ensure_future(execute(scheduler(), [10] * 30, perform, release))
        while len(begun) < after:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert busy == set()
        assert sorted(released) == sorted(begun)
        assert len(begun) < 30

    asyncio.run(run())


def test_cancelled_twice_it_still_waits(rng: np.random.Generator) -> None:
    """An impatient caller does not get memory back that a thread is writing to."""
    busy = threading.Event()
    ended = threading.Event()

    def in_thread() -> None:
        busy.set()
        time.sleep(0.15)
        ended.set()

    released: list[bool] = []

    async def perform(job: int, stage: str) -> None:
        await offload(in_thread)

    async def run() -> None:
        task = asyncio.ensure_future(
            execute(scheduler(), [1], perform, lambda job: released.append(ended.is_set()))
        )
        while not busy.is_set():
            await asyncio.sleep(0.001)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert released == [True]


def test_an_error_of_any_type_is_raised(rng: np.random.Generator) -> None:
    """A lack of memory ends the pipeline as an I/O error does."""
    work = Work(rng, {(3, "hash"): MemoryError("none left")})
    with pytest.raises(MemoryError):
        asyncio.run(execute(scheduler(), [10] * 10, work.perform, work.release))
    assert sorted(work.released) == sorted(work.held)


def test_offload_returns_what_its_function_does() -> None:
    """Or raises it."""

    def fails() -> None:
        raise KeyError("x")

    async def run(work: Callable[[], Awaitable[object]]) -> object:
        return await work()

    assert start(run(lambda: offload(divmod, 7, 3))).result() == (2, 1)
    with pytest.raises(KeyError):
        start(run(lambda: offload(fails))).result()


@pytest.mark.parametrize("jobs", range(2, 9))
@pytest.mark.parametrize("drain", [False, True])
def test_jobs_begin_a_stage_in_order_where_it_asks_for_that(jobs: int, drain: bool) -> None:
    """Also where several stages end at one moment, and whoever ended one goes on with the next."""
    stages = (Stage("capture", "cpu"), Stage("hash", "cpu"), Stage("write", "io", in_order=True))
    for cpu, io in itertools.product((1, 2, 3), (1, 2, 3)):
        begun: list[int] = []

        async def perform(job: int, stage: str, begun: list[int] = begun) -> None:
            if stage == "write":
                begun.append(job)
            await asyncio.sleep(0)

        budget = Budget(100, {"cpu": cpu, "io": io})
        asyncio.run(execute(Scheduler(stages, budget, drain=drain), [10] * jobs, perform))
        assert begun == list(range(jobs))
