"""Spans: the counts and times of an operation's stages."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading

import pytest
from support.drivers import asynchronous

from holdfast.core import spans
from holdfast.core.histogram import BUCKET_MIN_S, BUCKETS, bucket_of, quantile_s
from holdfast.core.spans import SLOWEST, Recorder, Where, count_retry, recording, span


class Clock:
    """A clock that stands still until it is set."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    """Return the clock of the recorder."""
    return Clock()


@pytest.fixture
def recorder(clock: Clock) -> Recorder:
    """Return a recorder of rank 3."""
    return Recorder(3, clock)


def test_overlapping_operations_are_busy_once(recorder: Recorder, clock: Clock) -> None:
    """Two operations, from 1 to 4 s and from 2 to 6 s, and one from 8 to 9 s: 8 s of work in 6 s."""
    written = [recorder.span("write", lambda: Where("a", 0, 10)) for _ in range(3)]
    for now_s, ends, number in ((1, 0, 0), (2, 0, 1), (4, 1, 0), (6, 1, 1), (8, 0, 2), (9, 1, 2)):
        clock.now_s = 1000 + now_s
        if ends:
            written[number].__exit__(None, None, None)
        else:
            written[number].__enter__()
    stage = recorder.summary().stages["write"]
    assert (stage.count, stage.nbytes) == (3, 30)
    assert (stage.seconds, stage.busy_s) == (8, 6)
    assert (stage.first_s, stage.last_s) == (1, 9)
    assert sum(stage.histogram) == 3
    assert 4 <= stage.quantile_s(1) <= 8
    with contextlib.suppress(ValueError), recorder.span("read"):  # a failed one counts too
        clock.now_s += 2
        raise ValueError
    assert recorder.summary().stages["read"].busy_s == 2


def test_the_slowest_operations_are_kept(recorder: Recorder, clock: Clock) -> None:
    """They are sorted, with their places; ties keep their order, and all of them have a key."""
    for number in range(100):
        with recorder.span("write", lambda number=number: Where("image", number * 8, 8)):
            clock.now_s += 50 - abs(50 - number)
    with recorder.span("round commit"):
        clock.now_s += 1000
    slowest = recorder.summary().slowest
    assert len(slowest) == SLOWEST
    assert [slow.seconds for slow in slowest[:4]] == [50, 49, 49, 48]
    assert [slow.offset for slow in slowest[:3]] == [400, 392, 408]
    places = {(slow.stage, slow.key, slow.nbytes, slow.rank) for slow in slowest}
    assert places == {("write", "image", 8, 3)}


def test_peaks_of_memory_and_queue(recorder: Recorder) -> None:
    """The summary has the peak of host memory and of each stage's queue."""
    for nbytes in (5, 7, -5, 4, -11):
        recorder.hold(nbytes)
    for queued in (1, 4, 2):
        with recorder.span("hash", queued=queued):
            pass
    summary = recorder.summary()
    assert summary.peak_nbytes == 12
    assert summary.stages["hash"].queued_max == 4
    assert summary.cpu_s >= 0


def test_retries_count_in_the_innermost_operation(recorder: Recorder) -> None:
    """Outside of any operation they are not counted."""
    with recording(recorder):
        count_retry()
        with span("exchange"):
            with span("read"):
                count_retry()
                count_retry()
                spans.count_hedge()
            spans.waited_for(7)
    stages = recorder.summary().stages
    assert (stages["read"].retries, stages["read"].hedges) == (2, 1)
    assert (stages["exchange"].retries, stages["exchange"].last_rank) == (0, 7)
    assert stages["read"].last_rank is None


@asynchronous
async def test_tasks_inherit_the_recorder(recorder: Recorder) -> None:
    """Tasks count in the operation that started them, not in concurrent ones."""
    other = Recorder()

    async def work(name: str) -> None:
        with span(name):
            await asyncio.sleep(0)

    async def operation(mine: Recorder, name: str) -> None:
        with recording(mine):
            await asyncio.gather(work(name), work(name))

    await asyncio.gather(operation(recorder, "a"), operation(other, "b"))
    for mine, name in ((recorder, "a"), (other, "b")):
        stages = mine.summary().stages
        assert (list(stages), stages[name].count) == ([name], 2)


def test_threads_count_without_losses(recorder: Recorder) -> None:
    """Several threads count in one stage at a time."""
    interval = sys.getswitchinterval()
    with recording(recorder):
        counted = spans.counting("verify")

    def work() -> None:
        assert spans.current() is None
        for _ in range(500):
            with counted(Where(nbytes=2)):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    stage = recorder.summary().stages["verify"]
    assert (stage.count, stage.nbytes, sum(stage.histogram)) == (2000, 4000, 2000)


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [(0.0, 0), (BUCKET_MIN_S, 1), (1.0, 21), (1.5, 21), (1e9, BUCKETS - 1)],
)
def test_buckets_of_a_histogram(seconds: float, bucket: int) -> None:
    """Each bucket is twice as wide as the previous one, and the last one is open."""
    assert bucket_of(seconds) == bucket


def test_quantiles_are_the_ends_of_buckets() -> None:
    """They are never too small and at most twice too large; 0 without operations."""
    histogram = [0] * BUCKETS
    assert quantile_s(histogram, 0.5) == 0
    for seconds in (0.9, 0.9, 0.9, 3.0):
        histogram[bucket_of(seconds)] += 1
    assert 0.9 <= quantile_s(histogram, 0.5) <= 1.8
    assert 3.0 <= quantile_s(histogram, 0.99) <= 6.0
