"""The outcomes of a Checkpointer's saves, counted and logged."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace

from ...core.forks.renewal import new_lock
from ..operations.prune import PruneReport
from ..operations.report import SaveReport

__all__ = ["Counters", "Stats", "log_if_unsaved"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Counters:
    """Saves on this rank. Each that was ``due`` is in the end one of ``saved``, ``failed`` and
    ``skipped``.

    ``waited``: how many held up training until another had ended; ``queued``: how many were copied
    while another was being written. ``stalled_s``: how long training stood still for all of it,
    fences included. ``nbytes``: written by this rank. ``pruned``: checkpoints deleted, on rank 0.

    ``kept``: steps in the memory of keepers, on all ranks; ``not_kept``: steps that were to be, and
    are not.
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
    def under_way(self) -> int:
        """Saves that have not ended."""
        return self.due - self.saved - self.failed - self.skipped


class Stats:
    """Counts, from any thread."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.durable_step = 0
        """The newest step that is in storage."""
        self._error: BaseException | None = None
        self._first_error: BaseException | None = None
        self._unsaved: BaseException | None = None
        """What the first save failed with, if it was the first to end."""
        self._lock = new_lock()

    def due(self, step: int) -> None:
        """The save of ``step`` is due. One of the following comes of it."""
        self._add(due=1)

    def skipped(self, step: int) -> None:
        """It is left out: another save is under way."""
        self._add(skipped=1)
        _log.warning(
            "step %d: not saved, another save is under way (%d left out so far)",
            step,
            self.counters.skipped,
        )

    def kept(self, step: int) -> None:
        """It is in the memory of keepers."""
        self._add(kept=1)

    def not_kept(self, step: int, why: str) -> None:
        """It was to be kept in memory, and is not."""
        self._add(not_kept=1)
        _log.warning(
            "step %d: not kept in memory (%d so far): %s", step, self.counters.not_kept, why
        )

    def stalled(self, seconds: float) -> None:
        """Training stood still for a call."""
        self._add(stalled_s=seconds)

    def waited(self, seconds: float) -> None:
        """It has waited for another save."""
        self._add(waited=1, stalled_s=seconds)
        _log.info("training waited %.3f s for another save", seconds)

    def begun(self, step: int, stalled_s: float, *, queued: bool) -> None:
        """It is under way; the call took ``stalled_s`` seconds."""
        self._add(queued=int(queued), stalled_s=stalled_s)
        _log.info("step %d: saving%s", step, ", after the save under way" if queued else "")

    def saved(self, step: int, report: SaveReport) -> None:
        """It is committed; that is logged with every save."""
        self.durable_step = max(self.durable_step, step)
        self._add(saved=1, nbytes=report.nbytes, stalled_s=report.fenced_s)

    def failed(self, step: int, error: BaseException) -> None:
        """It has failed. What is there is untouched."""
        self._fail(step, error, is_save=True)

    def undecided(self, step: int, error: BaseException) -> None:
        """The ranks have not come to a decision on it."""
        self._fail(step, error, is_save=False)

    def _fail(self, step: int, error: BaseException, *, is_save: bool) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
            if is_save and self.counters.saved == 0:
                self._first_error = self._first_error or error
                self._unsaved = self._unsaved or error
        self._add(failed=1)
        _log.warning("step %d: not saved (%d failed so far): %s", step, self.counters.failed, error)

    def pruned(self, report: PruneReport) -> None:
        """Old checkpoints are deleted."""
        self._add(pruned=len(report.checkpoints))
        if report.checkpoints:
            _log.info("deleted %s", ", ".join(c.path for c in report.checkpoints))

    def raise_at_end(self, on_error: str) -> None:
        """Raise as :meth:`raise_first` does; where no save has ever succeeded, also an error that
        was raised before, and caught."""
        self.raise_first(on_error)
        with self._lock:
            error = self._unsaved
        if error is not None and self.counters.saved == 0:
            raise error

    def raise_first(self, on_error: str) -> None:
        """Raise what a save has failed with, once: with ``raise``; and as long as none was ever
        saved, also with ``warn``, which otherwise forgets it."""
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

    def _add(self, **more: float) -> None:
        with self._lock:
            now = self.counters
            self.counters = replace(
                now, **{name: getattr(now, name) + value for name, value in more.items()}
            )


def log_if_unsaved(pid: int, stats: Stats, on_error: str, uri: str) -> None:
    """Log, in the process ``pid``, what closing a Checkpointer would have raised: it was collected
    without, or the process ends."""
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
