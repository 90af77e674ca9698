"""What became of a checkpointer's saves: counted, and logged, one line each."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from typing import Any

from ..prune import PruneReport
from ..report import SaveReport

__all__ = ["Counters", "Ledger"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Counters:
    """Saves on this rank. Each that was ``due`` is in the end one of ``saved``, ``failed`` and ``skipped``.

    ``waited``: how many held up training until another had ended; ``queued``: how many were copied while another was being
    written. ``stalled_s``: how long training stood still for all of it, fences included. ``nbytes``: written by this rank.
    ``pruned``: checkpoints deleted, on rank 0.
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

    @property
    def under_way(self) -> int:
        """Saves that have not ended."""
        return self.due - self.saved - self.failed - self.skipped


class Ledger:
    """Counts, from any thread."""

    def __init__(self) -> None:
        self.counters = Counters()
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def due(self, step: int) -> None:
        """The save of ``step`` is due. One of the following comes of it."""
        self._add(due=1)

    def skipped(self, step: int) -> None:
        """It is left out: another save is under way."""
        self._add(skipped=1)
        _log.warning("step %d: not saved, another save is under way (%d left out so far)", step, self.counters.skipped)

    def waited(self, seconds: float) -> None:
        """It has waited for another save."""
        self._add(waited=1, stalled_s=seconds)
        _log.info("training waited %.3f s for another save", seconds)

    def begun(self, step: int, stalled_s: float, *, queued: bool) -> None:
        """It is under way; the call took ``stalled_s`` seconds."""
        self._add(queued=int(queued), stalled_s=stalled_s)
        _log.info("step %d: saving%s", step, ", after the save under way" if queued else "")

    def saved(self, step: int, report: SaveReport) -> None:
        """It is committed."""
        self._add(saved=1, nbytes=report.nbytes, stalled_s=report.fenced_s)
        rate = report.nbytes / 1e9 / max(report.durable_s, 1e-9)
        _log.info(
            "step %d: saved, %.2f GB from this rank in %.2f s (%.2f GB/s); fences waited %.1f ms",
            *(step, report.nbytes / 1e9, report.durable_s, rate, report.fenced_s * 1e3),
        )

    def failed(self, step: int, error: BaseException) -> None:
        """It has failed. What is there is untouched."""
        with self._lock:
            self._error = self._error or error
        self._add(failed=1)
        _log.warning("step %d: not saved (%d failed so far): %s", step, self.counters.failed, error)

    def pruned(self, report: PruneReport) -> None:
        """Old checkpoints are deleted."""
        self._add(pruned=len(report.checkpoints))
        if report.checkpoints:
            _log.info("deleted %s", ", ".join(c.path for c in report.checkpoints))

    def raise_first(self, on_error: str) -> None:
        """With ``raise``, raise what a save has failed with, once; with ``warn``, forget it."""
        with self._lock:
            error, self._error = self._error, None
        if error is not None and on_error == "raise":
            raise error

    def _add(self, **more: Any) -> None:
        with self._lock:
            now = self.counters
            self.counters = replace(now, **{name: getattr(now, name) + value for name, value in more.items()})
