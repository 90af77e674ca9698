"""What all ranks of a job decide together, in one round, while it begins: above all what they make
of a try to load something. What one rank cannot have, none goes on from."""

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
    """How a try went on one rank, or on all. ``FAILED_ELSEWHERE``: another rank says for itself
    what it found."""

    WHOLE = "whole"
    MISFIT = "misfit"
    DAMAGED = "damaged"
    FAILED_ELSEWHERE = "failed elsewhere"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Attempted:
    """The outcome on one rank; ``error`` says how it has failed."""

    outcome: Outcome
    error: str = ""


TRY = Round.of("resume", Attempted, Attempted)


def held_round(
    round: Round[S, V], call: Call, deadline_s: float, statement: S, decide: Decide[S, V]
) -> V:
    """What the leader makes of all ranks' statements. Raises what it raises, and as a call does
    whose ranks do not all come."""

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
    """The same, where it may take a rank longer to find out what to state, by ``state(moved)`` on
    the engine's loop, than the others would wait for it: they do, for as long as that calls
    ``moved()``."""
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
    """What all ranks make of it that each of them has called ``load()``, and what that has raised
    on this one, if anything. ``may_misfit``: whether a mismatch is no reason to give up. Raises
    what makes further tries vain."""
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
    """The same of ``work(moved)``, for which ranks wait as in :func:`held_at_length`."""

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
    """What all ranks make of one checkpoint, by what each has made of it. Raises RankFailedError
    for a rank that failed by itself."""
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
