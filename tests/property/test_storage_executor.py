"""The executor keeps the scheduler's rules, whatever fails or is cancelled."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clock import run_virtual
from support.effort import examples

from holdfast.storage.runtime.engine import offload
from holdfast.storage.runtime.executor import Pipeline, Stage
from holdfast.storage.runtime.scheduler import Budget, StageSpec


@dataclass(frozen=True)
class Step:
    """One stage of one job: its duration, failure, and behaviour when cancelled."""

    takes_s: int
    fails: bool
    lingers_s: int
    well: bool


@dataclass
class Workshop:
    """Performs steps in virtual time, and checks at every moment which resources are in use."""

    stages: list[StageSpec]
    budget: Budget
    drain: bool
    sizes: list[int]
    steps: dict[tuple[int, int], Step]
    held: set[int] = field(default_factory=set)
    running: dict[int, int] = field(default_factory=dict)
    done: list[tuple[int, int]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    stopped_s: float = float("inf")
    turns: Counter[int] = field(default_factory=Counter)

    async def run(self) -> None:
        """Run all jobs."""
        stages = [
            Stage(spec.name, spec.lane, partial(self.perform, i), in_order=spec.in_order)
            for i, spec in enumerate(self.stages)
        ]
        pipeline = Pipeline(stages, self.budget, drain=self.drain, release=self.release)
        await pipeline.run(range(len(self.sizes)), self.sizes)

    async def perform(self, stage: int, job: int) -> None:
        # A stage that the executor has just begun may get its turn a little later.
        assert asyncio.get_running_loop().time() <= self.stopped_s, (
            "nothing begins after a failure or a cancellation"
        )
        assert job not in self.running
        if self.stages[stage].in_order:
            assert job == self.turns[stage], "jobs begin in order"
            self.turns[stage] += 1
        self.held.add(job)
        self.running[job] = stage
        self.check()
        step = self.steps[job, stage]
        try:
            await self._take(step)
            if step.fails:
                self.stop()
                self.failures.append(OSError(f"{job} {stage}"))
                raise self.failures[-1]
            self.done.append((job, stage))
        finally:
            del self.running[job]

    def stop(self) -> None:
        self.stopped_s = min(self.stopped_s, asyncio.get_running_loop().time())

    async def _take(self, step: Step) -> None:
        try:
            await asyncio.sleep(step.takes_s)
        except asyncio.CancelledError:
            until_s = asyncio.get_running_loop().time() + step.lingers_s
            while (left_s := until_s - asyncio.get_running_loop().time()) > 0:
                try:
                    await asyncio.sleep(left_s)
                except asyncio.CancelledError:
                    continue
            if not step.well:
                raise

    def release(self, job: int) -> None:
        assert job not in self.running, "a buffer in use is not released"
        self.held.remove(job)
        self.released.append(job)

    def check(self) -> None:
        held_nbytes = sum(self.sizes[job] for job in self.held)
        assert held_nbytes <= self.budget.memory_nbytes or len(self.held) == 1
        lanes = [self.stages[stage].lane for stage in self.running.values()]
        assert all(lanes.count(lane) <= width for lane, width in self.budget.lanes.items())


@st.composite
def workshops(draw: st.DrawFn, fragile: bool) -> Workshop:
    """Draw stages that end with writes, and jobs, some larger than the whole budget."""
    order = draw(st.sampled_from(["any", "ascending", "serial"]))
    kinds = [*draw(st.lists(st.sampled_from(["cpu", "io"]), max_size=2)), "write"]
    stages = [
        StageSpec(f"{i}", lane, in_order=lane == "write" and order != "any")
        for i, lane in enumerate(kinds)
    ]
    lanes = {
        "cpu": draw(st.integers(1, 3)),
        "io": draw(st.integers(1, 3)),
        "write": 1 if order == "serial" else 3,
    }
    sizes = draw(st.lists(st.integers(1, 30), max_size=8))
    failing = st.integers(0, 9).map(lambda n: n == 0) if fragile else st.just(False)
    steps = st.builds(Step, st.integers(0, 4), failing, st.integers(0, 3), st.booleans())
    taken = {(job, stage): draw(steps) for job in range(len(sizes)) for stage in range(len(stages))}
    return Workshop(
        stages, Budget(draw(st.integers(1, 40)), lanes), draw(st.booleans()), sizes, taken
    )


def pending() -> set[asyncio.Task[object]]:
    """Return all tasks but the caller's."""
    return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[return-value]


@examples(150)
@given(workshops(fragile=True))
def test_everything_runs_or_the_first_failure_is_raised(shop: Workshop) -> None:
    """Stages run once, in order, without idling; buffers are released after their last use."""

    async def run() -> tuple[BaseException | None, float]:
        error = None
        try:
            await shop.run()
        except OSError as raised:
            error = raised
        assert pending() == set()
        return error, asyncio.get_running_loop().time()

    error, ended_s = run_virtual(run())
    assert error is (shop.failures[0] if shop.failures else None)
    assert shop.running == {}
    assert shop.held == set()
    assert len(set(shop.released)) == len(shop.released)
    assert ended_s <= sum(step.takes_s for step in shop.steps.values())
    for job in range(len(shop.sizes)):
        assert [stage for j, stage in shop.done if j == job] == list(
            range(sum(j == job for j, _ in shop.done))
        )
    if error is None:
        assert sorted(shop.done) == sorted(shop.steps)
        assert sorted(shop.released) == list(range(len(shop.sizes)))


@examples(150)
@given(workshops(fragile=True), st.lists(st.integers(0, 12), min_size=1, max_size=3), st.booleans())
def test_cancelled_it_begins_nothing_and_waits_for_what_runs(
    shop: Workshop, cancels_s: list[int], late: bool
) -> None:
    """A cancellation at any moment, and repeated ones, wait for running stages."""

    async def run() -> None:
        task = asyncio.ensure_future(shop.run())
        for at_s in sorted(cancels_s):
            await asyncio.sleep(at_s - asyncio.get_running_loop().time())
            if late:  # the executor has not yet noticed stages that end at this moment
                await asyncio.sleep(0)
            if not task.done():
                task.cancel()
                shop.stop()
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        assert pending() == set()
        assert shop.running == {}
        assert shop.held == set()
        assert len(set(shop.released)) == len(shop.released)
        if outcome is None:
            assert sorted(shop.done) == sorted(shop.steps)
        else:
            assert isinstance(outcome, asyncio.CancelledError) or outcome is shop.failures[0]

    run_virtual(run())


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
        # A job that was started may be cancelled before its first step.
        assert len(released) == len(set(released)) < 30
        assert begun <= set(released)

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
