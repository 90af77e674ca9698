"""Announces errors that one rank hits while entering a call. Otherwise the other ranks would wait
for this rank until their deadline."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import AsyncIterator, Iterator
from typing import Protocol, SupportsIndex, TypeVar

from ...drivers.uri import Uri, parse, redact
from ...errors import HoldfastError, UsageError
from ..ranks.calls import Call
from ..ranks.process_group import current_team
from ..ranks.team import Team
from ..runtime.engine import start
from .location import UriLike


class Closable(Protocol):
    """A driver, or an object that owns one."""

    async def close(self) -> None: ...


Opened = TypeVar("Opened", bound=Closable)


@contextlib.contextmanager
def announcing_errors(team: Team, opened: Closable | None = None) -> Iterator[None]:
    """Announce an error of the body to the other ranks, and close ``opened``."""
    try:
        yield
    except BaseException as error:
        start(_give_up(team, error, opened)).result()
        raise


async def _give_up(team: Team, error: BaseException, opened: Closable | None) -> None:
    try:
        await team.fail(error)
    finally:
        if opened is not None:
            await opened.close()


@contextlib.contextmanager
def announcing_errors_of_call(
    kind: str, uri: UriLike | Uri, step: object, deadline_s: float
) -> Iterator[None]:
    """Announce errors like :func:`announcing_errors`, before the call has a team: no rank waits."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(UsageError):
            call = Call(kind, printed_uri(uri), printed_step(step))
            team = current_team(call, deadline_s, saving=True)
            start(team.fail(error)).result()
        raise


@contextlib.asynccontextmanager
async def closing(opened: Opened) -> AsyncIterator[Opened]:
    """Close ``opened`` at the end of the block."""
    try:
        yield opened
    finally:
        await opened.close()


def printed_uri(uri: UriLike | Uri) -> str:
    """Return ``uri`` as its driver would print it, even if no such driver exists."""
    try:
        parsed = uri if isinstance(uri, Uri) else parse(uri)
        return Uri(parsed.scheme, parsed.location).redacted
    except (HoldfastError, TypeError, ValueError):
        return redact(str(uri))


def printed_step(step: object) -> int | None:
    """Return the step of a call, or None if it is not a whole number."""
    try:
        return operator.index(step) if isinstance(step, SupportsIndex) else None
    except TypeError:
        return None
