"""What an asynchronous save gives back: stages that can be asked, waited for, and awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any

from ..errors import DeadlineError
from .report import SaveReport

__all__ = ["SaveHandle", "StageHandle"]


class StageHandle:
    """A point in the life of a save. Fails if the save fails before it is reached."""

    def __init__(self, name: str, seen: Callable[[], None] = lambda: None) -> None:
        """``seen()`` is called whenever somebody learns that the stage is reached."""
        self._name = name
        self._seen = seen
        self._future: Future[None] = Future()

    def done(self) -> bool:
        """Whether the stage was reached, or the save failed before it."""
        if not self._future.done():
            return False
        self._seen()
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Return when the stage is reached. Raises what the save failed with, or DeadlineError after ``timeout`` seconds.

        Without ``timeout``, the save's own deadlines bound the wait.
        """
        try:
            self._future.result(timeout)
        except FutureTimeoutError as error:
            if self._future.done():
                raise
            raise DeadlineError(f"the save was not {self._name} within {timeout:g} s; it goes on") from error
        self._seen()

    def __await__(self) -> Generator[Any, None, None]:
        yield from asyncio.shield(asyncio.wrap_future(self._future)).__await__()
        self._seen()

    def reach(self) -> None:
        """For the engine: the stage is reached."""
        if not self._future.done():
            self._future.set_result(None)

    def fail(self, error: BaseException) -> None:
        """For the engine: the stage will not be reached."""
        if not self._future.done():
            self._future.set_exception(error)


@dataclass
class SaveHandle:
    """A save under way.

    ``captured``: every byte has been copied; the state may change again. ``sealed``: whole in host memory and checksummed
    (with a budget smaller than the image: as each chunk passed through). ``durable``: committed, on every rank.
    """

    uri: str
    captured: StageHandle = field(default_factory=lambda: StageHandle("captured"))
    sealed: StageHandle = field(default_factory=lambda: StageHandle("sealed"))
    durable: StageHandle = field(default_factory=lambda: StageHandle("durable"))
    report: SaveReport | None = None
    """Set when durable."""

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self.durable.done()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the checkpoint is committed. Raises what the save failed with, on this rank or another."""
        self.durable.wait(timeout)

    def __await__(self) -> Generator[Any, None, None]:
        return self.durable.__await__()

    def reach(self, name: str) -> None:
        """For the engine: stage ``name`` is reached."""
        getattr(self, name).reach()

    def fail(self, error: BaseException) -> None:
        """For the engine: no further stage will be reached."""
        for stage in (self.captured, self.sealed, self.durable):
            stage.fail(error)
