"""Measures where the time of an operation goes, by counting and timing its stages.

A :class:`Recorder` belongs to one operation on one rank, such as a save. While it is
:func:`recording`, every :func:`span` in the operation's tasks counts in it. Without a recorder, a
span does nothing. Threads do not inherit the recorder: code there uses a function obtained from
:func:`counting` beforehand.

A recorder keeps sums and a histogram per stage, and the slowest few requests of the whole
operation: so it takes the same few kilobytes however long an operation is.

Scope: knows neither stages nor storage; names and keys are given.
"""

from __future__ import annotations

import contextlib
import heapq
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import NamedTuple

from .forks.renewal import new_lock
from .histogram import BUCKETS, bucket_of, quantile_s

SLOWEST = 16
"""Number of slowest operations to keep."""

Span = contextlib.AbstractContextManager[None]
NOT_COUNTED: Span = contextlib.nullcontext()
"""A span that records nothing."""


class Where(NamedTuple):
    """The object and byte range in storage that an operation of a stage concerns."""

    key: str = ""
    offset: int = 0
    nbytes: int = 0


NOWHERE = Where()
"""No place in storage."""


@dataclass(frozen=True, slots=True)
class StageReport:
    """The operations of one stage on this rank, such as its writes of chunks. Times are in seconds.

    - ``count``, ``nbytes``, ``seconds``: number, bytes and durations of all operations, summed
    - ``busy_s``: time during which at least one operation was running
    - ``first_s``, ``last_s``: start of the first and end of the last one, since the call
    - ``queued_max``: largest number that waited for others to end
    - ``retries``: requests sent again after a failure
    - ``hedges``: requests duplicated because they were slow
    - ``throttled_s``: total time that requests were delayed, by ``max_bytes_per_s`` or because the
      storage asked for a pause
    - ``histogram[i]``: number of operations that took up to ``2**i`` microseconds (of 2⁻²⁰ s each),
      but longer than those in ``histogram[i - 1]``

    If the stage is a round of messages between ranks:

    - ``last_rank``: the rank that arrived last
    - ``arrivals``: (sender, arrival time since the call), in order; on the rank that gathers only
    """

    count: int
    nbytes: int
    seconds: float
    busy_s: float
    first_s: float
    last_s: float
    queued_max: int = 0
    retries: int = 0
    hedges: int = 0
    last_rank: int | None = None
    histogram: tuple[int, ...] = ()
    arrivals: tuple[tuple[int, float], ...] = ()
    throttled_s: float = 0.0

    def quantile_s(self, part: float) -> float:
        """Return the duration that ``part`` (0 to 1) of its operations did not exceed.

        The result may be up to twice too large.
        """
        return quantile_s(self.histogram, part)


@dataclass(frozen=True, slots=True)
class SlowOperation:
    """One slow operation of a stage: ``nbytes`` of the object ``key`` from ``offset`` on.

    ``began_s``: its start, in seconds since the call.
    """

    stage: str
    key: str
    offset: int
    nbytes: int
    rank: int
    began_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The record of one operation on one rank.

    ``stages``: by name, in order of their beginning. ``slowest``: the slowest operations, the
    slowest first. ``cpu_s``: this process's processor time since the call. ``peak_nbytes``: the
    most bytes held in host memory at any time. ``elapsed_s``: from the call to this summary.
    """

    stages: dict[str, StageReport]
    slowest: tuple[SlowOperation, ...]
    cpu_s: float
    peak_nbytes: int
    elapsed_s: float = 0.0


@dataclass(slots=True)
class _Stage:
    """The counts of one stage; see :class:`StageReport`. Guarded by the recorder's lock."""

    name: str
    first_s: float
    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    busy_s: float = 0.0
    busy_since_s: float = 0.0
    last_s: float = 0.0
    running: int = 0
    queued_max: int = 0
    retries: int = 0
    hedges: int = 0
    last_rank: int | None = None
    histogram: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    arrivals: list[tuple[int, float]] = field(default_factory=list)
    throttled_s: float = 0.0

    def begin(self, now_s: float, queued: int) -> None:
        if not self.running:
            self.busy_since_s = now_s
        self.running += 1
        self.queued_max = max(self.queued_max, queued)

    def end(self, now_s: float, seconds: float, nbytes: int) -> None:
        self.running -= 1
        if not self.running:
            self.busy_s += now_s - self.busy_since_s
        self.last_s = now_s
        self.count += 1
        self.nbytes += nbytes
        self.seconds += seconds
        self.histogram[bucket_of(seconds)] += 1

    def add(self, report: StageReport) -> None:
        for name in ("count", "nbytes", "seconds", "busy_s", "retries", "hedges", "throttled_s"):
            setattr(self, name, getattr(self, name) + getattr(report, name))
        self.last_s = max(self.last_s, report.last_s)
        self.queued_max = max(self.queued_max, report.queued_max)
        self.histogram = [a + b for a, b in zip(self.histogram, report.histogram, strict=True)]

    def report(self) -> StageReport:
        found = {name: getattr(self, name) for name in StageReport.__dataclass_fields__}
        lists = {"histogram": tuple(self.histogram), "arrivals": tuple(self.arrivals)}
        return StageReport(**(found | lists))


class Recorder:
    """Records one operation on ``rank``, starting now. Thread-safe."""

    def __init__(
        self,
        rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self.rank = rank
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._called_s = clock()
        self._called_cpu_s = cpu_clock()
        self._lock = new_lock()
        self._stages: dict[str, _Stage] = {}
        self._slowest: list[tuple[float, int, SlowOperation]] = []
        self._slow_ones = 0
        self._held_nbytes = 0
        self._peak_nbytes = 0

    def span(
        self, name: str, where: Callable[[], Where] = lambda: NOWHERE, queued: int = 0
    ) -> Span:
        """Count the body as one operation of the stage ``name``.

        ``where()`` is called at its end for the place in storage. ``queued``: the number of
        operations waiting at its beginning. The slowest operations with a key are kept.
        """
        return _Span(self, name, where, queued)

    def hold(self, nbytes: int) -> None:
        """Add ``nbytes``, possibly negative, to the bytes held in host memory."""
        with self._lock:
            self._held_nbytes += nbytes
            self._peak_nbytes = max(self._peak_nbytes, self._held_nbytes)

    def add(self, summary: Summary) -> None:
        """Count what another process has recorded for this operation since it was called."""
        with self._lock:
            for name, report in summary.stages.items():
                stage = self._stages.setdefault(name, _Stage(name, report.first_s))
                stage.add(report)
            for slow in summary.slowest:
                if len(self._slowest) < SLOWEST or slow.seconds > self._slowest[0][0]:
                    self._keep(slow)
            self._called_cpu_s -= summary.cpu_s

    def summary(self) -> Summary:
        """Return a summary of everything that has ended by now."""
        with self._lock:
            stages = {name: stage.report() for name, stage in self._stages.items() if stage.count}
            slowest = tuple(slow for *_, slow in sorted(self._slowest, reverse=True))
            cpu_s = self._cpu_clock() - self._called_cpu_s
            elapsed_s = self._clock() - self._called_s
            return Summary(stages, slowest, cpu_s, self._peak_nbytes, elapsed_s)

    def _begin(self, name: str, queued: int) -> tuple[_Stage, float]:
        with self._lock:
            now_s = self._clock() - self._called_s
            stage = self._stages.get(name)
            if stage is None:
                stage = self._stages[name] = _Stage(name, now_s)
            stage.begin(now_s, queued)
            return stage, now_s

    def _end(self, stage: _Stage, began_s: float, where: Where) -> None:
        with self._lock:
            now_s = self._clock() - self._called_s
            seconds = now_s - began_s
            stage.end(now_s, seconds, where.nbytes)
            if where.key and (len(self._slowest) < SLOWEST or seconds > self._slowest[0][0]):
                self._keep(SlowOperation(stage.name, *where, self.rank, began_s, seconds))

    def _keep(self, slow: SlowOperation) -> None:
        self._slow_ones += 1  # of equally slow operations, the first stays
        heapq.heappush(self._slowest, (slow.seconds, -self._slow_ones, slow))
        if len(self._slowest) > SLOWEST:
            heapq.heappop(self._slowest)


class _Span:
    """See :meth:`Recorder.span`."""

    __slots__ = ("_began_s", "_name", "_queued", "_recorder", "_stage", "_token", "_where")

    def __init__(
        self, recorder: Recorder, name: str, where: Callable[[], Where], queued: int
    ) -> None:
        self._recorder = recorder
        self._name = name
        self._where = where
        self._queued = queued

    def __enter__(self) -> None:
        self._stage, self._began_s = self._recorder._begin(self._name, self._queued)
        self._token: Token[_Stage | None] = _current_stage.set(self._stage)

    def __exit__(self, *_: object) -> None:
        _current_stage.reset(self._token)
        self._recorder._end(self._stage, self._began_s, self._where())


_current_recorder: ContextVar[Recorder | None] = ContextVar("holdfast_recorder", default=None)
_current_stage: ContextVar[_Stage | None] = ContextVar("holdfast_stage", default=None)


@contextlib.contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Record the body and the tasks it starts with ``recorder``; with None, record nothing."""
    token = _current_recorder.set(recorder)
    try:
        yield
    finally:
        _current_recorder.reset(token)


def current() -> Recorder | None:
    """Return the current recorder, or None."""
    return _current_recorder.get()


def counting(name: str) -> Callable[[Where], Span]:
    """Return a function that begins operations of the stage ``name``, also in other threads."""
    recorder = _current_recorder.get()
    if recorder is None:
        return lambda where: NOT_COUNTED
    return lambda where: recorder.span(name, lambda: where)


def span(name: str, where: Where = NOWHERE) -> Span:
    """Count the body as one operation of the stage ``name`` in the current recorder."""
    return counting(name)(where)


def count_retry() -> None:
    """Count a retried request of the current operation."""
    stage = _current_stage.get()
    if stage is not None:
        stage.retries += 1


def count_hedge() -> None:
    """Count a hedged request of the current operation."""
    stage = _current_stage.get()
    if stage is not None:
        stage.hedges += 1


def count_throttled(seconds: float) -> None:
    """Count ``seconds`` for which a request of the current operation is held back."""
    stage = _current_stage.get()
    if stage is not None:
        stage.throttled_s += seconds


def waited_for(rank: int) -> None:
    """Record that the current operation waited for ``rank`` last."""
    stage = _current_stage.get()
    if stage is not None:
        stage.last_rank = rank


def arrived(ranks: Iterable[int]) -> None:
    """Record that the messages of ``ranks`` have arrived in the current round."""
    recorder = _current_recorder.get()
    stage = _current_stage.get()
    if recorder is not None and stage is not None:
        now_s = recorder._clock() - recorder._called_s
        stage.arrivals += [(rank, now_s) for rank in ranks]
