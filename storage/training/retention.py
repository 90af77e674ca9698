"""Which checkpoints of a run are kept: the last ones, every n-th, and the best by a metric.

Metrics lie beside the checkpoints, in one small file, so that a run that goes on knows what the best were. A checkpoint
without a known metric is none of the best; the other rules decide on it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections.abc import Collection, Container
from dataclasses import dataclass
from typing import Any

from ...drivers.contract import Driver
from ...errors import NotFoundError, UsageError
from ..place import Place
from ..prune import PruneReport, choose, prune_here
from ..reader import ListedCheckpoint

__all__ = ["Keep", "Retention", "checkpoint_name", "step_of"]

METRICS_KEY = "metrics.json"
_NAME = re.compile(r"step-([0-9]{8,18})")
_METRICS_NBYTES_MAX = 16 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Keep:
    """What is kept; the rest is deleted. A checkpoint stays if any rule keeps it; what was saved last always does.

    ``last`` as many of the highest steps; ``every``: those whose step is a multiple of it; ``best`` as many of those with
    the best metric: the lowest, unless ``highest``.
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    highest: bool = False

    def __post_init__(self) -> None:
        for name, value in (("last", self.last), ("every", self.every), ("best", self.best)):
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"keep: {name} is {value!r}, which is no whole number above 0")
        if self.last is self.every is self.best is None:
            raise UsageError("keep: no rule is given", advice="Give last, every or best; keep=None keeps everything.")

    def best_of(self, metrics: dict[int, float], steps: Container[int]) -> list[int] | None:
        """The best of those ``steps`` that have a metric; of equal ones the latest. None without such a rule."""
        if self.best is None:
            return None
        known = [(metric if self.highest else -metric, step) for step, metric in metrics.items() if step in steps]
        return [step for _, step in sorted(known, reverse=True)[: self.best]]


def checkpoint_name(step: int) -> str:
    """The folder of a step's checkpoint, below the run's."""
    return f"step-{step:08d}"


def step_of(path: str) -> int | None:
    """The step of a checkpoint's folder; None for what was not named by :func:`checkpoint_name`."""
    match = _NAME.fullmatch(path)
    return int(match[1]) if match else None


class Retention:
    """The rules of one run, on its leader."""

    def __init__(self, root: Place, keep: Keep) -> None:
        self._turn = asyncio.Lock()  # one save may begin while another is followed by this
        self._root = root
        self._keep = keep
        self._metrics: dict[int, float] | None = None

    async def note(self, step: int, metric: float) -> None:
        """Keep in mind, and in the run's folder, how good ``step`` is. Raises StorageError."""
        async with self._turn, self._root.opened() as driver:
            metrics = await self._known(driver)
            metrics[step] = metric
            await driver.put(METRICS_KEY, json.dumps({str(s): m for s, m in sorted(metrics.items())}).encode())

    async def apply(self, under_way: Collection[int]) -> PruneReport:
        """Delete what is not to be kept, but nothing of the steps that are ``under_way``. Raises StorageError."""
        async with self._turn:
            async with self._root.opened() as driver:
                metrics = {} if self._keep.best is None else await self._known(driver)

            def chosen(listed: list[ListedCheckpoint]) -> list[ListedCheckpoint]:
                steps = {c.step for c in listed if c.step is not None}
                for gone in [step for step in metrics if step not in steps and step < max(steps, default=0)]:
                    del metrics[gone]
                return choose(listed, self._keep.last, self._keep.every, self._keep.best_of(metrics, steps))

            def only(path: str) -> bool:
                step = step_of(path)
                return step is not None and step not in under_way

            return await prune_here(self._root, chosen, only)

    async def _known(self, driver: Driver) -> dict[int, float]:
        if self._metrics is None:
            try:
                self._metrics = _decoded(await driver.get(METRICS_KEY))
            except NotFoundError:
                self._metrics = {}
        return self._metrics


def _decoded(data: bytes) -> dict[int, float]:
    """What :meth:`Retention.note` has written; of what is not, nothing."""
    try:
        told: Any = json.loads(data) if len(data) <= _METRICS_NBYTES_MAX else None
        if not isinstance(told, dict) or not all(type(m) in (int, float) for m in told.values()):
            raise ValueError("no table of metrics")
        return {int(step): float(metric) for step, metric in told.items() if math.isfinite(metric)}
    except (ValueError, OverflowError, RecursionError) as error:
        _log.warning("%s is damaged: which checkpoints were the best so far is not known: %s", METRICS_KEY, error)
        return {}
