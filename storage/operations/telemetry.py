"""Recording of saves and loads: the recorder, log lines, and the stored telemetry."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from typing import Literal

from ...core.spans import Recorder, StageReport, Summary, current
from ...errors import UsageError
from ..format.save_telemetry import RankTelemetry, SaveTelemetry, encode_head, encode_record
from .report import LoadReport, SaveReport

__all__ = [
    "Telemetry",
    "check_telemetry",
    "encoded_telemetry",
    "log_loaded",
    "log_safely",
    "log_saved",
    "rank_telemetry",
    "recorder_of",
    "summary_of",
]

Telemetry = Literal["on", "off"]
"""Whether a save or a load records its timings."""

LONGEST = 3
"""Number of stages named in the log line of a save or a load."""

_log = logging.getLogger(__name__)


def check_telemetry(telemetry: object) -> None:
    """Raise UsageError for unknown values."""
    if telemetry not in ("on", "off"):
        raise UsageError(f"telemetry={telemetry!r}", advice='Give "on" or "off".')


def recorder_of(telemetry: Telemetry, rank: int) -> Recorder | None:
    """Return a recorder for an operation that begins now; None if telemetry is off."""
    if telemetry == "off":
        return None
    return Recorder(rank)


def summary_of(recorder: Recorder | None) -> Summary:
    """Return the summary so far; empty without a recorder."""
    if recorder is None:
        return Summary({}, (), 0.0, 0)
    return recorder.summary()


def rank_telemetry(
    rank: int, nbytes: int, stored_nbytes: int, fenced_s: float
) -> RankTelemetry | None:
    """Return this rank's timings so far of the save in whose context this is called; None if it is
    not recorded.

    ``nbytes``: size of its image; ``stored_nbytes``: size of the image's file, which may be
    compressed. ``fenced_s``: seconds that training waited in fences.
    """
    recorder = current()
    if recorder is None:
        return None
    summary = recorder.summary()
    return RankTelemetry(
        rank=rank,
        nbytes=nbytes,
        stored_nbytes=stored_nbytes,
        elapsed_s=summary.elapsed_s,
        fenced_s=fenced_s,
        cpu_s=summary.cpu_s,
        peak_nbytes=summary.peak_nbytes,
        stages=summary.stages,
        slowest=summary.slowest,
    )


def encoded_telemetry(
    head: tuple[str, int | None, float], world: int, mine: RankTelemetry, others: bytes
) -> bytes:
    """Return the telemetry object that rank 0 stores.

    ``head``: id of the attempt, step, and time of the save in seconds since the epoch. ``mine``:
    the record of rank 0. ``others``: the concatenated outputs of :func:`encode_record` on the other
    ranks.
    """
    attempt, step, created_s = head
    arrivals = {name: stage.arrivals for name, stage in mine.stages.items() if stage.arrivals}
    whole = SaveTelemetry(attempt, step, world, created_s, mine.elapsed_s, arrivals, {})
    return encode_head(whole) + encode_record(mine) + others


def log_saved(report: SaveReport, step: int | None) -> None:
    """Log one line at level INFO, and one per stage at level DEBUG."""
    if not _log.isEnabledFor(logging.INFO):
        return
    name = "" if step is None else f"step {step}: "
    _log.info(
        "%ssaved, %s to %s; captured after %.2f s, fences waited %.1f ms%s",
        name,
        _moved(report.nbytes, "from this rank", report.durable_s),
        report.uri,
        report.captured_s,
        report.fenced_s * 1e3,
        _described(report),
    )
    _log_stages(f"{name}saved", report.stages)


def log_loaded(report: LoadReport) -> None:
    """Log one line at level INFO, and one per stage at level DEBUG."""
    if not _log.isEnabledFor(logging.INFO):
        return
    _log.info(
        "loaded, %s of %s; %s read, %s received%s",
        _moved(report.bytes_wanted, "for this rank", report.seconds),
        report.uri,
        _amount(report.bytes_read),
        _amount(report.bytes_received),
        _described(report),
    )
    _log_stages("loaded", report.stages)


def log_safely(log: Callable[..., object], *args: object) -> None:
    """Call ``log``; print any exception, so that a user's failing log handler does no harm."""
    try:
        log(*args)
    except BaseException:
        traceback.print_exc()


def _moved(nbytes: int, whose: str, seconds: float) -> str:
    rate = nbytes / max(seconds, 1e-9)
    return f"{_amount(nbytes)} {whose} in {seconds:.2f} s ({_amount(rate)}/s)"


def _described(report: SaveReport | LoadReport) -> str:
    """Return the end of a log line: the longest stages and the resources used."""
    if not report.stages:
        return ""
    stages = sorted(report.stages.items(), key=lambda item: -item[1].busy_s)
    longest = ", ".join(_timed(name, stage) for name, stage in stages[:LONGEST])
    text = f"; longest: {longest}; {report.cpu_s:.2f} s of processor time"
    text += f", {_amount(report.peak_nbytes)} held at most"
    again = sum(stage.retries + stage.hedges for stage in report.stages.values())
    if again:
        text += f", {again} requests made again"
    return text


def _timed(name: str, stage: StageReport) -> str:
    if stage.last_rank is None:
        return f"{name} {stage.busy_s:.2f} s"
    return f"{name} {stage.busy_s:.2f} s (rank {stage.last_rank} came last)"


def _log_stages(what: str, stages: Mapping[str, StageReport]) -> None:
    if not _log.isEnabledFor(logging.DEBUG):
        return
    for name, stage in stages.items():
        _log.debug(
            "%s: %s: %d times, %s, from %.3f to %.3f s, busy for %.3f s, half within %.2g s, all "
            "within %.2g s, at most %d waiting, %d tried again, %d hedged",
            what,
            name,
            stage.count,
            _amount(stage.nbytes),
            stage.first_s,
            stage.last_s,
            stage.busy_s,
            stage.quantile_s(0.5),
            stage.quantile_s(1),
            stage.queued_max,
            stage.retries,
            stage.hedges,
        )


def _amount(nbytes: float) -> str:
    """Format an amount in the largest unit that it reaches."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"
