"""Going on from the newest checkpoint of a run that is whole; the same one on all ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ...drivers.uri import join
from ...errors import DamagedError, NotACheckpointError, NotFoundError, RankFailedError
from ..api import load
from ..frameworks.process_group import current_team
from ..pipeline.engine import start
from ..place import Place
from ..reader import ListedCheckpoint, list_in, manifest_keys
from .retention import checkpoint_name, step_of

__all__ = ["newest_good"]

_DAMAGE = (DamagedError, NotACheckpointError, NotFoundError)
_log = logging.getLogger(__name__)


def newest_good(root: Place, state: Any, load_options: Mapping[str, Any], deadline_s: float) -> int:
    """Load the newest checkpoint of the run into ``state``; return its step, 0 where there is none at all.

    One that is damaged, on any rank, is passed over by all, with a warning. Raises DamagedError where none is whole: then
    ``state`` may be partly filled. What else :func:`load` raises, it raises: the next one would fit no better.
    """
    found = json.loads(_round(deadline_s, b"", lambda _: _survey(root)))
    steps: list[int] = found["steps"]
    if not steps and not found["broken"]:
        return 0
    for step in steps:
        uri = str(join(root.uri, checkpoint_name(step)))
        error = _try(uri, state, load_options)
        try:
            verdict = _round(deadline_s, _outcome(error), _verdict)
        except RankFailedError as told:
            raise told if error is None or isinstance(error, (*_DAMAGE, RankFailedError)) else error from None
        if verdict == b"whole":
            return step
        _log.warning("the checkpoint of step %d is damaged, trying the one before: %s", step, error)
    raise DamagedError(
        f"none of the {len(steps) + found['broken']} checkpoints of this run is whole",
        uri=root.uri.redacted,
        advice="`holdfast verify` says what is wrong with each. To start anew, use another folder.",
    )


def _try(uri: str, state: Any, load_options: Mapping[str, Any]) -> Exception | None:
    try:
        load(uri, into=state, **load_options)
    except Exception as error:
        return error
    return None


def _round(deadline_s: float, statement: bytes, decide: Any) -> bytes:
    """What the leader makes of all ranks' statements."""
    team = current_team(deadline_s, saving=False)

    async def held() -> bytes:
        async with team.session():
            return await team.round("resume", statement, decide)

    return start(held()).result()


async def _survey(root: Place) -> bytes:
    """On the leader: the steps of the run's checkpoints, newest first, and how many cannot be opened."""
    async with root.opened() as driver:
        keys = [key for key in await manifest_keys(driver) if step_of(key.rpartition("/")[0]) is not None]
        listed: Sequence[ListedCheckpoint] = await list_in(driver, keys)
    broken = [c for c in listed if c.problem is not None]
    for c in broken:
        _log.warning("the checkpoint %s cannot be opened: %s", c.path, c.problem)
    steps = [step for c in listed if c.problem is None and (step := step_of(c.path)) is not None]
    return json.dumps({"steps": sorted(steps, reverse=True), "broken": len(broken)}).encode()


def _outcome(error: Exception | None) -> bytes:
    if error is None:
        return b"whole"
    if isinstance(error, RankFailedError):
        return b"told"  # by a rank that says for itself what it found
    return b"damaged" if isinstance(error, _DAMAGE) else f"{type(error).__name__}: {error}".encode()


async def _verdict(outcomes: Sequence[bytes]) -> bytes:
    known = {b"whole", b"damaged", b"told"}
    for rank, outcome in enumerate(outcomes):
        if outcome not in known:
            raise RankFailedError(f"rank {rank} failed: {outcome.decode()}", rank=rank)
    if b"damaged" in outcomes:
        return b"damaged"
    return b"whole" if all(outcome == b"whole" for outcome in outcomes) else b"damaged"
