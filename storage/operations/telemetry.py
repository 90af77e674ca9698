"""Recording of saves and loads: the recorder, log lines, listeners, and the stored telemetry."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ...core.forks.renewal import new_lock
from ...core.spans import Recorder, StageReport, Summary, current
from ...errors import UsageError
from ..format.save_telemetry import RankTelemetry, SaveTelemetry, encode_head, encode_record
from .report import LoadReport, SaveReport, Update

Telemetry = Literal["on", "off"]
"""Whether a save or a load records its timings."""

Operation = Literal["save", "load", "push", "update"]
"""``"push"``: a publisher saves a version of weights; ``"update"``: a subscriber updates to one."""

LONGEST = 3
"""Number of stages named in the log line of a save or a load."""

_log = logging.getLogger(__name__)


def check_telemetry(telemetry: object) -> None:
    """Raise UsageError for unknown values."""
    if telemetry not in ("on", "off"):
        raise UsageError(f"telemetry={telemetry!r}", advice='Give "on" or "off".')


def recorder_of(telemetry: Telemetry, rank: int) -> Recorder | None:
    """Return a recorder for an operation that begins now; None if telemetry is off."""
    return None if telemetry == "off" else Recorder(rank)


def recorded_figures(recorder: Recorder | None) -> dict[str, Any]:
    """Return the fields of a report that a recorder has figures for; none without a recorder."""
    return {} if recorder is None else _figures(recorder.summary())


def _figures(summary: Summary) -> dict[str, Any]:
    return {
        "stages": summary.stages,
        "slowest": summary.slowest,
        "cpu_s": summary.cpu_s,
        "peak_nbytes": summary.peak_nbytes,
    }


class Wrote(NamedTuple):
    """Sizes of a rank's save. ``nbytes``: of its image; the others as in SaveReport."""

    nbytes: int = 0
    stored_nbytes: int = 0
    borrowed_nbytes: int = 0
    why_whole: str = ""


def rank_telemetry(rank: int, wrote: Wrote, fenced_s: float) -> RankTelemetry | None:
    """Return this rank's timings so far of the save in whose context this is called; None if it is
    not recorded. ``fenced_s``: seconds that training waited in fences."""
    recorder = current()
    if recorder is None:
        return None
    summary = recorder.summary()
    return RankTelemetry(
        rank=rank,
        elapsed_s=summary.elapsed_s,
        fenced_s=fenced_s,
        **wrote._asdict(),
        **_figures(summary),
    )


def encoded_telemetry(
    head: tuple[str, int | None, float], world: int, mine: RankTelemetry, others: bytes
) -> bytes:
    """Return the telemetry object that rank 0 stores. ``head``: id of the attempt, step, and time
    of the save in seconds since the epoch. ``mine``: the record of rank 0. ``others``: the
    concatenated outputs of :func:`encode_record` on the other ranks."""
    attempt, step, created_s = head
    arrivals = {name: stage.arrivals for name, stage in mine.stages.items() if stage.arrivals}
    whole = SaveTelemetry(attempt, step, world, created_s, mine.elapsed_s, arrivals, {})
    return encode_head(whole) + encode_record(mine) + others


def log_saved(report: SaveReport, step: int | None, operation: Operation) -> None:
    """Log one line at level INFO, and one per stage at level DEBUG."""
    if operation == "push":
        name = f"version {step}: published"
        how = f", {_amount(report.stored_nbytes)} of it stored"
    else:
        name = "saved" if step is None else f"step {step}: saved"
        how = _borrowed(report)
    _log.info(
        "%s, %s to %s%s; captured after %.2f s, fences waited %.1f ms%s",
        name,
        _moved(report.nbytes, "from this rank", report.durable_s),
        report.uri,
        how,
        report.captured_s,
        report.fenced_s * 1e3,
        _described(report),
    )
    _log_stages(name, report.stages)


def _borrowed(report: SaveReport) -> str:
    if report.why_whole:
        return f" as a whole: {report.why_whole}"
    if not report.base:
        return ""
    return f", {_amount(report.borrowed_nbytes)} of it copied from {report.base}"


def log_loaded(report: LoadReport) -> None:
    """Log one line at level INFO, and one per stage at level DEBUG."""
    _log.info(
        "loaded, %s of %s; %s read, %s received%s",
        _moved(report.bytes_wanted, "for this rank", report.seconds),
        report.uri,
        _amount(report.bytes_read),
        _amount(report.bytes_received),
        _described(report),
    )
    _log_stages("loaded", report.stages)


def log_updated(report: Update) -> None:
    """Log one line at level INFO, and one per stage at level DEBUG."""
    name = f"version {report.version}: in use"
    _log.info(
        "%s after %.2f s and a pause of %.1f ms, %s of %s read, %d chunks of it whole%s",
        name,
        report.prepare_s,
        report.pause_s * 1e3,
        _amount(report.received_nbytes),
        report.uri,
        report.anchored_chunks,
        _described(report),
    )
    _log_stages(name, report.stages)


def log_safely(log: Callable[..., object], *args: object) -> None:
    """Call ``log``; print any exception, so that a user's failing log handler does no harm."""
    try:
        log(*args)
    except BaseException:
        traceback.print_exc()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an operation on this rank. ``uri`` is redacted. ``seconds``: from the call
    to the end; of an update, without the time that it waited for a version. ``report``: set on
    success, a SaveReport of a push; ``error``: set on failure. ``step``: the version of a push or
    an update; None for loads and for checkpoints without a step."""

    operation: Operation
    uri: str
    seconds: float
    step: int | None = None
    report: SaveReport | LoadReport | Update | None = None
    error: BaseException | None = None


Listener = Callable[[Outcome], object]
_listeners: list[Listener] = []
_listeners_lock = new_lock()


def listen(listener: Listener) -> Callable[[], None]:
    """Call ``listener`` with the :class:`Outcome` of every future save, load, push and update of
    this process.

    Returns a function that unsubscribes. The listener runs on the thread that ends the operation:
    the engine's for a save or a push, else the caller's. Others wait for it, so it should return
    quickly. Its exceptions are printed and ignored.
    """

    def told(outcome: Outcome) -> None:
        listener(outcome)

    def stop() -> None:
        with _listeners_lock:
            if told in _listeners:
                _listeners.remove(told)

    with _listeners_lock:
        _listeners.append(told)
    return stop


def announce(outcome: Outcome) -> None:
    """Call every listener."""
    with _listeners_lock:
        listeners = list(_listeners)
    for listener in listeners:
        log_safely(listener, outcome)


def _moved(nbytes: int, whose: str, seconds: float) -> str:
    rate = nbytes / max(seconds, 1e-9)
    return f"{_amount(nbytes)} {whose} in {seconds:.2f} s ({_amount(rate)}/s)"


def _described(report: SaveReport | LoadReport | Update) -> str:
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
        times = f"from {stage.first_s:.3f} to {stage.last_s:.3f} s, busy for {stage.busy_s:.3f} s"
        amount = _amount(stage.nbytes)
        _log.debug("%s: %s: %d times, %s, %s", what, name, stage.count, amount, times)


def _amount(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"
