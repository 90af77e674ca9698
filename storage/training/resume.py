"""Going on from a checkpoint of a run: the newest one that is whole, or an earlier one; the same
one on all ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from ..ranks.process_group import current_team
from ..ranks.team import Decide
from ..runtime.engine import run
from .line import Line, Survey, is_own

__all__ = ["Back", "resumed"]

_DAMAGE = (DamagedError, NotACheckpointError, NotFoundError)
_NAMED = 10
"""So many steps, or paths, are named in a message."""
_log = logging.getLogger(__name__)


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
    line: Line,
    root: Place,
    back: Back,
    state: Any,
    load_options: Mapping[str, Any],
    deadline_s: float,
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

    async def look(_: Sequence[bytes]) -> bytes:
        survey = await line.survey()
        found.append(_Found(survey, back.among(survey)))
        return json.dumps(_told(back, root, survey, found[0].tried)).encode()

    told = json.loads(_round(Call("resume", root.uri.redacted, back.step), deadline_s, b"", look))
    if told["refused"] is not None:
        raise UsageError(told["refused"], uri=root.uri.redacted, advice=told["advice"])
    chosen = _load_first(root, told["tried"], told["broken"], state, load_options, deadline_s, back)

    async def take_up(_: Sequence[bytes]) -> bytes:
        gone_on_from = None if chosen is None else found[0].tried[chosen]
        await line.take_up(gone_on_from, found[0].survey, record=back.asked)
        return b""

    step: int | None = None if chosen is None else told["tried"][chosen]["step"]
    _round(Call("resume", root.uri.redacted, step), deadline_s, b"", take_up)
    return step


def _told(
    back: Back, root: Place, survey: Survey, tried: Sequence[ListedCheckpoint]
) -> dict[str, Any]:
    """What all ranks are to know of the run's folder."""
    for c in survey.broken:
        _log.warning("the checkpoint %s cannot be opened: %s", c.path, c.problem)
    refused = advice = None
    if not tried and (back.asked or any(c.abandoned for c in survey.steps)):
        asked = "that is not abandoned" if not back.asked else f"before step {back.before}"
        asked = asked if back.step is None else f"of step {back.step}"
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
    return {
        "tried": [{"path": c.path, "step": c.step, "own": is_own(c)} for c in tried],
        "broken": len(survey.broken),
        "refused": refused,
        "advice": advice,
    }


def _load_first(
    root: Place,
    tried: Sequence[Mapping[str, Any]],
    broken: int,
    state: Any,
    load_options: Mapping[str, Any],
    deadline_s: float,
    back: Back,
) -> int | None:
    """Load the first of ``tried`` that is whole and fits; its place among them. None where there is
    nothing to try."""
    if not tried and not broken:
        return None
    misfit: Exception | None = None
    touched: set[str] = set()
    for place, candidate in enumerate(tried):
        may_misfit = not candidate["own"] and back.step is None
        error = _try(str(join(root.uri, candidate["path"])), state, load_options, touched)
        try:
            call = Call("resume", root.uri.redacted, candidate["step"])
            verdict = _round(call, deadline_s, _outcome(error, may_misfit), _verdict)
        except RankFailedError as told:
            if error is None or isinstance(error, (*_DAMAGE, RankFailedError)):
                raise told from error
            raise error from None
        if verdict == b"whole":
            return place
        if verdict == b"misfit":
            misfit = misfit or error
            _log.warning("the checkpoint %s does not fit, trying the one before", candidate["path"])
        else:
            _log.warning(
                "the checkpoint of step %d is damaged, trying the one before: %s",
                candidate["step"],
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
        f"none of the {len(tried) + broken} checkpoints of this run is whole",
        uri=root.uri.redacted,
        advice="`holdfast verify` says what is wrong with each. To start anew, use another folder.",
    )


def _try(
    uri: str, state: Any, load_options: Mapping[str, Any], touched: set[str]
) -> Exception | None:
    try:
        load_state(uri, state, LoadOptions(**load_options), touched)
    except Exception as error:
        return error
    return None


def _round(call: Call, deadline_s: float, statement: bytes, decide: Decide) -> bytes:
    """What the leader makes of all ranks' statements."""
    team = current_team(call, deadline_s, saving=False)

    async def held() -> bytes:
        async with team.session():
            try:
                return await team.round("resume", statement, decide)
            except BaseException as error:
                await team.fail(error)
                raise

    return run(held())


def _outcome(error: Exception | None, may_misfit: bool) -> bytes:
    if error is None:
        return b"whole"
    if isinstance(error, RankFailedError):
        return b"told"  # by a rank that says for itself what it found
    if may_misfit and isinstance(error, MismatchError):
        return b"misfit"
    return b"damaged" if isinstance(error, _DAMAGE) else f"{type(error).__name__}: {error}".encode()


async def _verdict(outcomes: Sequence[bytes]) -> bytes:
    known = {b"whole", b"damaged", b"misfit", b"told"}
    for rank, outcome in enumerate(outcomes):
        if outcome not in known:
            raise RankFailedError(f"rank {rank} failed: {outcome.decode()}", rank=rank)
    for verdict in (b"damaged", b"misfit"):
        if verdict in outcomes:
            return verdict
    return b"whole" if all(outcome == b"whole" for outcome in outcomes) else b"damaged"
