"""The tables of a report, for terminals and pages.

Scope: pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.units import size_text
from ...storage.format.save_telemetry import RankTelemetry, SaveTelemetry
from ...storage.operations.reporting.findings import Straggler, retries_of, typical
from ...storage.operations.reporting.report_saves import RecordedSave
from ..tables import NONE, Table
from ..text import time_text
from .words import Against, borrowed_words, nbytes_of, rate_text

_RANKS_SHOWN = 16
_OPERATIONS_SHOWN = 8


def stage_names(save: SaveTelemetry) -> list[str]:
    """Return the stages of all ranks, in the order they began."""
    began_s: dict[str, float] = {}
    for record in save.ranks.values():
        for name, stage in record.stages.items():
            began_s[name] = min(began_s.get(name, stage.first_s), stage.first_s)
    return sorted(began_s, key=began_s.__getitem__)


def stages_table(save: SaveTelemetry) -> Table:
    """Return a row for each stage: the typical rank and the slowest one."""
    titles = (
        "stage", "ranks", "typical", "slowest", "rank", "bytes", "rate", "retries", "throttled",
    )  # fmt: skip
    rows = [_stage_row(name, save) for name in stage_names(save)]
    return Table("stages, by busy time", titles, rows, ("stage",))


def _stage_row(name: str, save: SaveTelemetry) -> tuple[str, ...]:
    by_rank = {r: record.stages[name] for r, record in save.ranks.items() if name in record.stages}
    stages = by_rank.values()
    slowest = max(by_rank, key=lambda rank: by_rank[rank].busy_s)
    nbytes = sum(stage.nbytes for stage in stages)
    busy_s = sum(stage.busy_s for stage in stages)
    return (
        name,
        str(len(stages)),
        f"{typical([stage.busy_s for stage in stages]):.3f} s",
        f"{by_rank[slowest].busy_s:.3f} s",
        str(slowest),
        size_text(nbytes) if nbytes else NONE,
        rate_text(nbytes, busy_s),
        str(sum(stage.retries + stage.hedges for stage in stages)),
        f"{sum(stage.throttled_s for stage in stages):.2f} s",
    )


def ranks_table(save: SaveTelemetry) -> Table:
    """Return a row for each rank, or for the last ones to finish if there are many."""
    titles = ("rank", "called", "wrote", "rate", "written after", "retries", "cpu", "memory")
    last = sorted(save.ranks.values(), key=lambda record: -_written_s(save, record))
    shown = sorted(last[:_RANKS_SHOWN], key=lambda record: record.rank)
    return Table(_ranks_title(save), titles, [_rank_row(save, record) for record in shown])


def _ranks_title(save: SaveTelemetry) -> str:
    nbytes = [record.nbytes for record in save.ranks.values()]
    mean = sum(nbytes) / max(1, len(nbytes))
    title = "ranks"
    if mean:
        title += f", the largest image {max(nbytes) / mean:.2f} times the mean"
    if len(save.ranks) > _RANKS_SHOWN:
        title += f"; the {_RANKS_SHOWN} that finished last"
    return title


def _rank_row(save: SaveTelemetry, record: RankTelemetry) -> tuple[str, ...]:
    write = record.stages.get("write")
    return (
        str(record.rank),
        f"+{save.called_s[record.rank]:.2f} s",
        size_text(record.nbytes),
        NONE if write is None else rate_text(write.nbytes, write.busy_s),
        f"{_written_s(save, record):.2f} s",
        str(retries_of(record)),
        f"{record.cpu_s:.2f} s",
        size_text(record.peak_nbytes),
    )


def _written_s(save: SaveTelemetry, record: RankTelemetry) -> float:
    """Return when all bytes of a rank were durable, in seconds since the first rank's call."""
    written = record.stages.get("upload_commit")
    if written is None:
        return save.called_s[record.rank]
    return save.called_s[record.rank] + written.last_s


def operations_table(save: SaveTelemetry) -> Table:
    """Return a row for each of the slowest operations."""
    titles = ("rank", "stage", "took", "after", "bytes", "offset", "key")
    rows = [
        (
            str(slow.rank),
            slow.stage,
            f"{slow.seconds:.3f} s",
            f"{slow.began_s:.2f} s",
            size_text(slow.nbytes) if slow.nbytes else NONE,
            f"{slow.offset:,}",
            slow.key,
        )
        for slow in save.slowest[:_OPERATIONS_SHOWN]
    ]
    return Table("slowest operations", titles, rows, ("stage", "key"))


def history_table(
    saves: Sequence[RecordedSave],
    found: Sequence[Sequence[Straggler]],
    against: Against | None = None,
) -> Table:
    """Return a row for each save of a run. ``found`` holds the stragglers of each save; ``against``
    is the baseline of the rates."""
    titles: tuple[str, ...] = (
        "step", "saved", "ranks", "took", "bytes", "rate", "stalled", "retries", "borrowed",
        "slowest",
    )  # fmt: skip
    rows = [_history_row(save, slow) for save, slow in zip(saves, found, strict=True)]
    if against is not None:
        titles = ("of bench", *titles)
        shares = [save.telemetry and against.share(save.telemetry) for save in saves]
        rows = [
            (NONE if share is None else f"{share:.0%}", *row)
            for share, row in zip(shares, rows, strict=True)
        ]
    return Table("saves", titles, rows, ("saved", "borrowed", "slowest"))


def _history_row(save: RecordedSave, found: Sequence[Straggler]) -> tuple[str, ...]:
    checkpoint = save.checkpoint
    step = NONE if checkpoint.step is None else str(checkpoint.step)
    telemetry = save.telemetry
    if telemetry is None:
        problem = f"{checkpoint.path or '.'}: {save.problem}"
        return (step, *[NONE] * 8, problem)
    records = telemetry.ranks.values()
    nbytes = nbytes_of(telemetry)
    return (
        step,
        time_text(telemetry.created_s),
        str(telemetry.world),
        f"{telemetry.seconds:.2f} s",
        size_text(nbytes),
        rate_text(nbytes, telemetry.seconds),
        f"{max((record.fenced_s for record in records), default=0.0):.3f} s",
        str(sum(map(retries_of, records))),
        borrowed_words(telemetry) or NONE,
        f"rank {found[0].rank}, {found[0].stage}: {found[0].cause}" if found else "",
    )
