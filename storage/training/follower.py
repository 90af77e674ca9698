"""What comes after a save: its outcome is counted, its metric noted, and old checkpoints are
deleted. In the background.

Nothing that goes wrong here is lost: a save that fails, however it fails, is counted and logged; so
is what keeps old checkpoints from being deleted.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass

from ...errors import HoldfastError
from ..operations.handle import SaveHandle
from .retention import Retention
from .stats import Ledger

__all__ = ["Flight", "follow"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Flight:
    """A save under way; ``followed`` is done when old checkpoints are deleted, too."""

    step: int
    handle: SaveHandle
    ended: Future[None]
    followed: Future[None]


async def follow(
    step: int,
    handle: SaveHandle,
    metric: float | None,
    ledger: Ledger,
    retention: Retention | None,
    under_way: Callable[[], Collection[int]],
) -> None:
    """Wait for the save of ``step``, and do what comes after it. Raises nothing.

    ``retention`` is the leader's; the metric counts from when the save is durable. ``under_way()``:
    steps that are being saved, of which nothing is deleted.
    """
    try:
        await handle.durable.reached()
        assert handle.report is not None
    except BaseException as error:
        _tell(ledger.failed, step, error)
        return
    _tell(ledger.saved, step, handle.report)
    if retention is None:
        return
    try:
        await retention.note(step, metric)
    except BaseException as error:
        _tell(_warn, "step %d: its metric could not be kept: %s", step, error)
    try:
        report = await retention.apply(step, [other for other in under_way() if other != step])
    except BaseException as error:
        _tell(_warn, "step %d: old checkpoints could not be deleted: %s", step, error)
    else:
        _tell(ledger.pruned, report)


def _tell(say: Callable[..., None], *what: object) -> None:
    """Count and log something. A log handler of the user's that raises keeps nothing from being
    done after it."""
    try:
        say(*what)
    except BaseException:
        traceback.print_exc()


def _warn(text: str, step: int, error: BaseException) -> None:
    """With the traceback of what is not an error of ours: that is a defect, which somebody must be
    able to find."""
    said = error if isinstance(error, HoldfastError) else repr(error)
    _log.warning(text, step, said, exc_info=None if isinstance(error, HoldfastError) else error)
