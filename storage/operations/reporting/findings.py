"""Diagnoses a save from its telemetry: which ranks delayed the others, how long, and why.

A rank is compared with the typical one: the median of all ranks, the lower of two. Its excess is
reported if it is much more than typical and significant for the whole save.

Pure. Needs a save of several ranks: a single rank has no peers to compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import attrgetter

from ....core.spans import StageReport
from ...format.save_telemetry import RankTelemetry, SaveTelemetry

CALL = "call"
"""Pseudo-stage: the call of the save itself."""

FACTOR = 1.5
"""A rank stands out if it takes this many times the typical time ..."""
PART = 0.05
"""... and exceeds it by this fraction of the save ..."""
LEAST_S = 0.1
"""... and by this many seconds: clocks of ranks agree within half of that."""
_MORE_BYTES = 1.2
_HALF = 0.5
_FEW = 4
"""If the slowest of many requests took this many times the median, it alone is to blame."""

_PARTS = {"write": "open", "capture": "device_copy"}
"""Stages mapped to a stage that they contain or wait for."""


class Cause(StrEnum):
    """Reason why a rank was slow."""

    LATE = "late call"
    THROTTLED = "throttled"
    RETRIES = "retries"
    MORE_BYTES = "more bytes"
    SLOW_STORAGE = "slow device or network"
    SLOW_REQUESTS = "a few slow requests"
    SLOW_COPIES = "slow copies"
    PROCESSOR = "busy processor"
    NOT_RUNNING = "was not running"
    WAITED = "waited before it began"


_OF_STAGE = {
    "capture": Cause.SLOW_COPIES,
    "device_copy": Cause.SLOW_COPIES,
    "wait": Cause.WAITED,
    "open": Cause.SLOW_STORAGE,
    "write": Cause.SLOW_STORAGE,
    "upload_commit": Cause.SLOW_STORAGE,
}
"""Default causes by stage; the processor for all others."""


_COMPUTING = {Cause.SLOW_COPIES, Cause.PROCESSOR}
"""Causes in stages that keep the processor busy. If such a stage (other than copies off a
device) took long without processor time, the process was stopped or others used the processor."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that was slow in ``stage``: it took ``seconds``; ``typical_s`` are typical. For
    :data:`CALL`, it called that long after the first rank. ``detail`` gives the evidence for
    ``cause``. ``also``: other stages slow for the same cause."""

    rank: int
    stage: str
    seconds: float
    typical_s: float
    cause: Cause
    detail: str
    also: tuple[str, ...] = ()

    @property
    def excess_s(self) -> float:
        """Seconds beyond the typical time."""
        return self.seconds - self.typical_s

    @property
    def factor(self) -> float | None:
        """Multiple of the typical time; None if that is close to zero."""
        return None if self.typical_s < LEAST_S / 2 else self.seconds / self.typical_s


def stragglers(telemetry: SaveTelemetry) -> list[Straggler]:
    """Return the ranks that stand out, slowest first, once per cause."""
    if len(telemetry.ranks) < 2:
        return []
    found = [*_late(telemetry), *_slow(telemetry)]
    by_cause: dict[tuple[int, Cause], Straggler] = {}
    for slow in sorted(found, key=lambda s: -s.excess_s):
        first = by_cause.setdefault((slow.rank, slow.cause), slow)
        if first is not slow:
            also = (*first.also, slow.stage)
            by_cause[slow.rank, slow.cause] = replace(first, also=also)
    return list(by_cause.values())


def typical(values: Sequence[float]) -> float:
    """Return the lower median, so that the faster of two ranks is the typical one."""
    return sorted(values)[(len(values) - 1) // 2]


def _stands_out(seconds: float, typical_s: float, telemetry: SaveTelemetry) -> bool:
    least_s = max(LEAST_S, PART * telemetry.seconds)
    return seconds - typical_s >= least_s and seconds >= FACTOR * typical_s


def _late(telemetry: SaveTelemetry) -> Iterator[Straggler]:
    called_s = telemetry.called_s
    typical_s = typical(list(called_s.values()))
    for rank, seconds in called_s.items():
        if _stands_out(seconds, typical_s, telemetry):
            detail = f"it called {seconds:.2f} s after the first rank"
            yield Straggler(rank, CALL, seconds, typical_s, Cause.LATE, detail)


def _slow(telemetry: SaveTelemetry) -> Iterator[Straggler]:
    for record in telemetry.ranks.values():
        slow = {
            name: stage
            for name, stage in record.stages.items()
            if not name.startswith("round ")  # in a round, a rank waits for others
            and _stands_out(stage.busy_s, _typical_of(telemetry, name, _busy_s), telemetry)
        }
        for name, stage in slow.items():
            part = slow.get(_PARTS.get(name, ""))
            if part is not None and part.busy_s > stage.busy_s / 2:
                continue  # the contained stage is the cause
            yield _explained(telemetry, record, name)


_busy_s = attrgetter("busy_s")


def _typical_of(
    telemetry: SaveTelemetry, name: str, figure: Callable[[StageReport], float]
) -> float:
    stages = (record.stages.get(name) for record in telemetry.ranks.values())
    return typical([figure(stage) for stage in stages if stage is not None])


def _explained(telemetry: SaveTelemetry, record: RankTelemetry, name: str) -> Straggler:
    stage = record.stages[name]
    cause, detail = _cause(telemetry, record, name)
    return Straggler(
        record.rank, name, stage.busy_s, _typical_of(telemetry, name, _busy_s), cause, detail
    )


def _cause(telemetry: SaveTelemetry, record: RankTelemetry, name: str) -> tuple[Cause, str]:
    stage = record.stages[name]
    excess_s = stage.busy_s - _typical_of(telemetry, name, _busy_s)
    if stage.throttled_s > excess_s / 2:
        return Cause.THROTTLED, f"requests were throttled for {stage.throttled_s:.2f} s in total"
    if stage.retries > _typical_of(telemetry, name, lambda other: other.retries):
        return Cause.RETRIES, f"{stage.retries} requests were retried"
    typical_nbytes = _typical_of(telemetry, name, lambda other: other.nbytes)
    if typical_nbytes and stage.nbytes > _MORE_BYTES * typical_nbytes:
        times = stage.nbytes / typical_nbytes
        return Cause.MORE_BYTES, f"it wrote {times:.1f} times as many bytes as others"
    cause = _OF_STAGE.get(name, Cause.PROCESSOR)
    if cause is Cause.SLOW_STORAGE and stage.count > 1 and stage.histogram:
        return _of_requests(telemetry, name, stage)
    if cause in _COMPUTING and name != "device_copy" and record.cpu_s < excess_s * _HALF:
        return Cause.NOT_RUNNING, f"its process ran for {record.cpu_s:.2f} s in total"
    return cause, _slowest_words(record, name)


def _of_requests(telemetry: SaveTelemetry, name: str, stage: StageReport) -> tuple[Cause, str]:
    """Return whether all requests were slow or only a few, with the evidence."""
    half_s = stage.quantile_s(_HALF)
    typical_s = _typical_of(telemetry, name, lambda other: other.quantile_s(_HALF))
    words = f"half of its requests took up to {half_s:.2g} s; {typical_s:.2g} s are typical"
    longest_s = stage.quantile_s(1)
    if half_s > typical_s or longest_s < _FEW * half_s:
        return Cause.SLOW_STORAGE, words
    return Cause.SLOW_REQUESTS, f"{words}, and the slowest took up to {longest_s:.2g} s"


def _slowest_words(record: RankTelemetry, name: str) -> str:
    slowest = [slow for slow in record.slowest if slow.stage == name]
    if not slowest:
        return ""
    return f"the slowest operation took {slowest[0].seconds:.2f} s ({slowest[0].key})"


def retries_of(record: RankTelemetry) -> int:
    """Return the number of requests that a rank repeated."""
    return sum(stage.retries + stage.hedges for stage in record.stages.values())
