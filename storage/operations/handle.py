"""The handle of an asynchronous save: stages that can be queried, waited for, and awaited."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Generator
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field

from ...errors import DeadlineError
from ..runtime.engine import EngineFuture
from .report import SaveReport

__all__ = ["SaveHandle", "StageHandle"]


class StageHandle:
    """A point in the life of a save. Fails if the save fails before it is reached."""

    def __init__(self, name: str, seen: Callable[[], None] = lambda: None) -> None:
        """``seen()`` is called whenever a caller learns that the stage is reached."""
        self._name = name
        self._seen = seen
        self._future = EngineFuture[None]()

    def __repr__(self) -> str:
        return f"<StageHandle {self._name}: {self.status}>"

    @property
    def status(self) -> str:
        """``reached``, ``not yet`` or ``failed``; asking changes nothing."""
        if not self._future.done():
            return "not yet"
        if self._future.exception() is None:
            return "reached"
        return "failed"

    def done(self) -> bool:
        """Whether the stage was reached, or the save failed before it."""
        if not self._future.done():
            return False
        self._seen()
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Return when the stage is reached. Raises what the save failed with, or DeadlineError
        after ``timeout`` seconds.

        Without ``timeout``, the save's own deadlines bound the wait.
        """
        try:
            failure = self._future.exception(timeout)
        except FutureTimeoutError as error:
            raise DeadlineError(
                f"the save was not {self._name} within {timeout:g} s; it goes on"
            ) from error
        if failure is not None:
            raise _copy_of(failure)
        self._seen()

    def __await__(self) -> Generator[object, None, None]:
        yield from self.reached().__await__()
        self._seen()

    async def reached(self) -> None:
        """For the engine: as awaiting it, but without calling ``seen``, since no code that writes
        to the state learns of it."""
        self._future.done()  # raises UsageError in a forked child
        ended = asyncio.wrap_future(self._future)
        await asyncio.wait([ended])
        failure = ended.exception()
        if failure is not None:
            raise _copy_of(failure)

    def reach(self) -> None:
        """For the engine: the stage is reached."""
        if not self._future.done():
            self._future.set_result(None)

    def fail(self, error: BaseException) -> None:
        """For the engine: the stage will not be reached."""
        if not self._future.done():
            self._future.set_exception(error)


def _copy_of(error: BaseException) -> BaseException:
    """A copy of ``error``, to be raised: an exception keeps the frames that it was raised through
    and their variables, and the handle keeps ``error``."""
    copied = copy.copy(error)
    copied.__cause__ = error.__cause__
    copied.__context__ = error.__context__
    copied.__suppress_context__ = error.__suppress_context__
    return copied.with_traceback(error.__traceback__)


@dataclass(repr=False)
class SaveHandle:
    """A save under way.

    ``captured``: every byte has been copied; the state may change again. ``sealed``: whole in host
    memory and checksummed (with a budget smaller than the image: as each chunk passed through).
    ``durable``: committed, on every rank.
    """

    uri: str
    captured: StageHandle = field(default_factory=lambda: StageHandle("captured"))
    sealed: StageHandle = field(default_factory=lambda: StageHandle("sealed"))
    durable: StageHandle = field(default_factory=lambda: StageHandle("durable"))
    report: SaveReport | None = None
    """Set when durable."""

    def __repr__(self) -> str:
        stages = {"captured": self.captured, "sealed": self.sealed, "durable": self.durable}
        statuses = ", ".join(f"{name} {stage.status}" for name, stage in stages.items())
        return f"<SaveHandle {self.uri}: {statuses}>"

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self.durable.done()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the checkpoint is committed. Raises what the save failed with, on this rank
        or another."""
        self.durable.wait(timeout)

    def __await__(self) -> Generator[object, None, None]:
        return self.durable.__await__()

    def fail(self, error: BaseException) -> None:
        """For the engine: no further stage will be reached."""
        for stage in (self.captured, self.sealed, self.durable):
            stage.fail(error)
