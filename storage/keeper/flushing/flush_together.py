"""Flushes a generation with several keepers: each writes its own images, and the leader commits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from ....errors import DamagedError, SaveError, SupersededError
from ...arenas.label import GenerationId, Label
from ...arenas.messages import Flush
from ...protocol.collect import give_up
from ...protocol.commit import begin, commit_attempt
from ..decisions.standing import FlushOrder, Written
from ..reading import peers_of
from ..reporting import Reporting
from ..tiers import HeldImage
from .flush import fragment_of, opened_for, write_part

__all__ = ["flush_together"]

_LOOK_S = 1.0


async def flush_together(
    request: Flush,
    generation: GenerationId,
    images: Sequence[HeldImage],
    reporting: Reporting,
    is_wanted: Callable[[], bool],
) -> tuple[str, int]:
    """Have all keepers of the job write a generation, and commit it. Return the id of the attempt
    and the total size of the images in bytes. ``images``: the images held by this keeper, the
    leader.

    Raises SaveError if another keeper fails to write its part or has not reported for too long,
    DamagedError if an image has changed in memory, and SupersededError if the generation is no
    longer wanted or another keeper has dropped it; then nothing is committed. Also raises as
    :func:`commit_attempt`.
    """
    if not images:
        raise DamagedError(f"no image of step {generation.step} is in memory")
    world = images[0].label.world
    async with opened_for(request, world) as (driver, compression):
        attempt = await begin(driver)
        try:
            reporting.order(FlushOrder(generation, attempt.id))
            stored = {
                image.label.rank: await write_part(driver, attempt.id, image, compression)
                for image in images
            }
            labels = {image.label.rank: image.label for image in images}
            written = await _written(reporting, is_wanted)
            for name, part in written.items():
                stored |= dict(zip(part.ranks, part.stored_nbytes, strict=True))
                labels |= await _labels(reporting, images[0].label.run, generation, name, part)
            if labels.keys() != set(range(world)):
                lacking = sorted(set(range(world)) - labels.keys())
                raise SaveError(f"no keeper has written the image of rank {lacking[0]}")
            _check_wanted(is_wanted)
        except BaseException:
            await give_up(driver, attempt)
            raise
        fragments = [
            fragment_of(labels[rank], attempt.id, stored[rank], compression)
            for rank in range(world)
        ]
        await commit_attempt(driver, attempt, fragments, compression, request.branch)
    return attempt.id, sum(label.nbytes for label in labels.values() if label.digests)


async def _written(reporting: Reporting, is_wanted: Callable[[], bool]) -> Mapping[str, Written]:
    """Return the results of the other keepers, once all of them have finished."""
    others = reporting.lead.names - {reporting.name}
    while True:
        written = reporting.lead.written()
        for name, part in written.items():
            if part.gone:
                raise SupersededError(f"the keeper {name} no longer holds it: {part.problem}")
            if part.problem:
                kind = DamagedError if part.damaged else SaveError
                raise kind(f"the keeper {name} cannot write its part: {part.problem}")
        _check_wanted(is_wanted)
        if written.keys() >= others:
            return {name: written[name] for name in sorted(others)}
        # If the job was restarted on other hosts meanwhile, its keepers do not report here.
        if gone := [*reporting.unheard(), *sorted(others - reporting.lead.names)]:
            raise SaveError(f"the keeper {gone[0]} has stopped reporting")
        await reporting.moved(_LOOK_S)


def _check_wanted(is_wanted: Callable[[], bool]) -> None:
    if not is_wanted():
        raise SupersededError("a resume has discarded this step")


async def _labels(
    reporting: Reporting,
    run: str,
    generation: GenerationId,
    name: str,
    part: Written,
) -> dict[int, Label]:
    """Read the labels of the images that another keeper has written."""
    async with peers_of(generation, reporting.hosts, reporting.certificate) as peers:
        found = await asyncio.gather(*(peers.label(name, rank, run) for rank in part.ranks))
    return dict(zip(part.ranks, found, strict=True))
