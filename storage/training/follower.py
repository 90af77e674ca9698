"""Background work after a save: count the outcome, record the metric, delete old checkpoints.

No error is lost: every failed save, and every failure to delete old checkpoints, is counted or
logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass

from ...errors import HoldfastError
from ..operations.saving.handle import SaveHandle
from ..operations.telemetry import log_safely
from .retention import Retention
from .stats import Stats

__all__ = ["PendingSave", "follow", "follow_memory"]

_log = logging.getLogger(__name__)


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
    """Wait for the save of ``step``, then do the work that follows it. Never raises.

    ``retention`` is set on the leader only. The metric counts once the save is durable.
    ``in_flight()`` returns the steps being saved, which must not be deleted.
    """
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
