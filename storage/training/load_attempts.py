"""Rounds of agreement while a run begins, above all on the outcome of an attempt to load.

A checkpoint that one rank cannot load is used by none.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...errors import (
    DamagedError,
    MismatchError,
    NotACheckpointError,
    NotFoundError,
    RankFailedError,
)
from ..ranks.calls import Call
from ..ranks.messages import Round
from ..ranks.process_group import current_team
from ..ranks.team import Decide
from ..runtime.engine import run

__all__ = [
    "Attempted",
    "Outcome",
    "held_at_length",
    "held_round",
    "tried",
    "tried_at_length",
    "verdict_of",
]

_DAMAGE = (DamagedError, NotACheckpointError, NotFoundError)

S = TypeVar("S")
V = TypeVar("V")


class Outcome(enum.Enum):
    """The outcome of a load attempt, on one rank or on all.

    ``FAILED_ELSEWHERE``: another rank failed and reports its own outcome.
    """

    WHOLE = "whole"
    MISFIT = "misfit"
    DAMAGED = "damaged"
    FAILED_ELSEWHERE = "failed elsewhere"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Attempted:
    """The outcome on one rank; ``error`` describes an unexpected failure."""

    outcome: Outcome
    error: str = ""


TRY = Round.of("resume", Attempted, Attempted)


def held_round(
    round: Round[S, V], call: Call, deadline_s: float, statement: S, decide: Decide[S, V]
) -> V:
    """Send ``statement`` to the leader and return its decision.

    Raises what ``decide`` raises on the leader, and RankFailedError or DeadlineError if a rank does
    not arrive.
    """

    async def known(moved: Callable[[], None]) -> S:
        return statement

    return held_at_length(round, call, deadline_s, known, decide)


def held_at_length(
    round: Round[S, V],
    call: Call,
    deadline_s: float,
    state: Callable[[Callable[[], None]], Awaitable[S]],
    decide: Decide[S, V],
) -> V:
    """Hold a round like :func:`held_round`, whose statement may take long to prepare.

    ``state(moved)`` runs on the engine's loop. The other ranks wait past their deadline as long as
    it keeps calling ``moved()``.
    """
    team = current_team(call, deadline_s, saving=False)

    async def held() -> V:
        async with team.session():
            try:
                return await team.round(round, await state(team.report_progress), decide)
            except BaseException as error:
                await team.fail(error)
                raise

    return run(held())


def tried(
    call: Call, deadline_s: float, load: Callable[[], object], *, may_misfit: bool = False
) -> tuple[Outcome, Exception | None]:
    """Call ``load()`` on every rank; return the common outcome and this rank's error, if any.

    ``may_misfit``: whether a mismatch is an outcome (MISFIT) rather than an error. Raises errors
    that make further attempts pointless.
    """
    error: Exception | None = None
    try:
        load()
    except Exception as problem:
        error = problem

    async def known(moved: Callable[[], None]) -> Exception | None:
        return error

    return _judged(call, deadline_s, known, may_misfit)


def tried_at_length(
    call: Call, deadline_s: float, work: Callable[[Callable[[], None]], Awaitable[object]]
) -> tuple[Outcome, Exception | None]:
    """Call ``work(moved)`` on every rank; return as :func:`tried`.

    Other ranks wait as in :func:`held_at_length`.
    """

    async def attempt(moved: Callable[[], None]) -> Exception | None:
        try:
            await work(moved)
        except Exception as problem:
            return problem
        return None

    return _judged(call, deadline_s, attempt, may_misfit=False)


def _judged(
    call: Call,
    deadline_s: float,
    attempt: Callable[[Callable[[], None]], Awaitable[Exception | None]],
    may_misfit: bool,
) -> tuple[Outcome, Exception | None]:
    error: Exception | None = None

    async def attempted(moved: Callable[[], None]) -> Attempted:
        nonlocal error
        error = await attempt(moved)
        return _outcome(error, may_misfit)

    try:
        verdict = held_at_length(TRY, call, deadline_s, attempted, verdict_of)
    except RankFailedError as failure:
        if error is None or isinstance(error, (*_DAMAGE, RankFailedError)):
            raise failure from error
        raise error from None
    return verdict.outcome, error


def _outcome(error: Exception | None, may_misfit: bool) -> Attempted:
    if error is None:
        return Attempted(Outcome.WHOLE)
    if isinstance(error, RankFailedError):
        return Attempted(Outcome.FAILED_ELSEWHERE)
    if may_misfit and isinstance(error, MismatchError):
        return Attempted(Outcome.MISFIT)
    if isinstance(error, _DAMAGE):
        return Attempted(Outcome.DAMAGED)
    return Attempted(Outcome.FAILED, f"{type(error).__name__}: {error}")


async def verdict_of(attempts: Sequence[Attempted]) -> Attempted:
    """Combine the outcomes of all ranks into one.

    Raises RankFailedError for a rank that failed for a reason of its own.
    """
    for rank, attempt in enumerate(attempts):
        if attempt.outcome is Outcome.FAILED:
            raise RankFailedError(f"rank {rank} failed: {attempt.error}", rank=rank)
    outcomes = {attempt.outcome for attempt in attempts}
    for outcome in (Outcome.DAMAGED, Outcome.MISFIT):
        if outcome in outcomes:
            return Attempted(outcome)
    if outcomes == {Outcome.WHOLE}:
        return Attempted(Outcome.WHOLE)
    return Attempted(Outcome.DAMAGED)
