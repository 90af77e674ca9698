"""Saves as a trace in Chrome's format, for Perfetto and chrome://tracing.

A rank is a process of the trace and each of its stages a thread; one more thread shows the slowest
operations. Ranks are offset by their call time, see ``SaveTelemetry.called_s``, and saves by their
start.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...format.save_telemetry import RankTelemetry, SaveTelemetry

_US = 1e6
_SLOWEST = 0
"""Thread number of the slowest operations; stages are numbered from 1."""


def chrome_trace(saves: Sequence[SaveTelemetry]) -> dict[str, object]:
    """Return the trace document, to be written as JSON. Times are in microseconds since the
    first save."""
    stages = {name for save in saves for record in save.ranks.values() for name in record.stages}
    ranks = {rank for save in saves for rank in save.ranks}
    first_s = min((save.created_s for save in saves), default=0.0)
    threads = {name: number for number, name in enumerate(sorted(stages), 1)}
    events = list(_named(sorted(ranks), threads))
    for save in saves:
        begins_s = save.created_s - first_s - save.called_s.get(0, 0.0)
        for rank, record in save.ranks.items():
            events += _of_rank(save, record, begins_s + save.called_s[rank], threads)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(ranks: Sequence[int], threads: dict[str, int]) -> Iterator[dict[str, object]]:
    for rank in ranks:
        yield _meta("process_name", rank, _SLOWEST, f"rank {rank}")
        yield _meta("thread_name", rank, _SLOWEST, "slowest operations")
        for name, number in threads.items():
            yield _meta("thread_name", rank, number, name)


def _meta(what: str, rank: int, thread: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}


def _of_rank(
    save: SaveTelemetry, record: RankTelemetry, called_s: float, threads: dict[str, int]
) -> Iterator[dict[str, object]]:
    for name, stage in record.stages.items():
        args: dict[str, object] = {
            "step": save.step,
            "operations": stage.count,
            "bytes": stage.nbytes,
            "busy_s": stage.busy_s,
            "operation_s": stage.seconds,
            "retries": stage.retries,
            "hedges": stage.hedges,
            "throttled_s": stage.throttled_s,
            "last_rank": stage.last_rank,
        }
        began_s = called_s + stage.first_s
        seconds = stage.last_s - stage.first_s
        yield _complete(name, (record.rank, threads[name]), began_s, seconds, args)
    for slow in record.slowest:
        about: dict[str, object] = {
            "step": save.step,
            "key": slow.key,
            "offset": slow.offset,
            "bytes": slow.nbytes,
        }
        where = (record.rank, _SLOWEST)
        yield _complete(slow.stage, where, called_s + slow.began_s, slow.seconds, about)


def _complete(
    name: str, where: tuple[int, int], began_s: float, seconds: float, args: dict[str, object]
) -> dict[str, object]:
    rank, thread = where
    return {
        "ph": "X",
        "cat": "save",
        "name": name,
        "pid": rank,
        "tid": thread,
        "ts": round(began_s * _US),
        "dur": max(1, round(seconds * _US)),
        "args": args,
    }
