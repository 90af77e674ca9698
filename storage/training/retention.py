"""Retention: which checkpoints of a run to keep, by recency, by step and by metric.

Only checkpoints named by the run's Checkpointer are deleted. "Last" is decided by steps along the
lineage of the run and by the step the caller saved last, never by a clock.

Metrics are stored in one small file next to the checkpoints, so that a resumed run knows its best
steps. A checkpoint without a metric is never among the best; the other rules decide on it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass

from ...drivers.contract import Driver
from ...errors import NotFoundError, UsageError
from ..operations.location import Place
from ..operations.maintenance.choice import choose
from ..operations.maintenance.listing import ListedCheckpoint
from ..operations.maintenance.prune import PruneReport, prune_here
from .run_lineage import is_own, step_of

METRICS_KEY = "metrics.json"
_METRICS_NBYTES_MAX = 16 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Keep:
    """Rules for keeping checkpoints. One stays if any rule keeps it, or if it was saved last; all
    others are deleted.

    ``last``: keep this many of the highest steps. ``every``: keep steps that are a multiple of it.
    ``best``: keep this many of the best by metric: the lowest, unless ``highest``.

    Checkpoints after the step that training went back to are abandoned. No rule keeps them: each is
    deleted once the run has saved its step, or a later one, again. With ``abandoned`` they stay
    until ``holdfast prune --abandoned``.
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    highest: bool = False
    abandoned: bool = False

    def __post_init__(self) -> None:
        for name, value in (("last", self.last), ("every", self.every), ("best", self.best)):
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"keep: {name} is {value!r}, which is not a whole number above 0")
        if self.last is self.every is self.best is None:
            raise UsageError(
                "keep: no rule is given",
                advice="Give last, every or best; keep=None keeps everything.",
            )

    def best_of(self, metrics: dict[int, float], steps: Container[int]) -> list[int] | None:
        """Return the best of ``steps`` by metric, the later among equals; None without a rule."""
        if self.best is None:
            return None
        known = [
            (metric if self.highest else -metric, step)
            for step, metric in metrics.items()
            if step in steps
        ]
        return [step for _, step in sorted(known, reverse=True)[: self.best]]


class Retention:
    """The retention of one run, on its leader."""

    def __init__(self, root: Place, keep: Keep) -> None:
        self._turn = asyncio.Lock()  # a save may begin while another is being followed up
        self._root = root
        self._keep = keep
        self._metrics: dict[int, float] | None = None

    async def note(self, step: int, metric: float | None) -> None:
        """Store the metric of ``step`` in the run's folder, replacing an earlier one."""
        async with self._turn, self._root.opened() as driver:
            if metric is None and self._keep.best is None:
                return
            metrics = await self._known(driver)
            before = dict(metrics)
            if metric is None:
                metrics.pop(step, None)
            else:
                metrics[step] = metric
            if metrics != before:
                await driver.put(
                    METRICS_KEY,
                    json.dumps({str(s): m for s, m in sorted(metrics.items())}).encode(),
                )

    async def apply(self, saved: int, in_flight: Collection[int]) -> PruneReport:
        """Delete the checkpoints that no rule keeps, now that ``saved`` is committed."""
        async with self._turn:
            async with self._root.opened() as driver:
                metrics: dict[int, float] = {}
                if self._keep.best is not None:
                    metrics = await self._known(driver)

            def chosen(listed: Sequence[ListedCheckpoint]) -> list[ListedCheckpoint]:
                return self._chosen([c for c in listed if is_own(c)], saved, metrics)

            def only(path: str) -> bool:
                step = step_of(path)
                return step is not None and step not in in_flight

            return await prune_here(self._root, chosen, only)

    def _chosen(
        self, listed: Sequence[ListedCheckpoint], saved: int, metrics: dict[int, float]
    ) -> list[ListedCheckpoint]:
        live = [c for c in listed if not c.abandoned]
        steps = {c.step for c in live if c.step is not None}
        for deleted in [step for step in metrics if step not in steps and step <= saved]:
            del metrics[deleted]
        best = self._keep.best_of(metrics, steps)
        kept = {saved, *(best or ())}
        last = self._keep.last
        if last is None and best is not None:
            last = 1
        damaged = [c.path for c in live if c.damage is not None]
        gone = choose(
            live, last, self._keep.every, [c.path for c in live if c.step in kept], damaged
        )
        if not self._keep.abandoned:
            gone += [c for c in listed if c.abandoned and (c.step or 0) <= saved]
        return gone

    async def _known(self, driver: Driver) -> dict[int, float]:
        if self._metrics is None:
            try:
                self._metrics = _decoded(await driver.get(METRICS_KEY))
            except NotFoundError:
                self._metrics = {}
        return self._metrics


def beyond(
    listed: Sequence[ListedCheckpoint], count: int, kept: Collection[int | None] = ()
) -> list[ListedCheckpoint]:
    """Return the checkpoints to delete so that ``count`` whole ones remain, for trainers that limit
    their total.

    The newest one and the steps ``kept`` always stay. Next in line are the newest ones, and last
    the abandoned ones. Pure.
    """
    whole = [c for c in listed if c.step is not None and not (c.problem or c.damage)]
    whole.sort(key=lambda c: (c.abandoned, -(c.step or 0)))
    others = [c for c in whole[1:] if c.step not in kept]
    return others[max(0, count - (len(whole) - len(others))) :]


def _decoded(data: bytes) -> dict[int, float]:
    try:
        if len(data) > _METRICS_NBYTES_MAX:
            raise ValueError("not a table of metrics")
        table = json.loads(data)
        if not isinstance(table, dict) or not all(type(m) in (int, float) for m in table.values()):
            raise ValueError("not a table of metrics")
        return {int(step): float(metric) for step, metric in table.items() if math.isfinite(metric)}
    except (ValueError, OverflowError, RecursionError) as error:
        _log.warning(
            "%s is damaged, so the best checkpoints so far are unknown: %s", METRICS_KEY, error
        )
        return {}
