"""Reports of a rank's failure, and the errors that other ranks raise for them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import NoReturn

from ... import errors
from ...errors import (
    CoordinationError,
    DeadlineError,
    HoldfastError,
    MismatchError,
    RankFailedError,
)

MESSAGE_CHARS = 10_000
SHORT_MESSAGE_CHARS = 3000


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of ``reporter`` as sent to others. ``rank``: the one that the error names."""

    reporter: int
    type: str
    message: str
    rank: int | None = None
    uri: str | None = None
    key: str | None = None
    advice: str | None = None
    differences: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: BaseException, reporter: int) -> Failure:
        """Return the failure that ``reporter`` sends for ``error``."""
        kind = type(error).__name__
        if isinstance(error, HoldfastError):
            # A class of one room is reported as the class that a handler knows.
            kind = next(c.__name__ for c in type(error).__mro__ if hasattr(errors, c.__name__))
            return cls(
                reporter,
                kind,
                error.message[:MESSAGE_CHARS],
                error.rank,
                error.uri,
                error.key,
                error.advice,
                tuple(getattr(error, "differences", ())),
            )
        if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
            return cls(reporter, kind, "the call was interrupted")
        return cls(reporter, kind, f"{kind}: {error}"[:MESSAGE_CHARS])

    @property
    def timed_out(self) -> bool:
        """Return whether the rank failed only because another rank did not arrive in time."""
        return self.type == DeadlineError.__name__

    def shortened(self) -> Failure:
        """Return this failure without its potentially long parts."""
        return replace(self, message=self.message[:SHORT_MESSAGE_CHARS], differences=())

    def raise_alike(self) -> NoReturn:
        """Raise the leader's error with the same class, which concerns all ranks alike."""
        kind: object = getattr(errors, self.type, None)
        if not isinstance(kind, type) or not issubclass(kind, HoldfastError):
            raise self._rank_failed()
        error = kind(self.message, rank=self.rank, uri=self.uri, key=self.key, advice=self.advice)
        if isinstance(error, MismatchError):
            error.differences = self.differences
        raise error

    def as_error(self) -> CoordinationError:
        """Return the error that other ranks raise for this failure. A DeadlineError or
        RankFailedError keeps its class and message, because it already names the rank at fault. Any
        other error becomes a RankFailedError that names ``reporter``."""
        if self.timed_out:
            return DeadlineError(self.message, rank=self.rank, advice=self.advice)
        if self.type == RankFailedError.__name__:
            return RankFailedError(self.message, rank=self.rank)
        return self._rank_failed()

    def _rank_failed(self) -> RankFailedError:
        return RankFailedError(f"rank {self.reporter} failed: {self.message}", rank=self.reporter)
