"""The handle of an asynchronous save: stages that can be queried, waited for, and awaited."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Generator
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field

from ....errors import DeadlineError, UsageError
from ...runtime.engine import EngineFuture
from ..report import SaveReport


class StageHandle:
    """A point in the life of a save. Fails if the save fails before reaching it."""

    def __init__(
        self, name: str, seen: Callable[[], None] = lambda: None, *, absent: str = ""
    ) -> None:
        """``seen()`` is called when a caller learns that it is reached; ``absent``: why it never
        is."""
        self._name = name
        self._seen = seen
        self._absent = absent
        self._future = EngineFuture[None]()

    def __repr__(self) -> str:
        return f"<StageHandle {self._name}: {self.status}>"

    @property
    def status(self) -> str:
        """``reached``, ``not yet``, ``failed`` or ``never``. Reading it has no side effects."""
        if self._absent:
            return "never"
        if not self._future.done():
            return "not yet"
        return "reached" if self._future.exception() is None else "failed"

    def done(self) -> bool:
        """Return whether there is nothing to wait for: the stage was reached, the save failed, or
        it never reaches this stage."""
        if self._absent:
            return True
        if not self._future.done():
            return False
        self._seen()
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the stage is reached. Raises the save's error, or DeadlineError after
        ``timeout`` seconds.

        Without ``timeout``, the save's own deadlines bound the wait. Raises UsageError if this save
        never reaches the stage.
        """
        self._check_present()
        try:
            failure = self._future.exception(timeout)
        except FutureTimeoutError as error:
            raise DeadlineError(
                f"the save was not {self._name} within {timeout:g} s; it continues"
            ) from error
        if failure is not None:
            raise _copy_of(failure)
        self._seen()

    def _check_present(self) -> None:
        if self._absent:
            raise UsageError(f"this save is never {self._name}: {self._absent}")

    def __await__(self) -> Generator[object, None, None]:
        self._check_present()
        yield from self.reached().__await__()
        self._seen()

    async def reached(self) -> None:
        """Wait on the engine, like awaiting the stage, but without calling ``seen``."""
        self._future.done()  # raises UsageError in a forked child
        ended = asyncio.wrap_future(self._future)
        await asyncio.wait([ended])
        failure = ended.exception()
        if failure is not None:
            raise _copy_of(failure)

    def reach(self) -> None:
        """Mark the stage as reached. Engine only."""
        if not self._future.done():
            self._future.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Mark the stage as failed. Engine only."""
        if not self._future.done():
            self._future.set_exception(error)

    def end(self, error: BaseException | None) -> None:
        """Mark the stage as reached, or as failed with ``error``. Engine only."""
        if error is None:
            self.reach()
        else:
            self.fail(error)


def _copy_of(error: BaseException) -> BaseException:
    """Return a copy of ``error`` to raise, because raising adds references to frames' variables."""
    copied = copy.copy(error)
    copied.__cause__ = error.__cause__
    copied.__context__ = error.__context__
    copied.__suppress_context__ = error.__suppress_context__
    return copied.with_traceback(error.__traceback__)


_NO_KEEPER = "it does not use a keeper"
_NOT_LOCAL = "no keeper writes it to the host's storage"
_UNGUARDED = "no keepers on several hosts protect each other"


@dataclass(repr=False)
class SaveHandle:
    """A save in progress, with its stages.

    ``captured``: every byte has been copied; the state may change again. ``sealed``: complete in
    host memory and checksummed (with a budget smaller than the image: as each chunk passed
    through). ``agreed``: in the memory of keepers on every rank, so that it survives the trainers.
    ``local``: this host's part is on the host's storage, so that it survives a reboot.
    ``protected``: parity or copies exist on other hosts, so that it survives the loss of a host;
    fails if a later step is protected instead. ``durable``: committed, on every rank.

    ``agreed`` requires a keeper, ``local`` a keeper that writes this step to the host's storage,
    ``protected`` keepers on several hosts that protect each other. A step that stays in memory is
    never ``durable``. Waiting for an unavailable stage raises UsageError.
    """

    uri: str
    captured: StageHandle = field(default_factory=lambda: StageHandle("captured"))
    sealed: StageHandle = field(default_factory=lambda: StageHandle("sealed"))
    agreed: StageHandle = field(default_factory=lambda: StageHandle("agreed", absent=_NO_KEEPER))
    local: StageHandle = field(default_factory=lambda: StageHandle("local", absent=_NOT_LOCAL))
    protected: StageHandle = field(
        default_factory=lambda: StageHandle("protected", absent=_UNGUARDED)
    )
    durable: StageHandle = field(default_factory=lambda: StageHandle("durable"))
    report: SaveReport | None = None
    """Set when durable."""

    def __repr__(self) -> str:
        statuses = ", ".join(f"{name} {stage.status}" for name, stage in self._stages.items())
        return f"<SaveHandle {self.uri}: {statuses}>"

    @property
    def _stages(self) -> dict[str, StageHandle]:
        names = ("captured", "sealed", "agreed", "local", "protected", "durable")
        stages: dict[str, StageHandle] = {name: getattr(self, name) for name in names}
        return {name: stage for name, stage in stages.items() if stage.status != "never"}

    @property
    def last(self) -> StageHandle:
        """The stage that ends this save; ``local`` and ``protected`` are side stages."""
        beside = (self.local, self.protected)
        return [stage for stage in self._stages.values() if stage not in beside][-1]

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not."""
        return self.last.done()

    def wait(self, timeout: float | None = None) -> SaveReport | None:
        """Wait until the checkpoint is committed, and return its report; if it stays in memory,
        wait until it is agreed, and return None.

        Raises the error with which the save failed, on this rank or another.
        """
        self.last.wait(timeout)
        return self.report

    def __await__(self) -> Generator[object, None, SaveReport | None]:
        yield from self.last.__await__()
        return self.report

    def fail(self, error: BaseException) -> None:
        """Fail all stages not yet reached. Engine only."""
        for stage in self._stages.values():
            stage.fail(error)
