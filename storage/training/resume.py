"""Going on from a checkpoint of a run: the newest one that is whole, or an earlier one; the same
one on all ranks."""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...drivers.uri import join
from ...errors import (
    DamagedError,
    MismatchError,
    NotACheckpointError,
    NotFoundError,
    RankFailedError,
    UsageError,
)
from ..operations.listing import ListedCheckpoint
from ..operations.location import Place
from ..operations.options import LoadOptions
from ..operations.start_load import load_state
from ..ranks.calls import Call
from ..ranks.messages import Nothing, Round
from ..ranks.process_group import current_team
from ..ranks.team import Decide
from ..runtime.engine import run
from .run_lineage import RunLineage, Survey, is_own

__all__ = ["Attempted", "Back", "Outcome", "resumed", "verdict_of"]

_DAMAGE = (DamagedError, NotACheckpointError, NotFoundError)
_NAMED = 10
"""So many steps, or paths, are named in a message."""
_log = logging.getLogger(__name__)

S = TypeVar("S")
V = TypeVar("V")


class Outcome(enum.Enum):
    """How the load of one checkpoint went on one rank, or on all. ``FAILED_ELSEWHERE``: another
    rank says for itself what it found."""

    WHOLE = "whole"
    MISFIT = "misfit"
    DAMAGED = "damaged"
    FAILED_ELSEWHERE = "failed elsewhere"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint to try; ``own``: this run's Checkpointer has named it."""

    path: str
    step: int | None
    own: bool


@dataclass(frozen=True, slots=True)
class Candidates:
    """What all ranks are to know of the run's folder. ``broken``: how many checkpoints cannot be
    opened. ``refused``: why there is nothing to go on from."""

    tried: tuple[Candidate, ...]
    broken: int
    refused: str | None = None
    advice: str | None = None


@dataclass(frozen=True, slots=True)
class Attempted:
    """The outcome on one rank; ``error`` says how it has failed."""

    outcome: Outcome
    error: str = ""


LOOK = Round.of("resume", Nothing, Candidates)
TRY = Round.of("resume", Attempted, Attempted)
TAKE_UP = Round.of("resume", Nothing, Nothing)


@dataclass(frozen=True, slots=True)
class Back:
    """Where to go on: at ``step``; or at the newest ``before`` that step; or, by default, at the
    newest of all."""

    step: int | None = None
    before: int | None = None

    def __post_init__(self) -> None:
        if self.step is not None and self.before is not None:
            raise UsageError("resume: step and before are both given", advice="Give one of them.")
        for name, value in (("step", self.step), ("before", self.before)):
            if value is not None and type(value) is not int:
                raise UsageError(f"resume: {name} is {value!r}, which is no whole number")

    @property
    def asked(self) -> bool:
        """Whether the caller asked for another one than the newest."""
        return self.step is not None or self.before is not None

    def among(self, survey: Survey) -> list[ListedCheckpoint]:
        """The checkpoints to try, in that order."""
        if self.step is not None:
            exact = [c for c in survey.steps if c.step == self.step]
            return sorted(exact, key=lambda c: c.abandoned)[:1]
        live = [c for c in survey.steps if not c.abandoned]
        return [c for c in live if self.before is None or (c.step or 0) < self.before]


@dataclass
class _Found:
    """What the leader found in the run's folder."""

    survey: Survey
    tried: Sequence[ListedCheckpoint]


def resumed(
    lineage: RunLineage,
    root: Place,
    back: Back,
    state: object,
    options: LoadOptions,
) -> int | None:
    """Load a checkpoint of the run into ``state``; return its step, None where there is none at
    all.

    One that is damaged, on any rank, is passed over by all, with a warning, unless it was asked for
    by its step. So is one that does not fit, if it was not this run's Checkpointer that named it.
    What is later than the one that was loaded is abandoned from here on. Raises UsageError where
    there is no checkpoint that was asked for; DamagedError where none is whole: then ``state`` may
    be partly filled. So it may be at a MismatchError, where the next one has no values for what the
    load of a damaged one began to fill. What else :func:`load` raises, it raises: the next one
    would fit no better.
    """
    found: list[_Found] = []  # on the leader

    async def look(_: Sequence[Nothing]) -> Candidates:
        survey = await lineage.survey()
        found.append(_Found(survey, back.among(survey)))
        return _candidates(back, root, survey, found[0].tried)

    call = Call("resume", root.uri.redacted, back.step)
    candidates = _round(LOOK, call, options.deadline_s, Nothing(), look)
    if candidates.refused is not None:
        raise UsageError(candidates.refused, uri=root.uri.redacted, advice=candidates.advice)
    chosen = _load_first(root, candidates, state, options, back)

    async def take_up(_: Sequence[Nothing]) -> Nothing:
        if chosen is None:
            gone_on_from = None
        else:
            gone_on_from = found[0].tried[chosen]
        await lineage.take_up(gone_on_from, found[0].survey, record=back.asked)
        return Nothing()

    if chosen is None:
        step = None
    else:
        step = candidates.tried[chosen].step
    call = Call("resume", root.uri.redacted, step)
    _round(TAKE_UP, call, options.deadline_s, Nothing(), take_up)
    return step


def _candidates(
    back: Back, root: Place, survey: Survey, tried: Sequence[ListedCheckpoint]
) -> Candidates:
    """What all ranks are to know of the run's folder."""
    for c in survey.broken:
        _log.warning("the checkpoint %s cannot be opened: %s", c.path, c.problem)
    refused = advice = None
    if not tried and (back.asked or any(c.abandoned for c in survey.steps)):
        if not back.asked:
            asked = "that is not abandoned"
        else:
            asked = f"before step {back.before}"
        if back.step is not None:
            asked = f"of step {back.step}"
        refused = f"this run has no checkpoint {asked}"
        steps = ", ".join(f"{c.step}{' (abandoned)' * c.abandoned}" for c in survey.steps[:_NAMED])
        advice = (
            f"It has these steps: {steps or 'none'}. resume(state, step=…) goes on from any "
            f"of them."
        )
    elif not tried and not survey.broken and survey.others:
        _log.warning(
            "nothing to go on from is in %s, though checkpoints are there that lie deeper, or "
            "have no step: %s",
            *(root.uri.redacted, ", ".join(path or "." for path in survey.others[:_NAMED])),
        )
    candidates = tuple(Candidate(c.path, c.step, is_own(c)) for c in tried)
    return Candidates(candidates, len(survey.broken), refused, advice)


def _load_first(
    root: Place,
    candidates: Candidates,
    state: object,
    options: LoadOptions,
    back: Back,
) -> int | None:
    """Load the first of ``tried`` that is whole and fits; return its place among them. None where
    there is nothing to try."""
    if not candidates.tried and not candidates.broken:
        return None
    misfit: Exception | None = None
    touched: set[str] = set()
    for place, candidate in enumerate(candidates.tried):
        may_misfit = not candidate.own and back.step is None
        error = _try(str(join(root.uri, candidate.path)), state, options, touched)
        try:
            call = Call("resume", root.uri.redacted, candidate.step)
            verdict = _round(TRY, call, options.deadline_s, _outcome(error, may_misfit), verdict_of)
        except RankFailedError as failure:
            if error is None or isinstance(error, (*_DAMAGE, RankFailedError)):
                raise failure from error
            raise error from None
        if verdict.outcome is Outcome.WHOLE:
            return place
        if verdict.outcome is Outcome.MISFIT:
            misfit = misfit or error
            _log.warning("the checkpoint %s does not fit, trying the one before", candidate.path)
        else:
            _log.warning(
                "the checkpoint of step %d is damaged, trying the one before: %s",
                candidate.step,
                error,
            )
    if misfit is not None:
        raise misfit
    if back.step is not None:
        raise DamagedError(
            f"the checkpoint of step {back.step} is damaged",
            uri=root.uri.redacted,
            advice=(
                "`holdfast verify` says what is wrong with it. resume(state, before=…) goes on "
                "from one before it."
            ),
        )
    raise DamagedError(
        f"none of the {len(candidates.tried) + candidates.broken} checkpoints of this run is whole",
        uri=root.uri.redacted,
        advice="`holdfast verify` says what is wrong with each. To start anew, use another folder.",
    )


def _try(uri: str, state: object, options: LoadOptions, touched: set[str]) -> Exception | None:
    try:
        load_state(uri, state, options, touched)
    except Exception as error:
        return error
    return None


def _round(
    round: Round[S, V], call: Call, deadline_s: float, statement: S, decide: Decide[S, V]
) -> V:
    """What the leader makes of all ranks' statements."""
    team = current_team(call, deadline_s, saving=False)

    async def held() -> V:
        async with team.session():
            try:
                return await team.round(round, statement, decide)
            except BaseException as error:
                await team.fail(error)
                raise

    return run(held())


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
