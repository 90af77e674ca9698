"""A save in separate steps, for a caller that does its own planning.

One rank begins an attempt, each rank writes its image and reports a fragment, and one rank commits.
Nothing is visible in between. If the caller never commits, the next save collects the attempt.
Callers whose ranks do not know of each other begin with :func:`divide` and end with
:func:`commit_together`; callers that coordinate their ranks need neither.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from ....drivers.contract import Driver
from ...format.fragment import Fragment
from ...format.manifest import image_key
from ...format.packed import Compression
from ...pipeline.capture import TensorChunks
from ...pipeline.image_writer import ImageWriter
from ...protocol.attempt import Attempt
from ...protocol.collect import give_up
from ...protocol.commit import begin, commit_attempt
from ...ranks.messages import LEADER, Nothing
from ...ranks.team import Team
from ...runtime.engine import offload
from ...state.plan import plan_save
from ..rounds import DIVIDE, Boxes, Division, FragmentCodec, commit_round
from .plan_leader import check_same
from .save import written_fragment
from .save_job import SaveJob


async def write_image(driver: Driver, attempt: Attempt, rank: int, job: SaveJob) -> Fragment:
    """Write everything that ``rank`` holds as its image, durable on return; return its fragment."""
    plan = await offload(plan_save, job.flat, rank, None)
    chunks = TensorChunks(plan.layout, plan.source)
    writer = ImageWriter(
        driver, plan.layout, chunks, job.budget_nbytes, job.callbacks, job.compression
    )

    async def key() -> str:
        return image_key(attempt.id, rank, job.compression)

    written = await writer.write(key)
    return written_fragment(attempt, job, plan, written, rank)


async def divide(
    team: Team, driver: Driver, nbytes: Mapping[str, int], *, overwrite: bool = True
) -> Division:
    """Begin an attempt, and assign boxes that several ranks have, balancing the bytes per rank.
    Every rank calls this; ``nbytes`` are the sizes of its boxes, by names that are equal on all
    ranks. Raises UsageError if ``overwrite`` differs between ranks, StorageError, RankFailedError,
    DeadlineError, and ExistsError as :func:`...protocol.commit.begin`."""

    async def decide(statements: Sequence[Boxes]) -> Division:
        check_same("overwrite", [statement.overwrite for statement in statements])
        writers = _dealt_out([statement.nbytes for statement in statements])
        attempt = await begin(driver, overwrite=overwrite)
        return Division(attempt.id, time.time(), writers)

    async with team.session():
        return await team.round(DIVIDE, Boxes(dict(nbytes), overwrite), decide)


def _dealt_out(nbytes: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Assign each box that several ranks have to the rank with the least to write so far."""
    having: defaultdict[str, list[int]] = defaultdict(list)
    for rank, of_rank in enumerate(nbytes):
        for name in of_rank:
            having[name].append(rank)
    loads = [
        sum(size for name, size in of_rank.items() if len(having[name]) == 1) for of_rank in nbytes
    ]
    writers: dict[str, int] = {}
    for name, ranks in having.items():
        if len(ranks) > 1:
            writer = min(ranks, key=loads.__getitem__)
            loads[writer] += nbytes[writer][name]
            writers[name] = writer
    return writers


async def commit_together(
    team: Team,
    driver: Driver,
    fragment: Fragment,
    merged: Callable[[Sequence[Fragment]], Sequence[Fragment]],
    compression: Compression | None = None,
    *,
    overwrite: bool = True,
) -> None:
    """Send this rank's fragment to the leader, which commits ``merged`` of all fragments. Raises as
    :func:`...protocol.commit.commit_attempt`, RankFailedError and DeadlineError."""
    attempt = Attempt(fragment.head[0])
    has_all = False

    async def decide(fragments: Sequence[Fragment]) -> Nothing:
        nonlocal has_all
        has_all = True
        await commit_attempt(driver, attempt, merged(fragments), compression, overwrite=overwrite)
        return Nothing()

    try:
        async with team.session():
            await team.round(commit_round(FragmentCodec(set(), {})), fragment, decide)
    except BaseException:
        if team.rank == LEADER and not has_all:
            await give_up(driver, attempt)
        raise
