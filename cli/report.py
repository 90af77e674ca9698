"""``holdfast report``: where the time of saves went, and which ranks kept the others waiting."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..core.spans import StageReport
from ..core.units import size_text
from ..drivers.uri import parse
from ..errors import UsageError
from ..storage.format.save_telemetry import RankTelemetry, SaveTelemetry
from ..storage.operations.findings import Cause, Straggler, retries_of, stragglers, typical
from ..storage.operations.report_saves import RecordedSave, recorded_saves
from ..storage.operations.trace import chrome_trace
from .commands import complain, print_json
from .tables import print_table
from .text import one_of, paint, printable, time_text

__all__ = ["run", "words"]

_RANKS_SHOWN = 16
_OPERATIONS_SHOWN = 8
_NONE = "-"
_STAGE_TITLES = ("stage", "ranks", "typical", "slowest", "rank", "bytes", "rate", "again", "held")
_RANK_TITLES = ("rank", "called", "wrote", "rate", "written after", "again", "cpu", "memory")
_OPERATION_TITLES = ("rank", "stage", "took", "after", "bytes", "offset", "key")


def run(uri: str, *, json_output: bool, trace: str | None) -> int:
    """Print it; 0 if anything was recorded, 1 if not. ``trace``: a file for Perfetto."""
    saves = recorded_saves(uri)
    known = [save.telemetry for save in saves if save.telemetry is not None]
    if trace is not None and known:
        _write(trace, json.dumps(chrome_trace(known)))
    redacted = parse(uri).redacted
    if json_output:
        print_json({"uri": redacted, "saves": [_entry(save) for save in saves]})
    elif len(saves) > 1:
        _print_history(saves)
    elif known:
        _print_save(known[0])
    if not saves:
        complain(f"no checkpoint at or below {redacted}")
    elif not known:
        complain(f"no telemetry at {redacted}: {saves[0].problem}")
    return int(not known)


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def words(slow: Straggler) -> str:
    """One straggler in a sentence."""
    if slow.cause is Cause.LATE:
        return f"rank {slow.rank}: {slow.cause}: {slow.detail}"
    if slow.factor is None:
        times = f"{slow.excess_s:.2f} s longer than is typical"
    else:
        times = f"{slow.factor:.1f} times the typical {slow.typical_s:.2f} s"
    text = f"rank {slow.rank}: {slow.cause}: {slow.stage} took {slow.seconds:.2f} s, {times}"
    if slow.also:
        text += f"; also {', '.join(slow.also)}"
    if slow.detail:
        text += f"; {slow.detail}"
    return text


def _print_save(save: SaveTelemetry) -> None:
    nbytes = sum(record.nbytes for record in save.ranks.values())
    facts = {
        "step": _NONE if save.step is None else str(save.step),
        "saved": time_text(save.created_s),
        "ranks": f"{save.world}"
        + ("" if len(save.ranks) == save.world else f", of which {len(save.ranks)} recorded"),
        "took": f"{save.seconds:.2f} s, {size_text(nbytes)}, {_rate(nbytes, save.seconds)}",
        "retries": str(sum(map(retries_of, save.ranks.values()))),
    }
    print("\n".join(f"{paint(f'{name:<9}', 'dim')}{fact}" for name, fact in facts.items()) + "\n")
    _print_stragglers(save)
    print_table("stages, busy for", _STAGE_TITLES, list(_stage_rows(save)), ("stage",))
    print_table(_ranks_title(save), _RANK_TITLES, list(_rank_rows(save)), ())
    rows = list(_operation_rows(save))
    print_table("slowest operations", _OPERATION_TITLES, rows, ("stage", "key"))


def _print_stragglers(save: SaveTelemetry) -> None:
    found = stragglers(save)
    for slow in found:
        print(paint(printable(words(slow)), "red"))
    if not found and len(save.ranks) > 1:
        print("no rank stands out")
    if found or len(save.ranks) > 1:
        print()


def _stage_rows(save: SaveTelemetry) -> Iterator[tuple[str, ...]]:
    names: dict[str, float] = {}
    for record in save.ranks.values():
        for name, stage in record.stages.items():
            names[name] = min(names.get(name, stage.first_s), stage.first_s)
    for name in sorted(names, key=names.__getitem__):
        by_rank = {
            rank: record.stages[name]
            for rank, record in save.ranks.items()
            if name in record.stages
        }
        slowest = max(by_rank, key=lambda rank: by_rank[rank].busy_s)
        yield _stage_row(name, list(by_rank.values()), slowest, by_rank[slowest])


def _stage_row(
    name: str, stages: Sequence[StageReport], rank: int, slowest: StageReport
) -> tuple[str, ...]:
    nbytes = sum(stage.nbytes for stage in stages)
    busy_s = sum(stage.busy_s for stage in stages)
    return (
        name,
        str(len(stages)),
        f"{typical([stage.busy_s for stage in stages]):.3f} s",
        f"{slowest.busy_s:.3f} s",
        str(rank),
        size_text(nbytes) if nbytes else _NONE,
        _rate(nbytes, busy_s),
        str(sum(stage.retries + stage.hedges for stage in stages)),
        f"{sum(stage.throttled_s for stage in stages):.2f} s",
    )


def _rate(nbytes: float, seconds: float) -> str:
    """Of one rank, where seconds are of all ranks together."""
    if not nbytes or seconds <= 0:
        return _NONE
    return f"{size_text(int(nbytes / seconds))}/s"


def _ranks_title(save: SaveTelemetry) -> str:
    nbytes = [record.nbytes for record in save.ranks.values()]
    mean = sum(nbytes) / len(nbytes)
    title = "ranks"
    if mean:
        title += f", the largest image {max(nbytes) / mean:.2f} times the mean"
    if len(save.ranks) > _RANKS_SHOWN:
        title += f"; the {_RANKS_SHOWN} that were last"
    return title


def _rank_rows(save: SaveTelemetry) -> Iterator[tuple[str, ...]]:
    shown = sorted(save.ranks.values(), key=lambda record: -_written_s(save, record))
    for record in sorted(shown[:_RANKS_SHOWN], key=lambda record: record.rank):
        write = record.stages.get("write")
        yield (
            str(record.rank),
            f"+{save.called_s[record.rank]:.2f} s",
            size_text(record.nbytes),
            _NONE if write is None else _rate(write.nbytes, write.busy_s),
            f"{_written_s(save, record):.2f} s",
            str(retries_of(record)),
            f"{record.cpu_s:.2f} s",
            size_text(record.peak_nbytes),
        )


def _written_s(save: SaveTelemetry, record: RankTelemetry) -> float:
    """When all of a rank was durable, after the first rank's call."""
    written = record.stages.get("upload_commit")
    if written is None:
        return save.called_s[record.rank]
    return save.called_s[record.rank] + written.last_s


def _operation_rows(save: SaveTelemetry) -> Iterator[tuple[str, ...]]:
    for slow in save.slowest[:_OPERATIONS_SHOWN]:
        yield (
            str(slow.rank),
            slow.stage,
            f"{slow.seconds:.3f} s",
            f"{slow.began_s:.2f} s",
            size_text(slow.nbytes) if slow.nbytes else _NONE,
            f"{slow.offset:,}",
            slow.key,
        )


def _print_history(saves: Sequence[RecordedSave]) -> None:
    titles = ("step", "saved", "ranks", "took", "bytes", "rate", "stalled", "again", "slowest")
    found = [stragglers(save.telemetry) if save.telemetry else [] for save in saves]
    rows = [_history_row(save, slow) for save, slow in zip(saves, found, strict=True)]
    print_table("saves", titles, rows, ("saved", "slowest"))
    often = Counter(f"rank {slow.rank}: {slow.cause}" for each in found for slow in each)
    recorded = sum(save.telemetry is not None for save in saves)
    for name, count in often.most_common(_OPERATIONS_SHOWN):
        print(paint(f"{name}, in {count} of {one_of(recorded, 'save')}", "red"))


def _history_row(save: RecordedSave, found: Sequence[Straggler]) -> tuple[str, ...]:
    checkpoint = save.checkpoint
    step = _NONE if checkpoint.step is None else str(checkpoint.step)
    telemetry = save.telemetry
    if telemetry is None:
        problem = f"{checkpoint.path or '.'}: {save.problem}"
        return (step, *[_NONE] * 7, problem)
    records = telemetry.ranks.values()
    nbytes = sum(record.nbytes for record in records)
    return (
        step,
        time_text(telemetry.created_s),
        str(telemetry.world),
        f"{telemetry.seconds:.2f} s",
        size_text(nbytes),
        _rate(nbytes, telemetry.seconds),
        f"{max((record.fenced_s for record in records), default=0.0):.3f} s",
        str(sum(map(retries_of, records))),
        f"rank {found[0].rank}, {found[0].stage}: {found[0].cause}" if found else "",
    )


def _entry(save: RecordedSave) -> dict[str, Any]:
    """What ``--json`` prints of one save."""
    entry: dict[str, Any] = {
        "path": save.checkpoint.path,
        "step": save.checkpoint.step,
        "problem": save.problem,
        "telemetry": None,
        "stragglers": [],
    }
    telemetry = save.telemetry
    if telemetry is None:
        return entry
    fields = {
        "attempt": telemetry.attempt,
        "world": telemetry.world,
        "created_s": telemetry.created_s,
        "seconds": telemetry.seconds,
        "nbytes": sum(record.nbytes for record in telemetry.ranks.values()),
        "arrivals": {name: list(found) for name, found in telemetry.arrivals.items()},
        "ranks": [
            {"called_s": telemetry.called_s[rank], **asdict(record)}
            for rank, record in telemetry.ranks.items()
        ],
        "slowest": [asdict(slow) for slow in telemetry.slowest],
    }
    slow_ranks = [
        {**asdict(slow), "excess_s": slow.excess_s, "factor": slow.factor, "text": words(slow)}
        for slow in stragglers(telemetry)
    ]
    return {**entry, "telemetry": fields, "stragglers": slow_ranks}
