"""Rounds of agreement while a run begins, above all on the outcome of an attempt to load. A
checkpoint that one rank cannot load is used by none."""

from __future__ import annotations

import enum
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ...errors import (
    DamagedError,
    HoldfastError,
    MismatchError,
    NotACheckpointError,
    NotFoundError,
    RankFailedError,
)
from ..operations.location import Place
from ..pipeline.mapping import image_driver
from ..pipeline.verifier import is_damaged_at
from ..protocol.current import read_manifest
from ..ranks.calls import Call
from ..ranks.messages import Round
from ..ranks.process_group import current_team
from ..ranks.team import Decide
from ..runtime.engine import run

_DAMAGE = (DamagedError, NotACheckpointError, NotFoundError)

_log = logging.getLogger(__name__)

S = TypeVar("S")
V = TypeVar("V")
Prepare = Callable[[Callable[[], None]], Awaitable[S]]
"""Prepares a statement on the engine's loop. It may take long: the other ranks wait past their
deadline as long as it keeps calling its argument."""


class Outcome(enum.Enum):
    """The outcome of a load attempt, on one rank or on all. ``FAILED_ELSEWHERE``: another rank
    failed and reports its own outcome."""

    WHOLE = "whole"
    MISFIT = "misfit"
    DAMAGED = "damaged"
    FAILED_ELSEWHERE = "failed elsewhere"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Attempted:
    """The outcome on one rank, or on all. ``error`` describes an unexpected failure. ``image``: as
    in DamagedError. ``skip``: number of further candidates not to try."""

    outcome: Outcome
    error: str = ""
    image: tuple[int, int] | None = None
    skip: int = 0


TRY = Round.of("resume", Attempted, Attempted)


async def verdict_of(attempts: Sequence[Attempted]) -> Attempted:
    """Combine the outcomes of all ranks. Raises RankFailedError for a rank's own failure."""
    for rank, attempt in enumerate(attempts):
        if attempt.outcome is Outcome.FAILED:
            raise RankFailedError(f"rank {rank} failed: {attempt.error}", rank=rank)
    outcomes = {attempt.outcome for attempt in attempts}
    for outcome in (Outcome.DAMAGED, Outcome.MISFIT):
        if outcome in outcomes:
            images = (attempt.image for attempt in attempts)
            return Attempted(outcome, image=next(filter(None, images), None))
    return Attempted(Outcome.WHOLE if outcomes == {Outcome.WHOLE} else Outcome.DAMAGED)


async def verdict_and_skips(
    root: Place, others: Sequence[str], attempts: Sequence[Attempted]
) -> Attempted:
    """Return the verdict of all ranks on a checkpoint. Of ``others``, the paths to try next, skip
    the first ones that are damaged in the same place: they share a dead file or block with it."""
    verdict = await verdict_of(attempts)
    if verdict.outcome is not Outcome.DAMAGED or verdict.image is None:
        return verdict
    skip = 0
    for path in others:
        try:
            async with root.opened(path) as driver:
                manifest, _ = await read_manifest(driver)
                images = image_driver(driver, manifest)
                if not await is_damaged_at(images, manifest, *verdict.image):
                    break
        except HoldfastError:
            break  # the load says why
        what = "the checkpoint %s is damaged in the same place, trying the previous one"
        _log.warning(what, path)
        skip += 1
    return replace(verdict, skip=skip)


def ready(statement: S) -> Prepare[S]:
    """Return the preparation of a statement that is known already."""

    async def prepared(moved: Callable[[], None]) -> S:
        return statement

    return prepared


def held_round(
    round: Round[S, V], call: Call, deadline_s: float, prepare: Prepare[S], decide: Decide[S, V]
) -> V:
    """Send this rank's statement to the leader and return its decision. Raises what ``decide``
    raises on the leader, and RankFailedError or DeadlineError if a rank does not arrive."""
    team = current_team(call, deadline_s, saving=False)

    async def held() -> V:
        async with team.session():
            return await team.round(round, await prepare(team.report_progress), decide)

    return run(held())


def tried_here(
    call: Call,
    deadline_s: float,
    load: Callable[[], object],
    decide: Decide[Attempted, Attempted] = verdict_of,
    *,
    may_misfit: bool = False,
) -> tuple[Attempted, Exception | None]:
    """Call ``load()`` on every rank, in the caller's thread; return as :func:`tried`."""
    error: Exception | None = None
    try:
        load()
    except Exception as problem:
        error = problem

    async def attempt(moved: Callable[[], None]) -> None:
        if error is not None:
            raise error

    return tried(call, deadline_s, attempt, decide, may_misfit=may_misfit)


def tried(
    call: Call,
    deadline_s: float,
    attempt: Prepare[object],
    decide: Decide[Attempted, Attempted] = verdict_of,
    *,
    may_misfit: bool = False,
) -> tuple[Attempted, Exception | None]:
    """Call ``attempt`` on every rank; return the common verdict and this rank's error, if any.
    ``may_misfit``: whether a mismatch is an outcome (MISFIT) rather than an error. Raises errors
    that make further attempts pointless."""
    error: Exception | None = None

    async def attempted(moved: Callable[[], None]) -> Attempted:
        nonlocal error
        try:
            await attempt(moved)
        except Exception as problem:
            error = problem
        return _outcome(error, may_misfit)

    try:
        verdict = held_round(TRY, call, deadline_s, attempted, decide)
    except RankFailedError as failure:
        if error is None or isinstance(error, (*_DAMAGE, RankFailedError)):
            raise failure from error
        raise error from None
    return verdict, error


def _outcome(error: Exception | None, may_misfit: bool) -> Attempted:
    if error is None:
        return Attempted(Outcome.WHOLE)
    if isinstance(error, RankFailedError):
        return Attempted(Outcome.FAILED_ELSEWHERE)
    if may_misfit and isinstance(error, MismatchError):
        return Attempted(Outcome.MISFIT)
    if isinstance(error, DamagedError):
        return Attempted(Outcome.DAMAGED, image=error.image)
    if isinstance(error, _DAMAGE):
        return Attempted(Outcome.DAMAGED)
    return Attempted(Outcome.FAILED, f"{type(error).__name__}: {error}")
