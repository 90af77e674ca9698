"""A driver layer that reports each successful operation to the rank's team as progress."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from ...drivers.contract import Driver
from ...drivers.layers.layer import Layer, Operation
from ..ranks.team import Team

T = TypeVar("T")


class _ProgressLayer(Layer):
    """Calls ``worked`` after each successful operation."""

    def __init__(self, inner: Driver, worked: Callable[[], None]) -> None:
        super().__init__(inner)
        self._worked = worked

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        result = await call()
        self._worked()
        return result


def with_progress(driver: Driver, team: Team) -> Driver:
    """Make ``driver``'s operations count as progress of this rank, if others may wait."""
    if team.world == 1:
        return driver
    return _ProgressLayer(driver, team.report_progress)
