"""The shell around the scheduler, where the virtual time of its property tests does not reach."""

from __future__ import annotations

import asyncio
import itertools
import time

import numpy as np
import pytest

from holdfast.storage.runtime.engine import offload
from holdfast.storage.runtime.executor import Pipeline, Stage
from holdfast.storage.runtime.scheduler import Budget


@pytest.mark.parametrize(("after", "cancels"), [(0, 1), (1, 3), (5, 1), (12, 3)])
def test_cancelled_it_waits_for_what_runs(
    after: int, cancels: int, rng: np.random.Generator
) -> None:
    """Buffers are released after the worker threads that use them have ended, each once."""
    busy: set[int] = set()
    released: list[int] = []
    begun: set[int] = set()

    async def perform(job: int) -> None:
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
        stages = [Stage(name, lane, perform) for name, lane in (("read", "io"), ("hash", "cpu"))]
        pipeline = Pipeline(stages, Budget(40, {"io": 3, "cpu": 2}), release=release)
        task = asyncio.ensure_future(pipeline.run(range(30), [10] * 30))
        while len(begun) < after:
            await asyncio.sleep(0)
        for _ in range(cancels):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert busy == set()
        assert sorted(released) == sorted(begun)
        assert len(begun) < 30

    asyncio.run(cancelled())


@pytest.mark.parametrize("jobs", [2, 8])
@pytest.mark.parametrize("drain", [False, True])
def test_jobs_begin_a_stage_in_order_where_it_asks_for_that(jobs: int, drain: bool) -> None:
    """Stages that end at the same moment do not change the order."""
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
