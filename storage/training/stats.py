"""The outcomes of a Checkpointer's saves: counters, log messages, and the work that follows a save.
No error is lost: every failed save, and every failure to delete old checkpoints, is counted or
logged."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, replace

from ...core.forks.renewal import new_lock
from ...errors import HoldfastError
from ..operations.maintenance.prune import PruneReport
from ..operations.report import SaveReport
from ..operations.saving.handle import SaveHandle
from ..operations.telemetry import log_safely
from .retention import Retention
from .run_lineage import checkpoint_name

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts of saves on this rank. Each ``due`` save ends as ``saved``, ``failed`` or ``skipped``.

    ``waited``: saves that blocked training until another save ended. ``queued``: saves that were
    copied while another was being written. ``stalled_s``: total time that training was blocked,
    fences included. ``nbytes``: bytes written by this rank. ``pruned``: checkpoints deleted, on
    rank 0.

    ``kept``: steps held in keeper memory on all ranks. ``not_kept``: steps that should have been,
    but are not.
    """

    due: int = 0
    saved: int = 0
    failed: int = 0
    skipped: int = 0
    waited: int = 0
    queued: int = 0
    pruned: int = 0
    nbytes: int = 0
    stalled_s: float = 0.0
    kept: int = 0
    not_kept: int = 0

    @property
    def in_flight(self) -> int:
        """The number of saves in flight."""
        return self.due - self.saved - self.failed - self.skipped


class Stats:
    """Thread-safe counters, and the errors still to be raised."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.durable_step = 0
        """The newest step that is durable in storage."""
        self.newest: str | None = None
        """The name of the newest checkpoint in storage that leads to the current state."""
        self._error: BaseException | None = None
        self._first_error: BaseException | None = None
        self._unsaved: BaseException | None = None
        """The error of the first save, if no save has succeeded since."""
        self.not_kept_in_a_row = 0
        """Number of steps not held in memory since the last one that was."""
        self._lock = new_lock()

    def count(self, **more: float) -> None:
        """Add to counters, by name. Exactly one outcome of a save below follows ``due=1``."""
        with self._lock:
            now = self.counters
            self.counters = replace(
                now, **{name: getattr(now, name) + value for name, value in more.items()}
            )

    def skipped(self, step: int) -> None:
        """Count a save as skipped because another is in flight."""
        self.count(skipped=1)
        _log.warning(
            "step %d: skipped, another save is in flight (%d skipped so far)",
            step,
            self.counters.skipped,
        )

    def kept(self, step: int) -> None:
        """Count a step as held in keeper memory."""
        self.count(kept=1)
        with self._lock:
            self.not_kept_in_a_row = 0

    def not_kept(self, step: int, why: str) -> None:
        """Count a step that could not be held in keeper memory. Warns of the first one in a row,
        the second, the fourth and so on, since the reason may last."""
        self.count(not_kept=1)
        with self._lock:
            self.not_kept_in_a_row += 1
            in_a_row = self.not_kept_in_a_row
        level = logging.DEBUG if in_a_row & (in_a_row - 1) else logging.WARNING
        so_far = self.counters.not_kept
        _log.log(level, "step %d: not kept in memory (%d so far): %s", step, so_far, why)

    def waited(self, seconds: float) -> None:
        """Count a save that waited for another one."""
        self.count(waited=1, stalled_s=seconds)
        _log.info("training waited %.3f s for another save", seconds)

    def begun(self, step: int, stalled_s: float, *, queued: bool) -> None:
        """Record that a save is in flight; the call took ``stalled_s`` seconds."""
        self.count(queued=int(queued), stalled_s=stalled_s)
        _log.info("step %d: saving%s", step, ", after the save in flight" if queued else "")

    def saved(self, step: int, report: SaveReport) -> None:
        """Count a committed save. The save itself logs its success."""
        if step >= self.durable_step:
            self.durable_step = step
            self.newest = checkpoint_name(step)
        self.count(saved=1, nbytes=report.nbytes, stalled_s=report.fenced_s)

    def failed(self, step: int, error: BaseException) -> None:
        """Count a failed save. Existing checkpoints are untouched."""
        self._fail(step, error, is_save=True)

    def undecided(self, step: int, error: BaseException, *, is_counted: bool) -> None:
        """Count a step without a common decision as a failed save (``is_counted``: as due)."""
        if not is_counted:
            self.count(due=1)
        self._fail(step, error, is_save=False)

    def _fail(self, step: int, error: BaseException, *, is_save: bool) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
            if is_save and self.counters.saved == 0:
                self._first_error = self._first_error or error
                self._unsaved = self._unsaved or error
        self.count(failed=1)
        _log.warning("step %d: not saved (%d failed so far): %s", step, self.counters.failed, error)

    def pruned(self, report: PruneReport) -> None:
        """Count and log deleted checkpoints."""
        self.count(pruned=len(report.checkpoints))
        if report.checkpoints:
            _log.info("deleted %s", ", ".join(c.path for c in report.checkpoints))

    def raise_at_end(self, on_error: str) -> None:
        """Raise as :meth:`raise_first`; if no save ever succeeded, re-raise an earlier error."""
        self.raise_first(on_error)
        with self._lock:
            error = self._unsaved
        if error is not None and self.counters.saved == 0:
            raise error

    def raise_first(self, on_error: str) -> None:
        """Raise the first unreported error, once. With ``"raise"``, raise any error. With
        ``"warn"``, raise only if no save has succeeded yet; drop the error otherwise."""
        with self._lock:
            error: BaseException | None = None
            if on_error == "raise":
                error = self._error
            if error is None and self.counters.saved == 0:
                error = self._first_error
            self._error = None
            self._first_error = None
        if error is not None:
            raise error


def log_if_unsaved(pid: int, stats: Stats, on_error: str, uri: str) -> None:
    """Log what close() would have raised, for a Checkpointer that was never closed."""
    if os.getpid() != pid:
        return
    try:
        stats.raise_at_end(on_error)
    except BaseException as error:
        _log.error(
            "the Checkpointer of %s was never closed, which would have raised an error (%d saved, "
            "%d failed): %s. Use it in a with statement, or call close() at the end",
            uri,
            stats.counters.saved,
            stats.counters.failed,
            error,
        )


@dataclass(frozen=True, slots=True)
class PendingSave:
    """A save in flight. ``followed`` is done once :func:`follow` has ended."""

    step: int
    handle: SaveHandle
    ended: Future[None]
    followed: Future[None]


async def follow(
    step: int,
    handle: SaveHandle,
    metric: float | None,
    stats: Stats,
    retention: Retention | None,
    in_flight: Callable[[], Collection[int]],
) -> None:
    """Wait for the save of ``step``, then do the work that follows it. Never raises. ``retention``
    is set on the leader only. The metric counts once the save is durable. ``in_flight()`` returns
    the steps being saved, which must not be deleted."""
    try:
        await handle.durable.reached()
        assert handle.report is not None
    except BaseException as error:
        log_safely(stats.failed, step, error)
        return
    log_safely(stats.saved, step, handle.report)
    if retention is None:
        return
    try:
        await retention.note(step, metric)
    except BaseException as error:
        log_safely(_warn, "step %d: its metric could not be stored: %s", step, error)
    try:
        report = await retention.apply(step, [other for other in in_flight() if other != step])
    except BaseException as error:
        log_safely(_warn, "step %d: old checkpoints could not be deleted: %s", step, error)
    else:
        log_safely(stats.pruned, report)


async def follow_memory(step: int, handle: SaveHandle, stats: Stats) -> None:
    """Wait until ``step`` is held in memory on all ranks, and count it. Never raises."""
    try:
        await handle.agreed.reached()
    except BaseException as error:
        log_safely(stats.not_kept, step, str(error))
        return
    log_safely(stats.kept, step)


def _warn(text: str, step: int, error: BaseException) -> None:
    """Log a warning, with a traceback if the error is not one of Holdfast's: that is a bug."""
    if isinstance(error, HoldfastError):
        _log.warning(text, step, error)
    else:
        _log.warning(text, step, repr(error), exc_info=error)
