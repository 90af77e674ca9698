"""The shell around the scheduler."""

from __future__ import annotations

import asyncio
import itertools
import time
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


def run(perform: Perform, release: Callable[[int], None], jobs: int) -> Coroutine[Any, Any, None]:
    """Three stages over two lanes, with memory for four jobs of 10 bytes, and so many jobs."""
    stages = [Stage(name, lane, partial(perform, name)) for name, lane in STAGES]
    pipeline = Pipeline(stages, Budget(40, {"io": 3, "cpu": 2}), release=release)
    return pipeline.run(range(jobs), [10] * jobs)


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


def test_an_error_of_any_type_is_raised() -> None:
    """A lack of memory ends the pipeline as an I/O error does."""
    held, released = set[int](), list[int]()

    async def perform(stage: str, job: int) -> None:
        held.add(job)
        if (job, stage) == (3, "hash"):
            raise MemoryError("none left")

    with pytest.raises(MemoryError):
        asyncio.run(run(perform, released.append, 10))
    assert sorted(released) == sorted(held)


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
